"""Of how many things a loss is the mean, as its graph says."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.comparison.parts_of_loss import difference_by_parts
from autopar.runtime.batches.loss_counts import count_of
from autopar.runtime.pipelines.ready_runs import shares_of

LOSSES = {
    "labels": (lambda out, y: F.cross_entropy(out, y), 4.0),
    "labels of a scaled loss": (lambda out, y: 0.5 * F.cross_entropy(out.float(), y, label_smoothing=0.1) + 1.0, 4.0),
    "another number": (lambda out, y: F.cross_entropy(out, y.clamp(min=0), ignore_index=0), 3.0),
    "shifted labels": (lambda out, y: F.cross_entropy(out, F.pad(y, (0, 1), value=-100)[1:].contiguous()), 3.0),
    "log likelihood": (lambda out, y: F.nll_loss(F.log_softmax(out, -1), y), 4.0),
    "a sum by hand": (lambda out, y: F.cross_entropy(out, y, reduction="sum") / (y != -100).sum(), 4.0),
    "a mask": (lambda out, y: (out.square().sum(-1) * (y > 0)).sum() / (y > 0).float().sum(), 3.0),
    "a mask that may be empty": (lambda out, y: (out[:, 0] * (y > 9)).sum() / (y > 9).sum().clamp(min=1), 0.0),
    "at least one": (lambda out, y: (out * (y > 9)[:, None]).sum() / torch.maximum((y > 9).sum(), torch.ones(())), 0.0),
    "labels, if any": (lambda out, y: torch.nan_to_num(F.cross_entropy(out, y)), 4.0),
    "rows": (lambda out, y: out.square().mean() + 0.1 * out.abs().mean(), None),
    "rows and labels": (lambda out, y: F.cross_entropy(out, y) + out.square().mean(), None),
    "classes of unequal weight": (lambda out, y: F.cross_entropy(out, y, torch.ones(5, dtype=out.dtype)), None),
    "a ratio": (lambda out, y: out.square().mean() / (y > 0).float().sum(), None),
}  # fmt: skip
"""Losses, and of how many things they are the mean; None where rows count."""
LABELS = torch.tensor([1, -100, 2, -100, 0, 3])


class Counted(nn.Module):
    """A linear model with a penalty, which is no mean over anything of the batch."""

    def __init__(self, name: str, penalty: bool = True) -> None:
        super().__init__()
        self.up, self.loss, self.penalty = nn.Linear(4, 5), LOSSES[name][0], penalty

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.loss(self.up(x), y)
        return loss + 0.01 * self.up.weight.square().sum() if self.penalty else loss


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_on_one_mesh_train_by_the_loss_of_the_batch(name: str) -> None:
    """Labels are ignored in later batches alone, unevenly, and in one of them in a whole microbatch."""
    torch.manual_seed(0)
    close = 1e-6 if "scaled" in name else 1e-12  # that one computes in single precision
    model = Counted(name).double()
    alone, all_count = copy.deepcopy(model), torch.tensor([1, 2, 1, 3, 2, 4, 1, 1, 2, 3, 4, 3])
    pm = autopar.parallelize(model, 1, (torch.randn(12, 4).double(), all_count), microbatches=3)
    none, some = torch.full((4,), 0 if "another" in name or "mask" in name else -100), LABELS[:4]
    for parts in ([none, some, all_count[:4]], [some, all_count[:4], none], [all_count[:4], none, some]):
        x, y = torch.randn(12, 4).double(), torch.cat(parts)
        pm.zero_grad()
        alone.zero_grad()
        loss, wanted = pm.train_step(x, y), alone(x, y)
        wanted.backward()
        assert loss.item() == pytest.approx(wanted.item(), rel=close)
        for parameter, name_of in ((p, n) for n, p in pm.named_parameters()):
            torch.testing.assert_close(parameter.grad, alone.get_parameter(name_of).grad, rtol=close, atol=close)
