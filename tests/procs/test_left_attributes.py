"""What a forward leaves in attributes, in a pipeline: it trains as on one device, and to read them is an error."""

from __future__ import annotations

from typing import Any

import torch
from procs.habits_of_loops import KeepsItsLoss

import autopar
from autopar.runtime.ranks.launch import run_local


class WithItsLoss(KeepsItsLoss):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        super().forward(x, y)
        return self.last_loss + 0.1 * self.parts[0].balance


def in_stages() -> tuple[list[float], list[str]]:
    """Losses less those of one device, of a step and of an evaluation; what reading an attribute raises."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x, y = WithItsLoss(), torch.randn(8, 8), torch.randint(0, 4, (8,))
    expected = model(x, y).detach()
    pm: Any = autopar.parallelize(model, 2, (x, y), stages=2, microbatches=1)
    losses, raised = [pm.train_step(x, y)], []
    for owner, name in ((pm, "last_loss"), (pm, "logged"), (pm.parts[0], "balance")):
        try:
            getattr(owner, name)
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    losses.append(pm.eval()(x, y).detach())
    return [float(loss - expected) for loss in losses], raised


def test_attributes_of_a_pipeline() -> None:
    for differences, raised in run_local(in_stages, 2, timeout=200):
        assert max(map(abs, differences)) < 1e-9
        assert raised[0].startswith("RunError: forward sets the attribute 'last_loss' of the model, and the program")
        assert raised[1].startswith("AttributeError")
        assert raised[2].startswith("RunError: forward sets the attribute 'parts.0.balance'")
