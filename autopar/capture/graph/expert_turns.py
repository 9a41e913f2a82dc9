"""Loops of which every turn does the same with the rows of one expert: one product of each row with its own matrices.

``for e in range(E): t, k = torch.where(top == e); out.index_add_(0, t, experts[e](x[t]))`` has become ``E`` turns that
compute all rows and leave out those of others by a mask (:mod:`.selected_rows`). Where the masks say that one tensor of
numbers is 0, 1, ..., and the turns differ in nothing but what each expert has of its own, the body runs once
(:mod:`.run_once`): products by rows (:mod:`autopar.rules.experts.experts`), with the parameters stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.capture.graph.run_once import Emit, NotAlikeError, TakenRows, TurnBody
from autopar.capture.graph.same_masks import picked_once
from autopar.capture.graph.spread_gates import column_of, numbers_spread

aten = torch.ops.aten


@dataclass(frozen=True)
class Turn:
    """One time that selected rows were added to a tensor, or put in it.

    Attributes:
        mask: what selected them.
        rows: the tensor of all rows before those of others were left out.
        tensor: that they were added to.
        write: the node that is this tensor afterwards.
        place: dims of ``tensor`` and of the mask that belong together.
        adds: whether they were added; else put.
        in_place: the tensor was written to; else ``write`` is another one.
    """

    mask: Any
    rows: Any
    tensor: Any
    write: Any
    place: tuple[tuple[int, int], ...]
    adds: bool
    in_place: bool = True


Finish = Callable[[Turn, Any, Any, Any], Any]
"""Writes to a turn's tensor, which is given, all rows by their mask."""


def as_one(
    graph: Graph, turns: Sequence[Turn], emit_as: Callable[[Any], Emit], finish: Finish, taken: TakenRows
) -> None:
    """Loops among the turns become one turn each; what they leave is read by nobody.

    Args:
        turns: in order.
        emit_as: how operators are made that stand in the module and at the line of a node.
        taken: which rows the turns work on.
    """
    order = {node: k for k, node in enumerate(graph.nodes)}
    before = {turn.write: turn.tensor for turn in turns if not turn.in_place}
    loops: dict[Any, list[Turn]] = {}
    for turn in turns:
        compared = routing(turn.mask)
        if compared is not None:
            root = root_of(turn.tensor)
            while root in before:
                root = root_of(before[root])
            loops.setdefault((compared[0], root, turn.place, turn.adds, turn.in_place), []).append(turn)
    for (key, root, _, _, _), loop in loops.items():
        numbers = [routing(turn.mask)[1] for turn in loop]  # type: ignore[index]
        if len(loop) > 1 and numbers == list(range(len(loop))) and _nothing_between(root, loop, order):
            with graph.inserting_before(loop[-1].write):
                _fuse(key, root, loop, emit_as(loop[-1].write), finish, taken)


def root_of(tensor: Any) -> Any:
    """The tensor that was there before anything was written to it."""
    while tensor.target is aten.copy_.default:
        tensor = tensor.args[0]  # type: ignore[assignment]
    return tensor


def routing(mask: Any) -> tuple[Any, int] | None:
    """What a mask compares with a number, written down so that equal expressions are equal, and the number."""
    if mask.target is aten.eq.Scalar and isinstance(mask.args[1], int):
        return _written(mask.args[0]), mask.args[1]
    if mask.target is aten.ne.Scalar and mask.args[1] == 0:  # of one_hot, in any order of dims
        select: Any = mask.args[0]
        if select.target is aten.select.int:
            hot, dims = select.args[0], list(range(select.args[0].meta["val"].dim()))
            if hot.target is aten.permute.default:
                dims, hot = [int(d) % len(dims) for d in hot.args[1]], hot.args[0]
            if hot.target is aten.one_hot.default and dims[int(select.args[1]) % len(dims)] == len(dims) - 1:
                rest = tuple(d for d in dims if d != len(dims) - 1)
                return ("permute", _written(hot.args[0]), rest), int(select.args[2])
    if mask.target is aten.any.dim and len(mask.args) == 2:  # whether it is any of several
        compared: Any = mask.args[0]
        dims = compared.meta["val"].dim()
        if picked_once(compared, set(range(dims - 1))) and int(mask.args[1]) % dims == dims - 1:
            return (ANY, _written(compared.args[0])), compared.args[1]
    column = column_of(mask)
    return None if column is None else ((COLUMN, *column[:2]), column[2])


ANY, COLUMN = "any", "column"


def of_several(key: Any) -> bool:
    """Whether a mask is of positions with several numbers each, and says whether one of them is that of the turn."""
    return isinstance(key, tuple) and key[0] in (ANY, COLUMN)


def _written(node: Any) -> Any:
    """A node, or the view that it is of one."""
    if isinstance(node, Node) and node.target in (aten.select.int, aten.reshape.default, aten.permute.default):
        return str(node.target), _written(node.args[0]), repr(node.args[1:])
    return node


def _numbers(written: Any, emit: Emit, mask: Any) -> Any:
    """The tensor of numbers that the masks compare, [rows]."""
    if isinstance(written, tuple) and written[0] == COLUMN:
        numbers = numbers_spread(written[1])
    elif isinstance(written, tuple) and written[0] == "permute":
        numbers = _read(written[1], emit)
        if list(written[2]) != list(range(len(written[2]))):
            numbers = emit(aten.permute.default, (numbers, list(written[2])))
    else:
        numbers = mask.args[0].args[0] if of_several(written) else mask.args[0]
    return emit(aten.reshape.default, (numbers, [-1]))


def _read(written: Any, emit: Emit) -> Any:
    if isinstance(written, Node):
        return written
    raise NotAlikeError


def _nothing_between(root: Any, loop: Sequence[Turn], order: dict[Any, int]) -> bool:
    """Whether nothing but the turns reads or writes the tensor before the last turn is done."""
    writes = {turn.write for turn in loop}
    last = order.get(loop[-1].write, 0)
    seen = {root, *writes}
    inside = {n for turn in loop for n in _behind(turn.write, seen)}
    first = min(order.get(w, 0) for w in writes)
    readers = {user for node in seen for user in node.users}
    return all(user in writes or user in inside or not first < order.get(user, 0) < last for user in readers)


def _behind(node: Any, stop: set[Any]) -> set[Any]:
    """What a turn computed from the tensor as it was."""
    behind: set[Any] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        n = waiting.pop()
        if n not in behind and n not in stop and n.op == "call_function":
            behind.add(n)
            waiting += n.all_input_nodes
    return behind


def _fuse(key: Any, root: Any, loop: Sequence[Turn], emit: Emit, finish: Finish, taken: TakenRows) -> None:
    last, shape = loop[-1], list(loop[-1].mask.meta["val"].shape)
    in_columns = isinstance(key, tuple) and key[0] == COLUMN
    if in_columns and key[1].meta["val"].shape[1] != len(loop):
        return
    try:
        numbers = _numbers(key, emit, loop[0].mask)
        each = numbers.meta["val"].shape[0] // prod(shape)
        expert = emit(aten.clamp.default, (numbers, 0, len(loop) - 1))
        rows_of_all = TurnBody(emit, expert, taken if of_several(key) else None, each).of([turn.rows for turn in loop])
    except NotAlikeError:
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
    for turn in loop:
        turn.write.replace_all_uses_with(root)
        turn.write.graph.erase_node(turn.write)


__all__ = ["Turn", "as_one", "root_of", "routing"]
