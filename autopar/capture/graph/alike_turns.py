"""Loops of which every turn does the same with the rows of one expert: one product of each row with its own matrices.

``for e in range(E): t, k = torch.where(top == e); out.index_add_(0, t, experts[e](x[t]))`` has become ``E`` turns that
compute all rows and leave out those of others by a mask (:mod:`.selected_rows`). Where the masks say that one tensor of
numbers is 0, 1, ..., and the turns differ in nothing but the matrices and biases of their linear layers, the body runs
once: products by rows (:mod:`autopar.rules.experts`) in the place of the linear layers, with the parameters stacked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

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
    """

    mask: Any
    rows: Any
    tensor: Any
    write: Any
    place: tuple[tuple[int, int], ...]
    adds: bool


Emit = Callable[..., Any]
Finish = Callable[[Turn, Any, Any, Any], Any]
"""Writes to a turn's tensor, which is given, all rows by their mask."""


def as_one(graph: Graph, turns: Sequence[Turn], emit_as: Callable[[Any], Emit], finish: Finish) -> None:
    """Loops among the turns become one turn each; what they leave is read by nobody.

    Args:
        turns: in order.
        emit_as: how operators are made that stand in the module and at the line of a node.
    """
    order = {node: k for k, node in enumerate(graph.nodes)}
    loops: dict[Any, list[Turn]] = {}
    for turn in turns:
        compared = routing(turn.mask)
        if compared is not None:
            loops.setdefault((compared[0], root_of(turn.tensor), turn.place, turn.adds), []).append(turn)
    for (key, root, _, _), loop in loops.items():
        numbers = [routing(turn.mask)[1] for turn in loop]  # type: ignore[index]
        if len(loop) > 1 and numbers == list(range(len(loop))) and _nothing_between(root, loop, order):
            with graph.inserting_before(loop[-1].write):
                _fuse(key, root, loop, emit_as(loop[-1].write), finish)


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
    return None


def _written(node: Any) -> Any:
    """A node, or the view that it is of one."""
    if isinstance(node, Node) and node.target in (aten.select.int, aten.reshape.default, aten.permute.default):
        return str(node.target), _written(node.args[0]), repr(node.args[1:])
    return node


def _numbers(written: Any, emit: Emit, mask: Any) -> Any:
    """The tensor of numbers that the masks compare, [rows]."""
    if isinstance(written, tuple) and written[0] == "permute":
        made = _read(written[1], emit)
        if list(written[2]) != list(range(len(written[2]))):
            made = emit(aten.permute.default, (made, list(written[2])))
    else:
        made = mask.args[0]  # type: ignore[assignment]
    return emit(aten.reshape.default, (made, [-1]))


def _read(written: Any, emit: Emit) -> Any:
    if isinstance(written, Node):
        return written
    raise _NotAlikeError


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


class _NotAlikeError(Exception):
    """The turns differ in more than the matrices of linear layers."""


def _fuse(key: Any, root: Any, loop: Sequence[Turn], emit: Emit, finish: Finish) -> None:
    last = loop[-1]
    try:
        numbers = _numbers(key, emit, loop[0].mask)
        expert = emit(aten.clamp.default, (numbers, 0, len(loop) - 1))
        made = _Body(emit, expert).of([turn.rows for turn in loop])
    except _NotAlikeError:
        return
    if made is loop[0].rows:
        return
    taken = emit(aten.reshape.default, (emit(aten.eq.Tensor, (numbers, expert)), list(last.mask.meta["val"].shape)))
    done = finish(last, root, made, taken)
    last.write.replace_all_uses_with(done)
    for turn in loop:
        turn.write.replace_all_uses_with(root)
        turn.write.graph.erase_node(turn.write)


class _Body:
    """The body of all turns, run once.

    Args:
        expert: int [rows].
    """

    def __init__(self, emit: Emit, expert: Any) -> None:
        self.emit, self.expert = emit, expert
        self.made: dict[Any, Any] = {}

    def of(self, nodes: Sequence[Any]) -> Any:
        """What stands for the same value of every turn."""
        first = nodes[0]
        if not isinstance(first, Node):
            if isinstance(first, (list, tuple)):
                if any(not isinstance(x, (list, tuple)) or len(x) != len(first) for x in nodes):
                    raise _NotAlikeError
                return type(first)(self.of(each) for each in zip(*nodes, strict=True))
            if any(isinstance(x, Node) or type(x) is not type(first) or x != first for x in nodes):
                raise _NotAlikeError
            return first
        if all(x is first for x in nodes):
            return first
        if first not in self.made:
            if any(not isinstance(x, Node) or x.op != "call_function" or x.target != first.target for x in nodes):
                raise _NotAlikeError
            if first.kwargs.keys() != nodes[-1].kwargs.keys() or len({len(x.args) for x in nodes}) > 1:
                raise _NotAlikeError
            self.made[first] = self._call(nodes)
        return self.made[first]

    def _call(self, nodes: Sequence[Any]) -> Any:
        first = nodes[0]
        if first.target is aten.linear.default:
            rows = self.of([x.args[0] for x in nodes])
            if rows.meta["val"].dim() != 2 or first.kwargs:
                raise _NotAlikeError
            weight = self.emit(aten.transpose.int, (self._stacked([x.args[1] for x in nodes]), 1, 2))
            made = self.emit(torch.ops.autopar.expert_linear.default, (rows, weight, self.expert))
            if len(first.args) > 2 and first.args[2] is not None:
                bias = self._stacked([x.args[2] for x in nodes])
                made = self.emit(aten.add.Tensor, (made, self.emit(aten.embedding.default, (bias, self.expert))))
            return made
        if "dropout" in str(first.target):
            raise _NotAlikeError  # every turn draws for itself
        args = [self.of([x.args[k] for x in nodes]) for k in range(len(first.args))]
        kwargs = {name: self.of([x.kwargs[name] for x in nodes]) for name in first.kwargs}
        if first.target is operator.getitem:
            return self.emit(operator.getitem, tuple(args))
        return self.emit(first.target, tuple(args), kwargs)

    def _stacked(self, tensors: Sequence[Any]) -> Any:
        """[experts ...] of what each expert has of its own: parameters, or parts of one."""
        whole = tensors[0].args[0] if tensors[0].target is aten.select.int else None
        if whole is not None and len(tensors) == whole.meta["val"].shape[0] and all(
            x.target is aten.select.int and x.args == (whole, 0, k) for k, x in enumerate(tensors)
        ):  # fmt: skip
            return whole  # type: ignore[no-any-return]
        if any(not isinstance(x, Node) or x.op != "placeholder" for x in tensors):
            raise _NotAlikeError
        if len({tuple(x.meta["val"].shape) for x in tensors}) > 1:
            raise _NotAlikeError
        return self.emit(aten.stack.default, (list(tensors),))


__all__ = ["Turn", "as_one", "root_of", "routing"]
