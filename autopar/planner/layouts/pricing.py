"""Prices of layouts of one model: whoever compares many captures the model once.

::

    layouts = PricedLayouts(model, captured, (args, kwargs))          captured: of the batch of a step
    row = layouts.price(load_cluster("dgx-h100-x8"), "tp=8,dp=8,sp,zero=1")
    row.seconds, row.memory_bytes, row.limit_bytes, row.fits, row.plan
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.capture import Captured, capture
from autopar.capture.batch_factor import inputs_with_rows
from autopar.capture.in_parts import InputRows
from autopar.capture.microbatches import rows_of
from autopar.errors import PlanError
from autopar.planner.intra_op.pins.options import Options
from autopar.planner.layouts.pinned_plan import PinnedPlan, pinned_plan
from autopar.planner.layouts.words import Layout, parse_layout
from autopar.planner.microbatch_graphs import MicrobatchGraphs
from autopar.words.graph import Graph
from autopar.words.precision import Precision
from cost_models.schedules import Timeline
from hardware_profiles import Cluster


@dataclass(frozen=True)
class PricedLayout:
    """A layout with its plan.

    Attributes:
        captured: the microbatch that the plan is for.
    """

    layout: Layout
    pinned: PinnedPlan
    captured: Captured

    @property
    def plan(self) -> Any:
        """The plan, whether it fits or not."""
        return self.pinned.plan

    @property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return self.pinned.timeline

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.pinned.seconds

    @property
    def memory_bytes(self) -> float:
        """Bytes of the fullest device."""
        return self.pinned.memory_bytes

    @property
    def limit_bytes(self) -> float:
        """Bytes that it may fill."""
        return self.pinned.limit_bytes

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return self.pinned.fits


@dataclass(eq=False)
class PricedLayouts:
    """Layouts of one model and one batch.

    Attributes:
        captured: of the whole batch of a step.
        example: the whole batch, as ``(args, kwargs)`` or ``(args, kwargs, targets)``.
        options: the memory limit and the optimizer, where a layout does not say another one.
        input_rows: the inputs that have the rows of the batch; None to find them.
    """

    model: torch.nn.Module
    captured: Captured
    example: Any
    options: Options = field(default_factory=Options)
    input_rows: InputRows = None
    _by_policy: dict[Precision | None, MicrobatchGraphs] = field(default_factory=dict, init=False, repr=False)

    def price(self, cluster: Cluster, text: str | Layout, cluster_name: str = "") -> PricedLayout:
        """Return a layout's plan, price and memory, whether it fits or not.

        Args:
            text: its words (:mod:`autopar.planner.layouts.words`).
            cluster_name: by which the plan finds the cluster again.

        Raises:
            PlanError, InfeasibleError: the words cannot be honoured for this model on this cluster.
        """
        layout = parse_layout(text) if isinstance(text, str) else text
        graphs = self._graphs(layout.precision)
        rows = rows_of(self.example)
        said = layout.said(graphs.captured.graph, self.options, cluster.n_devices, rows)
        graph = graphs.graph(said.microbatches)
        if graph.loss is None:
            raise PlanError(f"{said.text}: a layout is of a model that returns its loss; give loss_fn= and targets=")
        names = names_with_rows(graphs.captured.graph, rows)
        with_rows = frozenset(i for i, node in graph.of_kind("input") if node.target in names)
        pinned = pinned_plan(graph, cluster, said, with_rows, cluster_name)
        return PricedLayout(layout, pinned, graphs.captured_of(said.microbatches))

    def _graphs(self, precision: Precision | None) -> MicrobatchGraphs:
        """The graphs of microbatches under a policy; None: under that of the capture."""
        policy = precision if precision is not None else self.captured.graph.precision
        if policy not in self._by_policy:
            self._by_policy[policy] = MicrobatchGraphs(
                self.model, self._captured(policy), self.example, self.input_rows
            )
        return self._by_policy[policy]

    def _captured(self, policy: Precision | None) -> Captured:
        if policy == self.captured.graph.precision:
            return self.captured
        args, kwargs, *targets = self.example
        loss_fn = self.captured.example.loss_fn if self.captured.example is not None else None
        again = capture(
            self.model, args, kwargs, loss_fn=loss_fn, targets=targets[0] if targets else (), precision=policy
        )
        return replace(again, graph=replace(again.graph, expert_load=self.captured.graph.expert_load))


def names_with_rows(graph: Graph, rows: int) -> frozenset[str]:
    """Return the names of the inputs that have the rows of the batch.

    Args:
        graph: of the whole batch.
        rows: of the batch.
    """
    key = "inputs with rows", rows
    names: frozenset[str] | None = graph.derived.get(key)
    if names is None:
        found = inputs_with_rows(graph, rows).rows
        names = graph.derived[key] = frozenset(graph.nodes[i].target for i in found)
    return names


__all__ = ["PricedLayout", "PricedLayouts", "names_with_rows"]
