"""What a trainer can say: its words of layouts, and the layouts that it has for a model on a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from autopar.planner.layouts.layout_words import Layout, words_of
from autopar.targets.target import ModelFacts, Target
from hardware_profiles import Cluster

LEFT_OUT = {
    "dp": "1", "tp": "1", "cp": "1", "ep": "1", "pp": "1", "vp": "1", "zero": "0", "recompute": "none",
    "schedule": "1f1b",
}  # fmt: skip
"""Values that say as much as leaving the word out."""
OF_THE_BATCH = ("mbs", "m", "gas", "optimizer", "precision")
"""Words that every trainer has, unless it lists the values that it takes."""
FEW_SEQUENCES = 16384
"""Places of a row from which context parallelism is tried where it is not needed to fit."""

Words = dict[str, str | None]


def per_node(cluster: Cluster) -> int:
    """Return how many devices the smallest machine of a cluster has."""
    return min(Counter(cluster.node_of).values())


ORDER = ("tp", "sp", "cp", "pp", "vp", "dp", "ep", "etp", "zero", "fsdp", "mbs", "m", "gas", "schedule", "recompute")
"""In which words are written, so that a layout has one text."""


def text_of(words: Mapping[str, str | None]) -> str:
    """Return words as a layout's text; None and values that say nothing are left out."""
    said = [
        word if not value else f"{word}={value}"
        for word in dict.fromkeys([*ORDER, *words])
        if (value := words.get(word)) is not None and LEFT_OUT.get(word) != value
    ]  # fmt: skip
    return ",".join(said) or "dp=1"


def can_say(target: Target, word: str, value: str) -> bool:
    """Return whether a trainer has a word with a value, such as ``zero`` with ``1``."""
    if word not in target.words:
        return word in OF_THE_BATCH
    values = target.words[word]
    return values is None or any(fnmatchcase(value, pattern) for pattern in values)


def refusal(target: Target, layout: Layout, model: ModelFacts) -> str:
    """Return why a trainer cannot run a layout of a model, in one sentence; empty if it can."""
    for word, value in words_of(layout.text).items():
        if LEFT_OUT.get(word) == value or can_say(target, word, value):
            continue
        if word not in target.words:
            return f"{target.title} has no {word}, {word}{'=' if value else ''}{value} is asked for; leave it out"
        taken = [v or word for v in target.words[word] or ()]
        return f"{target.title} has {word} {' or '.join(taken)}, {value or word} is asked for; use one of these"
    name = layout.schedule.partition(":")[0]
    if layout.groups > 1 and not can_say(target, "schedule", name) and name != "1f1b":
        taken = list(target.words.get("schedule") or ("1f1b",))
        return f"{target.title} has the schedules {', '.join(taken)}, {name} is asked for; use one of these"
    return target.refuses(layout, model)


def storages(target: Target, shards: int) -> list[Words]:
    """Return the ways in which a trainer stores parameters over data ranks, those that send least first.

    ZeRO-1 sends what whole parameters send, so that whole ones come last. ``shards``: neighbours among which hybrid
    sharding cuts them, usually the devices of a machine.
    """
    ways: list[Words] = [{"zero": v} for v in ("1", "2", "3") if can_say(target, "zero", v)]
    ways += [{"fsdp": ""}] if can_say(target, "fsdp", "") else []
    ways += [{"fsdp": "keep"}] if can_say(target, "fsdp", "keep") else []
    ways += [{"fsdp": str(shards)}] if shards > 1 and can_say(target, "fsdp", str(shards)) else []
    return [*ways, {}]


def tried(target: Target, word: str, *, without: bool = True) -> list[str | None]:
    """Return the values of a word that a search tries; None leaves the word out."""
    values = [v for v in target.words.get(word) or () if "*" not in v]
    return ([None] if without else []) + [v for v in values if LEFT_OUT.get(word) != v]


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, the smallest first."""
    return [d for d in range(1, n + 1) if n % d == 0] if n < 4096 else _divisors(n)


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def shapes(target: Target, model: ModelFacts, cluster: Cluster, sequence: int | None) -> Iterator[dict[str, str]]:
    """Yield sizes of the axes that fill a cluster: ``tp``, ``pp``, ``cp``, ``ep`` and what they leave for ``dp``.

    Tensor parallelism stays in a machine. Those with the fewest devices for a replica come first.
    """
    heads = model.heads
    n_devices = cluster.n_devices
    kinds: list[tuple[int, int, int]] = []
    for tp in divisors(per_node(cluster)) if "tp" in target.words else [1]:
        if n_devices % tp or (heads and heads % tp):
            continue
        for pp in divisors(n_devices // tp) if "pp" in target.words else [1]:
            if pp > max(1, model.blocks):
                continue
            for cp in _contexts(target, n_devices // tp // pp, sequence):
                kinds.append((tp, pp, cp))
    for tp, pp, cp in sorted(kinds, key=lambda kind: (kind[2], kind[1], kind[0])):
        dp = n_devices // tp // pp // cp
        sizes = {"tp": str(tp), "pp": str(pp), "cp": _context(target, cp), "dp": str(dp)}
        if tp > 1 and can_say(target, "sp", ""):
            sizes["sp"] = ""
        for ep in _experts(target, model, dp):
            yield {**sizes, "ep": str(ep)}


def _context(target: Target, cp: int) -> str:
    """Return the value of ``cp``, with the way where a trainer has not the default one: ``4:ulysses``."""
    if cp == 1 or can_say(target, "cp", str(cp)):
        return str(cp)
    return next(f"{cp}{way[1:]}" for way in target.words["cp"] or () if way.startswith("*:"))


def _contexts(target: Target, left: int, sequence: int | None) -> list[int]:
    """Return sizes of context parallelism to try: 1, and more where sequences are long."""
    if "cp" not in target.words or sequence is None or sequence < FEW_SEQUENCES:
        return [1]
    return [cp for cp in divisors(left) if cp <= max(1, sequence // (FEW_SEQUENCES // 2))]


def _experts(target: Target, model: ModelFacts, dp: int) -> list[int]:
    """Return sizes of expert parallelism to try: 1, eight, and as many as there are ranks or experts."""
    if "ep" not in target.words or not model.experts:
        return [1]
    both = [e for e in divisors(dp) if model.experts % e == 0]
    return sorted({1, max(e for e in both if e <= 8), max(e for e in both if e <= 64)})
