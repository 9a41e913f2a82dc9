"""Where the rows of the batch are in what random operators draw.

A step may go through in microbatches, and what a row draws must not depend on how many there are: so each random
operator has to know along which dim of its result the rows of the batch lie. That follows from the inputs, whose first
dim they are, by the rules of the operators between; of a draw that takes no tensor (``torch.rand(len(x), 1)``), by
those of the operators that read it. A draw without rows (a mask for all of them) is one for the whole batch.

Of a batch of one row that is a dim of size 1, which no rule tells from one that is broadcast: then all that follows
from the inputs is drawn for the row, and so is what is drawn with a first dim of size 1.

An operator draws by its number among the random ones (``Node.site``), not among all nodes: those of a microbatch have
inputs for the totals of the batch before them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from autopar.capture.batch_factor import inputs_with_rows, may_have_rows
from autopar.rules.notation import Rule
from autopar.rules.registry import rules_of
from autopar.rules.terms import Term
from autopar.words.graph import Graph, Node, Ref, RowsAt

_WITHOUT: tuple[int, int, int] = (0, 0, 0)
"""The count of a dim, or a factor of one, without rows of the batch."""
_Digits = tuple[int, int, int]
"""The count of a dim: elements of ``(outer, rows, inner)``, the outer one changing slowest; :data:`_WITHOUT`."""
_ROUNDS = 8
"""Times that a graph is gone through, there and back, at most."""
_EXPANDED = "aten.expand.default"
_PERMUTATION = "aten.randperm.default"
"""Draws each element from all others: rows of one microbatch are not exchanged with those of another."""


Draws = Sequence[tuple[str, tuple[RowsAt, ...] | None]]
"""The random operators of a graph, in order, and where the rows are in what each draws."""


def note_rows_of_draws(graph: Graph) -> Graph:
    """Note in each random operator of a captured graph its number, and where the rows of the batch are."""
    _ = graph.fingerprint, graph.alike, graph.consumers  # of the model, not of a plan: once, for all meshes
    return with_rows_of_draws(graph)


def rows_of_draws(graph: Graph, with_rows: Collection[int]) -> Draws:
    """Return the rows in the draws of the random operators of a batch of several rows; nothing for one row."""
    if _rows_of_batch(graph, with_rows) in (None, 1):
        return ()
    nodes = with_rows_of_draws(graph, with_rows).nodes
    return tuple((nodes[i].target, nodes[i].rows) for i in _random(graph))


def with_rows_of_draws(
    graph: Graph, with_rows: Collection[int] | None = None, of_several: Draws = ()
) -> Graph:
    """Note in each random operator of a graph its number (``Node.site``) and where its rows are (``Node.rows``)."""
    rules = rules_of(graph, graph.alike)
    draws = _random(graph)
    if not draws:
        return graph
    rows = _rows_of_batch(graph, with_rows)
    if rows is None:
        return _with(graph, {i: replace(graph.nodes[i], site=k) for k, i in enumerate(draws)})
    if with_rows is None:
        among = may_have_rows(graph, rows)
        with_rows = inputs_with_rows(graph, rows).rows if len(among) > 1 else among
    dims = _dims(graph, rules, rows, with_rows)
    numbered: dict[int, Node] = {}
    if rows > 1 or [target for target, _ in of_several] != [graph.nodes[i].target for i in draws]:
        of_several = [("", None)] * len(draws)
    for number, (i, (_, place)) in enumerate(zip(draws, of_several, strict=True)):
        shape = graph.nodes[i].out.shape
        if place is None or any(shape[d : d + 1] != (outer * inner,) for d, outer, _, inner in place):
            place = _rows_of(graph, i, dims.get(Ref(i), ()), rows)
        else:
            place = tuple((d, outer, 1, inner) for d, outer, _, inner in place)
        numbered[i] = replace(graph.nodes[i], site=number, rows=place)
    return _with(graph, numbered)


def _with(graph: Graph, numbered: Mapping[int, Node]) -> Graph:
    """Return the graph with other nodes at some places, and with what was derived from it."""
    changed = replace(graph, nodes=tuple(numbered.get(i, node) for i, node in enumerate(graph.nodes)))
    for known in ("fingerprint", "alike", "consumers"):
        if known in graph.__dict__:
            changed.__dict__[known] = graph.__dict__[known]
    return changed


def _random(graph: Graph) -> list[int]:
    """Return the random operators of a graph."""
    return [i for i, rule in enumerate(rules_of(graph, graph.alike)) if rule is not None and rule.random]


def _rows_of_batch(graph: Graph, with_rows: Collection[int] | None) -> int | None:
    """Return the first dim of the first input that has one, among those with rows."""
    shapes = (node.out.shape for i, node in graph.of_kind("input") if with_rows is None or i in with_rows)
    return next((shape[0] for shape in shapes if shape and shape[0]), None)


def _rows_of(graph: Graph, i: int, dims: Sequence[_Digits | None], rows: int) -> tuple[RowsAt, ...] | None:
    """Return the rows in the draw of node ``i``; None if that is not known."""
    node = graph.nodes[i]
    shape = node.out.shape
    if not node.target.startswith("aten."):
        return None
    if node.target == _PERMUTATION:
        return () if shape[0] % rows or [*dims] == [_WITHOUT] else None
    found = tuple((d, *digits) for d, digits in enumerate(dims) if digits is not None and digits != _WITHOUT)
    if found:
        return found
    of_batch = any(ref.node in graph.from_inputs for ref in node.refs)
    if not of_batch and _reads_state(graph, i):
        return ()  # a part of a parameter is dropped
    if rows == 1 and (of_batch or shape[:1] == (1,)):
        return ((0, 1, 1, max(shape[0], 1)),) if shape else ()
    if rows == 1:
        return None if 1 in shape else ()
    unknown = [n for n, digits in zip(shape, dims or [None] * len(shape), strict=True) if digits is None]
    return None if any(n % rows == 0 for n in unknown) else ()


def _reads_state(graph: Graph, i: int) -> bool:
    """Check whether what a node is given follows from a parameter or buffer, as large as that is."""
    todo, seen = [ref.node for ref in graph.nodes[i].refs], set[int]()
    while todo:
        k = todo.pop()
        if graph.nodes[k].kind in ("param", "buffer"):
            return True
        if graph.nodes[k].target != _EXPANDED:
            todo += [ref.node for ref in graph.nodes[k].refs if ref.node not in seen]
            seen.update(ref.node for ref in graph.nodes[k].refs)
    return False


def _dims(
    graph: Graph, rules: Sequence[Rule | None], rows: int, with_rows: Collection[int]
) -> dict[Ref, list[_Digits | None]]:
    """Return how each dim of each tensor counts; None if it is not known. ``with_rows`` are the inputs with rows."""
    dims: dict[Ref, list[_Digits | None]] = {}
    for i, node in enumerate(graph.nodes):
        for out, spec in enumerate(node.outs):
            if spec is None:
                continue
            known: list[_Digits | None] = [None] * len(spec.shape)
            if node.kind != "op":
                known = [_WITHOUT] * len(spec.shape)
                if i in with_rows and rows > 1:
                    known[0] = (1, rows, 1)
            dims[Ref(i, out)] = known
    order = [(node, rule, i) for i, (node, rule) in enumerate(zip(graph.nodes, rules, strict=True)) if rule is not None]
    for number in range(_ROUNDS):
        changed = False
        for node, rule, i in order if number % 2 == 0 else reversed(order):
            changed |= _through(i, node, rule, dims)
        if not changed and number:
            break
    return dims


def _through(i: int, node: Node, rule: Rule, dims: dict[Ref, list[_Digits | None]]) -> bool:
    """Propagate how dims count between the tensors of a call; return whether anything is new."""
    outs = [Ref(i, k) for k, spec in enumerate(node.outs) if spec is not None]
    tensors = [*zip(node.refs, rule.inputs, strict=False), *zip(outs, rule.outputs, strict=False)]
    of_factor: dict[str, _Digits] = {}
    for ref, term in tensors:
        for factors, digits in zip(term, dims[ref], strict=False):
            if digits is not None:
                for factor, of_one in _divided(digits, [(f, rule.sizes[f]) for f in factors]):
                    if of_factor.get(factor, _WITHOUT) == _WITHOUT:
                        of_factor[factor] = of_one
    changed = False
    for ref, term in tensors:
        changed |= _joined(term, rule, of_factor, dims[ref])
    return changed


def _divided(digits: _Digits, factors: Sequence[tuple[str, int]]) -> Iterator[tuple[str, _Digits]]:
    """Yield how the factors of a dim count, given with their sizes, but for those that divide the rows."""
    outer, rows, inner = digits
    before, total = 1, prod(size for _, size in factors)
    for factor, size in factors:
        behind = total // (before * size)
        if digits == _WITHOUT or outer % (before * size) == 0 or inner % (behind * size) == 0:
            yield factor, _WITHOUT
        elif outer % before == 0 and inner % behind == 0 and outer // before * rows * (inner // behind) == size:
            yield factor, (outer // before, rows, inner // behind)
        before *= size


def _joined(term: Term, rule: Rule, of_factor: dict[str, _Digits], known: list[_Digits | None]) -> bool:
    """Let the dims of a tensor count as the factors they are made of; return whether that is new."""
    changed = False
    for d, factors in enumerate(term):
        if d >= len(known) or not factors or known[d] not in (None, _WITHOUT):
            continue
        before, sizes = 1, [rule.sizes[f] for f in factors]
        now = _WITHOUT if all(f in of_factor for f in factors) else None
        for factor, size in zip(factors, sizes, strict=True):
            if of_factor.get(factor, _WITHOUT) != _WITHOUT:
                outer, rows, inner = of_factor[factor]
                now = before * outer, rows, inner * (prod(sizes) // (before * size))
            before *= size
        if now is not None and now != known[d]:
            known[d], changed = now, True
    return changed
