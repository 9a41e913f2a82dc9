"""The plan of a stage from the decisions of a file: priced as the file says, or anew where it was edited."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.errors import PlanError
from autopar.planfile.stage_entries import Decisions, ReshardPath, StageReader
from autopar.planfile.writing import decisions, rest
from autopar.planner.intra_op.building.hidden_seconds import hidden
from autopar.planner.intra_op.building.price import Pricer, pricer
from autopar.planner.intra_op.memory.ledger import recompute_seconds
from autopar.planner.intra_op.memory.memory_walk import Walk
from autopar.planner.intra_op.memory.stage_peaks import with_working_bytes
from autopar.planner.intra_op.memory.walked_ledger import ledger_of
from autopar.planner.intra_op.plan_completion import complete, demand, needs
from autopar.plans.clusters import check_mesh
from autopar.plans.memory_decisions import RECOMPUTE
from autopar.plans.pins import Pins
from autopar.plans.plan import Solution, StagePlan, reshard_key, segment_numbers
from autopar.plans.prices import ONE_VERSION, KeptVersions, Price
from autopar.plans.stage_graphs import first_op
from autopar.rules.strategy import strategy_named
from autopar.words.graph import Graph, Ref
from autopar.words.placements import State
from hardware_profiles import Cluster


@dataclass(frozen=True)
class Setting:
    """The circumstances for which a stage is priced; ``cluster`` is called only when a price is needed."""

    cluster: Callable[[], Cluster]
    cluster_name: str
    devices: tuple[int, ...]
    optimizer: str
    microbatches: int
    in_flight: int
    pins: Pins
    versions: KeptVersions = ONE_VERSION


def stage_plan(reader: StageReader, decided: Decisions, setting: Setting) -> tuple[StagePlan, bool]:
    """Return the plan of the decisions, and True if it was priced anew because the file was edited."""
    raw, graph, bad = reader.raw, reader.graph, reader.bad
    chosen, buffers = demand(graph, reader.rules, reader.mesh, decided.ops)
    buffers.update(decided.buffers)
    made_as, wanted, outputs = needs(
        graph, reader.mesh, chosen, decided.params, buffers, decided.inputs, decided.outputs
    )
    checksum = raw.get("checksum") or {}
    plan = StagePlan(
        graph.fingerprint, reader.mesh,
        {node.name: chosen[i].names for i, node in enumerate(graph.nodes) if node.kind == "op"},
        {graph.nodes[i].target: choice for i, choice in sorted(decided.params.items())},
        buffers, tuple(outputs), {}, decided.inputs, setting.optimizer, setting.microbatches,
        memory=decided.memory, in_flight=setting.in_flight, first=first_op(graph), devices=setting.devices,
        versions=setting.versions,
    )  # fmt: skip
    edited = decisions(plan) != checksum.get("decisions")
    reshard_paths = dict(decided.reshard_paths)
    kept: dict[str, ReshardPath] = {}
    incomplete = False
    for ref, goals in wanted.items():
        key = reshard_key(graph, ref)
        given = reshard_paths.pop(key, ())
        problem = _misfit(made_as[ref], goals, given)
        if not problem:
            kept.update({key: given} if given else {})
        elif edited or not given:
            incomplete = True
        else:
            bad.add(f"routes: {key}", problem)
    if not edited:
        for key in reshard_paths:
            bad.add(f"routes: {key}", "nobody reads that tensor in another placement; remove the entry")
    bad.raise_if_any()
    if not edited and not incomplete and raw.get("price") is not None:
        solution = Solution(**raw["solution"]) if raw.get("solution") else None
        as_it_is = replace(plan, reshard_paths=kept, price=Price(**raw["price"]), solution=solution)
        if rest(as_it_is, setting.cluster_name, setting.pins) == checksum.get("rest"):
            return as_it_is, False
    cluster = setting.cluster()
    check_mesh(reader.mesh, cluster)
    return _priced(reader, plan, decided, kept, pricer(cluster, reader.mesh, setting.devices)), True


def _priced(
    reader: StageReader, plan: StagePlan, decided: Decisions, kept: Mapping[str, ReshardPath], priced: Pricer
) -> StagePlan:
    """Complete the plan and price it; reshard paths of the file that still connect are kept."""
    graph, rules = reader.graph, reader.rules
    try:
        done = complete(
            graph, rules, priced, decided.ops, decided.params, decided.outputs, inputs=plan.inputs,
            buffers=decided.buffers, optimizer=plan.optimizer, microbatches=plan.microbatches,
            in_flight=plan.in_flight, memory=plan.memory, versions=plan.versions,
        )  # fmt: skip
    except PlanError as error:
        raise PlanError(f"{reader.bad.where}: {error}") from error
    reshard_paths = {**done.reshard_paths, **kept}
    extra = _routes_seconds(graph, priced, kept)
    extra -= _routes_seconds(graph, priced, {key: done.reshard_paths.get(key, ()) for key in kept})
    price, peaks = done.price, done.peaks
    if kept:
        chosen = {
            i: strategy_named(graph, node, rules[i], done.ops[node.name])
            for i, node in enumerate(graph.nodes) if node.kind == "op"
        }  # fmt: skip
        walk, walk_without = (
            Walk(graph, rules, done.mesh, chosen, ways, done.memory, kernels=priced.kernels)
            for ways in (reshard_paths, done.reshard_paths)
        )
        with_kept, without = ledger_of(walk), ledger_of(walk_without)
        for sign, ways, holds in ((1, reshard_paths, with_kept), (-1, done.reshard_paths, without)):
            segment_of = segment_numbers(graph, holds.memory.get(RECOMPUTE.name, ()))
            beside_others = hidden(graph, rules, priced, chosen, ways, segment_of).values()
            again = recompute_seconds(graph, rules, priced, chosen, ways, holds)[1]
            extra += sign * (again - sum(h.total for h in beside_others))
        price = replace(
            price, activation_seconds=price.activation_seconds + extra * plan.microbatches,
            activation_bytes=plan.in_flight * with_kept.kept_bytes + with_kept.again_bytes,
            again_bytes=with_kept.again_bytes,
        )  # fmt: skip
        params = {i: done.params[node.target] for i, node in graph.of_kind("param")}
        price, peaks = with_working_bytes(
            price, walk, with_kept, params, done.outputs, plan.optimizer, plan.microbatches, plan.in_flight,
            plan.versions,
        )  # fmt: skip
    assert peaks is not None
    return replace(done, reshard_paths=reshard_paths, price=price, peaks=peaks, fullest=peaks.fullest(plan.in_flight))


def _routes_seconds(graph: Graph, priced: Pricer, reshard_paths: Mapping[str, ReshardPath]) -> float:
    """Return the seconds of reshard paths, forward and backward."""
    refs = {
        reshard_key(graph, Ref(i, k)): Ref(i, k)
        for i, node in enumerate(graph.nodes) for k, spec in enumerate(node.outs) if spec is not None
    }  # fmt: skip
    seconds = 0.0
    for key, reshard_path in reshard_paths.items():
        spec, node = graph.spec(refs[key]), graph.nodes[refs[key].node]
        seconds += sum(priced.step(spec, node.needs_grad and spec.is_float, a, b) for a, b in reshard_path)
    return seconds


def _misfit(made_as: State, goals: Mapping[State, None], reshard_path: ReshardPath) -> str:
    """Return the reason why a reshard path does not bring a tensor where it is needed; empty if it does."""
    if reshard_path and reshard_path[0][0] != made_as:
        return f"begins at {reshard_path[0][0].text}, the tensor is made as {made_as.text}; remove the entry"
    reached = {made_as, *(b for _, b in reshard_path)}
    missing = [g for g in goals if g not in reached]
    if missing:
        return f"does not reach {missing[0].text}, as which the tensor is wanted; remove the entry"
    return ""
