"""Tensors that torch reads a number of, where a function is given one in the place of a size, a count or a shift.

``torch.arange(counts.sum())``, ``F.interpolate(x, size=(h, w))``, ``x.roll(shifts=delay, dims=1)``, ``x[:, :n]``: torch
asks such a tensor for its value itself, where no mode is notified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autopar.words.trees import PyTree

_OF_SIZES = (
    torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn, torch.arange, torch.eye, torch.randperm,
    torch.linspace,
)  # fmt: skip
"""Functions all of whose arguments are numbers."""
_BEHIND_A_TENSOR = (
    torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.expand, torch.Tensor.repeat, torch.Tensor.roll,
    torch.roll, torch.Tensor.unflatten, torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty,
    torch.Tensor.topk, torch.topk, torch.multinomial, torch.Tensor.multinomial, torch.split, torch.Tensor.split,
    F.interpolate, F.pad, F.one_hot, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d,
)  # fmt: skip
"""Functions of a tensor and of numbers."""
_SIZE_FIRST = (torch.full,)
"""Functions whose first argument alone is made of numbers."""
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
READING_NUMBERS = (*_OF_SIZES, *_BEHIND_A_TENSOR, *_SIZE_FIRST, *_INDEXED)


def with_numbers(
    func: Any, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], number: Callable[[torch.Tensor], int | None]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Return the arguments of a call with numbers for the integers that torch would read.

    ``number``: gives that of a tensor of one integer; None if it is not known, and the tensor stays.
    """
    args, kwargs = tuple(args), dict(kwargs)

    def read(value: PyTree) -> PyTree:
        if type(value) in (tuple, list):
            return type(value)(map(read, value))
        if isinstance(value, torch.Tensor) and _is_a_number(value):
            known = number(value)
            return value if known is None else known
        return value

    def bounds(value: object) -> Any:
        if type(value) is tuple:
            return tuple(map(bounds, value))
        if isinstance(value, slice) and any(isinstance(x, torch.Tensor) for x in (value.start, value.stop, value.step)):
            return slice(read(value.start), read(value.stop), read(value.step))
        return value

    if func in _INDEXED and len(args) > 1:
        return (args[0], bounds(args[1]), *args[2:]), kwargs
    n_kept = 0 if func in _OF_SIZES or func in _SIZE_FIRST else 1 if func in _BEHIND_A_TENSOR else None
    if n_kept is None:
        return args, kwargs
    n_read = 1 if func in _SIZE_FIRST else len(args)
    given = (*args[:n_kept], *map(read, args[n_kept:n_read]), *args[n_read:])
    names = ("size",) if func in _SIZE_FIRST else tuple(kwargs)
    return given, {name: read(value) if name in names and name not in _TENSORS else value
                   for name, value in kwargs.items()}  # fmt: skip


_TENSORS = ("input", "self", "out", "generator")
"""Names of arguments that are no numbers."""


def _is_a_number(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.dtype in (torch.int64, torch.int32)
