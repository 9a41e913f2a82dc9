"""Operators that give a list of tensors, where the list has one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from autopar.certificate import check
from autopar.comparison.program_vs_eager import verify
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

LISTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "chunk": lambda z: z.chunk(1)[0],
    "split": lambda z: z.split(8)[0],
    "split, sizes": lambda z: z.split([8])[0],
    "unbind": lambda z: z.unsqueeze(1).unbind(1)[0],
    "a loop over the only chunk": lambda z: torch.cat([part * 2 for part in z.chunk(1, dim=1)], 1),
}


class Model(nn.Module):
    def __init__(self, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(4, 4), of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of(self.layer(x)).square().mean()


@pytest.mark.parametrize("name", LISTS)
def test_the_only_one_of_a_list(name: str) -> None:
    torch.manual_seed(0)
    model, x, cluster, mesh = Model(LISTS[name]), torch.randn(8, 4), load_cluster("local-x2"), Mesh.of(data=2)
    captured = autopar.capture(model, (x,))
    assert all(row.worst < 1e-6 for row in verify(captured, model, (x,), {}, mesh, cluster, random_plans=2))
    report = check(plan_graph(captured.graph, cluster, mesh), captured.graph, cluster, types=True)
    assert report.ok, report.failures
