"""Values that a forward leaves in attributes for its caller: ``self.last_loss = F.cross_entropy(...)``.

A script reads it from the model when the call is over, to train by it (a loss, the balance of experts) or to log it. A
program sets no attributes, so numbers (tensors of no dims, also in tuples, lists and dicts) are outputs of the graph
behind the model's own, which :mod:`~autopar.runtime.one_mesh.left_attributes` puts where the model would have.
Larger tensors would be kept alive by every call for a reader that is mostly not there: to read one is an error that
says so.

A list or dict that stands in an attribute already is followed too (``self.losses["a"] = ...``, ``self.log.append(x)``):
filled anew by every call, or appended to. Which of both shows in a trace that begins with what the one before has left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.capture.python.frozen_values import is_plain
from autopar.torch_private import FakeTensor, pytree


@dataclass(frozen=True)
class Left:
    """An attribute that a forward has set when it is over.

    Attributes:
        path: the path of the module that has it, ``""`` for the model itself.
        name: the name of the attribute.
        spec: pytree of its value, whose leaves are outputs of the graph; None if there are no outputs for it.
        plain: its value, where that is the same after every call of the program, in a tuple of one.
        into: what a list or dict held before that forward fills; it stays the same object.
        appends: forward leaves what that list held, and appends to it.
    """

    path: str
    name: str
    spec: pytree.TreeSpec | None = None
    plain: tuple[Any, ...] = ()
    into: list[Any] | dict[Any, Any] | None = None
    appends: bool = False

    @property
    def label(self) -> str:
        """``'layers.0.aux_loss'`` for messages."""
        return f"'{self.path}.{self.name}'" if self.path else f"'{self.name}'"


class LeftBehind:
    """Notes of the attributes of modules that a forward sets while it is traced."""

    def __init__(self) -> None:
        self.set: dict[tuple[int, str], tuple[torch.nn.Module, str, str]] = {}
        self.counted: set[tuple[int, str]] = set()
        self.into: dict[tuple[int, str], list[Any] | dict[Any, Any]] = {}
        """What lists and dicts that are filled held before."""
        self.all: tuple[Left, ...] = ()

    def note(self, owner: object, path: str, name: str, counted: bool = False) -> None:
        """Note that an attribute is set; ``counted`` if it is another plain value after every call."""
        if isinstance(owner, torch.nn.Module):
            self.set[id(owner), name] = owner, path, name
            if counted:
                self.counted.add((id(owner), name))

    def note_filled(self, owner: object, path: str, name: str, before: list[Any] | dict[Any, Any]) -> None:
        """Note that tensors were put into a list or dict that is an attribute."""
        self.note(owner, path, name)
        self.into[id(owner), name] = before

    def at_the_end(self) -> list[Any]:
        """Return the values that the forward leaves, in the order of the outputs; :attr:`all` names them."""
        labels, values = [], []
        for key, (owner, path, name) in self.set.items():
            if name not in vars(owner):  # a buffer, a property, or taken away again
                continue
            value, before = vars(owner)[name], self.into.get(key)
            appends = isinstance(before, list) and begins_with(value, before) and bool(before)
            if appends and before is not None:
                value = value[len(before) :]
            leaves, spec = pytree.tree_flatten(value)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if not tensors and is_plain(value) and key not in self.counted:
                labels.append(Left(path, name, plain=(value,)))
            elif tensors and all(isinstance(leaf, FakeTensor) and not leaf.ndim for leaf in leaves):
                labels.append(Left(path, name, spec, (), before, appends))
                values.append(value)
            elif tensors or key in self.counted:
                labels.append(Left(path, name))
        self.all = tuple(labels)
        return values


def begins_with(now: list[Any], before: list[Any]) -> bool:
    """Check that a list has its former elements, and maybe more."""
    return len(now) >= len(before) and all(a is b for a, b in zip(now, before, strict=False))


def own_outputs(exported: Any) -> pytree.TreeSpec:
    """Return the pytree of the model's own output, in a trace that may also give attributes."""
    spec: pytree.TreeSpec = exported.call_spec.out_spec
    return spec.children()[0] if any(left.spec is not None for left in exported.left) else spec
