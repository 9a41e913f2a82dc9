"""Loops over experts with isomorphic iterations become one iteration: a product of each row with its own matrices.

``for e in range(E): t, k = torch.where(top == e); out.index_add_(0, t, experts[e](x[t]))`` has become ``E`` iterations
that compute all rows and leave out those of others by a mask (:mod:`.selected_rows`). Where the masks say that one
tensor of numbers is 0, 1, ..., and the iterations differ in nothing but what each expert has of its own, the body runs
once (:mod:`.run_once`): products by rows (:mod:`autopar.rules.experts.experts`), with the parameters stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.capture.graph.exported_nodes import FxNode
from autopar.capture.graph.run_once import Emit, NotIsomorphicError, TakenRows, TurnBody
from autopar.capture.graph.same_masks import picked_once
from autopar.capture.graph.spread_gates import column_of, numbers_spread

aten = torch.ops.aten


@dataclass(frozen=True)
class Turn:
    """The addition of selected rows to a tensor, or an assignment of them.

    Attributes:
        mask: selects the rows.
        rows: all rows, those of other experts included.
        tensor: receives them.
        write: the tensor afterwards.
        place: dims of ``tensor`` and of the mask that correspond.
        adds: added, not assigned.
        in_place: ``tensor`` itself was written to.
    """

    mask: FxNode
    rows: FxNode
    tensor: FxNode
    write: FxNode
    place: tuple[tuple[int, int], ...]
    adds: bool
    in_place: bool = True


Finish = Callable[[Turn, Node, Node, Node], Node]
"""Writes all rows to an iteration's tensor by their mask: of the iteration, tensor, rows and mask."""


