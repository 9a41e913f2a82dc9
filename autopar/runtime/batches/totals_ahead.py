"""Totals of a batch that its microbatches read, computed ahead of the step on every rank, for itself and on the device.

They follow from the inputs alone (:mod:`autopar.capture.batch_totals`). A call that is no part of a step is a batch of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.capture import Captured
from autopar.capture.batch_totals import Totals
from autopar.errors import RunError
from autopar.lower.emit import lower
from autopar.planner.intra_op.one_device import one_device

Tensors = Mapping[str, torch.Tensor]
State = Callable[[str], torch.Tensor | None]
"""Gives the whole value of a parameter or buffer by name; None of one that this rank does not have."""


class TotalsAhead:
    """Gives the inputs of a program that are computed ahead of a step.

    Attributes:
        inputs: names and shapes of the caller's inputs from which they follow.
    """

    def __init__(self, totals: Totals, device: torch.device) -> None:
        self.totals, self.device = totals, device
        self.program = lower(totals.graph, one_device(totals.graph), device)
        self.inputs = {slot.name: slot.shape for slot in self.program.slots if slot.kind == "input"}
        self.unknown: list[str] = []

    @torch.no_grad()
    def terms(self, inputs: Tensors, state: State) -> list[torch.Tensor | None]:
        """What one microbatch adds to each of them: None where that is not known here, or nothing is added.

        Args:
            inputs: whole tensors by name.
        """
        values: list[torch.Tensor] = []
        for slot in self.program.slots:
            value = inputs[slot.name] if slot.kind == "input" else state(slot.name)
            if value is None:
                self.unknown.append(slot.name)
                return [None] * len(self.totals.ahead)
            values.append(value.detach().to(self.device))
        outputs = self.program.module(*values) if self.program.outputs else ()
        terms: list[torch.Tensor | None] = []
        for each in self.totals.ahead:
            given = [outputs[i] for i in each.outputs]
            if each.how == "scale":
                counts = given[0] != each.ignored
                if len(given) > 1:
                    wide = given[1].to(torch.float64)
                    counts = wide[torch.where(counts, given[0], 0)] * counts
                terms.append(counts.sum().to(torch.float64))
            else:
                terms.append(given[0] if given else None)
        return terms

    @torch.no_grad()
    def given(self, terms: Sequence[Sequence[torch.Tensor | None]], shares: Sequence[float]) -> list[dict[str, Any]]:
        """The inputs of every microbatch of a step.

        Args:
            terms: of each microbatch, :meth:`terms`.
            shares: by what part each counts by its rows.
        """
        inputs: list[dict[str, Any]] = [{} for _ in terms]
        for k, each in enumerate(self.totals.ahead):
            dtype = getattr(torch, each.spec.dtype)
            of_all = [x for x in (term[k] for term in terms) if x is not None]
            if each.how != "parts" and len(of_all) < len(terms):
                continue
            if each.how == "mean":
                whole = sum(x * share for x, share in zip(of_all, shares, strict=True))
            elif each.how != "parts":
                whole = sum(of_all[1:], of_all[0])
            for into, share in zip(inputs, shares, strict=True):
                if each.how == "parts":
                    into[each.name] = torch.full((), 1 / share, dtype=dtype, device=self.device)
                elif each.how == "scale":
                    into[each.name] = (1 / (whole * share)).to(dtype)
                else:
                    into[each.name] = whole.to(dtype)
        return inputs

    def alone(self, inputs: Tensors, state: State) -> dict[str, Any]:
        """The inputs of a call that is a batch of its own.

        Raises:
            RunError: they follow from a parameter or buffer that this rank does not have.
        """
        return self.of_step([inputs], [1.0], state)[0]

    def of_step(self, batches: Sequence[Tensors], shares: Sequence[float], state: State) -> list[dict[str, Any]]:
        """The inputs of every microbatch of a step, given their whole tensors."""
        return self.given([self.terms(inputs, state) for inputs in batches], shares)


def totals_ahead(captured: Captured, device: torch.device) -> TotalsAhead | None:
    """What gives the inputs of a captured microbatch that are computed ahead; None where it has none."""
    return None if captured.totals is None else TotalsAhead(captured.totals, device)


def check_totals(ahead: TotalsAhead, inputs: Mapping[str, Any], wanted: Sequence[str]) -> None:
    """Refuse to run a program without an input that it reads.

    Raises:
        RunError: it follows from a parameter or buffer of another stage.
    """
    missing = [each.name for each in ahead.totals.ahead if each.name in wanted and each.name not in inputs]
    if missing:
        raise RunError(
            f"the loss divides by a sum over the batch that follows from {', '.join(dict.fromkeys(ahead.unknown))}, "
            "which another stage of the pipeline has: have the module that computes the loss own it (a buffer of its "
            "own), or give it as an input"
        )


__all__ = ["State", "TotalsAhead", "check_totals", "totals_ahead"]
