"""Blocks of operators, found in the graph, between which a pipeline may be cut.

Repeated blocks are what folding finds; they begin where in their period the fewest bytes are passed on, and of such
places where the outermost module ends: between two layers, and not between the attention of one and the rest of it.
Where nothing repeats, a long stretch is cut into pieces of about equal work, none of which has less than a block that
repeats. None begins between operators that read and change one buffer. Blocks of the same kind cost the same, so they
share one solve.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from autopar.planner.effort import EFFORT
from autopar.planner.intra_op.building.fold import Fold
from autopar.plans.stage_graphs import hot_ops, spans_of_written_buffers
from autopar.rules.notation import Rule
from autopar.words.graph import Graph, Ref
from autopar.words.labels import common_depth


@dataclass(frozen=True)
class Block:
    """Operators ``first`` to ``end`` (positions in :func:`~autopar.plans.stage_graphs.hot_ops`).

    Equal ``kind``: equal cost.
    """

    first: int
    end: int
    kind: tuple[int, ...]
    stage_edge_bytes: int  # of all tensors that flow over its beginning, at global shapes


def blocks(graph: Graph, folding: Fold, rules: Sequence[Rule | None]) -> list[Block]:
    """Return the blocks of a graph in execution order; every operator of a stage is in one."""
    ops = hot_ops(graph)
    position = {i: p for p, i in enumerate(ops)}
    modules = [graph.nodes[i].module for i in ops]
    depths = [0, *(common_depth(a, b) for a, b in pairwise(modules)), 0]
    stage_edge = _crossing(graph, ops, position)
    work = list(accumulate((_work(graph, rules, i) for i in ops), initial=0.0))
    every = [i for i, n in enumerate(graph.nodes) if n.kind == "op"]
    cuts = {0, len(ops)}
    inside: set[int] = set()
    least = work[-1]
    for first, length, repeats in folding.blocks:
        hot = {at: _hot_from(every, position, at) for at in range(first + length, first + 2 * length)}
        begin = min(hot, key=lambda at: (stage_edge[hot[at]], depths[hot[at]], at)) - length
        last = repeats if begin == first else repeats - 1
        bounds = [_hot_from(every, position, begin + k * length) for k in range(last + 1)]
        end = _hot_from(every, position, begin + repeats * length) if begin != first else 0
        if end < len(ops) and stage_edge[end] <= stage_edge[bounds[-1]]:
            cuts.add(end)  # of a layer that folding saw half of
        least = min([least, *(work[b] - work[a] for a, b in pairwise(bounds))])
        cuts.update(bounds)
        inside.update(range(bounds[0] + 1, bounds[-1]))
    for a, b in pairwise(sorted(cuts)):
        if a not in inside and a + 1 not in inside:
            share = (work[b] - work[a]) / work[-1] if work[-1] else 0.0
            most = (work[b] - work[a]) // least if folding.blocks and least else EFFORT.pieces
            cuts.update(_pieces(stage_edge, depths, work, a, b, min(round(share * EFFORT.pieces), int(most))))
    parted = spans_of_written_buffers(graph)
    ends = [at for at in sorted(cuts) if not any(first < at <= last for first, last in parted)]
    return [
        Block(a, b, tuple(folding.representative[i] for i in ops[a:b]), stage_edge[a])
        for a, b in pairwise(ends)
        if b > a
    ]


def _hot_from(every: Sequence[int], position: dict[int, int], at: int) -> int:
    """Return the position of the first hot operator from operator position ``at`` on."""
    for i in every[at:]:
        if i in position:
            return position[i]
    return len(position)


def _work(graph: Graph, rules: Sequence[Rule | None], i: int) -> float:
    """Return a rough measure of seconds: flops, and what could be computed while bytes are moved."""
    node, rule = graph.nodes[i], rules[i]
    flops = rule.flops_at({}) if rule is not None else 0.0
    return flops + EFFORT.flops_a_byte * sum(o.n_bytes for o in node.outs if o is not None)


def _crossing(graph: Graph, ops: Sequence[int], position: dict[int, int]) -> list[int]:
    """Return the bytes of the tensors made before and read from each position on."""
    change = [0] * (len(ops) + 2)
    for i in ops:
        for out, spec in enumerate(graph.nodes[i].outs):
            if spec is None:
                continue
            readers = [position[c] for c, _ in graph.consumers.get(Ref(i, out), ()) if c in position]
            if readers:
                change[position[i] + 1] += spec.n_bytes
                change[max(readers) + 1] -= spec.n_bytes
    return list(accumulate(change))[: len(ops) + 1]


def _pieces(
    stage_edge: Sequence[int], depths: Sequence[int], work: Sequence[float], a: int, b: int, n: int
) -> list[int]:  # fmt: skip
    """Return up to ``n - 1`` cuts near equal shares of the work, where the fewest bytes are passed on."""
    cuts = []
    for k in range(1, n):
        low, high = (work[a] + (work[b] - work[a]) * (k + d) / n for d in (-EFFORT.moved_cut, EFFORT.moved_cut))
        start, stop = bisect_left(work, low, a + 1, b), bisect_left(work, high, a + 1, b)
        if start <= stop < b:
            cuts.append(min(range(start, stop + 1), key=lambda p: (stage_edge[p], depths[p], p)))
    return cuts
