"""A call of a block: everything that its code can see, and the operators that it became.

A :class:`BlockCall` has arguments, parameters and buffers, plain attributes, and the state around it. A
:class:`Traced` is the list of operators that the call became, its tensors identified by their origin.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx.node import Target

from autopar.capture.branches.data_branches import TAKEN
from autopar.capture.branches.random_answers import ASK
from autopar.capture.repeats.python_state import Memo, Namespace, Shape, Unknown, plain, seen, shape_of
from autopar.torch_private import OpOverload, pytree
from autopar.words.trees import PyTree

OwnState = dict[tuple[str, str], object]
Stack = tuple[tuple[str, tuple[str, object]], ...]


@dataclass(frozen=True)
class Int:
    """In a pattern: the result of the block's operator of this number."""

    number: int


@dataclass(frozen=True)
class Ext:
    """In a pattern: a tensor that the block did not make, by its number in ``Traced.external``."""

    number: int


@dataclass(frozen=True)
class Op:
    """One operator of a traced block."""

    target: Target
    args: PyTree
    kwargs: PyTree
    stack: Stack
    trace: str
    out: object

    def same(self, other: Op) -> bool:
        """Return whether two operators are equal."""
        return (
            self.target is other.target
            and self.trace == other.trace
            and self.stack == other.stack
            and self.out == other.out
            and repr((self.args, self.kwargs)) == repr((other.args, other.kwargs))
        )


@dataclass
class Traced:
    """A traced call of a block.

    Attributes:
        ops: its operators in order, their module paths relative to the block.
        metas: their metadata.
        names: names that were requested meanwhile, and in ``named`` for every operator the position of its own.
        external: tensors that it did not make: numbers of the call's tensors, or nodes that every call reads.
        outputs: the parts of the flat result, ``("tensor", number)`` of a call's tensor, ``("made", number of an
            operator)`` or ``("value", plain)``.
        made: for every operator in ``outputs`` the shape of its tensor.
        memory: the external tensors.
    """

    path: str
    ops: list[Op]
    metas: list[dict[str, PyTree]]
    names: list[str]
    named: list[int]
    external: list[int | torch.fx.Node]
    outputs: list[tuple[str, PyTree]]
    made: dict[int, Shape]
    spec: pytree.TreeSpec
    state: object
    own: OwnState
    reads: frozenset[tuple[str, str]]
    nodes: list[torch.fx.Node]
    memory: list[object]
    verified: bool = False

    def asks(self) -> list[tuple[str, bool]]:
        """Return the place and the answer of each branch on random numbers in this traced call."""
        return [(op.args[1], op.args[2]) for op in self.ops if str(op.target) == ASK]

    def taken(self) -> list[tuple[str, bool]]:
        """Return the place and the answer of each branch on data in this traced call."""
        return [(op.args[1], op.args[2]) for op in self.ops if str(op.target) == TAKEN]

    def same(self, other: Traced) -> bool:
        """Return whether two calls did the same, up to the instances' own tensors."""
        return (
            self.names == other.names and self.named == other.named and self.outputs == other.outputs
            and self.made == other.made and self.spec == other.spec and self.external == other.external
            and self.reads == other.reads and len(self.ops) == len(other.ops)
            and all(a.same(b) for a, b in zip(self.ops, other.ops, strict=True))
        )  # fmt: skip


@dataclass
class BlockCall:
    """A call of a block: everything that its code can see."""

    path: str
    key: object
    inputs: PyTree
    tensors: list[torch.Tensor]
    nodes: list[torch.fx.Node]
    values: object
    own: OwnState
    outer: object
    module: torch.nn.Module

    def fits(self, traced: Traced, varying: frozenset[tuple[str, str]]) -> bool:
        """Return whether everything that a traced call read is equal here."""
        keys = {k for k in self.own.keys() | traced.own.keys() if k not in varying} | traced.reads
        missing = object()
        return self.outer == traced.state and all(self.own.get(k, missing) == traced.own.get(k, missing) for k in keys)

    def check_arguments(self) -> None:
        """Check that containers among the arguments were not changed.

        Raises:
            Unknown: one does not.
        """
        leaves, _ = flatten(self.inputs)
        now, memo = tensors_of(leaves, self.module), Memo()
        values = tuple([None if isinstance(v, torch.Tensor) else seen(v, memo) for v in leaves])
        alike = len(now) == len(self.tensors) and all(a is b for a, b in zip(now, self.tensors, strict=True))
        if not alike or values != self.values:
            raise Unknown("it changes what its arguments hold")


