"""What a measured profile adds to a pipeline's stages beside their ops: the executor's own work.

    forward     handling of one microbatch
    backward    the same; gradients that arrive over several ways are added up, and weight gradients to those of
                earlier microbatches
    halves      where the backward is split: the same for each half, and more for every op, since autograd's graph is
                searched for the cuts and run in two parts
    step        the optimizer, and what is done once a step

Only a profile knows any of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from autopar.graph import Graph, Ref
from autopar.placements import State, local_shape, whole_state
from autopar.plan import StagePlan
from autopar.planner.intra_op.price import Pricer
from autopar.rules.strategy import Strategy
from cost_models.measured import between


@dataclass(frozen=True)
class Extra:
    """Seconds of one microbatch on one stage (``step_seconds``: of a step), beside the ops. ``summed_seconds``, for
    gradients that arrive over several ways, are in ``backward_seconds`` and in neither half."""

    forward_seconds: float
    backward_seconds: float
    input_seconds: float
    weight_seconds: float
    step_seconds: float
    summed_seconds: float


def extra_of(graph: Graph, plan: StagePlan, pricer: Pricer, chosen: Mapping[int, Strategy]) -> Extra:
    """What the executor adds to a stage.

    Args:
        pricer: one with a measured profile.
        chosen: what every op does.
    """
    known = pricer.measured
    assert known is not None
    own, summed, held, held_new = known.overheads, 0.0, 0.0, 0.0
    for ref, readers in graph.consumers.items():
        spec = graph.spec(ref)
        node = graph.nodes[ref.node]
        if node.needs_grad and spec.is_float and node.kind != "buffer":
            paths = sum(graph.nodes[i].needs_grad for i, _ in readers)
            if paths > 1:
                shape = local_shape(spec.shape, _made(plan, graph, ref, chosen), pricer.mesh)
                summed += (paths - 1) * between(known.accumulate, prod(shape) * spec.item_bytes)
    often = (plan.microbatches - 1) / plan.microbatches
    step = own.step_seconds
    optimizer = known.optimizers.get(plan.optimizer)
    for _, node in graph.of_kind("param"):
        if not node.needs_grad:
            continue
        choice = plan.params[node.target]
        shapes = (local_shape(node.out.shape, s, pricer.mesh) for s in (choice.used, choice.stored))
        used, stored = (prod(shape) * node.out.item_bytes for shape in shapes)
        held += often * between(known.accumulate, used)
        held_new += often * between(known.accumulate_new, used)  # the halves of a backward sum up anew
        if optimizer is not None:
            step += optimizer.tensor_seconds + optimizer.byte_seconds * stored
    n_ops = sum(n.kind == "op" and n.needs_grad for n in graph.nodes)
    return Extra(
        own.forward_seconds, own.backward_seconds + summed + held,
        own.input_seconds + n_ops * own.input_op_seconds,
        own.weight_seconds + n_ops * own.weight_op_seconds + held_new, step, summed,
    )  # fmt: skip


def _made(plan: StagePlan, graph: Graph, ref: Ref, chosen: Mapping[int, Strategy]) -> State:
    """The state in which a tensor is made."""
    node = graph.nodes[ref.node]
    if node.kind == "param":
        return plan.params[node.target].used
    if node.kind == "input":
        return plan.inputs.get(node.target, whole_state(plan.mesh))
    before = sum(out is not None for out in node.outs[: ref.out])
    return chosen[ref.node].outs[before]


__all__ = ["Extra", "extra_of"]
