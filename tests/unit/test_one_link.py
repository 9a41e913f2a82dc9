"""Activations and parameters in the memory of the host together: one link carries the copies of both."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import Captured
from autopar.certificate import check
from autopar.errors import InfeasibleError
from autopar.planner.host_bytes import host_bytes, moved_bytes, stored_bytes
from autopar.planner.inter_op.simulating.phases import phases
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.plans.offload_options import parse_offload
from autopar.plans.plan import StagePlan
from autopar.report.page.seconds_spent import HOST_COPIES, stage_tally
from autopar.words.meshes import Mesh
from cost_models import data_sheet_costs
from cost_models.host_link import HostCopies, Moved, copies_of, link_use
from cost_models.parameter_overlap import HIDES_ALL, SLOWDOWN, Computing, HostSeconds, ParameterSeconds, exposed
from hardware_profiles import Cluster, HostLink, load_cluster

LOST, ONE = SLOWDOWN, Mesh.of(data=1)
BOTH = [{"activations": ["*"], "optimizer": 1}, {"activations": ["*"], "parameters": 1}]


def link(both_fraction: float) -> HostCopies:
    return HostCopies(HostLink("test", 1.0, 1.0, both_fraction, 1, 0.0, 1e12, 1e12))


def busy(copies: HostCopies, out_seconds: float, in_seconds: float) -> float:
    """Return how long a link is busy with copies of both directions, each counted alone."""
    shorter, longer = sorted((out_seconds, in_seconds))
    return shorter / copies.both_fraction + (longer - shorter)


def waited(of_step: HostSeconds, both_fraction: float) -> list[float]:
    """Return what passes of 10 seconds wait for parameters, beside 7 seconds of activations that nothing waits for."""
    moved = [Moved(7.0, 7.0, 0, 0)]
    use = link_use(link(both_fraction), moved, [1.0, 9.0], [1.0, 9.0], 2)
    assert use.waits == (0.0, 0.0), "hidden behind the nine seconds between its first reader and its last"
    return list(exposed(of_step.both, of_step.both, Computing(10.0, 10.0), HIDES_ALL, of_step, use))


def test_the_link_has_what_activations_leave() -> None:
    """Of 10 seconds activations take 7. Five more in the same direction: three hide, and two are waited for."""
    out = HostSeconds(going=ParameterSeconds(forward_each=5.0))
    for fraction in (0.5, 1.0):
        assert waited(out, fraction) == pytest.approx([0, 0, 2 + 3 * LOST, 0])
        home = HostSeconds(coming=ParameterSeconds(backward_each=5.0))
        assert waited(home, fraction) == pytest.approx([0, 0, 0, 2 + 3 * LOST])


def test_directions_help_each_other_as_far_as_the_link_can() -> None:
    """Five seconds in, seven out, in ten: all hide where a direction loses nothing, three where they take turns."""
    coming = HostSeconds(coming=ParameterSeconds(gathers=5.0))
    assert waited(coming, 1.0) == pytest.approx([5 * LOST, 0, 0, 0])
    assert waited(coming, 0.5) == pytest.approx([2 + 3 * LOST, 0, 0, 0])
    both = busy(link(0.6), 7.0, 5.0)  # 10.3 seconds
    assert waited(coming, 0.6) == pytest.approx([both - 10 + (15 - both) * LOST, 0, 0, 0])


@pytest.fixture(scope="module")
def captured() -> Captured:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(x)))

    model, x = nn.Sequential(*(Block() for _ in range(4))), torch.ones(512, 64)
    return autopar.capture(model, (x,), loss_fn=nn.functional.mse_loss, targets=(x,))


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sheet_costs, "BUCKET_BYTES", 1e5)  # else all parameters are read first


def cluster_of(rate: float, both_fraction: float) -> Cluster:
    cluster = load_cluster(str(Path(__file__).parents[1] / "data" / "beside-a-host.toml"))
    (device,) = set(cluster.devices)
    assert device.host is not None
    host = replace(device.host, to_host_bytes_per_second=rate, to_device_bytes_per_second=rate,
                   both_fraction=both_fraction, memory_bytes_per_second=1e13)  # fmt: skip
    return replace(cluster, devices=(replace(device, host=host),) * cluster.n_devices)


def planned(captured: Captured, cluster: Cluster, offload: Any, microbatches: int = 1) -> StagePlan:
    options = Options(microbatches=microbatches, offload=parse_offload(offload))
    return plan_graph(captured.graph, cluster, ONE, options)


def carried(stage: StagePlan, captured: Captured, cluster: Cluster) -> float:
    """Return how long a step's link is busy, pass by pass, from the bytes of what the plan says is on the host."""
    graph, copies = captured.graph, copies_of(cluster, cluster.devices[0])
    assert copies is not None
    away = [graph.nodes[graph.index[key.partition("#")[0]]].out.n_bytes for key in stage.memory["offload"]]
    out, back = sum(map(copies.to_host, away)), sum(map(copies.to_device, away))
    params = [(node, stage.params[node.target].lifetime) for _, node in graph.of_kind("param")]
    assert all(stage.params[node.target].on_host for node, _ in params)
    once = sum(copies.to_device(4 * prod(node.out.shape)) for node, lifetime in params if lifetime == "step")
    each = sum(copies.to_device(4 * prod(node.out.shape)) for node, lifetime in params if lifetime == "use")
    passes = stage.microbatches
    first = busy(copies, out, once + each) + busy(copies, once + each, back + each)
    return first + (passes - 1) * (busy(copies, out, each) + busy(copies, each, back + each))


