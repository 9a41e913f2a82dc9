"""Prices of layouts of one model: whoever compares many captures the model once.

::

    layouts = PricedLayouts(model, captured, (args, kwargs))          captured: of the batch of a step
    row = layouts.price("dgx-h100-x8 as megatron-2023", "tp=8,dp=8,sp,zero=1")
    row.seconds, row.memory_bytes, row.limit_bytes, row.fits, row.plan

``autopar.layouts(model, inputs)`` gives one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autopar.capture import Captured, capture, none_narrow
from autopar.capture.batch_factor import inputs_with_rows
from autopar.capture.in_parts import InputRows
from autopar.capture.microbatches import rows_of
from autopar.errors import InfeasibleError, PlanError, first_few
from autopar.planner.intra_op.pins.options import Options
from autopar.planner.layouts.layout_words import Layout, parse_layout
from autopar.planner.layouts.loss_by_places import with_loss_by_places
from autopar.planner.layouts.operator_cuts import CONTEXT, TENSOR
from autopar.planner.layouts.pinned_plan import PinnedPlan, Said, pinned_plan
from autopar.planner.layouts.separate_products import separated
from autopar.planner.microbatch_graphs import MicrobatchGraphs
from autopar.plans.clusters import get_cluster, reference
from autopar.plans.offload_options import OffloadWish, parse_offload
from autopar.plans.plan import Plan
from autopar.words.graph import Graph
from autopar.words.precision import Precision
from autopar.words.texts import show_bytes
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
    def plan(self) -> Plan:
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
        """Bytes that the plan may fill on a device."""
        return self.pinned.limit_bytes

    @property
    def fits(self) -> bool:
        """Every device has the memory."""
        return self.pinned.fits

    def check_fits(self) -> None:
        """Refuse a layout that does not fit, or cannot be run."""
        if not self.pinned.runs:
            raise PlanError(f"{self.layout.written}: {self.pinned.notes[0]}")
        if not self.fits:
            raise InfeasibleError(
                f"{self.layout.written} needs {show_bytes(self.memory_bytes)} on its fullest device, which may fill "
                f"{show_bytes(self.limit_bytes)}; use a smaller mbs, recompute=full, zero=1 or zero=3, or more devices"
            )


@dataclass(eq=False)
class PricedLayouts:
    """Layouts of one model and one batch.

    Attributes:
        captured: the capture of the whole batch of a step.
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

    def price(
        self, cluster: str | Path | Cluster, text: str | Layout, offload: OffloadWish | None = None
    ) -> PricedLayout:
        """Return a layout's plan, price and memory, whether it fits or not.

        Args:
            cluster: its name, the path of its file, or the cluster itself.
            text: the words of the layout (:mod:`autopar.planner.layouts.layout_words`).
            offload: what is kept in the memory of the host, as for :func:`autopar.plan`: parameters and state as much
                as is said, all of them where no share is; activations as few as the limit asks for. None: as
                ``options`` says.
        """
        where = get_cluster(cluster)
        layout = parse_layout(text) if isinstance(text, str) else text
        graphs = self._graphs(layout.precision)
        rows = rows_of(self.example)
        options = self.options if offload is None else replace(self.options, offload=parse_offload(offload))
        said = layout.said(graphs.captured.graph, options, where.n_devices, rows)
        graph = graphs.graph(said.microbatches)
        if graph.loss is None:
            raise PlanError(f"{said.text}: a layout is of a model that returns its loss; give loss_fn= and targets=")
        if wide := none_narrow(graph):
            raise PlanError(f"{said.text}: {wide}, so write that, or other microbatches")
        names = names_with_rows(graphs.captured.graph, rows)
        pinned = _pinned(graph, where, said, names, reference(cluster))
        part = graphs.captured_of(said.microbatches)
        return PricedLayout(layout, pinned, part if pinned.runs else replace(part, graph=pinned.graph, example=None))

    def part(self, microbatches: int) -> Captured:
        """Return the capture of one of so many microbatches."""
        return self._graphs(None).captured_of(microbatches)

    def _graphs(self, precision: Precision | None) -> MicrobatchGraphs:
        """Return the graphs of microbatches under a policy; None: under that of the capture."""
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


