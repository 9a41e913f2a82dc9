"""Loops over the experts that were hit: ``for e in hit``, where ``hit`` are the places of a mask.

``hit = (mask.sum((-1, -2)) > 0).nonzero()`` names the experts that have rows. Where a turn does nothing but work on
rows (:mod:`autopar.capture.branches.only_rows`), all experts have one, and each turn asks whether its expert was hit,
as ``if hit[e]: ...`` in a loop over all of them does. ``e`` is a tensor of one number, which is known: what is indexed
by it, or compared with it, is indexed by, or compared with, the number.

So do ``for e in picked.unique()`` and ``for e in picked.unique().tolist()``, of numbers that a top-k has found: there
are no more of them than it had to choose from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from autopar.capture.branches.data_branches import OF_ROWS
from autopar.capture.branches.only_rows import loop_of_rows
from autopar.capture.branches.random_answers import site_of, users_frame
from autopar.capture.graph.expert_counts import CASTS, number_of_choices
from autopar.capture.graph.same_masks import behind
from autopar.capture.trace.patches import PASS, Args, Function, Handler, Kwargs, register
from autopar.capture.trace.recording import Recording
from autopar.capture.trace.value_origins import constant_value, depends_on_data, node_of
from autopar.errors import CaptureError
from autopar.torch_private import FakeTensor
from autopar.words.trees import PyTree

FOUND = (torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere)
DISTINCT = (torch.unique, torch.Tensor.unique)
ITERATED = (torch.Tensor.unbind, torch.unbind)
"""What ``iter(tensor)`` calls."""
COMPARED = (torch.eq, torch.Tensor.eq, torch.Tensor.__eq__)
SQUEEZED = (torch.squeeze, torch.Tensor.squeeze)


class HitExperts:
    """Handler of the places of masks in a trace, and of the loops over them."""

    def __init__(self) -> None:
        self._masks: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Places that were found, and the mask of one dim that they are of."""
        self._looped = False
        self._of_one: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What was indexed by a place, which has a dim of size 1 for it, and the same without."""

    def __call__(self, func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        """Handle a call of torch."""
        answer = self._answer(func, args, kwargs)
        return PASS if answer is None else answer

    def _answer(self, func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        if not args or not isinstance(args[0], torch.Tensor):
            return None
        if func in FOUND and not kwargs and len(args) == 1 and args[0].dim() == 1 and depends_on_data(args[0]):
            places = func(args[0])
            self._masks.append((places, args[0]))
            return places
        if func in DISTINCT and len(args) == 1:
            return self._distinct(args[0], **kwargs)
        if func in ITERATED:
            mask = self._mask_of(args[0])
            frame = users_frame() if mask is not None else None
            if mask is None or frame is None or args[1:] not in ((), (0,)) or kwargs:
                return None
            if not loop_of_rows(frame):
                raise _more_than_rows()
            return self.turns(mask, [torch.tensor([k] if args[0].dim() > 1 else k) for k in range(len(mask))])
        return self._by_number(func, args) if self._looped and not kwargs else None

    @contextlib.contextmanager
    def lists(self) -> Iterator[None]:
        """Make `tolist()` of the hit experts return a list whose loop is traced like a loop over the tensor."""
        in_parts = FakeTensor.tolist

        def tolist(tensor: FakeTensor) -> Any:
            mask = self._mask_of(tensor) if tensor.dim() == 1 else None
            return in_parts(tensor) if mask is None else _Places(self, mask)

        with mock.patch.object(FakeTensor, "tolist", tolist):
            yield

    def _mask_of(self, places: torch.Tensor) -> torch.Tensor | None:
        """Return the mask whose places a tensor holds; None of any other."""
        node = behind(node_of(places), CASTS) if self._masks else None
        if node is None:
            return None
        return next((mask for found, mask in self._masks if behind(node_of(found), CASTS) is node), None)

    def _distinct(
        self, picked: torch.Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False,
        dim: int | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Compute ``torch.unique`` of numbers of which it is known which could occur; None of others."""
        choices = number_of_choices(node_of(picked)) if depends_on_data(picked) else None
        if choices is None or dim is not None:
            return None
        if return_inverse or return_counts:
            raise CaptureError(
                f"forward asks which of {choices} numbers that a top-k has found occur, and how often or where, at "
                f"{site_of().partition('@')[0]}: how many there are depends on values\n  count all of them: "
                f"torch.bincount(picked.flatten(), minlength={choices})"
            )
        hit = torch.nn.functional.one_hot(picked.flatten(), choices).sum(0) > 0
        places = hit.nonzero().squeeze(-1)
        self._masks.append((places, hit))
        return places

    def turns(self, mask: torch.Tensor, places: list[Any]) -> Iterator[Any]:
        """Loop over all places of a mask, each of which asks whether it is set."""
        self._looped = True
        site = site_of() + OF_ROWS
        for k, place in enumerate(places):
            torch.ops.autopar.taken(mask[k] if mask.dtype == torch.bool else mask[k] != 0, site, True)
            yield place

    def _by_number(self, func: object, args: PyTree) -> PyTree:
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


class _Places:
    """The stand-in for ``places.tolist()``: a list that a loop can walk through, and nothing else."""

    def __init__(self, of: HitExperts, mask: torch.Tensor) -> None:
        self.of, self.mask = of, mask

    def __iter__(self) -> Iterator[int]:
        frame = users_frame()
        if frame is None or not loop_of_rows(frame):
            raise _more_than_rows()
        return self.of.turns(self.mask, list(range(len(self.mask))))

    def __len__(self) -> int:
        raise _more_than_rows()

    def __getitem__(self, index: PyTree) -> PyTree:
        raise _more_than_rows()


def _more_than_rows() -> CaptureError:
    return CaptureError(
        "the experts that have rows are asked for by more than a loop whose turns only work on the rows of each, at "
        f"{site_of().partition('@')[0]}: how many there are depends on values\n  loop over all of them, and find the "
        "rows of each in its turn (for e in range(n): rows, which = torch.where(picked == e))"
    )


def _is_one(tensor: torch.Tensor) -> bool:
    """Check that a tensor is one number, of no dim or one; a size that depends on data is no 1."""
    return not tensor.dim() or (tensor.dim() == 1 and isinstance(tensor.shape[0], int) and tensor.shape[0] == 1)


def _handler(record: Recording) -> HitExperts:
    hit = HitExperts()
    record.contexts.append(hit.lists())
    return hit


register(
    Handler(
        "hit experts", "how many experts have rows depends on data", _handler,
        (*FOUND, *DISTINCT, *ITERATED, *SQUEEZED, *COMPARED, torch.Tensor.__getitem__), before=("expert dispatch",),
    )
)  # fmt: skip
