"""Buckets that are planned together: one layout for several cuts, or a change of layout, by what a trace takes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from procs import in_buckets
from torch import nn
from torch.nn import functional as F

from autopar.api import capture
from autopar.errors import PlanError
from autopar.parallelizing import bucket_plans
from autopar.parallelizing.bucket_plans import BucketPlans, plan_buckets, relayout_seconds, steps_between
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import Options
from autopar.plans.clusters import get_cluster
from autopar.plans.offload_options import parse_offload
from autopar.words.meshes import Mesh
from autopar.words.placements import State

SHORT, LONG = (64, 512), (2, 16384)
MESH = Mesh.of(data=16, tensor=4)


class Layer(nn.Module):
    """A decoder with one layer, without values."""

    def __init__(self, dim: int = 2048, heads: int = 16, words: int = 32000) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.norm, self.norm_2 = nn.Embedding(words, dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down, self.head = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.Linear(dim, words)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(self.norm(h)).chunk(3, -1))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = h + self.down(F.gelu(self.up(self.norm_2(h))))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@pytest.fixture(scope="module")
def graphs() -> dict[tuple[int, int], Any]:
    with torch.device("meta"):
        model = Layer().to(torch.bfloat16)
        batches = {size: torch.zeros(*size, dtype=torch.long) for size in (SHORT, LONG)}
    return {size: capture(model, (x, x)).graph for size, x in batches.items()}


@pytest.fixture(scope="module")
def planned(graphs: dict[tuple[int, int], Any]) -> BucketPlans:
    return plan_buckets(graphs, [SHORT, LONG] * 4, get_cluster("dgx-h100-x64"), MESH)


def test_short_and_long_sequences_beat_any_single_plan(planned: BucketPlans) -> None:
    assert planned.seconds < 0.9 * planned.single_seconds < float("inf")
    assert planned.seconds <= planned.fixed_seconds
    steps = 4 * sum(plan.price.seconds for plan in planned.plans.values())
    assert planned.seconds == pytest.approx(steps + planned.switching_seconds)
    stored = [{name: choice.stored for name, choice in plan.params.items()} for plan in planned.plans.values()]
    assert (stored[0] == stored[1]) == (planned.switches == 0)


def test_a_change_of_layout_is_taken_where_it_pays(graphs: dict[tuple[int, int], Any]) -> None:
    """Not where it takes long, and at every step where it gains something."""
    cluster, plan_options = get_cluster("dgx-h100-x64"), Options()
    with mock.patch.object(bucket_plans, "relayout_seconds", return_value=1e3):
        never = plan_buckets(graphs, [SHORT, LONG] * 4, cluster, MESH, plan_options)
    assert never.switches == 0 and never.seconds == never.fixed_seconds
    with mock.patch.object(bucket_plans, "relayout_seconds", return_value=-1.0):
        gains = plan_buckets(graphs, [SHORT, LONG] * 4, cluster, MESH, plan_options)
    assert gains.switches == 7 and gains.switching_seconds == -7.0


def test_a_change_of_layout_pays_in_runs_of_steps() -> None:
    """By the prices alone, on a described cluster: in runs of ten steps, and not where every step is another bucket."""
    with torch.device("meta"):
        model = in_buckets.Decoder()
        batches = {size: torch.zeros(*size, dtype=torch.long) for size in (in_buckets.SHORT, in_buckets.LONG)}
    graphs = {size: capture(model, (x, x)).graph for size, x in batches.items()}
    cluster, pair = get_cluster(in_buckets.SLOW_PAIR), Mesh.of(data=2)
    in_runs = plan_buckets(graphs, in_buckets.RUNS, cluster, pair)
    assert in_runs.switches == 5 and in_runs.switching_seconds > 0
    assert in_runs.seconds < in_runs.fixed_seconds < 0.8 * in_runs.single_seconds
    in_turn = plan_buckets(graphs, list(batches) * 30, cluster, pair)
    assert in_turn.switches == 0 and in_turn.seconds == in_turn.fixed_seconds > in_runs.seconds


def test_moving_a_layout_counts_parameters_and_state(graphs: dict[tuple[int, int], Any]) -> None:
    graph, prices = graphs[SHORT], pricer(get_cluster("dgx-h100-x64"), MESH)
    names = [node.target for _, node in graph.of_kind("param")]
    cut, other = dict.fromkeys(names, State.parse("S0,I", MESH, "")), dict.fromkeys(names, State.parse("I,I", MESH, ""))
    assert relayout_seconds(graph, cut, cut, prices, "adamw") == 0
    adamw, sgd = (relayout_seconds(graph, cut, other, prices, name) for name in ("adamw", "sgd"))
    assert adamw == pytest.approx(3 * sgd) and sgd > 0


@pytest.mark.parametrize(("src", "dst"), [("S0,S1", "S1,S0"), ("S0,S0", "I,S0"), ("I,S1", "S0,I"), ("R,R", "S0,R")])
def test_steps_lead_from_one_layout_to_the_other(src: str, dst: str) -> None:
    a, b = State.parse(src, MESH, ""), State.parse(dst, MESH, "")
    steps = steps_between(a, b)
    assert steps and all(x == y for (_, _, x), (_, y, _) in pairwise(steps))
    assert [p if p.is_shard else "whole" for p in steps[-1][2]] == [p if p.is_shard else "whole" for p in b]


def test_buckets_move_activations_alone(graphs: dict[tuple[int, int], Any]) -> None:
    """``offload="auto"`` takes what buckets can agree on; by name more is refused."""
    cluster = get_cluster("dgx-h100-x64")
    with pytest.raises(PlanError, match="each would keep other parameters on the host"):
        plan_buckets(graphs, [SHORT], cluster, MESH, Options(offload=parse_offload("optimizer")))
    plans = plan_buckets(graphs, [SHORT], cluster, MESH, Options(offload=parse_offload("auto")))
    assert not any(choice.on_host for plan in plans.plans.values() for choice in plan.params.values())
