"""What the peak of a pipeline's stage adds up for other microbatches: messages received ahead, and on their way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.plans.plan import StagePlan
from autopar.plans.prices import Crossed, MicrobatchPeaks, Moment, OnTheirWay, Price, StagePeaks, copies_ahead
from autopar.plans.stage_graphs import cut, hot_ops
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

ONE = Mesh.of(one=1)


def test_the_next_messages_of_every_peer_are_received_ahead() -> None:
    assert copies_ahead([(0,)], 5) == [2]
    assert copies_ahead([(0,)], 1) == [1]
    assert copies_ahead([(0,)], 0) == [0]
    assert copies_ahead([(0,), (0,), (0,)], 5) == [1, 1, 0], "two messages, whatever they are"
    assert copies_ahead([(0,), (1,)], 5) == [2, 2], "of each of two stages two"
    assert copies_ahead([(2, 3)], 5) == [4], "a gradient comes from each stage that reads the tensor"


def test_what_is_on_its_way_when_a_stage_of_1f1b_is_fullest() -> None:
    # the first of three stages: F0 F1 F2 B0 F3 B1 ...
    assert OnTheirWay.at(3, 3, backward=True, is_first=True) == OnTheirWay(0, 2, 1, 0), "F2 is not answered yet"
    assert OnTheirWay.at(3, 6, backward=True, is_first=False) == OnTheirWay(2, 4, 1, 1), "in B1"
    assert OnTheirWay.at(3, 6, backward=False, is_first=False) == OnTheirWay(2, 5, 1, 1), "in F3"
    # the last one: F0 B0 F1 B1 ...
    assert OnTheirWay.at(1, 6, backward=True, is_first=False) == OnTheirWay(4, 4, 0, 1)
    # one microbatch: nothing is ahead of it or behind
    assert OnTheirWay.at(1, 1, backward=True, is_first=True) == OnTheirWay(0, 0, 0, 0)


def test_the_peak_with_so_many_in_flight() -> None:
    first = MicrobatchPeaks(100, 200, Moment(5, False, 0), Moment(5, True, 1))
    later = MicrobatchPeaks(110, 250, Moment(5, False, 0), Moment(4, True, 1))
    peaks = StagePeaks(first, later, 1000, 7, 40, (Crossed(3, 2, (0,)),), (Crossed(5, 4, (2,)),), 4)
    price = Price(parameter_bytes=1000, gradient_bytes=1000, optimizer_bytes=2000)
    # B1 of a step: gradients of parameters, one other microbatch, one activation ahead, two gradients ahead,
    # an activation sent and a gradient sent back
    two = 3000 + 1000 + 250 + 40 + 1 * 3 + 2 * 4 + 5 + 2
    assert peaks.added_to(price, 2).memory_bytes == two and peaks.fullest(2) == Moment(4, True, 1)
    # all four are in flight: B0 has no gradients of parameters yet, B1 has them and three in flight
    four = max(3000 + 200 + 3 * 40 + 2 * 4 + 5, 3000 + 1000 + 250 + 2 * 40 + 2 * 4 + 5 + 2)
    assert peaks.added_to(price, 4).memory_bytes == four
    # a search over schedules takes the number for a factor: it must never count less
    stored = price.stored_bytes + peaks.transient_bytes()
    assert all(stored + n * 40 >= peaks.added_to(price, n).memory_bytes for n in range(1, 5))
    # the optimizer's step, where nothing else is more
    small = replace(peaks, first=MicrobatchPeaks(0, 0, None, None), later=None)
    assert small.added_to(price, 4).memory_bytes == 4000 + 7 and small.fullest(4) is None


class Two(nn.Module):
    """Two stages with a product each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 64), nn.Linear(64, 32), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.relu(self.a(x))))).square().mean()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_plan_for_other_microbatches_in_flight_costs_what_it_would_cost_planned_so(stage: int) -> None:
    graph = capture(Two(), (torch.randn(512, 16),)).graph
    hot = hot_ops(graph)
    part = cut(graph, [graph.nodes[hot[len(hot) // 2]].name])[stage].graph
    cluster = load_cluster("local-x1")

    def planned(in_flight: int) -> StagePlan:
        return plan_graph(part, cluster, ONE, Options(microbatches=8, in_flight=in_flight))

    fewer = planned(4).with_in_flight(2)
    assert (fewer.price, fewer.fullest) == (planned(2).price, planned(2).fullest)
    assert planned(2).with_in_flight(4).price == planned(4).price
    alone = plan_graph(part, cluster, ONE)
    stage_edge = sum(sum(crossed[:2]) for crossed in (*alone.peaks.arrived, *alone.peaks.sent))  # type: ignore[union-attr]
    assert 0 < stage_edge, "something crosses"
    assert planned(1).price.memory_bytes > alone.price.memory_bytes + stage_edge // 2, "what is received ahead counts"
