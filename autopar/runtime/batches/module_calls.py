"""One call of a module, as far as it says which program it needs: the batch that a program for it is captured from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.capture import Captured, Example
from autopar.capture.in_parts import no_rows_in
from autopar.capture.microbatches import first_part, rows_of
from autopar.errors import RunError
from autopar.runtime.batches.calls import call_text
from autopar.torch_private import pytree
from autopar.words.autocasting import autocast_now, shown
from autopar.words.trees import PyTree

MOST_SHOWN = 500
"""Characters of a call that a message shows."""

Batch = tuple[tuple[Any, ...], Mapping[str, Any], tuple[Any, ...]]
"""Positional and keyword arguments of the model, and targets of its loss function."""


@dataclass(frozen=True)
class ModuleCall:
    """How a module is called.

    Attributes:
        in_parts: with a batch of several microbatches (``train_step``), each of which is a call of the program.
        parts: how many the caller says; None if the shapes say it.
        one: positional and keyword arguments of the first microbatch, if it is known what is cut; whole, also where
            the call has one rank's rows.
        of_step: it is one microbatch of a step that was looked at as a whole.
        of_several: the step has other microbatches, in other calls.
    """

    args: tuple[PyTree, ...]
    kwargs: Mapping[str, PyTree]
    in_parts: bool = False
    parts: int | None = None
    one: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
    of_step: bool = False
    of_several: bool = False

    def of(self, example: Example, rows: int) -> tuple[Batch, Any]:
        """Return the call that a program for this one is captured from, and its loss function.

        A call that leaves out the targets that the loss function takes has none.

        Args:
            example: how the model was called at first.
            rows: the rows of the program that there is: no microbatch is to be larger.
        """
        n = len(example.args)
        args, kwargs = self.one or (self.args, self.kwargs)
        targets = args[n:] if example.loss_fn is not None else ()
        batch: Batch = args[: n if targets else None], dict(kwargs), targets
        if self.in_parts and self.one is None:
            whole = example.in_parts.whole if example.in_parts is not None else frozenset()
            have = rows_of(batch, whole)
            batch = first_part(batch, self.parts or parts_of(have, rows), whole)
        return batch, example.loss_fn if targets or not example.targets else None

    def parts_of(self, captured: Captured) -> int | None:
        """Return the number of microbatches of a step of the captured program; None for a call that is no step."""
        if self.parts is not None or not self.in_parts or captured.example is None:
            return self.parts
        have, rows = rows_of((self.args, dict(self.kwargs)), no_rows_in(captured)), batch_rows(captured)
        return have // rows if have % rows == 0 else None

    def shown(self) -> str:
        """Return the call in words, for messages."""
        text = call_text(self.args, self.kwargs) + (f" {shown(on)}" if (on := autocast_now()) else "")
        return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def parts_of(rows: int, most: int) -> int:
    """Return the least number of equal microbatches of at most ``most`` rows."""
    return next(k for k in range(1, max(rows, 1) + 1) if rows % k == 0 and rows // k <= most)


def batch_rows(captured: Captured) -> int:
    """Return the rows of what a program was captured with; 0 if none of its inputs is a tensor with dims."""
    assert captured.example is not None
    example = captured.example
    leaves = pytree.tree_leaves((example.args, dict(example.kwargs), example.targets))
    if not any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves):
        return 0
    return rows_of((example.args, dict(example.kwargs), example.targets), no_rows_in(captured))


def check_autocast(captured: Captured) -> None:
    """Refuse a call under another autocast than that of the capture.

    Raises:
        RunError: with both.
    """
    if captured.autocast != (on := autocast_now()):
        raise RunError(
            f"the program was captured {shown(captured.autocast)}, and is called {shown(on)}: its casts are part "
            "of it; call it as it was captured, or parallelize with shapes='any', which captures again by itself"
        )
