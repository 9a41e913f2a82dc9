"""Attention as a ring over a sequence that its ranks do not divide: causal or not, with masks, with dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.comparison.program_vs_eager import compare, inputs_of, one_device, state_of, train
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster


class Attends(nn.Module):
    def __init__(self, length: int, causal: bool, mask: str, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.causal, self.dropout = nn.Linear(8, 24), causal, dropout
        scores = torch.randn(length, length)
        self.mask: Tensor | None = None
        if mask == "learned":
            self.mask = nn.Parameter(scores)
        elif mask:
            self.register_buffer("bias", scores > 0 if mask == "rows" else scores[:1])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.inner(x).view(b, n, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = self.mask
        if mask is None and hasattr(self, "bias"):
            mask = self.bias | torch.eye(n).bool() if self.bias.dtype == torch.bool else self.bias
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, self.causal)
        return y.transpose(1, 2).reshape(b, n, 8).square().mean()


CASES = {
    "one place": (5, 2, False, "", 0.0),
    "causal": (7, 4, True, "", 0.0),
    "causal, an odd number of pairs": (10, 4, True, "", 0.0),
    "causal, three ranks of odd pieces": (9, 3, True, "", 0.0),
    "causal, a rank with nothing": (5, 4, True, "", 0.0),
    "a rank with nothing": (5, 4, False, "", 0.0),
    "a mask of rows": (9, 2, False, "rows", 0.0),
    "a mask of rows, a rank with nothing": (5, 4, False, "rows", 0.0),
    "a mask that is the same for all": (7, 4, False, "all", 0.0),
    "a mask that learns": (7, 4, False, "learned", 0.0),
    "causal, with dropout": (7, 2, True, "", 0.5),
    "a mask and dropout": (9, 4, False, "rows", 0.5),
}
SLOW = ("one place", "causal, three ranks of odd pieces", "a mask of rows", "a mask and dropout")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
def test_the_numbers_of_one_device(name: str) -> None:
    length, ranks, *how = CASES[name]
    model, x = Attends(length, *how), torch.randn(2, length, 8, dtype=torch.float64)
    captured = capture(model, (x,))
    graph = captured.graph
    ring = {"*scaled_dot_product_attention*": {"ctx": "ring"}}
    mesh, cluster = Mesh.of(ctx=ranks), load_cluster(f"local-x{ranks}")
    plan = plan_graph(graph, cluster, mesh, Options(constraints=ring))
    (attention,) = (node.name for node in graph.nodes if "scaled_dot_product" in node.target)
    assert plan.ops[attention] == ("ring",)
    given = *state_of(captured, model), inputs_of(captured, (x,), {})
    found, alone = (train(captured, each, *given) for each in (plan, one_device(graph)))
    assert compare(name, found, alone).worst < 1e-9
