"""From a trainer's own file to seconds and bytes, and the changes that would help most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from autopar.errors import PlanError, first_few
from autopar.planner.layouts.layout_words import parse_layout, words_of
from autopar.planner.layouts.pricing import PricedLayout
from autopar.plans.plan import Plan
from autopar.targets import target_named, targets
from autopar.targets.search import TargetSearch, changes
from autopar.targets.space import Words, divisors, text_of
from autopar.targets.target import Config, ConfigError, ModelFacts, Source, Target
from hardware_profiles.strict import Unreadable, read_text

SHOWN = 3
"""Changes that are shown."""
PADDED = 1024
"""A vocabulary may be stated so many entries larger than the model's: trainers pad it."""


@dataclass(frozen=True)
class LayoutChange:
    """A change of a layout and its gain.

    Attributes:
        words: what is changed, such as ``recompute=none`` or ``mbs=2``.
        seconds: what a step takes less; negative where the change only makes it fit.
    """

    words: str
    found: PricedLayout
    seconds: float


def read_config(path: Path, of: str | None) -> tuple[Target, Config]:
    """Return the trainer of a file, and what the file says.

    ``of``: the trainer's name; None to find it by the file's contents.

    Raises:
        ConfigError: no trainer reads it, several do, or a field cannot be honoured.
    """
    try:
        source = Source(path, read_text(path))
    except (Unreadable, OSError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    known = [target for target in targets().values() if target.reads is not None and target.read is not None]
    if of is not None:
        found = [target_named(of)]
        if found[0].read is None:
            names = " or ".join(t.name for t in known)
            raise ConfigError(f"{found[0].title} has no file to be priced; give --of {names}")
    else:
        found = [target for target in known if target.reads is not None and target.reads(source)]
    if len(found) != 1:
        what = f"may be one of {' or '.join(t.name for t in found)}" if found else "is of no trainer that is known"
        raise ConfigError(f"{path.name} {what}; say which by --of: {first_few([t.name for t in known])}")
    assert found[0].read is not None
    return found[0], found[0].read(source)


def layout_words(config: Config, n_devices: int, rows: int, name: str) -> str:
    """Return the words of a config's layout with ``dp``, which follows from the number of devices.

    Raises:
        ConfigError: sizes do not make the devices, or the batch.
    """
    if config.devices is not None and config.devices != n_devices:
        raise ConfigError(f"{name} is for {config.devices} devices, the cluster has {n_devices}; give one of as many")
    words: Words = dict(config.words)
    sizes = {word: int((words.get(word) or "1").partition(":")[0]) for word in ("tp", "pp", "cp")}
    each = prod(sizes.values())
    if "dp" not in words:
        if n_devices % each:
            said = " x ".join(f"{word} {size}" for word, size in sizes.items() if size > 1)
            raise ConfigError(f"{name}: {said} do not divide the cluster's {n_devices} devices; change one of them")
        words["dp"] = str(n_devices // each)
    dp = int(words["dp"] or 1)
    if dp * each != n_devices:
        said = " x ".join(f"{word}={size}" for word, size in {"dp": dp, **sizes}.items() if word == "dp" or size > 1)
        raise ConfigError(
            f"{name}: its sizes, or its batch over microbatches and their rows, make {said}, {dp * each} devices; the "
            f"cluster has {n_devices}; change one of them"
        )
    if "mbs" in words:  # with the batch, it says how many microbatches there are
        words |= {"m": None, "gas": None}
    if "mbs" not in words and "m" not in words:
        words["m"] = "1"
    elif "mbs" in words and rows % (dp * int(words["mbs"] or 1)):
        raise ConfigError(
            f"{name}: a batch of {rows} rows is no multiple of {dp} data ranks x {words['mbs']} rows of a microbatch; "
            "change one of them"
        )
    return text_of(words)


def check_model(config: Config, model: ModelFacts, name: str) -> None:
    """Refuse a config that states other sizes than the model has.

    Raises:
        ConfigError: with the field and both numbers.
    """
    for field, stated in config.model.items():
        real = model.number(field)
        padded = field == "vocab_size" and real is not None and 0 <= stated - real <= PADDED
        if real is not None and real != stated and not padded:
            raise ConfigError(f"{name} says {field} {stated}, the model has {real}; give the model that it is for")


def best_changes(search: TargetSearch, found: PricedLayout) -> list[LayoutChange]:
    """Return the single changes of a layout that help most: that make it faster, or fit where it does not."""
    mine = words_of(found.layout.text)
    kinds = [*changes(search, found), *_other_shapes(mine)]
    helpful: dict[str, LayoutChange] = {}
    for words in kinds:
        other = search.price(words)
        if other is None or not other.fits:
            continue
        if not found.fits or other.seconds < found.seconds:
            what = changed(mine, words_of(other.layout.text))
            helpful.setdefault(what, LayoutChange(what, other, found.seconds - other.seconds))
    return sorted(helpful.values(), key=lambda change: -change.seconds)[:SHOWN]


def _other_shapes(words: Mapping[str, str]) -> list[Words]:
    """Return layouts with ranks of one axis given to another: twice or half the ``tp`` or ``pp``."""
    found: list[Words] = []
    sizes = {word: int(words.get(word, "1")) for word in ("dp", "tp", "pp")}
    for give, take in (("dp", "tp"), ("dp", "pp"), ("tp", "dp"), ("pp", "dp"), ("tp", "pp"), ("pp", "tp")):
        for by in divisors(sizes[give])[1:2]:
            other: Words = {**words, give: str(sizes[give] // by), take: str(sizes[take] * by)}
            if other.get("tp") == "1":
                other["sp"] = None
            if other.get("pp") == "1":
                other |= {"vp": None, "schedule": None}
            found.append(other)
    return found


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the words that differ: ``tp=4 for tp=8, dp=8 for dp=4``, ``without sp``."""
    parts = []
    for word in dict.fromkeys([*before, *after]):
        old, new = before.get(word), after.get(word)
        if old == new:
            continue
        said, was = (f"{word}={v}" if v else word for v in (new, old))
        if new is None:
            parts.append(f"without {was}")
        else:
            parts.append(said if old is None else f"{said} for {was}")
    return ", ".join(parts)


def where_time_goes(plan: Plan) -> dict[str, float]:
    """Return the seconds of a step by what they go to, on the group of devices that works longest; they add up."""
    groups = plan.schedule.stages_of_rank
    busiest = max(groups, key=lambda of: sum(plan.stages[s].price.seconds for s in of))
    prices = [plan.stages[s].price for s in busiest]
    parts = {
        "computing": sum(p.compute_seconds for p in prices),
        "collectives of activations": sum(p.activation_seconds for p in prices),
        "waiting for gathers and reductions of parameters": sum(p.exposed_seconds for p in prices),
        "launches and sums of gradients": sum(p.overhead_seconds for p in prices),
        "optimizer": sum(p.optimizer_seconds for p in prices),
    }
    parts["waiting for other stages, and transfers"] = plan.seconds - sum(parts.values())
    return {what: seconds for what, seconds in parts.items() if abs(seconds) > 1e-9}


def as_priced(config: Config, target: Target) -> Target:
    """Return the trainer with the software of the release that a config is of."""
    return target if config.software is None else replace(target, software=config.software)


def check_layout(words: str, name: str) -> None:
    """Refuse words that make no layout, naming the file."""
    try:
        parse_layout(words)
    except PlanError as error:
        raise ConfigError(f"{name}: {error}") from None


def of_batch(config: Config, n_devices: int) -> int | None:
    """Return the rows of a step's batch that a config says, or its microbatches make; None for neither."""
    if config.batch is not None:
        return config.batch
    words = config.words
    size, count = words.get("mbs"), words.get("m") or words.get("gas")
    if size is None or count is None:
        return None
    each = prod(int((words.get(word) or "1").partition(":")[0]) for word in ("tp", "pp", "cp"))
    return int(size) * int(count) * max(1, n_devices // each)


def facts(changes_: Sequence[LayoutChange]) -> list[dict[str, object]]:
    """Return changes as values for JSON."""
    return [
        {"change": c.words, "layout": c.found.layout.text, "saved_seconds": c.seconds, "seconds": c.found.seconds,
         "memory_bytes": c.found.memory_bytes, "fits": c.found.fits} for c in changes_
    ]  # fmt: skip
