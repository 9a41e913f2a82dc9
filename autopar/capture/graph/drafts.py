"""The forms of a captured model on its way to a :class:`~autopar.words.graph.Graph`, which passes rewrite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram

from autopar.capture.branches.random_answers import Question
from autopar.capture.graph.rows_of_graph import RowsOfGraph
from autopar.errors import CaptureError
from autopar.words.graph import Graph, Node, Ref

Refusal = Callable[[str, str], CaptureError]
"""Makes an error of a reason and a remedy."""


@dataclass
class TracedProgram:
    """An exported program, which passes rewrite in place.

    Attributes:
        rows: the replacements of selected rows, once the pass ``selected_rows`` has made some.
    """

    exported: ExportedProgram
    rows: RowsOfGraph | None = None

    @property
    def graph(self) -> torch.fx.Graph:
        """The operators of the program."""
        return self.exported.graph


@dataclass(frozen=True)
class Ask:
    """A question of Python's for a random number.

    Attributes:
        position: number of nodes before it.
        condition: the number, a bool without dims.
        answer: the value that Python got.
    """

    question: Question
    position: int
    condition: Ref
    answer: bool


@dataclass(frozen=True)
class Draft:
    """The nodes of a graph in execution order, before equal and unread ones are dropped.

    Attributes:
        outputs, loss, tied, updates, before: as in :class:`~autopar.words.graph.Graph`.
        user: for every input of the exported program its node, or None for a value that is no tensor.
        asks: in the order in which they were asked.
        refusals: the trained parameters that the forward writes, and the error of each where that cannot be honoured.
    """

    nodes: list[Node]
    outputs: tuple[Any, ...]
    loss: int | None
    tied: dict[str, str]
    updates: dict[str, Ref]
    user: list[int | None]
    asks: list[Ask] = field(default_factory=list)
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    before: Graph | None = None

    @property
    def graph(self) -> Graph:
        """The draft as a graph, with all of its nodes."""
        return Graph(tuple(self.nodes), self.outputs, self.loss, self.tied, self.updates, before=self.before)
