"""Plans for requests: on one mesh, on the best of several, or in stages.

:func:`autopar.plan`, :func:`autopar.parallelize` and ``autopar plan`` all come here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch

import autopar.lower.offloaded  # noqa: F401  (registers its decision about memory)
from autopar.capture import Captured
from autopar.capture.in_parts import refused_rows
from autopar.capture.microbatches import first_part, numbers_of_parts, rows_of, taken_of_batch
from autopar.errors import CaptureError, InfeasibleError, MeshError, PlanError
from autopar.planner.effort import EFFORT
from autopar.planner.host_bytes import notes_on_host
from autopar.planner.inter_op.exact.exact_stages import Exact
from autopar.planner.inter_op.simulating.order import check_name
from autopar.planner.inter_op.stage_pins import allows, check, check_counts, starts_of
from autopar.planner.inter_op.stage_search import INTERRUPTED, PipelineOptions, Planned, plan_pipeline
from autopar.planner.intra_op.building.integer_program import Beaten, NoChoice
from autopar.planner.intra_op.memory.recompute import check_modules
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.planner.intra_op.pins.clashing_pins import explained
from autopar.planner.intra_op.pins.host_storage import note_on_left_out
from autopar.planner.intra_op.pins.small_parameters import TooSmallError, note_on_small
from autopar.planner.microbatch_graphs import MicrobatchGraphs, part_of
from autopar.planner.plan_notes import next_best, notes_on, notes_on_matrices, with_note_on_statistics
from autopar.plans.memory_decisions import OFFLOAD
from autopar.plans.offload_options import parse_offload
from autopar.plans.pins import Pins
from autopar.plans.plan import Plan
from autopar.plans.request import PlanRequest
from autopar.plans.weight_versions import versions_of
from autopar.rules.experts.expert_load import notes_on_load, with_load
from autopar.words.graph import Graph
from autopar.words.meshes import AXIS_NAMES, Mesh, mesh_shapes
from autopar.words.texts import show_seconds
from cost_models.schedules import Timeline, usual
from hardware_profiles import Cluster, speed_of, subset_suffix


@dataclass(frozen=True)
class Outcome:
    """A plan, and how it was found.

    Attributes:
        captured: the capture of one microbatch, for which the plan is.
        timeline: the timeline of a step if stages were searched for.
        tried: the best layouts that were planned, ``(layout, seconds of a step)``, best first.
        others: all plans in stages that were made exactly, this one first.
        cluster: the cluster for which they are: that of the devices that work, where the plan leaves some idle.
    """

    plan: Plan
    captured: Captured
    timeline: Timeline | None = None
    tried: tuple[tuple[str, float], ...] = ()
    others: tuple[Exact, ...] = ()
    cluster: Cluster | None = None


def options_of(request: PlanRequest) -> Options:
    """Return the options of a request for one mesh."""
    pins = request.pins
    return Options(
        constraints=pins.ops or None, params=pins.params or None, inputs=pins.inputs or None,
        outputs=pins.outputs or None, memory_limit_bytes=pins.memory_limit_bytes, optimizer=request.optimizer,
        microbatches=request.microbatches, time_limit_seconds=request.time_limit_seconds, recompute=pins.recompute,
        may_recompute=request.may_recompute, offload=parse_offload(pins.offload),
    )  # fmt: skip


def wishes_of(plan: Plan) -> Options:
    """Return the options under which a plan, or a stage of it, is solved again as its user wanted it."""
    return options_of(PlanRequest(plan.pins, plan.optimizer, plan.microbatches))


def find(
    model: torch.nn.Module, captured: Captured, example: Callable[[], Any], cluster: Cluster, n: int,
    request: PlanRequest, name: str = "", runs: bool = True, say: Callable[[str], None] = lambda _: None,
) -> Outcome:  # fmt: skip
    """Return the best plan for ``n`` devices of a cluster that honours a request.

    Where the number of microbatches is left to the planner, a model that computes statistics of its batch (batch norms)
    is planned with one: with more, training would differ from one device.

    ``captured`` is a microbatch, or the batch of a step where the number of microbatches is to be chosen; ``example``
    gives the captured call as ``(args, kwargs)``, or ``(args, kwargs, targets)`` with a loss function. A plan finds its
    cluster by ``name``; ``runs`` as for :func:`in_parts`; ``say`` is called with what is planned next.

    Raises:
        MeshError, PlanError: the request cannot be honoured, or not for this model.
        InfeasibleError: nothing fits.
    """
    graph = with_load(captured.graph, request.pins.expert_load)
    offload = parse_offload(request.pins.offload)
    check_modules(graph, offload.patterns)
    loaded = captured if graph is captured.graph else replace(captured, graph=graph)
    outcome = _on_some_devices(model, loaded, example, cluster, n, request, name or cluster.name, runs, say)
    graph = outcome.captured.graph
    left_out = note_on_left_out(offload, request.optimizer, versions_of(outcome.plan.schedule))
    notes = [*notes_on_load(graph, outcome.plan), *notes_on_matrices(graph, outcome.plan), *filter(None, [left_out])]
    if offload.patterns and not any(stage.memory.get(OFFLOAD) for stage in outcome.plan.stages):
        notes.append(
            f"offload: nothing is moved: no result of '{', '.join(offload.patterns)}' waits for its backward on the "
            "device by itself (views, outputs, integers, and what is recomputed do not)"
        )
    return replace(outcome, plan=replace(outcome.plan, notes=(*outcome.plan.notes, *notes))) if notes else outcome


def _on_some_devices(
    model: torch.nn.Module, captured: Captured, example: Callable[[], Any], cluster: Cluster, n: int,
    request: PlanRequest, name: str, runs: bool, say: Callable[[str], None],
) -> Outcome:  # fmt: skip
    """Return the best plan on all ``n`` devices or, where their speeds differ, on the faster ones alone.

    A plan that is made to be run now has to use the ranks that are running: a note says which would be faster alone.
    """
    outcome: Outcome | None = None
    infeasible: InfeasibleError | None = None
    try:
        outcome = replace(_found(model, captured, example, cluster, n, request, name, runs, say), cluster=cluster)
    except InfeasibleError as error:
        infeasible = error
    best, chosen = outcome, tuple(range(n))
    for ranks in () if request.pins.mesh is not None else faster_devices(cluster, n):
        if best is not None and INTERRUPTED in best.plan.notes:
            break
        some, suffix = cluster.only(ranks), subset_suffix(ranks)
        say(f"{_called(cluster, ranks)} alone")
        try:
            found = _found(model, captured, example, some, len(ranks), request, name + suffix, False, say)
        except (InfeasibleError, MeshError, PlanError):  # so many stages, as much memory: only all devices have them
            continue
        if best is None or found.plan.seconds < best.plan.seconds * (1 - EFFORT.faster_by):
            best, chosen = replace(found, cluster=some), ranks
    if best is outcome:
        if outcome is None:
            assert infeasible is not None
            raise infeasible
        return outcome
    assert best is not None
    idle = [rank for rank in range(n) if rank not in chosen]
    alone = f"{show_seconds(best.plan.seconds)} on {_called(cluster, chosen)} alone"
    if outcome is None:
        if runs:
            raise InfeasibleError(f"{infeasible}\n  a step fits, and takes {alone}: start ranks on these only")
        takes = f"on all {n} devices none fits, a step takes {alone}"
    else:
        takes = f"a step takes {show_seconds(outcome.plan.seconds)} on all {n} devices, {alone}"
    if runs:
        assert outcome is not None
        said = f"the slower devices hold up the others: {takes}; start ranks on these only"
        return replace(outcome, plan=replace(outcome.plan, notes=(*outcome.plan.notes, said)))
    are = f"{_called(cluster, idle)} {'are' if len(idle) > 1 else 'is'} left idle"
    said = f"{are}: {takes}; run {len(chosen)} rank{'s' if len(chosen) > 1 else ''} there"
    return replace(best, plan=replace(best.plan, notes=(*best.plan.notes, said)))


def faster_devices(cluster: Cluster, n: int) -> list[tuple[int, ...]]:
    """Return sets of the first ``n`` devices without the slower ones; empty if all devices are equally fast.

    There is one for each speed but the lowest, with all devices that are at least as fast; and of the fastest devices
    those of one machine, and one alone.
    """
    speeds = [speed_of(cluster.device(rank)) for rank in range(n)] if not cluster.abstract else []
    distinct = sorted(set(speeds), reverse=True)
    if len(distinct) < 2:
        return []
    fastest = [rank for rank in range(n) if speeds[rank] == distinct[0]]
    machines: dict[int, list[int]] = {}
    for rank in fastest:
        machines.setdefault(cluster.node_of[rank], []).append(rank)
    sets = [[rank for rank in range(n) if speeds[rank] >= least] for least in distinct[:-1]]
    return list(dict.fromkeys(map(tuple, [*sets, max(machines.values(), key=len), fastest[:1]])))


def _called(cluster: Cluster, ranks: Sequence[int]) -> str:
    """Return devices in words: ``devices 4-5 (A100-SXM-80GB)``."""
    kinds = ", ".join(dict.fromkeys(cluster.device(rank).name for rank in ranks))
    return f"device{'s' if len(ranks) > 1 else ''} {subset_suffix(ranks)[1:]} ({kinds})"


def _found(
    model: torch.nn.Module, captured: Captured, example: Callable[[], Any], cluster: Cluster, n: int,
    request: PlanRequest, name: str, runs: bool, say: Callable[[str], None],
) -> Outcome:  # fmt: skip
    """Return :func:`find` of a graph that has its experts' loads."""
    if not request.piped or not (request.insisted or can_be_cut(captured.graph, example())):
        try:
            return on_best_mesh(captured, cluster, n, request, name, say)
        except InfeasibleError as error:
            of_names = isinstance(error, TooSmallError)  # which neither microbatches nor stages make larger
            if of_names or not request.whole or request.insisted or not can_be_cut(captured.graph, example()):
                raise
            hint = _hint_for_others(model, captured, example(), cluster, n, request, str(error))
            if not hint:
                raise
            raise InfeasibleError(f"{error}\n  {hint}") from None
    if request.numbers is None:
        say("stages")
        planned = in_stages({request.microbatches: captured.graph}, cluster, n, request, name)
        plan = with_note_on_statistics(planned.plan, captured.graph)
        return Outcome(plan, captured, planned.timeline, planned.tried, planned.others)
    say("meshes, stages, schedules, microbatches")
    taken = _taken(captured, rows_of(example()), request) if request.numbers == () and rows_of(example()) > 1 else ""
    if taken:
        request = replace(request, numbers=(1,))
    try:
        outcome = in_parts(model, captured, example(), cluster, n, request, name, runs)
    except InfeasibleError as error:
        if not taken:
            raise
        raise InfeasibleError(
            f"{error}\n  that is for the whole batch at once, because {taken}; give a number of microbatches to train "
            "with what each microbatch has of its own, as gradient accumulation does"
        ) from None
    if taken:
        said = f"one microbatch, because {taken}: give their number for more, of which each would have its own"
        outcome = replace(outcome, plan=replace(outcome.plan, notes=(*outcome.plan.notes, said)))
    if len(outcome.plan.stages) == 1 and outcome.plan.microbatches > 1 and 1 in (request.numbers or (1,)):
        return _simpler(outcome, captured, cluster, request, name)
    return outcome


