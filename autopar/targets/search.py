"""The fastest layouts that a trainer can express: shapes first, then one change at a time.

Every layout is priced exactly as its words say (:mod:`autopar.planner.layouts.pricing`), some tenths of a second each,
so not all are priced: for each shape of the axes the least that makes it fit, then changes of the best shapes for as
long as one helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from autopar.errors import AutoparError, InfeasibleError
from autopar.planner.layouts.layout_words import parse_layout, words_of
from autopar.planner.layouts.pricing import PricedLayout, PricedLayouts
from autopar.plans.lacking_memory import largest_part
from autopar.targets.space import Words, divisors, per_node, refusal, shapes, storages, text_of, tried
from autopar.targets.target import ModelFacts, Target
from autopar.words.texts import show_bytes
from hardware_profiles import Cluster

MOST_PRICED = 90
"""Layouts that are priced at most."""
IMPROVED = 2
"""Shapes, the best first, whose changes are tried."""
WORSE = 1.15
"""A shape so many times slower than the best one ends its row of growing tensor parallelism."""


@dataclass(frozen=True)
class Refused:
    """A layout that is not offered: the trainer cannot say it, or it does not fit.

    ``found`` is its price if it was priced.
    """

    words: str
    reason: str
    found: PricedLayout | None = None


@dataclass(frozen=True)
class TargetPlans:
    """What a search among a trainer's layouts found.

    Attributes:
        fitting: layouts that fit, the fastest first.
        refused: layouts that were looked at and cannot be, with reasons.
    """

    fitting: list[PricedLayout]
    refused: list[Refused]

    @property
    def best(self) -> PricedLayout:
        """The fastest one."""
        return self.fitting[0]


@dataclass(eq=False)
class TargetSearch:
    """A search among the layouts of one trainer, for one model and batch on one cluster.

    Attributes:
        where: the name of the cluster, or its file, with the trainer's software: ``dgx-h100 as torchtitan``.
        rows: rows of a step's batch.
        check: raises where the files of a layout cannot be written, which may depend on the model's own code.
    """

    target: Target
    layouts: PricedLayouts
    where: str
    cluster: Cluster
    model: ModelFacts
    rows: int
    sequence: int | None
    check: Callable[[PricedLayout], object] = lambda _: None
    say: Callable[[str], None] = lambda _: None
    _priced: dict[str, PricedLayout | None] = field(default_factory=dict, init=False)
    _reasons: dict[str, str] = field(default_factory=dict, init=False)
    _costs: int = field(default=0, init=False)

    def find(self, most: int = 1) -> TargetPlans:
        """Return the fastest layouts, of which the first ``most`` have been written to see that they can be.

        Raises:
            InfeasibleError: none fits; with the reasons.
        """
        self.settle_shapes()
        for found in self.written(IMPROVED):
            self.improve(found)
        best = self.written(most)
        if not best:
            raise InfeasibleError(self._nothing())
        last = self.fitting().index(best[-1]) + 1
        refused = [Refused(text, reason, self._too_large(text)) for text, reason in self._reasons.items()]
        return TargetPlans([*best, *self.fitting()[last:]], refused)

    def fitting(self) -> list[PricedLayout]:
        """Return the layouts so far that fit, and can be written as far as it was tried, the fastest first."""
        fine = (found for text, found in self._priced.items() if found is not None and text not in self._reasons)
        return sorted(fine, key=lambda found: found.seconds)

    def _too_large(self, text: str) -> PricedLayout | None:
        """Return a layout that does not fit; None for one that fits, or has no price."""
        found = self._priced.get(text)
        return None if found is None or found.fits else found

    def written(self, most: int) -> list[PricedLayout]:
        """Return the fastest layouts whose files can be written; of the others the reason is kept."""
        fine: list[PricedLayout] = []
        for found in self.fitting():
            if len(fine) == most:
                break
            try:
                self.check(found)
            except AutoparError as error:
                self._reasons[found.layout.text] = str(error)
            else:
                fine.append(found)
        return fine

    def price(self, words: Words) -> PricedLayout | None:
        """Return a layout with its price, whether it fits or not; None if the trainer or the model cannot have it."""
        text = text_of(words)
        if text in self._priced:
            return self._priced[text]
        found = None
        try:
            layout = parse_layout(text)
            reason = refusal(self.target, layout, self.model)
            if not reason and self._costs < MOST_PRICED:
                self._costs += 1
                self.say(text)
                found = self.layouts.price(self.where, layout)
                reason = "" if found.fits else misfit(found)
        except AutoparError as error:
            reason = str(error)
        if reason:
            self._reasons[text] = reason
        self._priced[text] = found
        return found

    # -- shapes

    def settle_shapes(self) -> None:
        """Price every shape with the least that makes it fit."""
        row: tuple[object, ...] = ()
        worse = 0
        for shape in shapes(self.target, self.model, self.cluster, self.sequence):
            if self.rows % int(shape["dp"]):
                continue
            same = shape["pp"], shape["cp"], shape["ep"]
            if same != row:
                row, worse = same, 0
            if worse > 1:
                continue
            best = self.fitting()
            found = self._settled(shape)
            if found is not None and best:
                worse = worse + 1 if found.seconds > WORSE * best[0].seconds else 0

    def _settled(self, shape: dict[str, str]) -> PricedLayout | None:
        """Return the layout of a shape that fits with the least recomputation and sharding, its microbatch large."""
        shards = min(per_node(self.cluster), int(shape["dp"]))
        ways = storages(self.target, shards if shards < int(shape["dp"]) else 1) if shape["dp"] != "1" else [{}]
        for recompute in tried(self.target, "recompute"):
            for way in list(ways):
                words: Words = {**shape, **way, "recompute": recompute, "mbs": "1"}
                if self.model.batch_norms:  # statistics are those of all rows that a rank has
                    words |= {"mbs": None, "m": "1"}
                small = self.price(words)
                if small is not None and small.fits:
                    return self._larger(words, small)
                if small is None or _stored(small) > small.limit_bytes:
                    ways.remove(way)  # whatever is recomputed
        return None

    def _larger(self, words: Words, small: PricedLayout) -> PricedLayout:
        """Return a layout with the largest microbatch that fits; in a pipeline it stays small."""
        most = self.rows // int(words["dp"] or 1)
        if words["pp"] != "1" or most == 1 or "m" in words:
            return small
        prices = [stage.price for stage in small.plan.stages]
        each = max(price.activation_bytes + max(0, price.working_bytes) for price in prices)
        room = 1 + (small.limit_bytes - small.memory_bytes) / each if each else most
        for size in [n for n in divisors(most) if 1 < n <= room][-2:][::-1]:
            larger = self.price({**words, "mbs": str(size)})
            if larger is not None and larger.fits:
                return larger
        return small

    # -- changes

    def improve(self, found: PricedLayout) -> None:
        """Change one thing at a time for as long as a change helps."""
        helps = True
        while helps and self._costs < MOST_PRICED:
            helps = False
            for words in list(changes(self, found)):
                other = self.price(words)
                if other is not None and other.fits and other.seconds < found.seconds:
                    found, helps = other, True

    def _nothing(self) -> str:
        """Return why there is no layout: none fits, or those that fit cannot be written, or the trainer has none."""
        near = [found for found in self._priced.values() if found is not None]
        here = f"{self.target.title} has no layout of this model on {self.where}"
        if not near:
            return f"{here}: {next(iter(self._reasons.values()), 'none divides the batch and the devices')}"
        least = min(near, key=lambda found: found.memory_bytes)
        if least.fits:
            return f"{here}: {self._reasons[least.layout.text]}"
        return (
            f"{here} that fits: the smallest is {least.layout.text}, {misfit(least)}; use more devices or a smaller "
            "batch"
        )


def _stored(found: PricedLayout) -> float:
    """Return the bytes that a device holds whatever is recomputed, of the fullest one."""
    stages = found.plan.stages
    return max(sum(stages[s].price.stored_bytes for s in of) for of in found.plan.schedule.stages_of_rank)


def misfit(found: PricedLayout) -> str:
    """Return why a layout does not fit: ``71.2 GiB of 67.1 GiB, most of it activations``."""
    part, _ = largest_part(found.plan)
    return f"{show_bytes(found.memory_bytes)} of {show_bytes(found.limit_bytes)}, most of it {part}"


def changes(search: TargetSearch, found: PricedLayout) -> Iterator[Words]:
    """Yield the layouts that differ from one by one decision, which may make it faster, or fit where it does not."""
    target, words = search.target, words_of(found.layout.text)
    pp, dp = int(words.get("pp", "1")), int(words.get("dp", "1"))

    def with_(**changed: str | None) -> Words:
        return {**words, **changed}

    others = [kind for kind in tried(target, "recompute") if kind != words.get("recompute")]
    fewer = others if not found.fits else others[: others.index(None) + 1] if None in others else []
    yield from (with_(recompute=kind) for kind in fewer)
    if "m" not in words and "gas" not in words:
        fine = divisors(search.rows // dp)
        at = fine.index(int(words.get("mbs", "1")))
        yield from (with_(mbs=str(fine[k])) for k in (at + 1, at - 1) if 0 <= k < len(fine))
        yield from (with_(mbs=size, recompute=kind) for kind in fewer for size in map(str, fine[:at]))
        if found.fits and at + 1 < len(fine):
            yield from (with_(mbs=str(fine[at + 1]), recompute=kind) for kind in others[:2] if kind is not None)
    neighbours = per_node(search.cluster)
    if dp > 1:
        yield from (
            with_(**{"zero": None, "fsdp": None, **way})
            for way in storages(target, neighbours if neighbours < dp else 1) if way or "zero" not in target.words
        )
    if pp > 1:
        yield from (with_(schedule=schedule, vp=None) for schedule in tried(target, "schedule"))
        if "vp" in target.words:
            fine = [v for v in divisors(-(-search.model.blocks // pp)) if v > 1] or [2]
            yield from (with_(vp=str(v), schedule=None) for v in fine[:4])
    if int(words.get("tp", "1")) > 1 and "sp" in target.words:
        yield with_(sp=None if "sp" in words else "")
