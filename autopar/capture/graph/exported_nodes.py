"""What a node of an exported program says of itself: its tensors, its module, its line in the user's code."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import torch

from autopar.words.graph import Spec

FxNode: TypeAlias = Any
"""A :class:`torch.fx.Node` whose arguments are read: torch types these as a union of sixteen, which does not narrow."""


@functools.lru_cache(maxsize=4096)
def name_of(target: object) -> str:
    """Return the name of the target of a traced node, such as ``aten.add.Tensor``."""
    return str(target)


def flat(val: object) -> list[Any]:
    """Return the results of an operator as a list, a single one too."""
    return list(val) if isinstance(val, (tuple, list)) else [val]


def spec_of(val: Any) -> Spec:
    """Return shape and dtype of a traced tensor."""
    return Spec(tuple(map(int, val.shape)), _name(val.dtype))


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def storage_of(val: Any) -> int | None:
    """Return the identity of the memory of a traced tensor; None for a value without memory."""
    try:
        return int(val.untyped_storage()._cdata)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def without_values(fx: torch.fx.Node) -> Any:
    """Return the results of a node, as meta tensors of the same sizes and strides."""

    def one(val: object) -> Any:
        if not isinstance(val, torch.Tensor):
            return val
        return torch.empty_strided(tuple(val.size()), tuple(val.stride()), dtype=val.dtype, device="meta")

    val = fx.meta.get("val")
    return [one(v) for v in val] if isinstance(val, (list, tuple)) else one(val)


def drawn_strides(fx: torch.fx.Node) -> tuple[int, ...]:
    """Return the strides of the draw of a traced random operator; none if it is contiguous.

    In place it draws into the tensor that it is given, else into a new one that lies as that tensor does, but for
    ``torch.bernoulli`` and ``torch.normal``.
    """
    given = fx.args[0].meta.get("val") if fx.args and isinstance(fx.args[0], torch.fx.Node) else None
    name = name_of(fx.target).removeprefix("aten.").partition(".")[0]
    if not isinstance(given, torch.Tensor) or name in ("bernoulli", "normal"):
        return ()
    strides = given.stride() if name.endswith("_") else torch.empty_like(given, device="meta").stride()
    return () if torch.empty(given.shape, device="meta").stride() == strides else tuple(strides)


_KNOWN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.fx.Node})


def is_symbolic(value: object) -> bool:
    """Check whether a size or a number in nested containers is not known when a model is traced."""
    if isinstance(value, (tuple, list)):
        for item in value:
            if type(item) not in _KNOWN and is_symbolic(item):
                return True
        return False
    if isinstance(value, dict):
        return any(map(is_symbolic, value.values()))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def module_of(fx: torch.fx.Node) -> str:
    """Return the path of the module whose code made a node."""
    stack = fx.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return path.replace("L['self'].", "").replace("L['self']", "")


def source_of(fx: torch.fx.Node) -> str:
    """Return ``file.py:12`` of the innermost line outside torch."""
    return _innermost(fx.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=4096)  # nodes of repeated blocks, and all nodes of one line, have the same trace
def _innermost(trace: str) -> str:
    place = ""
    for text in trace.splitlines():
        text = text.strip()
        if text.startswith("File ") and "/torch/" not in text:
            parts = text.split('"')
            number = text.split(", line ")[-1].split(",")[0]
            place = f"{parts[1].rsplit('/', 1)[-1]}:{number}"
    return place


def at(fx: torch.fx.Node) -> str:
    """Return `` at file.py:12`` for messages; empty if the line is not known."""
    source = source_of(fx)
    return f" at {source}" if source else ""


def get(module: object, path: str) -> Any:
    """Return the attribute at a dotted path."""
    for part in path.split("."):
        module = getattr(module, part)
    return module
