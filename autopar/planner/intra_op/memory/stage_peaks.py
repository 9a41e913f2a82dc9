"""The peak of a step on one rank of a stage.

It is that of its microbatches (:mod:`.moments`), with others in flight and what is passed to other stages
(:mod:`autopar.plans.prices`), or that of the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from autopar.planner.intra_op.building.matrix_prices import pieces_of
from autopar.planner.intra_op.memory.ledger import Ledger
from autopar.planner.intra_op.memory.memory_walk import Walk
from autopar.planner.intra_op.memory.moments import StepMoments
from autopar.plans.memory_decisions import KEEP
from autopar.plans.plan import ParamChoice
from autopar.plans.prices import ONE_VERSION, Crossed, KeptVersions, Price, StagePeaks
from autopar.plans.stepped_by import matrices_of, stepped_by
from autopar.words.graph import Graph, Ref
from autopar.words.placements import State
from cost_models.matrix_steps import WholeMatrix, loads, peak_bytes

OPTIMIZER_COPIES = {"adamw": 2, "adam": 2}
"""Copies of the largest parameter's piece that an optimizer makes while it steps, one parameter after the other: Adam
the root of the second moment and that root over the bias correction. Others work in place, or on something as small.
With ``foreach`` (torch's default for plain tensors on a GPU) it is one more copy of all parameters; activations are
gone by then, so that this is rarely the fullest moment, and it is not counted."""


def with_working_bytes(
    price: Price, walk: Walk, holds: Ledger, params: Mapping[int, ParamChoice], outputs: Sequence[State | None],
    optimizer: str, microbatches: int, in_flight: int, versions: KeptVersions = ONE_VERSION,
) -> tuple[Price, StagePeaks]:  # fmt: skip
    """Return the price with the working memory of a step's fullest moment, and the moments from which it follows.

    ``holds`` is the ledger of ``walk``; ``outputs`` are the placements of the graph's outputs. With several weight
    versions, a step begins in the middle of the one before: gradients are there all the time, or never for long.
    """
    first = later = None
    stay = walk.kernels.keeps_gradients
    flows = versions != ONE_VERSION
    if not stay and (versions.each_microbatch if flows else in_flight >= microbatches):
        first = StepMoments(walk, holds, params, outputs, False).peaks()
    if (microbatches > 1 or stay) and not versions.each_microbatch:
        later = StepMoments(walk, holds, params, outputs, True).peaks()
    in_step = _stepping(walk, params, optimizer)
    arrived, sent = _arrived(walk), _sent(walk, outputs)
    peaks = StagePeaks(
        first, later, price.gradient_bytes, in_step, holds.kept_bytes, arrived, sent, microbatches, flows
    )
    return peaks.added_to(price, in_flight), peaks


def _stepping(walk: Walk, params: Mapping[int, ParamChoice], optimizer: str) -> int:
    """Return the bytes that the optimizer needs beside its state while it steps, or the hungrier of two optimizers."""
    graph, copies = walk.graph, 0
    for i, choice in params.items():
        if graph.nodes[i].needs_grad and not choice.on_host:
            by = stepped_by(graph, graph.nodes[i], optimizer)
            copies = max(copies, OPTIMIZER_COPIES.get(by, 0) * walk.local_bytes(Ref(i), choice.stored))
    matrices = [
        WholeMatrix(node.out.shape, pieces_of(params[i].stored, walk.mesh), 0.0)
        for i, node in matrices_of(graph, optimizer)
    ]
    return max(copies, round(peak_bytes(loads(matrices, prod(walk.mesh.sizes)))))


def _arrived(walk: Walk) -> tuple[Crossed, ...]:
    """Return what a stage of a pipeline receives."""
    graph = walk.graph
    crossed = []
    for memory in sorted((walk.memories[number] for number in walk.arrived), key=lambda memory: memory.since):
        node = graph.nodes[memory.since]
        gradient_bytes = memory.n_bytes if node.needs_grad else 0
        crossed.append(Crossed(memory.n_bytes, gradient_bytes, (graph.arriving[node.target],)))
    return tuple(crossed)


def _sent(walk: Walk, outputs: Sequence[State | None]) -> tuple[Crossed, ...]:
    """Return what a stage of a pipeline sends, without what autograd keeps anyway, placed as the graph's outputs."""
    graph = walk.graph
    sent = []
    for out, state, targets in zip(graph.outputs, outputs, graph.targets, strict=False):
        assert isinstance(out, Ref) and state is not None, "what is sent is a tensor"
        n_bytes = walk.local_bytes(out, state)
        kept = any(entry.decision == KEEP.name for entry in walk.entries_of.get(walk.lies[out, state][0], ()))
        sent.append(Crossed(0 if kept else n_bytes, n_bytes if sends_back(graph, out) else 0, targets))
    return tuple(sent)


def sends_back(graph: Graph, sent: Ref) -> bool:
    """Return whether a gradient comes back for what is sent."""
    return graph.nodes[sent.node].needs_grad and graph.spec(sent).is_float
