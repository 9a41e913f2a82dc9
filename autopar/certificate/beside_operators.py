"""Seconds of a step beside operators: sums of gradients, and what is done once a step, such as steps of Muon."""

from __future__ import annotations

from math import prod

from autopar.plans.plan import StagePlan
from autopar.plans.stepped_by import matrices_of
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from autopar.words.graph import Graph, Ref
from autopar.words.placements import State, whole_state
from autopar.words.shards import local_shape
from cost_models.costs import Costs, StageWork
from cost_models.matrix_steps import WholeMatrix, iteration_seconds, loads
from cost_models.optimizer_bytes import MUON
from hardware_profiles import Device


def beside_operators(plan: StagePlan, graph: Graph, costs: Costs, device: Device) -> tuple[float, float]:
    """Return seconds beside operators: of all microbatches, and once a step."""

    def work() -> StageWork:
        summed, parameters = [], []
        for ref, readers in graph.consumers.items():
            node, spec = graph.nodes[ref.node], graph.spec(ref)
            gradients = sum(graph.nodes[i].needs_grad for i, _ in readers)
            if gradients > 1 and node.needs_grad and spec.is_float and node.kind != "buffer":
                shape = local_shape(spec.shape, _made_in(plan, graph, ref), plan.mesh)
                summed.append((gradients - 1, prod(shape) * spec.item_bytes))
        for _, node in graph.of_kind("param"):
            if node.needs_grad:
                choice = plan.params[node.target]
                used, stored = (prod(local_shape(node.out.shape, s, plan.mesh)) for s in (choice.used, choice.stored))
                on_device = 0 if choice.on_host else stored
                parameters.append((used * node.out.item_bytes, on_device * graph.stored(node).item_bytes))
        n_ops = sum(n.kind == "op" and n.needs_grad for n in graph.nodes)
        of_matrices, seconds = 0, 0.0
        if plan.optimizer == MUON:
            of_matrices, seconds = _whole_matrices(plan, graph, costs, device)
        return StageWork(
            summed, parameters, n_ops, plan.microbatches, plan.optimizer, forward_only=graph.forward_only,
            matrix_bytes=of_matrices, matrix_seconds=seconds,
        )  # fmt: skip

    extra = costs.stage(work)
    return (plan.microbatches * (extra.forward + extra.backward), extra.step) if extra is not None else (0.0, 0.0)


def _whole_matrices(plan: StagePlan, graph: Graph, costs: Costs, device: Device) -> tuple[int, float]:
    """Return the stored bytes on one rank of what Muon steps on, and the seconds of these steps on owners."""
    n_bytes, matrices, n = 0, [], len(plan.devices)
    for _, node in matrices_of(graph, plan.optimizer):
        shape, stored = node.out.shape, plan.params[node.target].stored
        n_bytes += prod(local_shape(shape, stored, plan.mesh)) * graph.stored(node).item_bytes
        cut = [size for p, size in zip(stored, plan.mesh.sizes, strict=True) if p.dim is not None]
        matrices.append(WholeMatrix(shape, prod(cut), iteration_seconds(costs, device, shape)))
    together = costs.axes({"all": n}, plan.devices)["all"]
    seconds = 0.0
    for load in loads(matrices, n):
        seconds += load.seconds
        for sent in (load.gathered_bytes, load.scattered_bytes):
            seconds += together.seconds("all_to_all", sent) if sent else 0.0
    return n_bytes, seconds


def _made_in(plan: StagePlan, graph: Graph, ref: Ref) -> State:
    """Return the state in which a tensor with a gradient is made."""
    node = graph.nodes[ref.node]
    if node.kind == "param":
        return plan.params[node.target].used
    if node.kind == "input":
        return plan.inputs.get(node.target, whole_state(plan.mesh))
    before = sum(out is not None for out in node.outs[: ref.out])
    return strategy_named(graph, node, rules_of(graph)[ref.node], plan.ops[node.name]).outs[before]
