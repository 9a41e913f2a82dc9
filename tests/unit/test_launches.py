"""Launches of operators, which no cut makes fewer, in the bounds of the search over stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.planner.inter_op.estimating.block_costs import ALONE
from autopar.planner.inter_op.exact.exact_stages import PipelineOptions
from autopar.planner.inter_op.per_microbatch_count import OneNumber
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster


def model(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, 8))


@pytest.mark.parametrize("mesh", ["data=8", "data=2,tensor=4"])
@pytest.mark.parametrize("hidden", [16, 4096])
def test_no_plan_takes_less_than_launches_and_its_share_of_the_rest(hidden: int, mesh: str) -> None:
    with torch.device("meta"):
        example = (torch.zeros(64, hidden),)
        graph = capture(model(hidden), example, loss_fn=lambda y: y.square().mean()).graph
    cluster = load_cluster("dgx-h100")
    sizes = Mesh.parse(mesh)
    launches = pricer(cluster, ALONE, (0,)).launches(graph)
    alone = plan_graph(graph, cluster, ALONE, Options(), devices=(0,)).price.compute_seconds
    cut = plan_graph(graph, cluster, sizes, Options(), devices=range(8)).price.compute_seconds
    assert 0 < launches <= alone
    assert cut >= launches + (alone - launches) / 8 - 1e-12


@pytest.mark.parametrize(("hidden", "small"), [(16, True), (16384, False)])
def test_a_small_model_is_looked_at_from_the_fewest_microbatches(hidden: int, small: bool) -> None:
    with torch.device("meta"):
        graph = capture(model(hidden), (torch.zeros(65536, hidden),), loss_fn=lambda y: y.square().mean()).graph
    search = OneNumber(graph, load_cluster("dgx-h100-x8"), 64, PipelineOptions(1), "dgx-h100-x8")
    assert search.launches_most() is small