@pytest.mark.parametrize("offload", BOTH, ids=lambda offload: str(list(offload)[1]))
@pytest.mark.parametrize(("rate", "fraction"), [*itertools.product((1e8, 5e8, 3e9), (0.5, 0.72, 1.0))])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_no_plan_is_faster_than_its_link(
    captured: Captured, offload: Any, rate: float, fraction: float, microbatches: int
) -> None:
    """The program's bound, the price, the phases, the page and the certificate agree."""
    cluster = cluster_of(rate, fraction)
    stage = planned(captured, cluster, offload, microbatches)
    assert stage.price.seconds >= carried(stage, captured, cluster)
    report = check(stage, captured.graph, cluster, tolerance=1e-6)
    assert report.ok, report.failures
    assert stage.solution is not None and stage.solution.objective_seconds <= stage.price.seconds * (1 + 1e-9)
    priced = pricer(cluster, ONE, stage.devices)
    parts = phases(captured.graph, stage, priced)
    in_parts = microbatches * (parts.forward_seconds + parts.backward_seconds) + parts.step_seconds
    assert in_parts == pytest.approx(stage.price.seconds)
    tally = stage_tally(captured.graph, stage, priced)
    spent = sum(tally.once.values()) + microbatches * sum(tally.seconds.values()) + stage.price.overhead_seconds
    assert spent == pytest.approx(stage.price.seconds)
    assert tally.once[HOST_COPIES] + microbatches * tally.seconds[HOST_COPIES] == pytest.approx(
        stage.price.exposed_seconds
    )


@pytest.mark.parametrize("offload", BOTH, ids=lambda offload: str(list(offload)[1]))
def test_both_together_wait_for_more_than_each_alone(captured: Captured, offload: Any) -> None:
    cluster = cluster_of(1e8, 0.5)
    (_, activations), (of, share) = offload.items()
    both = planned(captured, cluster, offload).price
    alone = planned(captured, cluster, {of: share}).price
    assert both.parameter_seconds == alone.parameter_seconds
    assert both.exposed_seconds > 1.2 * alone.exposed_seconds
    moved = planned(captured, cluster, {"activations": activations}).price
    assert both.activation_seconds == pytest.approx(moved.activation_seconds), "these have an order of their own"


def test_where_activations_are_chosen_the_share_of_the_state_is_kept(captured: Captured) -> None:
    cluster = cluster_of(1e8, 1.0)
    limit = 0.8 * planned(captured, cluster, {"optimizer": 1}).price.memory_bytes
    for wish in ({"activations": True, "optimizer": 1}, {"activations": 0.0, "optimizer": 1}):
        options = Options(memory_limit_bytes=limit, recompute=(), offload=replace(parse_offload(wish), activations=0.0))
        stage = plan_graph(captured.graph, cluster, ONE, options)
        assert stage.price.memory_bytes <= limit and stage.memory
        assert all(choice.on_host for choice in stage.params.values())


def test_the_memory_of_the_host_is_one_as_well(captured: Captured) -> None:
    cluster, offload = cluster_of(1e9, 1.0), BOTH[0]
    stage = planned(captured, cluster, offload)
    both = host_bytes(captured.graph, stage)
    moved, stored = moved_bytes(captured.graph, stage), stored_bytes(captured.graph, stage)
    assert both == moved + stored > max(moved, stored) > 0
    (device,) = set(cluster.devices)
    assert device.host is not None
    small = replace(device, host=replace(device.host, memory_bytes=4 * both - 8))  # of which four devices have a share
    with pytest.raises(InfeasibleError, match=r"moves .* to the memory of its host beside .* of parameters"):
        planned(captured, replace(cluster, devices=(small,) * cluster.n_devices), offload)