def as_one(
    graph: Graph, iterations: Sequence[Turn], emit_as: Callable[[Any], Emit], finish: Finish, taken: TakenRows
) -> None:
    """Replace each loop among the iterations, which are in order, by one iteration on all rows."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    before = {iteration.write: iteration.tensor for iteration in iterations if not iteration.in_place}
    loops: dict[Any, list[Turn]] = {}
    for iteration in iterations:
        compared = routing(iteration.mask)
        if compared is not None:
            root = root_of(iteration.tensor)
            while root in before:
                root = root_of(before[root])
            key = compared[0], root, iteration.place, iteration.adds, iteration.in_place
            loops.setdefault(key, []).append(iteration)
    for (key, root, _, _, _), loop in loops.items():
        numbers = [routing(iteration.mask)[1] for iteration in loop]  # type: ignore[index]
        if len(loop) > 1 and numbers == list(range(len(loop))) and _nothing_between(root, loop, order):
            with graph.inserting_before(loop[-1].write):
                _fuse(key, root, loop, emit_as(loop[-1].write), finish, taken)


def root_of(tensor: FxNode) -> FxNode:
    """Return the tensor before anything was written to it."""
    while tensor.target is aten.copy_.default:
        tensor = tensor.args[0]
    return tensor


def routing(mask: FxNode) -> tuple[object, int] | None:
    """Return the expression that a mask compares with a number, in a form with equality, and the number."""
    if mask.target is aten.eq.Scalar and isinstance(mask.args[1], int):
        return _written(mask.args[0]), mask.args[1]
    if mask.target is aten.ne.Scalar and mask.args[1] == 0:  # of one_hot, in any order of dims
        select = mask.args[0]
        if select.target is aten.select.int:
            hot, dims = select.args[0], list(range(select.args[0].meta["val"].dim()))
            if hot.target is aten.permute.default:
                dims, hot = [int(d) % len(dims) for d in hot.args[1]], hot.args[0]
            if hot.target is aten.one_hot.default and dims[int(select.args[1]) % len(dims)] == len(dims) - 1:
                rest = tuple(d for d in dims if d != len(dims) - 1)
                return ("permute", _written(hot.args[0]), rest), int(select.args[2])
    if mask.target is aten.any.dim and len(mask.args) == 2:  # whether it is any of several
        compared = mask.args[0]
        dims = compared.meta["val"].dim()
        if picked_once(compared, set(range(dims - 1))) and int(mask.args[1]) % dims == dims - 1:
            return (ANY, _written(compared.args[0])), compared.args[1]
    column = column_of(mask)
    return None if column is None else ((COLUMN, *column[:2]), column[2])


ANY, COLUMN = "any", "column"


def of_several(key: object) -> bool:
    """Return whether positions have several numbers each, any of which may be that of the iteration."""
    return isinstance(key, tuple) and key[0] in (ANY, COLUMN)


def _written(node: object) -> object:
    """Return a node, or the view that it is of one, in a form with equality."""
    if isinstance(node, Node) and node.target in (aten.select.int, aten.reshape.default, aten.permute.default):
        return str(node.target), _written(node.args[0]), repr(node.args[1:])
    return node


def _numbers(written: Any, emit: Emit, mask: FxNode) -> FxNode:
    """Emit the numbers that the masks compare, [rows]."""
    if isinstance(written, tuple) and written[0] == COLUMN:
        numbers = numbers_spread(written[1])
    elif isinstance(written, tuple) and written[0] == "permute":
        numbers = written[1]
        if not isinstance(numbers, Node):
            raise NotIsomorphicError
        if list(written[2]) != list(range(len(written[2]))):
            numbers = emit(aten.permute.default, (numbers, list(written[2])))
    else:
        numbers = mask.args[0].args[0] if of_several(written) else mask.args[0]
    return emit(aten.reshape.default, (numbers, [-1]))


def _nothing_between(root: Node, loop: Sequence[Turn], order: dict[Node, int]) -> bool:
    """Return whether only the iterations read or write the tensor before the last one is done."""
    writes = {iteration.write for iteration in loop}
    last = order.get(loop[-1].write, 0)
    seen = {root, *writes}
    inside = {n for iteration in loop for n in _behind(iteration.write, seen)}
    first = min(order.get(w, 0) for w in writes)
    readers = {user for node in seen for user in node.users}
    return all(user in writes or user in inside or not first < order.get(user, 0) < last for user in readers)


def _behind(node: Node, stop: set[Node]) -> set[Node]:
    """Return the operators of an iteration that lead to a node."""
    behind: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        n = waiting.pop()
        if n not in behind and n not in stop and n.op == "call_function":
            behind.add(n)
            waiting += n.all_input_nodes
    return behind


def _fuse(key: Any, root: FxNode, loop: Sequence[Turn], emit: Emit, finish: Finish, taken: TakenRows) -> None:
    last, shape = loop[-1], list(loop[-1].mask.meta["val"].shape)
    in_columns = isinstance(key, tuple) and key[0] == COLUMN
    if in_columns and key[1].meta["val"].shape[1] != len(loop):
        return
    try:
        numbers = _numbers(key, emit, loop[0].mask)
        each = numbers.meta["val"].shape[0] // prod(shape)
        expert = emit(aten.clamp.default, (numbers, 0, len(loop) - 1))
        body = TurnBody(emit, expert, taken if of_several(key) else None, each)
        rows_of_all = body.of([iteration.rows for iteration in loop])
    except NotIsomorphicError:
        return
    if rows_of_all is loop[0].rows:
        return
    shape += [each] if of_several(key) else []
    if in_columns:
        chosen = emit(key[2], (key[1], 0))
        selected = emit(aten.gather.default, (chosen, 1, emit(aten.reshape.default, (numbers, shape))))
    else:
        selected = emit(aten.reshape.default, (emit(aten.eq.Tensor, (numbers, expert)), shape))
    done = finish(last, root, rows_of_all, selected)
    last.write.replace_all_uses_with(done)
    for iteration in loop:
        iteration.write.replace_all_uses_with(root)
        iteration.write.graph.erase_node(iteration.write)
