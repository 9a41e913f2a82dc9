"""Sums over the whole batch that a loss divides by, as inputs of a microbatch's graph.

A mean over labels of which some are ignored, a mean weighted by the classes of labels, a sum over the sum of a mask: a
microbatch has a term of the numerator, and the denominator is the whole batch's. It follows from the inputs alone, so
it is known before a step begins, and the graph of a microbatch reads it as an input. Then the losses of microbatches,
each multiplied by its part of the rows, add up to the loss of the batch; also if there are several terms with
denominators of their own, where labels weigh unequally, and where in some microbatch nothing counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.capture.batch_factor import IGNORED
from autopar.capture.row_flows import FollowedRows
from autopar.words.graph import Graph, Node, Ref, Spec, map_refs, part_for

TOTAL = "autopar_total."
"""How the names of inputs begin that the program's runner gives, beside those of the caller."""
NONE, SUM = 0, 2
"""Reductions of torch's losses: none, so that each row has its own, and the sum."""


@dataclass(frozen=True)
class Ahead:
    """An input that is computed ahead of a step.

    Attributes:
        name: the name of the input.
        how: ``sum`` or ``mean`` over the microbatches of a tensor that each has; ``scale``: one over the number of
            labels that count in the batch, or over their weights, and over a microbatch's part of the rows; ``parts``:
            one over that part alone.
        outputs: which outputs of its level's graph it follows from: the tensor, or labels and their classes'
            weights.
        level: after how many others it can be computed, since it follows from them.
        ignored: the label that does not count.
        spec: shape and dtype of the input.
    """

    name: str
    how: str
    outputs: tuple[int, ...]
    ignored: int
    spec: Spec
    level: int = 0


@dataclass(frozen=True)
class Totals:
    """What is computed ahead of the microbatches of a step.

    Attributes:
        ahead: the inputs of the program.
        graphs: for each level, what gives that from which they follow, of the inputs of one microbatch and of those
            that were computed before.
        loss_is_sum: whether the losses of microbatches add up as they are, not as a mean over rows does.
    """

    ahead: tuple[Ahead, ...]
    graphs: tuple[Graph, ...]
    loss_is_sum: bool = False

    def weight(self, share: float) -> float:
        """Return the weight of the loss of a microbatch that has this part of the rows."""
        return 1.0 if self.loss_is_sum else share


def with_totals(
    graph: Graph, found: FollowedRows
) -> tuple[Graph, Totals | None, dict[int, int]]:
    """Return the graph of a microbatch that reads the totals of its batch; the same graph if there are none.

    Returns:
        The graph; what is to be computed ahead; and the new numbers of the nodes of ``graph``.
    """
    same = {i: i for i in range(len(graph.nodes))}
    if graph.loss is None or not (found.ratios or found.totals or found.scaled):
        return graph, None, same
    edit = _Edit(graph)
    for ref, is_mean in found.totals.items():
        edit.total(ref, is_mean)
    for number in found.ratios:
        edit.ratio(number)
    for number, position in sorted(found.scaled):
        if number >= 0:
            edit.scale(number, position)
    return edit.result(loss_is_sum=(-1, 0) in found.scaled)


