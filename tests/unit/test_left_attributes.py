"""What a forward leaves in attributes is there after a call, on one device; what is not there is an error to read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from procs.habits_of_loops import KeepsItsLoss
from torch import nn

import autopar
from autopar.errors import RunError


class Counted(nn.Module):
    """Counts its calls, which nobody in it reads, and keeps the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.rows = nn.Linear(8, 1), 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.rows = len(x)
        return self.layer(x).mean()


def test_outputs_of_attributes_stand_behind_the_models_own() -> None:
    model, x, y = KeepsItsLoss(), torch.randn(6, 8), torch.arange(6) % 4
    captured = autopar.capture(model, (x, y))
    assert captured.out_spec.num_leaves == 1 and len(captured.graph.outputs) == 10 and captured.graph.loss is None
    labels = [left.label for left in captured.left if left.spec is not None]
    assert labels == ["'parts.0.balance'", "'parts.0.logged'", "'parts.1.balance'", "'parts.1.logged'", "'last_loss'"]
    assert model.last_loss is None and model.parts[0].balance == 0.0


def test_a_step_leaves_those_of_its_last_microbatch() -> None:
    class WithLoss(KeepsItsLoss):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            super().forward(x, y)
            return self.last_loss + 0.1 * self.parts[0].balance

    model, x, y = WithLoss(), torch.randn(8, 8), torch.arange(8) % 4
    pm: Any = autopar.parallelize(model, 1, (x, y), microbatches=2)
    loss = pm.train_step(x, y)
    left = [pm.last_loss, pm.parts[0].balance]
    pm.zero_grad()
    theirs = sum(model(x[i : i + 4], y[i : i + 4]) for i in (0, 4)) / 2
    torch.testing.assert_close(loss, theirs.detach())
    torch.testing.assert_close(left, [model.last_loss.detach(), model.parts[0].balance.detach()])
    assert not any(value.requires_grad for value in left)


def test_what_changes_with_every_call_is_not_read() -> None:
    pm: Any = autopar.parallelize(Counted(), 1, torch.randn(4, 8))
    pm(torch.randn(3, 8)).backward()
    assert pm.rows == 3
    with pytest.raises(RunError, match=r"forward sets the attribute 'calls' of the model.*\n  return it from forward"):
        print(pm.calls)
