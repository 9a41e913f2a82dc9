"""The parameters that a model keeps after ``parallelize``: who reads their values is heard.

An average of weights, or a list of parameters, that was made from the model before ``parallelize`` goes on with these
parameters and their values of before. Reads of tensors leave no trace, so the parameters get a class whose
``__torch_function__`` sees every operator that takes one. It is taken away wherever the values do not matter, such as
while the model is captured again: tracers take :class:`torch.nn.Parameter` alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from autopar.torch_private import DisableTorchFunctionSubclass, pytree

_heard: Any = WeakIdKeyDictionary()
"""``{parameter: (what hears of a read, name)}``"""
_NEW = torch.nn.Parameter.__new__.__code__
_READING_GETTERS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes of a tensor that give its values; the others tell its form."""
_OF_FORM = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "is_contiguous",
    "type", "is_floating_point", "is_complex", "is_inference", "is_signed", "is_pinned", "is_shared", "is_same_size",
    "get_device", "data_ptr", "untyped_storage", "storage", "register_hook", "register_post_accumulate_grad_hook",
    "result_type", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_empty",
    "new_zeros", "new_ones", "new_full", "__len__", "__hash__", "__format__", "__repr__", "has_names",
})  # fmt: skip
"""Functions that do not compute with a tensor's values, or show them to a person."""


class ReplacedParameter(torch.nn.Parameter):
    """A parameter that a parallel module has replaced by one of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            for param in _read(func, args, kwargs):
                if param in _heard:
                    hears, name = _heard[param]
                    hears(name)
            if func is torch.Tensor.detach and sys._getframe(1).f_code is _NEW:
                # torch.nn.Parameter(param), as parametrizations have it, detaches and compares the classes
                args[0].__class__ = torch.nn.Parameter
                return torch.nn.Parameter(args[0].data, False)
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """A copy is a parameter like others."""
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: torch.nn.Parameter = memo[id(self)]
        return copied


def _read(func: Any, args: Any, kwargs: Any) -> list[ReplacedParameter]:
    """The parameters whose values a call reads."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        if getattr(getattr(func, "__self__", None), "__name__", "") not in _READING_GETTERS:
            return []
    elif name in _OF_FORM:
        return []
    elif name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")):
        args = args[1:]  # what is written to
    return [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if type(leaf) is ReplacedParameter]


def hear(params: Iterable[tuple[str, torch.Tensor]], hears: Callable[[str], None]) -> None:
    """Call ``hears(name)`` when the values of one of some parameters are read."""
    for name, param in params:
        if type(param) is torch.nn.Parameter and not param.is_meta:
            _heard[param] = hears, name
            param.__class__ = ReplacedParameter  # type: ignore[assignment]


def hear_no_more(params: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Have them be parameters like others."""
    for _, param in params:
        if type(param) is ReplacedParameter:
            param.__class__ = torch.nn.Parameter  # type: ignore[assignment]


__all__ = ["ReplacedParameter", "hear", "hear_no_more"]
