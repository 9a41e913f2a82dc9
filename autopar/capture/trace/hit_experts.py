"""``for e in hit`` while a model is traced, where ``hit`` are the places of a mask: how many turns there are depends on
data.

``hit = (mask.sum((-1, -2)) > 0).nonzero()`` names the experts that have rows. Where a turn does nothing but work on
rows (:mod:`autopar.capture.branches.only_rows`), all experts have one, and each turn asks whether its expert was hit,
as ``if hit[e]: ...`` in a loop over all of them does. ``e`` is a tensor of one number, which is known: what is indexed
by it, or compared with it, is indexed by, or compared with, the number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from autopar.capture.branches.asking import site_of, users_frame
from autopar.capture.branches.only_rows import loop_of_rows
from autopar.capture.branches.taken import OF_ROWS
from autopar.capture.trace.constants import constant_value, depends_on_data

FOUND = (torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere)
ITERATED = (torch.Tensor.unbind, torch.unbind)
"""What ``iter(tensor)`` calls."""
COMPARED = (torch.eq, torch.Tensor.eq, torch.Tensor.__eq__)
SQUEEZED = (torch.squeeze, torch.Tensor.squeeze)


class HitExperts:
    """The places of masks in a trace, and the loops over them."""

    def __init__(self) -> None:
        self._masks: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Places that were found, and the mask of one dim that they are of."""
        self._looped = False
        self._of_one: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What was indexed by a place, which has a dim of size 1 for it, and the same without."""

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function of torch gives here; None where it is torch's to say."""
        if not args or not isinstance(args[0], torch.Tensor):
            return None
        if func in FOUND and not kwargs and len(args) == 1 and args[0].dim() == 1 and depends_on_data(args[0]):
            places = func(args[0])
            self._masks.append((places, args[0]))
            return places
        if func in ITERATED:
            mask = next((mask for places, mask in self._masks if places is args[0]), None)
            frame = users_frame() if mask is not None else None
            return self._turns(mask) if mask is not None and frame is not None and loop_of_rows(frame) else None
        return self._by_number(func, args) if self._looped and not kwargs else None

    def _turns(self, mask: torch.Tensor) -> Iterator[torch.Tensor]:
        self._looped = True
        site = site_of() + OF_ROWS
        places = [torch.tensor([k], device=mask.device) for k in range(len(mask))]  # before all questions
        for k, place in enumerate(places):
            torch.ops.autopar.taken(mask[k] if mask.dtype == torch.bool else mask[k] != 0, site, True)
            yield place

    def _by_number(self, func: Any, args: Any) -> Any:
        if func in SQUEEZED:
            return next((one for given, one in self._of_one if given is args[0] and args[1:] in ((0,), ())), None)
        if len(args) != 2 or (func is not torch.Tensor.__getitem__ and func not in COMPARED):
            return None
        place = args[1]
        if not isinstance(place, torch.Tensor) or place.dtype != torch.int64 or not _is_one(place):
            return None
        number = constant_value(place, lambda value: int(value.item()))
        if number is None or not args[0].dim():
            return None
        made = func(args[0], number)
        if func in COMPARED or not place.dim():
            return made
        given = made.unsqueeze(0)
        if 1 not in made.shape:
            self._of_one.append((given, made))
        return given


def _is_one(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one number, of no dim or one; a size that depends on data is no 1."""
    return not tensor.dim() or (tensor.dim() == 1 and isinstance(tensor.shape[0], int) and tensor.shape[0] == 1)


__all__ = ["HitExperts"]
