"""Graphs of microbatches: one captured for every number of them that runs, the others on the line through two."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.capture import Captured, capture
from autopar.capture.in_parts import InputRows, captured_in_parts, no_rows_in
from autopar.capture.microbatches import NotLinear, resized, rows_of
from autopar.rules.experts.expert_load import with_load
from autopar.torch_private import pytree
from autopar.words.graph import Graph


@dataclass(eq=False)
class MicrobatchGraphs:
    """Graphs of one microbatch of a batch, by how many of them make up a step.

    The whole batch and the first part that is asked for are captured; other sizes follow from both where every size in
    the graph is linear in the rows, and are captured where not.

    Attributes:
        captured: the capture of the whole batch.
        example: the whole batch, as for :func:`part_of`.
        input_rows: the inputs that have its rows; None to find them.
    """

    model: torch.nn.Module
    captured: Captured
    example: Any
    input_rows: InputRows = None
    _captures: dict[int, Captured] = field(default_factory=dict, init=False, repr=False)
    _graphs: dict[int, Graph] = field(default_factory=dict, init=False, repr=False)

    def part(self, m: int) -> Captured:
        """Return one of ``m`` microbatches, captured."""
        if m == 1:
            return self.captured
        if m not in self._captures:
            self._captures[m] = part_of(self.model, self.captured, self.example, m, self.input_rows)
        return self._captures[m]

    def graph(self, m: int) -> Graph:
        """Return the graph of one of ``m`` microbatches."""
        if m not in self._graphs:
            self._graphs[m] = self._graph(m)
        return self._graphs[m]

    def _graph(self, m: int) -> Graph:
        second = next(iter(self._captures), m)
        if m in (1, second):
            return self.part(m).graph
        rows, other = rows_of(self.example), self.part(second)
        try:
            return resized(_as_part(self.captured, other), other.graph, rows, rows // second, rows // m)
        except NotLinear:
            return self.part(m).graph

    def captured_of(self, m: int) -> Captured:
        """Return a microbatch with its graph, and with its example where it was captured."""
        if m == 1 or m in self._captures:
            return self.part(m)
        return replace(self.captured, graph=self.graph(m), example=None)


def part_of(
    model: torch.nn.Module, captured: Captured, example: Any, parts: int, rows: InputRows = None
) -> Captured:
    """Return one of ``parts`` microbatches of a batch, captured as the whole batch or a microbatch of it was.

    ``example`` is the whole batch, ``(args, kwargs)`` or ``(args, kwargs, targets)`` with a loss function; ``rows`` are
    the inputs that have its rows (None: they are found).
    """
    args, kwargs, *targets = example
    loss_fn = captured.example.loss_fn if captured.example is not None else None

    def take(batch: Any) -> Captured:
        return capture(
            model, batch[0], batch[1], loss_fn=loss_fn, targets=batch[2], precision=captured.graph.precision
        )  # fmt: skip

    of_parts = captured.example.in_parts if captured.example is not None else None
    is_replicated = captured.example is not None and (of_parts is None or not of_parts.of_several)
    part: Captured = captured_in_parts(
        take, (args, kwargs, targets[0] if targets else ()), parts, model, rows,
        captured if is_replicated and _is_of(captured, (args, kwargs, *targets)) else None,
        without=no_rows_in(captured),
    )  # fmt: skip
    return replace(part, graph=with_load(part.graph, captured.graph.expert_load))


def _as_part(captured: Captured, part: Captured) -> Graph:
    """Return the graph of a whole batch with the inputs that a microbatch of it has."""
    decided = part.example.in_parts if part.example is not None else None
    return captured.graph if decided is None or captured.example is None else decided.of(captured).graph


def _is_of(captured: Captured, example: Any) -> bool:
    """Return whether a call was captured with the shapes of an example."""
    of = captured.example
    assert of is not None
    shapes = [
        [tuple(x.shape) for x in pytree.tree_leaves(each) if isinstance(x, torch.Tensor)]
        for each in ((of.args, dict(of.kwargs), of.targets), tuple(example))
    ]
    return shapes[0] == shapes[1]