def pinned_layout(
    graph_of: Callable[[int], Graph], cluster: Cluster, text: str | Layout, rows: int,
    options: Options | None = None, n_devices: int | None = None,
) -> PinnedPlan:  # fmt: skip
    """Return the plan of a layout of graphs that were captured elsewhere.

    ``graph_of``: gives the graph of a microbatch by their number in a step; ``text``: the words of the layout;
    ``rows``: those of the batch of a step; ``n_devices``: how many of the cluster's devices, from the first on; None
    for all.

    Raises:
        PlanError, InfeasibleError: the words cannot be honoured for this model on these devices.
    """
    layout = parse_layout(text) if isinstance(text, str) else text
    m = layout.microbatches_of(rows)
    graph = graph_of(m)
    said = layout.said(graph, options or Options(), n_devices or cluster.n_devices, rows)
    return _pinned(graph, cluster, said, names_with_rows(graph, rows // m))


def graph_for(graph: Graph, fingerprint: str) -> Graph:
    """Return the graph that a layout's plan is for: a microbatch as it is, or as trainers write the model.

    These have one matrix for each of fused products, and the loss by places (:func:`_pinned`). Where the fingerprint is
    of neither, the graph comes back as it is.
    """
    by_places = with_loss_by_places(graph)
    ways = (graph, by_places, separated(graph)[0], separated(by_places)[0])
    return next((way for way in ways if way.fingerprint == fingerprint), graph)


def _pinned(
    graph: Graph, cluster: Cluster, said: Said, with_rows: frozenset[str], cluster_name: str = ""
) -> PinnedPlan:
    """Return the plan of a layout; with tensor parallelism, fused products are split into one for each result.

    ``with_rows`` names the inputs that have the rows of the batch.
    """
    def planned(graph: Graph, notes: Sequence[str] = ()) -> PinnedPlan:
        rows = frozenset(i for i, node in graph.of_kind("input") if node.target in with_rows)
        plan = pinned_plan(graph, cluster, said, rows, cluster_name)
        return replace(plan, notes=(*notes, *plan.notes), runs=not notes)

    sizes = said.mesh.size_of
    notes: list[str] = []
    if sizes.get(CONTEXT, 1) > 1 and (by_places := with_loss_by_places(graph)) is not graph:
        graph = by_places
        notes.append(
            "priced with the loss over [batch vocabulary sequence], so that every rank takes that of its places; the "
            "module as it is cannot run so: it takes the loss over (batch sequence), one dim that is cut by rows alone"
        )
    if sizes.get(TENSOR, 1) == 1 or not graph.derived.get(APART):
        try:
            return planned(graph, notes)
        except PlanError:
            if sizes.get(TENSOR, 1) == 1 or not separated(graph)[1]:
                raise
    apart, modules = separated(graph)
    notes.append(
        f"priced with one matrix for each of what {first_few(modules, 2)} makes at once (q, k and v), as frameworks "
        "store them under tensor parallelism; the module as it is cannot run so: write one Linear for each"
    )
    plan = planned(apart, notes)
    graph.derived[APART] = True
    return plan


APART = "products have to be taken apart"
"""What is remembered of a graph whose products have to be (:mod:`.separate_products`)."""


def names_with_rows(graph: Graph, rows: int) -> frozenset[str]:
    """Return the names of the inputs that have the rows of the batch. ``graph``: that of a batch of `rows`."""
    key = "inputs with rows", rows
    names: frozenset[str] | None = graph.derived.get(key)
    if names is None:
        found = inputs_with_rows(graph, rows).rows
        names = graph.derived[key] = frozenset(graph.nodes[i].target for i in found)
    return names
