"""From a plan to the folder that a person runs with another trainer.

A plan of a layout that the trainer can say is written as it is. Of any other plan, such as one of the search over
everything, the nearest layout is written, and what the trainer cannot say is listed with what that costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from autopar.capture import Captured
from autopar.errors import PlanError
from autopar.frontends import Loaded
from autopar.planner.layouts.layout_words import parse_layout
from autopar.planner.layouts.pricing import PricedLayout, PricedLayouts
from autopar.plans.clusters import get_cluster
from autopar.plans.memory_decisions import OFFLOAD
from autopar.plans.plan import Plan
from autopar.report import Facts
from autopar.targets.host_shares import check_said
from autopar.targets.model_facts import facts_of
from autopar.targets.search import TargetSearch, misfit
from autopar.targets.space import Words, per_node, refusal, storages, tried
from autopar.targets.stages import blocks_in, counts
from autopar.targets.target import Export, Target, WrittenFiles
from autopar.words.texts import show_bytes, show_seconds
from cost_models.optimizer_bytes import MUON
from cost_models.schedules import label_of
from hardware_profiles import split_software
from hardware_profiles.software import AS


@dataclass(frozen=True)
class Deviation:
    """A decision of a plan that is written otherwise, because the trainer cannot say it."""

    what: str
    of_plan: str
    written: str


@dataclass(frozen=True)
class ExportCost:
    """What the nearest layout costs beside the plan.

    Attributes:
        seconds, memory_bytes: of the plan with the trainer's software; those of the layout are in ``found``.
    """

    found: PricedLayout
    seconds: float
    memory_bytes: float
    differences: tuple[Deviation, ...]

    def facts(self) -> Facts:
        """Return the differences and their cost as values for JSON."""
        return {
            "decisions": [{"what": d.what, "plan": d.of_plan, "written": d.written} for d in self.differences],
            "seconds": self.found.seconds - self.seconds,
            "memory_bytes": self.found.memory_bytes - self.memory_bytes,
        }

    def lines(self) -> list[str]:
        """Return the differences and their cost as lines of text."""
        more = self.found.seconds - self.seconds
        more_bytes = self.found.memory_bytes - self.memory_bytes
        total = (
            f"together {'+' if more >= 0 else '-'}{show_seconds(abs(more))} a step ({more / self.seconds:+.1%}), "
            f"{'+' if more_bytes >= 0 else '-'}{show_bytes(abs(more_bytes))} on the fullest device"
        )
        return [f"{d.what}: {d.of_plan} in the plan, {d.written} in the files" for d in self.differences] + [total]


@dataclass(eq=False)
class Exporter:
    """One model and batch, to be written for one trainer.

    Attributes:
        loaded: the model with the batch of a step; ``captured``: that batch.
        cluster: the name of the cluster or its file, with or without the software of a trainer.
    """

    target: Target
    loaded: Loaded
    captured: Captured
    layouts: PricedLayouts
    cluster: str
    rows: int
    say: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        """Take the trainer's software for prices."""
        self.where = f"{split_software(self.cluster)[0]}{AS}{self.target.software}"
        self.hardware = get_cluster(self.where)
        self.model = facts_of(self.loaded.model, self.captured)

    @property
    def sequence(self) -> int | None:
        """Places of a row; None where the model's source does not say it."""
        return self.loaded.seq

    def search(self) -> TargetSearch:
        """Return a search among the trainer's layouts."""
        return TargetSearch(
            self.target, self.layouts, self.where, self.hardware, self.model, self.rows, self.sequence, self.export,
            self.say,
        )  # fmt: skip

    def of_words(self, words: str) -> PricedLayout:
        """Return a layout that the trainer can say, priced.

        Raises:
            PlanError: the trainer cannot say it, or it does not fit.
        """
        layout = parse_layout(words)
        if reason := refusal(self.target, layout, self.model):
            raise PlanError(f"{words}: {reason}; autopar plan --for {self.target.name} finds what it can run")
        found = self.layouts.price(self.where, layout)
        if not found.fits:
            raise PlanError(f"{words} does not fit: {misfit(found)}; autopar plan --for {self.target.name} finds one")
        return found

    def nearest(self, plan: Plan) -> ExportCost:
        """Return the layout nearest to a plan: the fastest with its axes and stages, else the fastest of all."""
        search = self.search()
        for words in near(self.target, plan, per_node(self.hardware)):
            search.price(words)
        fitting = search.written(1)
        found = fitting[0] if fitting else search.find().best
        return ExportCost(found, plan.seconds, plan.memory_bytes, tuple(differences(plan, found)))

    def export(self, found: PricedLayout) -> tuple[Export, WrittenFiles]:
        """Return what a layout is written from, and its files.

        Raises:
            PlanError: the plan is for an optimizer that is written for no trainer, or moves results to the memory of
                the host.
        """
        if found.plan.optimizer == MUON:
            raise PlanError(
                "the plan is for muon, which steps on matrices beside AdamW, and no trainer's files are written with "
                "two optimizers: plan with --optimizer adamw, and change the files"
            )
        if _moved(found.plan) != NOTHING_MOVED:
            raise PlanError(
                f"{found.plan.pins.layout}: {_moved(found.plan)} are moved to the memory of the host, which files of "
                f"{self.target.name} cannot say; leave offload out"
            )
        check_said(self.target, found)
        found = remembering(self.target.name, found)
        export = Export(
            found, self.loaded, self.captured, self.model, self.hardware, self.where, self.rows, self.sequence,
            found.plan.pins.precision, found.plan.optimizer,
        )  # fmt: skip
        return export, self.target.write(export)