class _Edit:
    """Changes to a graph, made all at once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs: list[Node] = []
        self.ahead: list[Ahead] = []
        self.follow_from: list[tuple[Ref, ...]] = []
        self.instead: dict[Ref, Ref] = {}
        """The replacement of each tensor that is read otherwise; negative numbers of nodes are new ones."""
        self.before: dict[int, list[tuple[int, Node]]] = {}
        """New operators, by the node that they follow, with their numbers."""
        self.replaced: dict[int, tuple[int, ...]] = {}
        self.reads: dict[tuple[int, int], Ref] = {}
        self.made = 0

    def _number(self) -> int:
        self.made -= 1
        return self.made

    def _input(self, name: str, how: str, refs: Sequence[Ref], spec: Spec, ignored: int = IGNORED) -> Ref:
        name = TOTAL + name
        for k, node in enumerate(self.inputs):
            if node.name == name:
                return Ref(-1_000_000 - k)
        self.inputs.append(Node(name, "input", name, outs=(spec,)))
        self.ahead.append(Ahead(name, how, (), ignored, spec))
        self.follow_from.append(tuple(refs))
        return Ref(-1_000_000 - (len(self.inputs) - 1))

    def total(self, ref: Ref, is_mean: bool) -> None:
        """Read the total of a tensor."""
        node = self.graph.nodes[ref.node]
        name = node.name + (f".{ref.out}" if ref.out else "")
        self.instead[ref] = self._input(name, "mean" if is_mean else "sum", [ref], self.graph.spec(ref))

    def ratio(self, number: int) -> None:
        """Replace a loss of labels by the sum of its rows' losses, times the weight of a label in the batch."""
        node = self.graph.nodes[number]
        x, target, weight, _, ignored, *smoothing = _full(node)
        dtype = node.out.dtype
        small = dtype == "float16"  # whose largest number the sum of a thousand rows may pass: each row is scaled
        refs = [target] if weight is None else [target, weight]
        spec = Spec((), "float32" if small else dtype)
        scale = self._input(f"scale.{node.name}", "scale", refs, spec, int(ignored))
        of_rows, scaled = self._number(), self._number()
        each = Spec(self.graph.spec(target).shape if small else (), dtype)
        args = x, target, weight, NONE if small else SUM, ignored, *smoothing
        new = [
            (of_rows, replace(node, name=f"{node.name}_of_rows", args=args, kwargs={}, outs=(each,))),
            (scaled, replace(node, target="aten.mul.Tensor", args=(Ref(of_rows), scale), kwargs={}, outs=(each,))),
        ]
        if small:
            scaled, before = self._number(), scaled
            new[1] = before, replace(new[1][1], name=f"{node.name}_scaled")
            new.append((scaled, replace(node, target="aten.sum.default", args=(Ref(before),), kwargs={})))
        self.before.setdefault(number, []).extend(new)
        self.replaced[number] = (scaled,)

    def scale(self, number: int, position: int) -> None:
        """Multiply what is read at a place by the number of microbatches."""
        ref = self.graph.nodes[number].refs[position]
        spec, node = self.graph.spec(ref), self.graph.nodes[ref.node]
        dtype = spec.dtype if spec.is_float else "float32"
        parts = self._input(f"parts.{dtype}", "parts", [], Spec((), dtype))
        times = self._number()
        new = Node(
            f"{node.name}_of_batch.{-times}", "op", "aten.mul.Tensor", (ref, parts),
            outs=(spec,), module=node.module, source=node.source, needs_grad=node.needs_grad, hot=node.hot,
            again=node.again,
        )  # fmt: skip
        self.before.setdefault(ref.node, []).append((times, new))
        self.reads[number, position] = Ref(times)

    def result(self, loss_is_sum: bool) -> tuple[Graph, Totals | None, dict[int, int]]:
        graph = self.graph
        first = next((i for i, node in enumerate(graph.nodes) if node.kind == "op"), len(graph.nodes))
        place: dict[int, int] = {}
        nodes: list[Node] = []
        for i, node in enumerate(graph.nodes):
            if i == first:
                for k, new in enumerate(self.inputs):
                    place[-1_000_000 - k] = len(nodes)
                    nodes.append(new)
            if i not in self.replaced:
                place[i] = len(nodes)
                nodes.append(node)
            for number, new in self.before.get(i, ()):
                place[number] = len(nodes)
                nodes.append(new)
            for number in self.replaced.get(i, ()):
                place[i] = place[number]
        originals = {id(node): i for i, node in enumerate(graph.nodes)}

        def moved(ref: Ref) -> Ref:
            return Ref(place[ref.node], ref.out)

        def read(ref: Ref) -> Ref:
            return moved(self.instead.get(ref, ref))

        done = []
        for node in nodes:
            number = originals.get(id(node), -1)
            positions = iter(range(len(node.refs)))

            def one(ref: Ref, number: int = number, positions: Any = positions) -> Ref:
                other = self.reads.get((number, next(positions)))
                return moved(other) if other is not None else read(ref)

            args, kwargs = map_refs(node.args, one), map_refs(node.kwargs, one)
            fresh = replace(node, args=args, kwargs=kwargs)
            fresh.__dict__.pop("refs", None)
            done.append(fresh)
        outputs = tuple(moved(out) if isinstance(out, Ref) else out for out in graph.outputs)
        updates = {name: moved(ref) for name, ref in graph.updates.items()}
        new_graph = replace(graph, nodes=tuple(done), outputs=outputs, updates=updates)
        totals = replace(self._totals(new_graph, place), loss_is_sum=loss_is_sum)
        new_graph, kept = _without_unread(new_graph, {place[i] for i in _read(graph)})
        return new_graph, totals, {i: kept[place[i]] for i in range(len(graph.nodes)) if place.get(i) in kept}


    def _totals(self, graph: Graph, place: dict[int, int]) -> Totals:
        """Return the totals that are computed ahead, level by level, of a graph that still has their sums."""
        names = {each.name: k for k, each in enumerate(self.ahead)}
        sources = [[Ref(place[ref.node], ref.out) for ref in refs] for refs in self.follow_from]
        levels: dict[int, int] = {}

        def level(k: int) -> int:
            if k not in levels:
                part = part_for(graph, sources[k]).nodes
                before = [names[node.name] for node in part if node.name in names]
                levels[k] = 1 + max(map(level, before), default=-1)
            return levels[k]

        ahead = [replace(each, level=level(k)) for k, each in enumerate(self.ahead)]
        graphs = []
        for n in range(1 + max((each.level for each in ahead), default=-1)):
            wanted: list[Ref] = []
            for k, each in enumerate(ahead):
                if each.level == n:
                    wanted += [ref for ref in sources[k] if ref not in wanted]
                    ahead[k] = replace(each, outputs=tuple(wanted.index(ref) for ref in sources[k]))
            graphs.append(part_for(graph, wanted))
        return Totals(tuple(ahead), tuple(graphs))


