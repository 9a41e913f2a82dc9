"""``x[i]`` where a number of data or a random one says which row: it is looked up, as by ``index_select``.

torch reads such an index as a number (``x[rows.argmax()]``), which a trace has not; its kernels take a tensor as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autopar.capture.branches.unknown_numbers import Drawn
from autopar.torch_private import FakeTensor
from autopar.words.trees import PyTree

_INTEGERS = (torch.int64, torch.int32, torch.int16)


def _place(part: Any, known: Callable[[torch.Tensor], bool]) -> torch.Tensor | None:
    """Return the index that a part of an index is, where its value is not known in the trace; else None."""
    if type(part) is Drawn and part.tensor.dtype in _INTEGERS:
        return part.tensor
    one = isinstance(part, FakeTensor) and not part.dim() and part.dtype in _INTEGERS
    return part if one and not known(part) else None


def at_one_place(
    x: object, index: PyTree, known: Callable[[torch.Tensor], bool]
) -> tuple[torch.Tensor, int, torch.Tensor] | None:
    """Return ``(view, dim, place)``, if ``index`` names one place of a dim of the view that is not ``known``."""
    parts = list(index) if isinstance(index, tuple) else [index]
    places = [_place(part, known) for part in parts]
    if not isinstance(x, torch.Tensor) or sum(place is not None for place in places) != 1:
        return None
    others = [part for part, place in zip(parts, places, strict=True) if place is None]
    if not all(part is None or part is Ellipsis or type(part) in (int, slice) for part in others):
        return None
    at = next(i for i, place in enumerate(places) if place is not None)
    view = x[(*parts[:at], slice(None), *parts[at + 1 :])]
    before, after = ([p for p in some if type(p) is not int] for some in (parts[:at], parts[at + 1 :]))
    dim = view.dim() - 1 - len(after) if Ellipsis in before else len(before)
    place = places[at]
    assert place is not None
    return view, dim, _from_the_front(place, view.shape[dim])


def _from_the_front(place: torch.Tensor, size: int) -> torch.Tensor:
    place = place.to(torch.int64)
    return torch.where(place < 0, place + size, place).reshape(1)


def selected(args: PyTree) -> torch.Tensor | None:
    """Return ``torch.select(x, dim, place)``, export's ``x[place]``, of an unknown place; None of any other."""
    if len(args) != 3 or not isinstance(args[2], Drawn) or args[2].tensor.dtype not in _INTEGERS:
        return None
    x, dim, place = args
    return read_at(x, dim, _from_the_front(place.tensor, x.shape[dim]))


def read_at(view: torch.Tensor, dim: int, place: torch.Tensor) -> torch.Tensor:
    """Read the value at a place."""
    return view.index_select(dim, place).squeeze(dim)


def write_at(view: torch.Tensor, dim: int, place: torch.Tensor, value: PyTree) -> None:
    """Put a value there."""
    shape = [*view.shape[:dim], *view.shape[dim + 1 :]]
    value = value.tensor if isinstance(value, Drawn) else value
    given = value.to(view.dtype) if isinstance(value, torch.Tensor) else torch.full((), value, dtype=view.dtype)
    view.index_copy_(dim, place, given.to(view.device).expand(shape).unsqueeze(dim))