def remembering(target: str, found: PricedLayout) -> PricedLayout:
    """Return a layout whose plan remembers the trainer that it is for."""
    plan = replace(found.plan, pins=replace(found.plan.pins, target=target))
    return replace(found, pinned=replace(found.pinned, plan=plan))


def near(target: Target, plan: Plan, shards: int) -> Iterator[Words]:
    """Yield layouts with the stages and microbatches of a plan, and its axes in every role."""
    groups = plan.schedule.n_ranks
    chunks = len(plan.stages) // groups
    sizes = [size for size in plan.stages[0].mesh.sizes if size > 1]
    roles = [role for role in ("dp", "tp", "cp") if role == "dp" or role in target.words]
    kinds = {_by_role(sizes, of, roles) for of in product(roles, repeat=len(sizes))}
    name = plan.schedule.name.partition(":")[0] if groups > 1 else None
    pipeline: Words = {"pp": str(groups), "vp": str(chunks), "m": str(plan.microbatches)}
    for each in sorted(kinds):
        axes: Words = {role: str(size) for role, size in zip(roles, each, strict=True)}
        for way in storages(target, shards):
            for recompute in tried(target, "recompute"):
                for schedule in dict.fromkeys([name, None]):
                    words = {**axes, **pipeline, **way, "recompute": recompute, "schedule": schedule}
                    yield words
                    if axes.get("tp", "1") != "1" and "sp" in target.words:
                        yield {**words, "sp": ""}


def _by_role(sizes: list[int], roles: tuple[str, ...], names: list[str]) -> tuple[int, ...]:
    """Return the size of every role where axes of these sizes have these roles."""
    totals = dict.fromkeys(names, 1)
    for size, role in zip(sizes, roles, strict=True):
        totals[role] *= size
    return tuple(totals[name] for name in names)


def differences(plan: Plan, found: PricedLayout) -> Iterator[Deviation]:
    """Yield what a layout decides otherwise than a plan."""
    other = found.plan
    pairs = {
        "groups of devices": (str(plan.schedule.n_ranks), str(other.schedule.n_ranks)),
        "stages": (str(len(plan.stages)), str(len(other.stages))),
        "schedule": (_schedule(plan), _schedule(other)),
        "microbatches": (str(plan.microbatches), str(other.microbatches)),
        "mesh of a group": (plan.stages[0].mesh.shown(), other.stages[0].mesh.shown()),
        "recomputed": (_recomputed(plan), _recomputed(other)),
        "moved to the host": (_moved(plan), _moved(other)),
    }
    yield from (Deviation(what, a, b) for what, (a, b) in pairs.items() if a != b)
    graph = found.pinned.graph
    if len(plan.stages) == len(other.stages) > 1 and plan.microbatches == other.microbatches:
        a, b = counts(blocks_in(plan, graph)), counts(blocks_in(other, graph))
        if a != b:
            yield Deviation("blocks of the stages", "-".join(map(str, a)), "-".join(map(str, b)))
    ops, params = _otherwise(plan, other)
    if ops or params:
        yield Deviation("cuts", "chosen one by one", f"{ops} operators and {params} parameters otherwise")


def is_of_words(plan: Plan, other: Plan) -> bool:
    """Return whether a plan still decides what its words say, as ``other`` does: nobody has edited it."""
    return (
        plan.schedule == other.schedule and [s.mesh for s in plan.stages] == [s.mesh for s in other.stages]
        and _otherwise(plan, other) == (0, 0) and all(
            (a.first, a.memory) == (b.first, b.memory) for a, b in zip(plan.stages, other.stages, strict=True)
        )
    )  # fmt: skip


def _otherwise(plan: Plan, other: Plan) -> tuple[int, int]:
    """Return how many operators and parameters are cut or stored otherwise, on meshes of the same sizes."""
    mine, theirs = ([stage.mesh.sizes for stage in p.stages] for p in (plan, other))
    if mine != theirs:
        return 0, 0
    pairs = list(zip(plan.stages, other.stages, strict=True))
    ops = sum(a.ops.get(name) != how for a, b in pairs for name, how in b.ops.items())
    params = sum(
        (kept := a.params.get(name)) is None
        or (kept.stored, kept.used, kept.on_host) != (how.stored, how.used, how.on_host)
        for a, b in pairs for name, how in b.params.items()
    )  # fmt: skip
    return ops, params


def _schedule(plan: Plan) -> str:
    return label_of(plan.schedule) if plan.schedule.n_ranks > 1 else "none"


NOTHING_MOVED = "nothing"


def _moved(plan: Plan) -> str:
    moved = sum(len(stage.memory.get(OFFLOAD, ())) for stage in plan.stages)
    return f"{moved} results" if moved else NOTHING_MOVED


def _recomputed(plan: Plan) -> str:
    again = sum(len(ops) for stage in plan.stages for ops in stage.memory.get("recompute", ()))
    return f"{again} operators" if again else "nothing"
