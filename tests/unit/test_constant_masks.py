"""Masks that follow from no data: elements that they select have a number that is known when the model is captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from procs.in_turn import marked
from torch import nn

import autopar
from autopar.comparison.program_vs_eager import verify
from autopar.errors import CaptureError
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster


def contrastive(z: torch.Tensor) -> torch.Tensor:
    """The loss of SimCLR as most write it: positives and negatives are selected by masks."""
    similar = F.normalize(z, dim=1) @ F.normalize(z, dim=1).T
    labels = torch.cat([torch.arange(z.shape[0] // 2) for _ in range(2)])
    same = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    mask = torch.eye(z.shape[0], dtype=torch.bool)
    same, similar = same[~mask].view(z.shape[0], -1), similar[~mask].view(z.shape[0], -1)
    positives = similar[same.bool()].view(z.shape[0], -1)
    negatives = similar[~same.bool()].view(z.shape[0], -1)
    return F.cross_entropy(torch.cat([positives, negatives], 1) / 0.1, torch.zeros(z.shape[0], dtype=torch.int64))


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contrastive": contrastive,
    "rows": lambda z: z[torch.arange(z.shape[0]) % 3 == 0].square().mean(),
    "rows and columns": lambda z: z[torch.arange(z.shape[0]) > 4, 1].square().sum(),
    "columns": lambda z: z[:, torch.arange(z.shape[1]) % 2 == 1, None].square().sum(),
    "masked_select": lambda z: z.masked_select(torch.arange(z.shape[1]) > 3).exp().mean(),
    "nonzero": lambda z: z[torch.ones(5, 5).tril(-2).nonzero()[:, 0]].square().mean(),
    "nonzero as tuple": lambda z: z[torch.ones(5, 4).triu(2).nonzero(as_tuple=True)].square().mean(),
    "where": lambda z: z[torch.where(torch.arange(z.shape[0]) % 2 == 0)[0]].square().mean(),
    "sizes of a list": lambda z: z[: torch.tensor([3, 7, 5]).amax().item()].square().mean(),
    "packed images": lambda z: z[:8].mul(torch.arange(3).repeat_interleave(torch.tensor([2, 5, 1]))[:, None]).sum(),
    "a mask of a list": lambda z: z[torch.tensor([True, False] * 4)].square().mean(),
    "integers alone": lambda z: ((torch.arange(4) * -0.3).exp()[None] @ z.T).square().mean(),
    "nothing": lambda z: z[torch.arange(z.shape[0]) < 0].sum() + z.square().mean(),
}


class Model(nn.Module):
    def __init__(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers, self.loss = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)), loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layers(x))


@pytest.mark.filterwarnings("error:numbers and masks that follow from the model's inputs")
@pytest.mark.parametrize("name", marked(LOSSES, [*LOSSES][1::2]))
def test_a_mask_that_is_known_selects(name: str) -> None:
    torch.manual_seed(0)
    model, x = Model(LOSSES[name]), torch.randn(8, 6)
    captured = autopar.capture(model, (x,))
    for ranks in (2, 3):
        rows = verify(captured, model, (x,), {}, Mesh.of(data=ranks), load_cluster(f"local-x{ranks}"), random_plans=1)
        assert all(row.worst < 1e-9 for row in rows[1:]) and rows[0].worst < 1e-6, rows


@pytest.mark.parametrize("select", [
    lambda z: z[z > 0].sum(), lambda z: z.masked_select(z > 0).sum(), lambda z: z[(z > 0).nonzero()[:, 0]].sum(),
    lambda z: z[torch.rand(z.shape[0]) > 0.5].sum(),
])  # fmt: skip
def test_a_mask_of_data_or_chance_is_refused(select: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"depends on (the value of a tensor|values)"):
        autopar.capture(Model(select), (torch.randn(8, 6),))
