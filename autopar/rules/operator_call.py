"""One use of an operator, as rules see it: its arguments with places for tensors, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.words.graph import Node, Ref, Spec, map_refs
from autopar.words.load_shares import Load
from autopar.words.narrow_products import NarrowUse
from autopar.words.trees import PyTree


@dataclass(frozen=True, slots=True)
class In:
    """Stands for tensor input number ``position`` in the arguments of a :class:`Call`."""

    position: int


@dataclass(frozen=True)
class Call:
    """One use of an operator, free of its place in a graph: literals, shapes and dtypes.

    ``args`` and ``kwargs`` hold :class:`In` where the node has a tensor. ``load`` and ``narrow`` are those of the node.
    """

    target: str
    args: tuple[PyTree, ...]
    kwargs: Mapping[str, PyTree]
    ins: tuple[Spec, ...]
    outs: tuple[Spec | None, ...]
    load: Load = ()
    narrow: NarrowUse | None = None

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """Return the argument at ``position``, or by ``name``, or the default."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def replaced(self, position: int, name: str, value: PyTree) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """Return ``(args, kwargs)`` with one argument changed."""
        kwargs = dict(self.kwargs)
        if position < len(self.args):
            return (*self.args[:position], value, *self.args[position + 1 :]), kwargs
        kwargs[name] = value
        return self.args, kwargs

    @property
    def out(self) -> Spec:
        """The first output, which exists."""
        spec = self.outs[0]
        assert spec is not None
        return spec


def call_of(node: Node, specs: Callable[[Ref], Spec]) -> Call:
    """Return the :class:`Call` of a node."""
    ins = tuple(specs(ref) for ref in node.refs)
    latest: Call | None = node.__dict__.get("call")  # it is asked for thousands of times in a search
    if latest is not None and latest.ins == ins:
        return latest
    counter = iter(range(len(node.refs)))
    args = map_refs(node.args, lambda _: In(next(counter)))
    kwargs = map_refs(node.kwargs, lambda _: In(next(counter)))
    call = node.__dict__["call"] = Call(node.target, args, kwargs, ins, node.outs, node.load, node.narrow)
    return call