# -- what can be seen of a call


PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)
FAKE = frozenset({"fake_device", "fake_mode", "constant", "pytype", "dispatch_keys", "real_tensor"})


def own_state(module: torch.nn.Module, memo: Memo) -> OwnState:
    """Return snapshots of the plain attributes of a block and of the modules inside it, by path and name."""
    return {(path, k): v for path, m in module.named_modules() for k, v in plain(m, memo).items()}


def modes() -> object:
    """Return torch's modes around a call that operators see."""
    cpu, gpu = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    autocast = (cpu and torch.get_autocast_dtype("cpu"), gpu and torch.get_autocast_dtype("cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cpu, gpu, autocast, torch.get_default_dtype()


def callers() -> object:
    """Return the lines of the functions that run, from the call of a block outwards."""
    frame, lines = sys._getframe(1), []
    while frame is not None:
        lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(lines)


def flatten(value: PyTree) -> tuple[list[PyTree], pytree.TreeSpec]:
    """Return the leaves of arguments in Python's own containers; any other object is a leaf."""
    return pytree.tree_flatten(value, is_leaf=lambda v: not isinstance(v, (tuple, list, dict)))


def tensors_of(leaves: list[object], module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors of a call: those among the arguments, then all parameters and buffers."""
    of_modules = [t for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    return [t for t in leaves if isinstance(t, torch.Tensor)] + of_modules


def pattern(values: Iterable[object]) -> tuple[int, ...]:
    """Return for every value the position of the first equal one."""
    first: dict[object, int] = {}
    return tuple([first.setdefault(v, i) for i, v in enumerate(values)])


def global_state(where: Namespace, name: str, memo: Memo) -> object:
    """Return a snapshot of a variable."""
    return seen(where.get(name), memo)


# -- what tracing made of it


def last_node(graph: torch.fx.Graph) -> torch.fx.Node:
    """Return the last node of a graph."""
    return graph._root._prev


def nodes_after(graph: torch.fx.Graph, node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the nodes behind one."""
    node = node._next
    while node is not graph._root:
        yield node
        node = node._next


def is_operator(target: object) -> bool:
    """Return whether a target is an operator that may be part of a block."""
    return isinstance(target, OpOverload) and (target.namespace != "autopar" or str(target) in (ASK, TAKEN))


def written(node: torch.fx.Node) -> list[PyTree]:
    """Return the arguments that an operator writes to."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    values = [node.args[i] if i < len(node.args) else node.kwargs.get(a.name) for i, a in enumerate(schema)]
    written = [v for a, v in zip(schema, values, strict=True) if a.alias_info is not None and a.alias_info.is_write]
    return [v for v in pytree.tree_leaves(written) if v is not None]


def storage(value: object) -> int | None:
    """Return the identity of a tensor's memory."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def look_of(value: object) -> object:
    """Return the shape of a result."""
    if isinstance(value, torch.Tensor):
        return shape_of(value)
    if isinstance(value, (tuple, list)):
        return tuple([look_of(v) for v in value])
    if isinstance(value, PLAIN):
        return (type(value), value)
    raise Unknown(f"an operator gives a {type(value).__name__}")


HERE = "\0"
"""Stands for the path of the block in paths of modules."""


def relative(path: str, block: str) -> str:
    """Return the path of a module relative to the block that it is in; of others, the path."""
    rest = path.removeprefix(block)
    return HERE + rest if rest != path and rest[:1] in ("", ".", "@") else path


def relative_stack(stack: PyTree, block: str) -> Stack:
    """Return a stack of modules with paths relative to a block."""
    return tuple([(relative(k, block), (relative(v[0], block), v[1])) for k, v in (stack or {}).items()])


def empty(shape: Shape) -> torch.Tensor:
    """Return a tensor without a value, with the shape of a traced one."""
    tensor = torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device=shape.device)
    return tensor.requires_grad_().clone() if shape.requires_grad else tensor


def is_dense(t: torch.Tensor) -> bool:
    """Return whether a copy of a tensor has its strides."""
    return tuple(torch.empty_like(t, device="meta").stride()) == tuple(t.stride())