def _taken(captured: Captured, rows: int, request: PlanRequest) -> str:
    """Return why the batch is not divided when microbatches are left open; empty if it may be."""
    taken = taken_of_batch(captured.graph)
    if taken or request.input_rows is not None:
        return taken
    return refused_rows(captured, rows, "a microbatch has a part of the rows").split("\n")[0]


def can_be_cut(graph: Graph, example: Any) -> bool:
    """Return whether a model can be trained in stages or microbatches: it returns a loss, and its batch has rows."""
    try:
        return graph.loss is not None and rows_of(example) > 0
    except CaptureError:
        return False


def _simpler(outcome: Outcome, captured: Captured, cluster: Cluster, request: PlanRequest, name: str) -> Outcome:
    """Return the plan of the whole batch on the same mesh, if that takes hardly longer than in microbatches."""
    most = outcome.plan.seconds * (1 + EFFORT.simpler_by)
    options = replace(options_of(request), microbatches=1, worth_seconds=most, explains=False)
    try:
        simple = on_mesh(captured.graph, cluster, outcome.plan.mesh, options, name, request.pins)
    except (InfeasibleError, Beaten):
        return outcome
    if simple.seconds > most:
        return outcome
    return replace(outcome, plan=simple, captured=captured, timeline=None)


def _hint_for_others(
    model: torch.nn.Module, captured: Captured, example: Any, cluster: Cluster, n: int, request: PlanRequest, why: str
) -> str:
    """Return a hint on what would fit a model whose whole batch does not.

    Nothing if the same error ``why`` remains.
    """
    free = replace(request, whole=False, piped=True, numbers=())
    try:
        outcome = in_parts(model, captured, example, cluster, n, free, cluster.name, runs=False)
    except (InfeasibleError, PlanError, MeshError) as error:
        return "" if str(error) == why else f"nor in microbatches or stages: {error}"
    words = "stages='auto'" if len(outcome.plan.stages) > 1 else f"microbatches={outcome.plan.microbatches}"
    taken = taken_of_batch(captured.graph) if outcome.plan.microbatches > 1 else ""
    differs = f", by other numbers: {taken}, and each microbatch would have its own" if taken else ""
    return (
        f"that is for the whole batch at once, as pm(batch) and loss.backward() run it; {words} would fit "
        f"({outcome.tried[0][0]}: {show_seconds(outcome.plan.seconds)} a step), and trains by pm.train_step(*batch)"
        f"{differs}"
    )


