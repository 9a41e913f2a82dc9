"""Totals of a batch that its microbatches read, computed ahead of the step on every rank, for itself and on the device.

They follow from the inputs alone (:mod:`autopar.capture.batch_totals`). A call that is no part of a step is a batch of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from autopar.capture import Captured
from autopar.capture.batch_totals import Ahead, Totals
from autopar.capture.in_parts import decided_for_steps, is_at_once
from autopar.errors import RunError
from autopar.lower.emit import lower
from autopar.planner.intra_op.one_device import one_device

Tensors = Mapping[str, torch.Tensor]
State = Callable[[str], torch.Tensor | None]
"""Gives the whole value of a buffer by name."""


class TotalsAhead:
    """Gives the inputs of a program that are computed ahead of a step.

    Attributes:
        inputs: names and shapes of the caller's inputs from which they follow.
        buffers: names of the model's buffers from which they follow.
    """

    def __init__(self, totals: Totals, device: torch.device) -> None:
        self.totals, self.device = totals, device
        self.programs = [
            lower(graph, one_device(graph), device) if graph.outputs else None for graph in totals.graphs
        ]  # fmt: skip
        ahead = {each.name for each in totals.ahead}
        self.inputs = {
            slot.name: slot.shape for program in self.programs if program is not None for slot in program.slots
            if slot.kind == "input" and slot.name not in ahead
        }  # fmt: skip
        self.buffers = {
            slot.name for program in self.programs if program is not None for slot in program.slots
            if slot.kind != "input"
        }  # fmt: skip

    def of_level(self, level: int) -> list[Ahead]:
        """List the totals of `level`: those that follow from totals of the levels before."""
        return [each for each in self.totals.ahead if each.level == level]

    def terms(self, level: int, inputs: Tensors, state: Tensors) -> dict[str, torch.Tensor]:
        """Return one microbatch's term of each total of a level.

        Args:
            inputs: whole tensors by name, and what was computed before.
            state: the buffers from which they follow, whole.
        """
        program = self.programs[level]
        values: list[torch.Tensor] = []
        for slot in program.slots if program is not None else ():
            value = inputs[slot.name] if slot.kind == "input" else state[slot.name]
            values.append(value.detach().to(self.device))
        outputs = program.module(*values) if program is not None else ()
        terms = {}
        for each in self.of_level(level):
            given = [outputs[i] for i in each.outputs]
            if each.how == "scale":
                counts = given[0] != each.ignored
                if len(given) > 1:
                    wide = given[1].to(torch.float64)
                    counts = wide[torch.where(counts, given[0], 0)] * counts
                terms[each.name] = counts.sum().to(torch.float64)
            elif given:
                terms[each.name] = given[0]
        return terms


def check_in_parts(captured: Captured) -> None:
    """Refuse a step in microbatches of a program that was made for the batch at once and cannot take it.

    Raises:
        RunError: it says which input, or that the loss divides by a sum.
    """
    if not is_at_once(captured):
        return
    why, other = decided_for_steps(captured)
    if why:
        raise RunError(f"a step in microbatches: {why}")
    if other is not None:
        raise RunError(
            "a step in microbatches: the loss divides by a sum over the batch, or by how many rows it has, and the "
            "program, made for the batch at once with shapes='fixed', does not read that of several microbatches: "
            "parallelize with microbatches=n"
        )


@torch.no_grad()
def computed_ahead(
    of: Sequence[TotalsAhead | None], batches: Sequence[Tensors], shares: Sequence[float], state: State
) -> list[dict[str, torch.Tensor]]:
    """Return the inputs of every microbatch of a step that are computed ahead of it.

    Args:
        of: gives those of the program of each microbatch.
        batches: the whole inputs of each.
        shares: by what part each counts by its rows.
        state: gives a buffer that they follow from, whole; all ranks call it alike.
    """
    names = sorted(set().union(*(each.buffers for each in of if each is not None)))
    there = {name: value for name in names if (value := state(name)) is not None}
    given: list[dict[str, torch.Tensor]] = [{} for _ in batches]
    for level in range(max((len(each.programs) for each in of if each is not None), default=0)):
        terms = [
            each.terms(level, {**batch, **before}, there) if each is not None and level < len(each.programs) else {}
            for each, batch, before in zip(of, batches, given, strict=True)
        ]
        for each, into, share in zip(of, given, shares, strict=True):
            for ahead in each.of_level(level) if each is not None else ():
                if ahead.how == "parts":
                    dtype = getattr(torch, ahead.spec.dtype)
                    into[ahead.name] = torch.full((), 1 / share, dtype=dtype, device=each.device)  # type: ignore[union-attr]
                elif all(ahead.name in term for term in terms):
                    into[ahead.name] = _whole(ahead, [term[ahead.name] for term in terms], shares, share)
    return given


def _whole(ahead: Ahead, terms: Sequence[torch.Tensor], shares: Sequence[float], share: float) -> torch.Tensor:
    """Return one input of a microbatch, from the terms of all."""
    dtype = getattr(torch, ahead.spec.dtype)
    if ahead.how == "mean":
        terms = [term * each for term, each in zip(terms, shares, strict=True)]
    whole = sum(terms[1:], terms[0])
    return (1 / (whole * share)).to(dtype) if ahead.how == "scale" else whole.to(dtype)


def totals_ahead(captured: Captured, device: torch.device) -> TotalsAhead | None:
    """Return what computes the inputs of a captured microbatch ahead of it; None if there are none."""
    if captured.totals is None:
        return None
    nodes = {node.name: node for _, node in captured.graph.of_kind("input")}
    ahead = tuple(replace(each, spec=nodes[each.name].out) for each in captured.totals.ahead)  # in double, maybe
    return TotalsAhead(replace(captured.totals, ahead=ahead), device)