def _read(graph: Graph) -> set[int]:
    """Return the nodes that outputs and new values of buffers follow from."""
    read = {out.node for out in (*graph.outputs, *graph.updates.values()) if isinstance(out, Ref)}
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in read:
            read.update(ref.node for ref in graph.nodes[i].refs)
    return read


def _without_unread(graph: Graph, before: set[int]) -> tuple[Graph, dict[int, int]]:
    """Return the graph without operators that are not read any more, and the new numbers of the others.

    Nodes that were not read ``before`` stay.
    """
    read = _read(graph)
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in read or i not in before:
            read.update((i, *(ref.node for ref in graph.nodes[i].refs)))
    left = [i for i, node in enumerate(graph.nodes) if node.kind != "op" or i in read]
    kept = {i: k for k, i in enumerate(left)}

    def moved(ref: Ref) -> Ref:
        return Ref(kept[ref.node], ref.out)

    nodes = tuple(graph.nodes[i].moved(moved) for i in left)
    outputs = tuple(moved(out) if isinstance(out, Ref) else out for out in graph.outputs)
    return replace(
        graph, nodes=nodes, outputs=outputs, updates={name: moved(ref) for name, ref in graph.updates.items()}
    ), kept


def _full(node: Node) -> tuple[Any, ...]:
    """Return all arguments of a loss of labels."""
    names = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    defaults = (None, None, None, 1, IGNORED, 0.0)
    n = 6 if "cross_entropy" in node.target else 5
    given = {**dict(zip(names, defaults, strict=True)), **node.kwargs, **dict(zip(names, node.args, strict=False))}
    return tuple(given[name] for name in names[:n])
