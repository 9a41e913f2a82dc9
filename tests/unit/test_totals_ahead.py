"""What microbatches read of the whole batch, so that their losses add up to its loss."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.errors import RunError

WEIGHTS = torch.tensor([0.1, 1.0, 5.0, 20.0, 0.5])


def _balanced(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Classes weigh by how rare they are in the batch: a total of totals."""
    n = F.one_hot(y.clamp(min=0), 5).sum(0)
    each = (1 / (1 + n)).to(out.dtype)[y.clamp(min=0)] * (y >= 0)
    return (F.cross_entropy(out, y, reduction="none") * each).sum() / each.sum().clamp(min=1e-6)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "labels": lambda out, y: F.cross_entropy(out, y),
    "labels of a scaled loss": lambda out, y: 0.5 * F.cross_entropy(out.float(), y, label_smoothing=0.1) + 1.0,
    "another number": lambda out, y: F.cross_entropy(out, y.clamp(min=0), ignore_index=0),
    "log likelihood": lambda out, y: F.nll_loss(F.log_softmax(out, -1), y),
    "a sum by hand": lambda out, y: F.cross_entropy(out, y, reduction="sum") / (y != -100).sum(),
    "a mask": lambda out, y: (out.square().sum(-1) * (y > 0)).sum() / (y > 0).float().sum(),
    "a mask that may be empty": lambda out, y: (out[:, 0] * (y > 9)).sum() / (y > 9).sum().clamp(min=1),
    "a bound that counts": lambda out, y: (out[:, 0] * (y > 1)).sum() / (y > 1).sum().clamp(min=3),
    "at least one": lambda out, y: (out * (y > 9)[:, None]).sum() / torch.maximum((y > 9).sum(), torch.ones(())),
    "labels, if any": lambda out, y: torch.nan_to_num(F.cross_entropy(out, y)),
    "rows": lambda out, y: out.square().mean() + 0.1 * out.abs().mean(),
    "rows and labels": lambda out, y: F.cross_entropy(out, y) + out.square().mean(),
    "three terms": lambda out, y: F.cross_entropy(out, y) + 0.1 * out.square().mean() - out.abs().sum() / (y > 1).sum(),
    "classes of unequal weight": lambda out, y: F.cross_entropy(out, y, WEIGHTS.to(out.dtype), label_smoothing=0.1),
    "weighted by hand": lambda out, y: (
        F.cross_entropy(out, y, reduction="none") * WEIGHTS.to(out)[y.clamp(min=0)]
    ).sum() / WEIGHTS.to(out)[y.clamp(min=0)].sum(),
    "classes balanced in the batch": _balanced,
    "a ratio": lambda out, y: out.square().mean() / (y > 0).float().sum(),
    "positives of the batch": lambda out, y: F.binary_cross_entropy_with_logits(
        out[:, 0], (y > 1).to(out), pos_weight=(1 + (y <= 1).sum()) / (1 + (y > 1).sum())
    ),
    "a sum": lambda out, y: out.square().sum(),
    "a sum over how many rows": lambda out, y: out.square().sum() / out.shape[0] + out.abs().sum() / out.numel(),
    "rows over how many there are": lambda out, y: (out.square().sum(1) / len(out)).sum() + out.mean(),
    "a number of rows as a tensor": lambda out, y: out.square().sum() / torch.tensor(len(out)) + out.mean(),
    "a mean times how many rows": lambda out, y: out.square().mean() * len(out) + out.mean(),
    "twelve, which is no number of rows": lambda out, y: out.square().sum() / 12 + out.mean() * 4,
    "a sum over a number": lambda out, y: out.square().sum() / 7 + 0.1 * out.abs().mean(),
    "targets around their mean": lambda out, y: (out[:, 0] - (y.to(out) - y.to(out).mean())).square().mean(),
}  # fmt: skip
LABELS = torch.tensor([1, -100, 2, -100, 0, 3])


class Counted(nn.Module):
    """A linear model with a penalty, which is no mean over anything of the batch."""

    def __init__(self, name: str, penalty: bool = True) -> None:
        super().__init__()
        self.up, self.loss, self.penalty = nn.Linear(4, 5), LOSSES[name], penalty

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


@pytest.mark.parametrize(
    "name", ["labels", "rows and labels", "a sum over how many rows", "a number of rows as a tensor"]
)  # fmt: skip
def test_a_step_of_several_of_a_program_for_the_batch_at_once(name: str) -> None:
    """Nobody has said that there are microbatches: the step is twice as long as the example."""
    torch.manual_seed(0)
    model = Counted(name).double()
    alone = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, (torch.randn(6, 4).double(), LABELS.clamp(min=0)))
    for _ in range(2):
        x, y = torch.randn(12, 4).double(), torch.cat([LABELS, LABELS.clamp(min=0)])
        pm.zero_grad()
        alone.zero_grad()
        loss, wanted = pm.train_step(x, y, microbatches=2), alone(x, y)
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=0)
        for parameter, name_of in ((p, n) for n, p in pm.named_parameters()):
            torch.testing.assert_close(parameter.grad, alone.get_parameter(name_of).grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(pm(x[:6], y[:6]).detach(), alone(x[:6], y[:6]).detach(), rtol=1e-12, atol=0)


def test_shapes_that_are_fixed_refuse_such_a_step() -> None:
    pm = autopar.parallelize(Counted("labels").double(), 1, (torch.randn(6, 4).double(), LABELS), shapes="fixed")
    with pytest.raises(RunError, match=r"divides by a sum over the batch.*parallelize with microbatches=n"):
        pm.train_step(torch.randn(12, 4).double(), torch.cat([LABELS, LABELS]), microbatches=2)


def test_buffers_that_change_count_as_they_are() -> None:
    """Class weights are read at each step."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 5)
            self.register_buffer("w", WEIGHTS.double())

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.up(x), y, self.w)

    torch.manual_seed(0)
    model = Weighted().double()
    alone = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, (torch.randn(6, 4).double(), torch.zeros(6).long()), microbatches=3)
    for k in range(2):
        x, y = torch.randn(6, 4).double(), LABELS
        torch.testing.assert_close(pm.train_step(x, y), alone(x, y).detach(), rtol=1e-12, atol=0)
        with torch.no_grad():
            pm.w.add_(k + 1)
            alone.w.add_(k + 1)
