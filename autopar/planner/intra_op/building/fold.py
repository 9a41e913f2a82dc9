"""Folding: identical blocks are found in the graph and decided once, so that planning does not grow with depth.

Two stretches of operators are the same block if operator, literals, shapes and dtypes agree one by one, and every
input is either shared by both (a mask, say), or the corresponding tensor of its own block, or comes from the block
before. Where blocks are, and how long, follows from the graph alone, not from module names.

The steps of a *scan*, a loop over the places of a sequence that was unrolled, are alike but for the place that each
takes or writes, and have the same parameters, if any. They are decided once too, within the block that they stand in,
so that planning does not grow with the length of the sequence either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.words.graph import Graph, Ref

MIN_CONTRACTIONS = 4
"""Least operators of a block with a parameter of two or more dims: neighbouring layers of a plain MLP must stay free to
differ (one is cut by columns, the next by rows)."""
MIN_REPEATS = 3
GRAM = 4
"""Operators in a row that identify a position: single operators equal others everywhere."""
MIN_STEPS = 4
"""Least steps of a scan: fewer may as well be branches of a model, one after the other."""
PLACES = {"aten.select.int": 2, "aten.select_scatter.default": 3}
"""Operators that read or write one place of a dim, and the argument that says it, on which no rule depends."""
PERIODS = 12
"""Distances that are tried, the most frequent first: others are those of rare operators."""


@dataclass(frozen=True)
class Fold:
    """The nodes that are decided together.

    Attributes:
        representative: for every node, the number of the node that is decided in its place.
        blocks: ``(first operator, length, repeats)`` of every repeated stretch, in operator positions.
    """

    representative: tuple[int, ...]
    blocks: tuple[tuple[int, int, int], ...]

    @property
    def counts(self) -> Counter[int]:
        """The number of nodes that each representative stands for."""
        return Counter(self.representative)


def unfolded(graph: Graph) -> Fold:
    """Return the fold in which every node is decided by itself."""
    return Fold(tuple(range(len(graph.nodes))), ())


def fold(graph: Graph) -> Fold:
    """Find the repeated blocks of a graph, and the scans."""
    layers, scans = _Layers(graph, graph.alike), _Scans(graph, _alike_but_for_places(graph))
    blocks = layers.find()
    if scans.find():
        # of a scan in a repeated block, those steps are decided that stand in the first repeat
        representative = tuple([scans.representative[i] for i in layers.representative])
    else:
        representative = tuple(layers.representative)
    return Fold(representative, tuple(sorted(blocks)))


def _alike_but_for_places(graph: Graph) -> tuple[int, ...]:
    """Return :attr:`Graph.alike` with operators equal that read or write other places of one tensor."""
    first: dict[object, int] = {}
    result = list(graph.alike)
    for i, node in graph.of_kind("op"):
        place = PLACES.get(node.target)
        if place is None or place >= len(node.args) or node.kwargs:
            continue
        call = [graph.call_of(replace(node, args=(*node.args[:place], *node.args[place + 1 :])))]
        if len(node.refs) == 1:  # what is read place by place is one tensor, which lets several of them be told apart
            readers = {graph.alike[reader] for reader, _ in graph.consumers[node.refs[0]]}
            if len(readers) < MIN_STEPS:
                continue
            call.append(node.refs[0])
        result[i] = first.setdefault(tuple(call), i)
    return tuple(result)


class _Repeats:
    """A search for repeated stretches of operators; ``alike`` has for every node the first that it equals."""

    least_repeats: int

    def __init__(self, graph: Graph, alike: Sequence[int]) -> None:
        self.graph = graph
        self.ops = [i for i, node in enumerate(graph.nodes) if node.kind == "op"]
        self.position = [-1] * len(graph.nodes)
        for p, i in enumerate(self.ops):
            self.position[i] = p
        self.signs = [alike[i] for i in self.ops]
        self.representative = list(range(len(graph.nodes)))
        self.taken = [False] * len(self.ops)

    def find(self) -> list[tuple[int, int, int]]:
        """Return ``(first operator, length, repeats)`` of all stretches, and set :attr:`representative`."""
        taken, result = self.taken, []
        for period in _periods(self.signs):
            start = 0
            while start + period < len(self.ops):
                if taken[start] or self.signs[start] != self.signs[start + period]:
                    start += 1
                    continue
                run = self._run(start, period)
                if run is None:
                    start += 1
                    continue
                first, repeats = run
                length, repeats = self.length_and_repeats(first, period, repeats)
                if repeats >= self.least_repeats:
                    self._merge(first, length, repeats)
                    taken[first : first + length * repeats] = [True] * (length * repeats)
                    result.append((first, length, repeats))
                    start = first + length * repeats
                else:
                    start = first + 1
        return result

    def length_and_repeats(self, _first: int, length: int, repeats: int) -> tuple[int, int]:
        """Return the length of a block in a repeated stretch, and the repeats: 0 if it is no block."""
        return length, repeats

    def alike_inputs(self, ref: Ref, next_ref: Ref) -> bool:
        """Return whether two blocks read corresponding nodes outside of all blocks of the stretch."""
        raise NotImplementedError

    def _run(self, start: int, period: int) -> tuple[int, int] | None:
        """Return ``(first operator, repeats)`` of the repeated stretch that begins at ``start``, if there is one."""
        end, signs, taken = start, self.signs, self.taken
        while (
            end + period < len(self.ops)
            and not taken[end]
            and not taken[end + period]
            and signs[end] == signs[end + period]
            and self._same_inputs(start, end, period)
        ):
            end += 1
        repeats = (end - start) // period + 1
        return (start, repeats) if repeats >= self.least_repeats else None

    def _same_inputs(self, start: int, at: int, period: int) -> bool:
        first, nodes, ops = at - start < period, self.graph.nodes, self.ops
        for ref, next_ref in zip(nodes[ops[at]].refs, nodes[ops[at + period]].refs, strict=True):
            a, b = self.position[ref.node], self.position[next_ref.node]  # -1: no operator
            if ref.out == next_ref.out and b - a == period and a >= 0:
                continue
            if self.alike_inputs(ref, next_ref):
                continue
            if ref.node != next_ref.node and b >= 0 and first and start <= b < start + period and a < start:
                continue  # the first block is fed from before the blocks, the others from the block before
            return False
        return True

    def _contractions(self, first: int, length: int) -> int:
        """Return the number of operators with a parameter of two or more dims."""
        nodes, spec = self.graph.nodes, self.graph.spec
        return sum(
            any(nodes[r.node].kind == "param" and len(spec(r).shape) >= 2 for r in nodes[i].refs)
            for i in self.ops[first : first + length]
        )

    def _merge(self, first: int, length: int, repeats: int) -> None:
        nodes, ops, representative = self.graph.nodes, self.ops, self.representative
        for offset in range(length):
            base = ops[first + offset]
            owned = any(nodes[r.node].kind in ("param", "buffer") for r in nodes[base].refs)
            for block in range(1, repeats):
                twin = ops[first + block * length + offset]
                representative[twin] = base
                for a, b in zip(nodes[base].refs, nodes[twin].refs, strict=True) if owned else ():
                    kept = nodes[b.node].kind in ("param", "buffer")
                    if a.node != b.node and kept and representative[b.node] == b.node:
                        representative[b.node] = representative[a.node]


class _Layers(_Repeats):
    """Blocks with parameters of their own."""

    least_repeats = MIN_REPEATS

    def length_and_repeats(self, first: int, length: int, repeats: int) -> tuple[int, int]:
        """Join several repeats to one block where a single one has few contractions."""
        while self._contractions(first, length) < MIN_CONTRACTIONS and repeats >= 2 * MIN_REPEATS:
            length, repeats = length * 2, repeats // 2
        return length, repeats if self._contractions(first, length) >= MIN_CONTRACTIONS else 0

    def alike_inputs(self, ref: Ref, next_ref: Ref) -> bool:
        """Accept other parameters and buffers, but no other inputs of the model."""
        node, next_node = (self.graph.nodes[r.node] for r in (ref, next_ref))
        if ref.node == next_ref.node:
            return ref.out == next_ref.out
        return node.kind == next_node.kind and node.kind in ("param", "buffer")


class _Scans(_Repeats):
    """Steps over the places of a sequence, which share whatever they do not make."""

    least_repeats = MIN_STEPS

    def __init__(self, graph: Graph, alike: Sequence[int]) -> None:
        super().__init__(graph, alike)
        self.next_step: dict[int, int] = {}

    def find(self) -> list[tuple[int, int, int]]:
        """Find also the scans over results of other scans."""
        result: list[tuple[int, int, int]] = []
        while more := super().find():
            result += more
            for first, length, repeats in more:
                self.next_step |= {
                    self.ops[p]: self.ops[p + length] for p in range(first, first + length * (repeats - 1))
                }
        return result

    def alike_inputs(self, ref: Ref, next_ref: Ref) -> bool:
        """Accept several results of one operator, such as an unbound sequence, and results of another scan's steps."""
        if self.next_step.get(ref.node) == next_ref.node:
            return ref.out == next_ref.out
        return ref.node == next_ref.node and self.graph.spec(ref) == self.graph.spec(next_ref)


def _periods(signs: list[int]) -> list[int]:
    """Return distances at which the sequence of signatures repeats, most frequent first."""
    last: dict[tuple[int, ...], int] = {}
    periods: Counter[int] = Counter()
    for p in range(len(signs) - GRAM + 1):
        key = tuple(signs[p : p + GRAM])
        if key in last:
            periods[p - last[key]] += 1
        last[key] = p
    return [p for p, n in sorted(periods.items(), key=lambda e: (-e[1], e[0])) if n >= 2][:PERIODS]
