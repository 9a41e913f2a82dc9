"""Attributes, lists and dicts of a model before a forward and after it."""

from __future__ import annotations

import contextlib
import copy
import types
from typing import Any

import torch

from autopar.capture.python.frozen_values import OTHER, Held, items_in
from autopar.capture.trace.recording import under_way
from autopar.errors import CaptureError
from autopar.words.trees import PyTree

_REGISTERED = ("_parameters", "_buffers", "_modules")
"""Tables of a module in which torch looks for what is no attribute like others, in this order."""


def shallow_copy(container: object) -> Any:
    """Return what :func:`refill` gives a container again; itself, where it cannot be changed."""
    for builtin in (dict, list, set):
        if isinstance(container, builtin):
            return builtin(items_in(container) or [])
    return copy.copy(container) if isinstance(container, types.SimpleNamespace) else container


def refill(container: Any, before: Any) -> None:
    """Give a container that can be changed what it held before."""
    if isinstance(container, list):
        container[:] = before
    elif isinstance(container, (dict, set)):
        container.clear()
        container.update(before)
    elif isinstance(container, types.SimpleNamespace):
        vars(container).clear()
        vars(container).update(vars(before))


def plain_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors with values in a module's plain attributes, or in lists and dicts there."""
    found: dict[int, torch.Tensor] = {}

    def look(value: object, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if not value.is_meta:
                found[id(value)] = value
        elif depth and isinstance(value, (list, tuple, dict, types.SimpleNamespace)):
            for item in items_in(vars(value) if isinstance(value, types.SimpleNamespace) else value) or []:
                look(item[1] if isinstance(value, (dict, types.SimpleNamespace)) else item, depth - 1)

    for m in module.modules():
        for name, value in vars(m).items():
            if name not in _REGISTERED:
                look(value, 3)
    return list(found.values())


def table_of(module: torch.nn.Module, name: str) -> dict[str, Any] | None:
    """Return the table of a module's parameters, buffers or submodules that has a name; None if none has."""
    return next((vars(module)[kind] for kind in _REGISTERED if name in vars(module).get(kind, {})), None)


def restored(owner: object, name: str, value: object) -> None:
    """Set an attribute, past what a class makes of it; of a module also what is registered there, where it stays."""
    if isinstance(owner, torch.nn.Module) and name not in vars(owner):
        table = table_of(owner, name)
        if table is not None:
            table[name] = value
            return
    with contextlib.suppress(AttributeError):
        object.__setattr__(owner, name, value)


class OfTheCallBefore(torch.Tensor):
    """The stand-in for a tensor of the call before, of which a forward may ask nothing but whether it is one."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        if (now := under_way()) is not None and now.in_forward:
            raise CaptureError("a tensor of the call before is read")
        return super().__torch_function__(func, types, args, kwargs or {})


def unreadable(value: object) -> Any:
    """Return the stand-in for a tensor of the call before; other values as they are."""
    tensor = value is None or isinstance(value, torch.Tensor)
    return torch.empty(0).as_subclass(OfTheCallBefore) if tensor else value


def new_tensors(before: object, now: object) -> list[torch.Tensor]:
    """Return tensors in a container that it did not hold before."""

    def held(container: object) -> list[Any]:
        if isinstance(container, (list, tuple, set, frozenset)):
            return items_in(container) or []
        return [item for _, item in items_in(container if isinstance(container, dict) else vars(container)) or []]

    old = {id(item) for item in held(before)}
    return [item for item in held(now) if isinstance(item, torch.Tensor) and id(item) not in old]


def only_more(before: object, now: object) -> bool:
    """Check that a dict has only gained entries that are no plain values: a cache."""
    if not (isinstance(before, tuple) and isinstance(now, tuple) and before[:1] == now[:1] == ("dict",)):
        return False
    more = now[len(before) :]
    return now[: len(before)] == before and all(v is OTHER or isinstance(v, Held) for _, v in more)
