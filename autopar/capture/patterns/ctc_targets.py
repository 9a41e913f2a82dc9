"""``ctc_loss`` is traced with its targets in rows (:mod:`autopar.rules.families.ctc`).

What models take from rows of labels by a mask, to hand it to ``ctc_loss``, has a size that depends on data. The mask
itself is handed on instead; whatever else is done with what was taken is refused as it is without this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import functional

from autopar.capture.trace.patches import PASS, Args, Function, Handler, Kwargs, register
from autopar.rules.families.ctc import ctc_of_rows
from autopar.torch_private import pytree
from autopar.words.trees import PyTree

_SELECT = (torch.masked_select, torch.Tensor.masked_select)


class Transcripts:
    """Handler that makes ``ctc_loss`` a loss of each row, and the reduction operators of their own."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def __call__(self, func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        """Handle a call of torch."""
        if func in _SELECT and len(args) == 2 and not kwargs and args[0].ndim == 2 and args[0].shape == args[1].shape:
            stands_for = args[0].flatten()
            self._taken[id(stands_for)] = stands_for, args[0], args[1]
            return stands_for
        if func is functional.ctc_loss:
            loss = self._loss(*args, **kwargs)
            if loss is not None:
                return loss
        if not self._taken:
            return PASS
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._really, (args, kwargs))
        return func(*args, **kwargs)

    def _really(self, value: torch.Tensor) -> torch.Tensor:
        """Return the selected values that a placeholder stands for, which the tracer refuses."""
        if id(value) not in self._taken:
            return value
        _, rows, mask = self._taken[id(value)]
        return torch.masked_select(rows, mask)

    def _loss(
        self, log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
        reduction: str = "mean", zero_infinity: bool = False,
    ) -> torch.Tensor | None:  # fmt: skip
        """Compute ``torch.nn.functional.ctc_loss``, with the same parameters; None for a single row."""
        if log_probs.ndim != 3:
            return None
        _, rows, mask = self._taken.get(id(targets), (None, targets, None))
        n_steps, n_targets = (_lengths(given, log_probs.device) for given in (input_lengths, target_lengths))
        losses = ctc_of_rows(log_probs, rows, mask, n_steps, n_targets, blank, zero_infinity)
        if zero_infinity:
            losses = torch.where(losses == torch.inf, torch.zeros_like(losses), losses)
        if reduction == "mean":
            return (losses / n_targets.clamp(min=1).to(losses.dtype)).mean()
        return losses.sum() if reduction == "sum" else losses


def _lengths(given: torch.Tensor | Iterable[int], device: torch.device) -> torch.Tensor:
    return given if isinstance(given, torch.Tensor) else torch.tensor([*given], device=device)


register(Handler("transcripts of CTC", "rows of labels that a mask selects have a size that depends on data",
                 lambda _record: Transcripts(), before=("packed sequences",)))  # fmt: skip
