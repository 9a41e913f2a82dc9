"""Buffers that several operators write to, or that are read around their writer, are planned so that all agree."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture import capture
from autopar.comparison.program_vs_eager import verify
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.planner.intra_op.written_buffers import held_whole
from autopar.plans.plan import Plan
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

MESH = Mesh.of(tensor=2)


class Shared(nn.Module):
    """One norm for two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.norm(self.first(x)).relu())).square().mean()


def test_a_norm_that_layers_share_is_planned() -> None:
    """A cut of the channels by one of the layers alone was a PlanError after the search."""
    torch.manual_seed(0)
    model, x = Shared().double(), torch.randn(4, 3, 2, 2, dtype=torch.float64)
    captured, cluster = capture(model, (x,)), load_cluster("local-x2")
    norms = [i for i, node in enumerate(captured.graph.nodes) if node.target == "aten.batch_norm.default"]
    assert sorted(held_whole(captured.graph)) == norms
    for constraints in ({"first": {"tensor": "o"}}, {"norm:batch_norm*": {"tensor": "c"}}):
        plan = Plan.alone(plan_graph(captured.graph, cluster, MESH, Options(constraints=constraints)))
        channels = plan.ops[captured.graph.nodes[norms[0]].name] == ("c",)
        assert channels == ("first" not in constraints)  # pins that agree are heard
        for difference in verify(captured, model, (x,), {}, MESH, cluster, plan=plan):
            assert difference.worst < 1e-9, difference


def test_a_norm_of_its_own_layer_may_be_cut() -> None:
    graph = capture(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)), (torch.zeros(4, 3, 2, 2),), loss_fn=torch.sum)
    assert not held_whole(graph.graph)
