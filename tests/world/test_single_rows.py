"""A cut batch may leave a single row to a rank, whose stride may be any: that of a transposed view is another one."""

from __future__ import annotations

import pytest
import torch
from family_trial import CLUSTER
from torch import Tensor, nn

from autopar.capture import capture
from autopar.comparison.program_vs_eager import compare, doubled, inputs_of, one_device, promoted, state_of, train
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster


class Places(nn.Module):
    """A list of places that has those of a normed picture and others, as encoders of detection models make them."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(4, 6, 1), norm, nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        picture = self.first(x)
        places = [y.flatten(2).transpose(1, 2) for y in (self.norm(picture), picture[..., :2])]
        return self.last(torch.cat(places, 1)).square().mean()


NORMS = {
    "batch": nn.BatchNorm2d(6), "batch, given statistics": nn.BatchNorm2d(6).eval(),
    "instance": nn.InstanceNorm2d(6, affine=True),
    "instance, given statistics": nn.InstanceNorm2d(6, affine=True, track_running_stats=True).eval(),
}  # fmt: skip


@pytest.mark.parametrize("kind", NORMS)
def test_norm_of_single_rows(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Places(NORMS[kind]), torch.randn(4, 4, 4, 4)
    captured = capture(model, (x,))
    double = promoted(captured)
    plan = plan_graph(double.graph, load_cluster(CLUSTER), Mesh.of(data=4))
    norm = next(node for node in double.graph.nodes if "_norm." in node.target)
    assert set(plan.ops[norm.name]) == {"b"}
    weights, buffers = map(doubled, state_of(captured, model))
    inputs = doubled(inputs_of(captured, (x,), {}))
    reference = train(double, one_device(double.graph), weights, buffers, inputs)
    assert compare("single rows", train(double, plan, weights, buffers, inputs), reference).worst < 1e-12
