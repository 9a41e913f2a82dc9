"""The optimizers of ``train_step(..., optimizer=)``: one, or several in a list, such as Muon and AdamW."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.errors import RunError
from autopar.runtime.optimizers.closures import needs_closure

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""What ``train_step`` is given; nothing where the caller steps by himself."""


def listed(given: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers of a step, in the order in which they step.

    Raises:
        RunError: something among them is no optimizer, or one whose step computes the loss itself.
    """
    if given is None:
        return ()
    several = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for each in several:
        if not all(hasattr(each, name) for name in ("step", "zero_grad", "param_groups")):
            raise RunError(
                f"train_step: optimizer= has an object of type {type(each).__name__}, which has no step(), "
                "zero_grad() and param_groups: give a torch.optim.Optimizer, or several in a list"
            )
        if needs_closure(each):
            raise RunError(
                f"train_step: the step() of {type(each).__name__} in optimizer= needs a closure, since it computes the "
                "loss as often as it wants: call it yourself, optimizer.step(closure), where closure() calls "
                "optimizer.zero_grad() and returns model.train_step(*batch), without optimizer=, on a model without "
                "stages"
            )
    if len({id(each) for each in several}) != len(several):
        raise RunError("train_step: optimizer= has one optimizer twice, which would step twice; give each once")
    return several