# --- on one mesh -----------------------------------------------------------------------------------------------------


def on_only_mesh(graph: Graph, cluster: Cluster, mesh: Mesh, options: Options, name: str, pins: Pins) -> Plan:
    """Return :func:`on_mesh`, where no other mesh is looked at."""
    try:
        return on_mesh(graph, cluster, mesh, options, name, pins)
    except NoChoice as error:
        raise explained(graph, cluster, mesh, options, error) from None


def on_mesh(graph: Graph, cluster: Cluster, mesh: Mesh, options: Options, name: str, pins: Pins) -> Plan:
    """Return the plan of a whole model on one mesh (:func:`~autopar.planner.intra_op.mesh_plan.plan_graph`)."""
    stage = plan_graph(graph, cluster, mesh, options)
    notes = *notes_on(graph), *note_on_small(graph, pins.params, [stage]), *notes_on_host(graph, [stage], cluster)
    return Plan.alone(stage, name, pins, notes)


def on_best_mesh(
    captured: Captured, cluster: Cluster, n: int, request: PlanRequest, name: str,
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:  # fmt: skip
    """Return the plan on the requested mesh, or the fastest over the mesh shapes of ``n`` devices."""
    graph, pins, options = captured.graph, request.pins, options_of(request)
    shapes = [pins.mesh] if pins.mesh is not None else mesh_shapes(n, request.max_axes, options.named_axes)
    if pins.mesh is None:
        shapes = [shape for shape in shapes if allows(shape, options)]
    if not shapes:
        raise MeshError(
            f"no mesh shape of {n} devices has the axes that the constraints name "
            f"({', '.join(sorted(options.named_axes))}) and as many as there are placements; shapes that are chosen "
            f"have up to {request.max_axes} axes, with names among {', '.join(AXIS_NAMES)}: name these, or give the "
            "mesh that you mean"
        )
    best: Plan | None = None
    infeasible: InfeasibleError | None = None
    failed: Mesh = shapes[0]
    tried: list[tuple[str, float]] = []
    for shape in shapes:
        say(shape.shown())
        least = best.seconds if best is not None else inf
        try:
            wanted = replace(options, worth_seconds=least, explains=len(shapes) == 1)
            plan = on_mesh(graph, cluster, shape, wanted, name, pins)
        except Beaten:
            continue
        except InfeasibleError as error:
            if infeasible is None:
                infeasible, failed = error, shape
            continue
        except KeyboardInterrupt:
            if best is None:
                raise
            best = replace(best, notes=(*best.notes, INTERRUPTED))
            break
        tried.append((shape.shown(), plan.seconds))
        if plan.seconds < least * (1 - EFFORT.faster_by):
            best = plan
    if best is None:
        assert infeasible is not None
        if isinstance(infeasible, NoChoice):
            raise explained(graph, cluster, failed, options, infeasible)
        if len(shapes) == 1:
            raise infeasible
        best = on_mesh(graph, cluster, failed, options, name, pins)  # down to the smallest plan, or what that needs
        tried.append((failed.shown(), best.seconds))
    return Outcome(best, captured, None, tuple(sorted(tried, key=lambda way: way[1])))


# --- in stages -------------------------------------------------------------------------------------------------------


def in_stages(
    graphs: Mapping[int, Graph], cluster: Cluster, n: int, request: PlanRequest, name: str
) -> Planned:
    """Return the best plan in stages on ``n`` devices, from the graphs of microbatches by their number in a step."""
    graph, pins = next(iter(graphs.values())), request.pins
    if pins.mesh is not None:
        size = pins.mesh.n_devices
        if pins.stages == 1 and size < n:  # as without stages: the first devices
            n = size
        if pins.stages is not None and size * pins.stages != n:
            raise MeshError(
                f"{pins.stages} stages on a mesh of {size} devices each need {pins.stages * size} devices, there are "
                f"{n}"
            )
        if pins.stages is None and n % size:
            raise MeshError(
                f"a mesh of {size} devices for every group does not divide {n} devices; use one whose size divides {n}"
            )
    if n > cluster.n_devices:
        raise MeshError(f"{n} devices are wanted, cluster '{cluster.name}' has {cluster.n_devices}")
    if graph.loss is None and not pins.mode:
        raise PlanError("a pipeline trains a model that returns its loss; give loss_fn= and targets=")
    schedules = pins.schedules or usual()
    for schedule in schedules:
        check_name(schedule)
    options = options_of(request)
    check(graph, options, pins.mesh)
    counts = [pins.stages] if pins.stages else [g for g in range(1, n + 1) if n % g == 0]
    sizes = [m for g in counts for m in mesh_shapes(max(1, n // g), named=options.named_axes)]
    check_counts(pins.stages, pins.cuts, n, schedules, pins.mesh, options, sizes)
    starts = starts_of(graph, pins.cuts) if pins.cuts else None
    wanted = PipelineOptions(
        request.microbatches, pins.stages, schedules, pins.mesh, starts, options, may_recompute=request.may_recompute,
        top=request.top, max_axes=request.max_axes,
    )  # fmt: skip
    planned = plan_pipeline(graphs, cluster, n, wanted, cluster_name=name)
    small = note_on_small(graph, pins.params, planned.plan.stages)
    on_host = notes_on_host(graphs.get(planned.plan.microbatches, graph), planned.plan.stages, cluster)
    notes = (*planned.plan.notes, *notes_on(graph), *small, *on_host, *next_best(planned))
    return replace(planned, plan=replace(planned.plan, pins=pins, notes=notes))


def in_parts(
    model: torch.nn.Module, captured: Captured, example: Any, cluster: Cluster, n: int, request: PlanRequest, name: str,
    runs: bool = True,
) -> Outcome:  # fmt: skip
    """Return the best plan in stages of a whole captured batch, the number of microbatches chosen too.

    A plan that ``runs`` is for a program that is made now. A plan for a file is for the graph that follows from two
    captured ones; whoever runs it captures the model, and a graph that is another one is refused.

    Raises:
        CaptureError: the rows of the batch do not divide, or there are none.
    """
    rows = rows_of(example)
    counts = sorted(set(request.numbers or ())) or numbers_of_parts(rows)
    for m in counts:
        first_part(example, m)  # refuses what does not divide before anything takes its time
    of_parts = MicrobatchGraphs(model, captured, example, request.input_rows)
    graphs = {m: of_parts.graph(m) for m in counts}
    planned = in_stages(graphs, cluster, n, request, name)
    one = planned.plan.microbatches
    chosen = of_parts.part(one) if runs else of_parts.captured_of(one)
    if chosen.graph.fingerprint != planned.plan.fingerprint:  # the model treats this size in another way
        planned = in_stages({planned.plan.microbatches: chosen.graph}, cluster, n, request, name)
    plan = with_note_on_statistics(planned.plan, chosen.graph)
    return Outcome(plan, chosen, planned.timeline, planned.tried, planned.others)


__all__ = ["Outcome", "find", "in_stages", "on_best_mesh", "on_mesh", "on_only_mesh", "part_of", "wishes_of"]
