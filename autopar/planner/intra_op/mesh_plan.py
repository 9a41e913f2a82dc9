"""Planning: fold, build the problem, solve it, complete the plan; more memory-careful only when the limit binds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache

from autopar.errors import InfeasibleError, MeshError, PlanError
from autopar.garbage_collection import uncollected
from autopar.planner.effort import EFFORT
from autopar.planner.intra_op.building.decoder import Decoder
from autopar.planner.intra_op.building.integer_program import Beaten, Choice, MomentBytes
from autopar.planner.intra_op.memory.memory_errors import AllTooLarge, OutOfReach, host_hint, too_big
from autopar.planner.intra_op.mesh_problem import MeshProblem
from autopar.planner.intra_op.offload_choice import brought_back, check_host_memory, decided_of, moved_to_host
from autopar.planner.intra_op.pins.options import Options, device_limit
from autopar.planner.intra_op.solving import highs
from autopar.planner.intra_op.within_memory import UNLIMITED, WithinMemory, against
from autopar.plans.memory_decisions import REGATHER
from autopar.plans.offload_options import EVERY
from autopar.plans.plan import StagePlan
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.texts import show_bytes
from hardware_profiles import Cluster


@dataclass
class Earlier:
    """Results that plans of one graph on one mesh pass to later plans under other limits.

    Attributes:
        free: the fastest plan, whatever memory it needs.
        ends: where the simplex method ended, by kind of program: the next program begins there.
    """

    free: StagePlan | None = None
    ends: dict[object, object] = field(default_factory=dict)


@uncollected()
def plan_graph(
    graph: Graph, cluster: Cluster, mesh: Mesh, options: Options | None = None, *,
    devices: Sequence[int] | None = None, earlier: Earlier | None = None,
) -> StagePlan:  # fmt: skip
    """Return the cheapest plan of a graph on a mesh of the cluster's first devices, or of those given.

    ``earlier``: of the same graph on the same mesh and devices of the same type, with the same options but for the
    limit and the microbatches in flight; what this plan finds is added.

    Raises:
        MeshError: the mesh does not fit the cluster.
        InfeasibleError: the pins or the memory limit leave no plan; the message names the culprits.
        Beaten: the plan is not worth the search (see ``worth_seconds``).
    """
    options = options or Options()
    setting = MeshProblem(graph, cluster, mesh, options, devices)
    limit = device_limit(cluster, setting.priced.devices, options.memory_limit_bytes)
    earlier = earlier or Earlier()

    @cache
    def keeping() -> WithinMemory:
        return WithinMemory(setting, *setting.problem(limit < float("inf")), limit)

    if limit == float("inf"):
        return check_host_memory(setting, keeping().plan())
    if earlier.free is None:
        earlier.free = keeping().free()
    free = replace(earlier.free.with_in_flight(options.in_flight), devices=setting.priced.devices)
    if free.price.memory_bytes <= limit:
        return check_host_memory(setting, free)
    if free.price.seconds >= options.worth_seconds:  # with all memory that it wants, and what saves memory takes longer
        raise Beaten(free.price.seconds)
    if not options.offload.chooses_activations:
        return check_host_memory(setting, _within(setting, limit, free, keeping, earlier.ends))
    return _with_offload(setting, limit, free)


def _within(
    setting: MeshProblem, limit: float, free: StagePlan, keeping: Callable[[], WithinMemory],
    ends: dict[object, object] | None,
) -> StagePlan:  # fmt: skip
    """Return the cheapest plan within a limit that the fastest plan, ``free``, exceeds.

    Raises:
        InfeasibleError: nothing fits.
        Beaten: it is not worth the search.
    """
    options = setting.options
    best, bound, small = choosing(setting, limit, ends)  # the same problem, and more to choose from
    if best is None and not small and bound == float("inf") and not options.explains:  # nor with fewer choices
        raise OutOfReach(f"no plan fits {show_bytes(limit)} per device on {setting.mesh.shown()}")
    # recomputation is priced in the finished plan only: a plan without may be faster than the program says
    if best is None or (best.solution is not None and best.solution.gap > min(EFFORT.far_gap, options.memory_gap)):
        best = _or_keeping_all(keeping(), best, bound, small)
    if best is None:
        raise _too_large(setting, free, min(small, key=_memory), limit)
    return best


def _with_offload(setting: MeshProblem, limit: float, free: StagePlan) -> StagePlan:
    """Return the fastest of four plans within a limit, each with as little moved to the host as it needs.

    One chooses of everything at once. The others choose of less, which are easier programs: nothing is moved; nothing
    is recomputed; all is moved that may be.

    Raises:
        InfeasibleError, Beaten: as :func:`_within`.
    """
    plans: list[StagePlan] = []
    failures: list[InfeasibleError | Beaten] = []
    options = setting.options
    for variant in _variants(setting):
        if plans:
            worth = min(plan.price.seconds for plan in plans)
            variant.options = replace(variant.options, worth_seconds=min(worth, options.worth_seconds))

        def keeping(variant: MeshProblem = variant) -> WithinMemory:
            return WithinMemory(variant, *variant.problem(True, choices=bool(variant.asked)), limit)

        try:
            plan = keeping().plan() if variant.asked else _within(variant, limit, free, keeping, None)
            plans.append(check_host_memory(variant, brought_back(variant, plan, limit)))
        except (InfeasibleError, Beaten) as error:
            failures.append(error)
    if not plans and isinstance(failures[0], AllTooLarge) and options.explains:
        smallest = min([failures[0].smallest, *_smallest_of_variants(setting, limit)], key=_memory)
        if smallest.price.memory_bytes > limit:
            raise _too_large(setting, free, smallest, limit)
        plans.append(check_host_memory(setting, smallest))
    if not plans:
        raise failures[0]
    return min(plans, key=lambda plan: plan.price.seconds)


def _variants(setting: MeshProblem) -> tuple[MeshProblem, ...]:
    """Return a problem that may move activations to the host, and those of fewer choices that are compared with it."""
    offload = setting.options.offload
    without, of_all = (replace(offload, activations=moved) for moved in (None, (EVERY,)))
    return (
        setting, setting.like(offload=without), setting.like(may_recompute=False),
        setting.like(offload=of_all, may_recompute=False),
    )  # fmt: skip


def _smallest_of_variants(setting: MeshProblem, limit: float) -> list[StagePlan]:
    """Return plans of few bytes: of each variant the smallest, with what may be moved to the host if it needs that."""
    plans = []
    for variant in _variants(setting):
        with suppress(InfeasibleError):  # not solved in time
            smallest = WithinMemory(variant, *variant.problem(True, choices=True), limit).smallest()
            plans.append(moved_to_host(setting, smallest, limit))
    return plans


def _memory(plan: StagePlan) -> int:
    return plan.price.memory_bytes


def _too_large(setting: MeshProblem, free: StagePlan, smallest: StagePlan, limit: float) -> AllTooLarge:
    """Return the error that nothing fits, with what the smallest plan that is known needs."""
    hint = host_hint(setting.options, setting.priced.device, setting.graph.forward_only)
    return AllTooLarge(smallest, too_big(setting.graph, free, smallest, limit, hint))


def _or_keeping_all(
    within: WithinMemory, best: StagePlan | None, bound: float, small: list[StagePlan]
) -> StagePlan | None:
    """Return the plan of a program without decisions about memory, if it is faster than the best one.

    A smallest plan that does not fit is added to those that are too large.
    """
    within.known_seconds = best.price.seconds if best is not None else float("inf")
    try:
        plan = within.plan()
    except AllTooLarge as error:
        small.append(error.smallest)
        return best
    except (OutOfReach, Beaten) as error:
        if best is None and not (isinstance(error, OutOfReach) and small):
            raise
        return best
    if best is not None and best.price.seconds <= plan.price.seconds:
        return best
    return replace(plan, solution=against(min(bound, within.bound), plan, within.setting.options.memory_gap))


def choosing(
    setting: MeshProblem, limit: float, ends: dict[object, object] | None = None
) -> tuple[StagePlan | None, float, list[StagePlan]]:
    """Return the cheapest plan within the limit when recomputing and regathering are choices of the program.

    Also return the seconds that no such plan beats, and small plans that do not fit if none does. At first, all that is
    recomputed of a block is counted as recomputed at once. That is so where whole blocks are, and too much where parts
    are: so where nothing repeats, or nothing fits, the least that is there in any case gives another bound, of which
    the smaller counts, and another plan, where the first is far from it.

    Raises:
        Beaten: it is not worth the search.
    """
    problem, decoder = setting.problem(True, choices=True)

    @cache
    def all_recomputed() -> StagePlan | None:
        return with_all_recomputed(setting, limit)

    small: list[StagePlan] = []
    plans: list[StagePlan] = []
    bounds: list[float] = []
    first: tuple[MomentBytes, ...] = ()
    for at_once in (True, False):
        if decoder.moments is not None:
            decoder.moments.at_once = at_once
            if bounds == [float("inf")] and not plans and decoder.moments.first() == first:
                break  # the same program, of which it is known that nothing fits
            first = decoder.moments.first()
        within = WithinMemory(
            setting, problem, decoder, limit, ends={} if ends is None else ends, otherwise=all_recomputed
        )  # fmt: skip
        near = plans and plans[0].solution is not None and plans[0].solution.gap <= EFFORT.far_gap
        try:
            if near:
                within.relax()
            else:
                plans.append(within.plan())
        except AllTooLarge as error:
            small.append(error.smallest)
        except OutOfReach:
            pass
        except InfeasibleError:  # of the relaxation alone
            assert near
        bounds.append(within.bound)
        if decoder.recomputable is None or (plans and setting.folding.blocks):
            break
    if not plans:
        return None, min(bounds), small
    best, bound = min(plans, key=lambda p: p.price.seconds), min(bounds)
    if len(bounds) > 1:
        best = replace(best, solution=against(bound, best, setting.options.memory_gap))
    return best, bound, []


def with_all_recomputed(setting: MeshProblem, limit: float) -> StagePlan | None:
    """Return the cheapest plan within the limit in which everything that may be recomputed is, or None.

    Recomputation is not chosen there, so its program is as easy as one without: 0.8 s for two layers of 405B in a stage
    of 7 GiB, where the choice was not found in a minute.
    """
    fixed = setting.with_all_recomputed()
    if fixed is None:
        return None
    with suppress(InfeasibleError, Beaten):
        return WithinMemory(fixed, *fixed.problem(True, choices=True), limit).plan()
    return None


class PlansByMemory:
    """The fastest plan of a graph on a mesh, and smaller ones: of these plans, no other has less of both.

    Of each there are variants with the same cuts: nothing recomputed, all copies regathered that may be, and all
    operators recomputed that may be. They are the optima at rising prices of a byte, so they lie on the convex hull of
    seconds over bytes. With a solver that cannot price bytes there is only the fastest.

    Raises:
        MeshError, InfeasibleError: as for :func:`plan_graph`, but for memory.
    """

    @uncollected()
    def __init__(
        self, graph: Graph, cluster: Cluster, mesh: Mesh, options: Options, *, devices: Sequence[int] | None = None
    ) -> None:
        self.setting = MeshProblem(graph, cluster, mesh, options, devices)

    @uncollected()
    def fastest(self) -> StagePlan:
        """Return the fastest plan alone, from a program without strategies that only save memory."""
        problem, decoder = self.setting.problem(False)
        program = highs.program(problem, effort=self.setting.options.effort())
        return self.setting.realise(decoder.decided(program.hull(())[0].picked))

    @uncollected()
    def every(self, prices: Sequence[float] = EFFORT.byte_prices) -> list[StagePlan]:
        """Return all plans, the fastest first, at the prices of :meth:`~.solving.highs.HighsProgram.hull`."""
        problem, decoder = self.setting.problem(True, choices=True)
        program = highs.program(replace(problem, limit_bytes=UNLIMITED), effort=self.setting.options.effort())
        fastest, *others = program.hull(prices, EFFORT.peak_share)
        plans: dict[object, StagePlan] = {}
        self._add_variants(decoder, fastest, plans)
        for choice in others:
            with suppress(PlanError):  # rounded to strategies between which there is no way
                self._add_variants(decoder, choice, plans)
        return list(plans.values())

    def _add_variants(self, decoder: Decoder, choice: Choice, plans: dict[object, StagePlan]) -> None:
        """Add the cuts of a choice without its decisions about memory, with them, and with all that may be made.

        ``plans`` are those so far, by cuts and decisions about memory: choices at rising prices may differ in the
        latter alone.
        """
        decided = decoder.decided(choice.picked)
        cuts, nothing = decided.cuts, frozenset[int]()
        if cuts not in plans:
            plans[cuts] = self.setting.realise(decided._replace(recomputed=nothing, tensors={}))
        sets = [(decided.recomputed, decided.tensors), (nothing, {REGATHER.name: frozenset(plans[cuts].reshard_paths)})]
        if decoder.recomputable is not None:
            sets.append((decoder.recomputable.every(self.setting.folding), {}))
        sets += [(nothing, tensors) for tensors in decoder.all_given_up()]
        for again, tensors in sets:
            key = cuts, again, frozenset((name, keys) for name, keys in tensors.items() if keys)
            if key not in plans and any(key[1:]):
                variant = self.setting.realise(decided._replace(recomputed=again, tensors=tensors))
                if variant.memory:
                    plans[key] = variant


@uncollected()
def repriced(
    graph: Graph, cluster: Cluster, mesh: Mesh, options: Options, plans: Sequence[StagePlan], *,
    devices: Sequence[int] | None = None, weighed: bool = True,
) -> list[StagePlan] | None:  # fmt: skip
    """Return plans with the decisions of another graph's plans; None if the sizes, in which they differ, forbid it."""
    setting = MeshProblem(graph, cluster, mesh, options, devices)
    priced = []
    for plan in plans:
        try:
            priced.append(setting.realise(decided_of(setting, plan, plan.about_tensors), plan, weighed))
        except (PlanError, MeshError):
            return None
    return priced


__all__ = ["Earlier", "Options", "PlansByMemory", "device_limit", "plan_graph", "repriced"]
