"""Moves of a decided plan's results to the memory of the host: as few as its limit asks for.

The integer program decides for blocks that are alike as one; here results are taken one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from autopar.errors import InfeasibleError, PlanError
from autopar.planner.host_bytes import moved_bytes, stored_bytes
from autopar.planner.intra_op.building.decoder import Decided
from autopar.planner.intra_op.building.space import fitting_strategy
from autopar.planner.intra_op.mesh_problem import MeshProblem
from autopar.planner.intra_op.within_memory import against
from autopar.plans.memory_decisions import OFFLOAD
from autopar.plans.offload_options import EVERY, Offload
from autopar.plans.plan import ParamChoice, StagePlan
from autopar.rules.strategy import Strategy
from autopar.words.texts import show_bytes


def moved_to_host(setting: MeshProblem, plan: StagePlan, limit: float) -> StagePlan:
    """Return a plan, of which all but memory is decided, with what the option ``offload`` moves to the host.

    Where the planner chooses, that is as little as fits the limit; all that may be moved if that does not.
    """
    offload = setting.options.offload
    if offload.activations is None or (offload.chooses_activations and plan.price.memory_bytes <= limit):
        return plan
    asked = setting.asked if offload.patterns else setting.like(offload=Offload((EVERY,))).asked
    moved = _away_only(setting, plan, [setting.graph.nodes[i].name for i in sorted(asked)])
    if moved is None or not offload.chooses_activations or moved.price.memory_bytes > limit:
        return moved or plan
    return brought_back(setting, moved, limit)


def brought_back(setting: MeshProblem, plan: StagePlan, limit: float) -> StagePlan:
    """Return a plan within the limit without those of its copies to the host for which there is room.

    The last ones of the forward are kept first: they come back the soonest, and so are waited for the most. As many,
    spread over the forward, are tried as well: their copies have more computation between them.
    """
    away = sorted(plan.memory.get(OFFLOAD, ()), key=lambda key: setting.graph.index[key.partition("#")[0]])
    fits: dict[int, StagePlan] = {len(away): plan}
    low, high = -1, len(away)  # the first `high` of them may be all that is moved; with `low` it does not fit
    while high - low > 1:
        middle = (low + high) // 2
        fewer = _away_only(setting, plan, away[:middle])
        if fewer is not None and fewer.price.memory_bytes <= limit:
            fits[middle], high = fewer, middle
        else:
            low = middle
    spread = _away_only(setting, plan, [away[k * len(away) // high] for k in range(high)])
    if spread is not None and spread.price.memory_bytes <= limit:
        fits[-1] = spread
    best = min(fits.values(), key=lambda fitting: (fitting.price.seconds, len(fitting.memory.get(OFFLOAD, ()))))
    if plan.solution is None:
        return best
    bound = plan.solution.objective_seconds * (1 - plan.solution.gap)
    said = replace(plan.solution, objective_seconds=plan.solution.objective_seconds - plan.price.seconds
                   + best.price.seconds)  # fmt: skip
    best = replace(best, solution=said)
    return replace(best, solution=against(min(bound, said.objective_seconds), best, setting.options.memory_gap))


def check_host_memory(setting: MeshProblem, plan: StagePlan) -> StagePlan:
    """Return a plan whose moved results fit its device's share of the host's memory, beside parameters stored there.

    All microbatches in flight count.

    Raises:
        InfeasibleError: they do not.
    """
    host, moved = setting.priced.host, moved_bytes(setting.graph, plan)
    stored = stored_bytes(setting.graph, plan)
    if host is None or not moved or moved + stored <= host.memory_bytes:
        return plan
    beside = f" beside {show_bytes(stored)} of parameters, gradients and state" if stored else ""
    raise InfeasibleError(
        f"offload: the plan moves {show_bytes(moved)} of a device to the memory of its host{beside}, in which a device "
        f"of this cluster has {show_bytes(int(host.memory_bytes))}; move the results of fewer modules "
        "(offload={'activations': ['layers.0', ...]}), let some be recomputed, or use more hosts"
    )


def _away_only(setting: MeshProblem, plan: StagePlan, away: Sequence[str]) -> StagePlan | None:
    """Return the plan with these results alone moved to the host; None if its decisions cannot be taken over."""
    tensors = {**plan.about_tensors, OFFLOAD: frozenset(away)}
    like = replace(plan, memory={**plan.memory, OFFLOAD: tuple(away)})
    with suppress(PlanError):
        return setting.realise(decided_of(setting, like, tensors), like)
    return None


def decided_of(setting: MeshProblem, plan: StagePlan, tensors: Mapping[str, frozenset[str]]) -> Decided:
    """Return the decisions of a plan of another graph, or of this one, with these about tensors.

    Raises:
        PlanError: an operator cannot be cut so here.
    """
    graph = setting.given
    ops: dict[int, Strategy] = {}
    params: dict[int, ParamChoice] = {}
    for i, (node, rule) in enumerate(zip(graph.nodes, setting.rules, strict=True)):
        if node.kind == "param" and node.target in plan.params:
            params[i] = plan.params[node.target]
        elif node.kind == "op" and node.hot:
            assert rule is not None
            names = plan.ops.get(node.name)
            strategy = fitting_strategy(graph, node, rule, setting.mesh, names) if names is not None else None
            if strategy is None:
                raise PlanError(f"{node.where} cannot be cut as in the other plan")
            ops[i] = strategy
    outputs = {k: state for k, state in enumerate(plan.outputs) if state is not None}
    stored = {graph.nodes[i].target: plan.buffers[graph.nodes[i].target] for i in setting.stored}
    return Decided(ops, params, outputs, dict(plan.inputs), tensors=dict(tensors), buffers=stored)
