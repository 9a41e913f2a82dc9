"""Operators that may be recomputed in the backward instead of being kept, as choices of the integer program.

A recomputed operator keeps nothing: neither what autograd would keep inside of it, nor its results for their readers.
It needs its inputs for that, which are kept or recomputed in their turn. So it is one choice for each operator, made
together with its cut: none, some pointwise operators and norms, attention's inside, or all of a block are points of one
space.

What a block gives to the next is kept, though its maker may be recomputed for what it would keep inside: if it were
recomputed for the next block, the backward of the last block would run the whole model a second time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.memory.ledger import Entry
from autopar.plans.plan import Recompute, reshard_key
from autopar.plans.regather import can_recompute_result
from autopar.rules.notation import Rule
from autopar.words.graph import Graph, Node, Ref, has_effect
from autopar.words.labels import common_depth


@dataclass(frozen=True)
class Recomputable:
    """The operators of a graph that may be recomputed.

    Attributes:
        able: operators that may, by representative of their fold class.
        gives_up: those of `able` whose results need not be kept for other readers either.
        block_of: the number of the block of every operator; what stands between repeated blocks has numbers too.
    """

    able: frozenset[int]
    gives_up: frozenset[int]
    block_of: dict[int, int]

    def every(self, folding: Fold) -> frozenset[int]:
        """Return all operators that may be recomputed, of every block."""
        return frozenset(i for i, r in enumerate(folding.representative) if r in self.able)

    def segments(self, graph: Graph, rules: Sequence[Rule | None], chosen: Collection[int]) -> Recompute:
        """Return runs of chosen operators with the views between them, none over the end of a block."""
        runs: list[list[int]] = []
        between: list[int] = []  # views behind the last run
        block = -1
        for i, node in graph.of_kind("op"):
            joins = bool(runs) and self.block_of[i] == block and i == ([*runs[-1], *between][-1] + 1)
            if i in chosen:
                if joins:
                    runs[-1] += [*between, i]
                else:
                    runs.append([i])
                between, block = [], self.block_of[i]
            elif joins and _is_view(node, rules[i]):
                between.append(i)
            else:
                block = -1
        return tuple((graph.nodes[run[0]].name, graph.nodes[run[-1]].name) for run in runs)

    def may_join(
        self, graph: Graph, rules: Sequence[Rule | None], folding: Fold, first: int, last: int
    ) -> bool:  # fmt: skip
        """Return whether two operators of a block fit one segment: all between them may be recomputed, or are views."""
        between = (i for i in range(first + 1, last) if graph.nodes[i].kind == "op")
        return all(folding.representative[i] in self.able or _is_view(graph.nodes[i], rules[i]) for i in between)

    def results(self, graph: Graph, segments: Recompute, folding: Fold) -> list[str]:
        """Return the results of `segments` that need not be kept for other readers either."""
        results = []
        for first, last in segments:
            inside = range(graph.index[first], graph.index[last] + 1)
            results += [
                reshard_key(graph, Ref(i, k)) for i in inside if folding.representative[i] in self.gives_up
                for k, spec in enumerate(graph.nodes[i].outs)
                if spec is not None and can_recompute_result(graph, Ref(i, k), {i: 0})
            ]  # fmt: skip
        return results


def recomputable_of(graph: Graph, folding: Fold, memory: Sequence[Entry], begins: Sequence[str] = ()) -> Recomputable:
    """Return the operators that may be recomputed.

    ``memory`` is all memory of the global tensors, also what nobody keeps; ``begins`` names the first operators of
    blocks.
    """
    starts = [graph.index[name] for name in begins] if begins else block_starts(graph, folding)
    block_of = blocks_from(graph, starts)
    able = {folding.representative[i] for i, node in graph.of_kind("op") if _may(node)}
    makes, read_behind = set(), set()
    for entry in memory:
        maker = graph.nodes[entry.since]
        if maker.kind == "op":
            makes.add(folding.representative[entry.since])
            here = block_of[entry.since]
            if any(i >= len(graph.nodes) or block_of[i] != here for i, _ in entry.readers):
                read_behind.add(folding.representative[entry.since])
    able &= makes
    return Recomputable(frozenset(able), frozenset(able - read_behind), block_of)


def block_starts(graph: Graph, folding: Fold) -> list[int]:
    """Return the operators with which repeated blocks begin, and those that follow the blocks.

    They begin where in their period the fewest bytes are passed on, and of such places where the outermost module ends,
    which is between two layers.
    """
    ops = [i for i, node in enumerate(graph.nodes) if node.kind == "op"]
    position = {i: p for p, i in enumerate(ops)}
    change = [0] * (len(ops) + 1)
    for i in ops:
        for k, spec in enumerate(graph.nodes[i].outs):
            readers = [position[c] for c, _ in graph.consumers.get(Ref(i, k), ()) if c in position]
            if spec is not None and readers and graph.nodes[i].hot:
                change[position[i] + 1] += spec.n_bytes
                change[max(readers) + 1 if max(readers) < len(ops) else len(ops)] -= spec.n_bytes
    stage_edge = list(accumulate(change))
    modules = [graph.nodes[i].module for i in ops]
    depths = [0, *(common_depth(a, b) for a, b in pairwise(modules)), 0]
    starts = []
    for first, length, repeats in folding.blocks:
        begin = min(
            range(first, first + length), key=lambda at: (stage_edge[at + length], depths[at + length], at)
        )
        starts += [begin + k * length for k in range(repeats)]
        end = begin + repeats * length  # perhaps behind the last repeat: a layer that folding saw half of ends there
        if begin == first or (end < len(ops) and stage_edge[end] <= stage_edge[end - length]):
            starts.append(end)
    return [ops[p] for p in starts if p < len(ops)]


def blocks_from(graph: Graph, starts: Sequence[int]) -> dict[int, int]:
    """Return the number of every operator's block, if blocks begin at `starts`."""
    begins = sorted(starts)
    return {i: bisect_right(begins, i) for i, _ in graph.of_kind("op")}


def _may(node: Node) -> bool:
    """Return whether an operator may be recomputed: it has a gradient, writes to nothing and is not a user's own."""
    grads = all(spec.is_float for spec in node.outs if spec is not None)
    fit = node.hot and node.needs_grad and grads and not has_effect(node.target)
    return fit and node.target.startswith("aten.")


def _is_view(node: Node, rule: Rule | None) -> bool:
    """Return whether an operator only views its input."""
    return rule is not None and rule.kind == "none" and not has_effect(node.target)
