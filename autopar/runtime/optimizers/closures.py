"""Optimizers whose step takes a closure, and so computes the loss as often as it wants, such as LBFGS.

Such a step looks at all parameters at once: LBFGS takes inner products of gradients over all of them. In a pipeline a
rank has those of its stages alone, would find other products and step elsewhere: refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import RunError
from autopar.words.trees import PyTree

_in_stages: Any = WeakIdKeyDictionary()
"""Parameters beside which other ranks have others."""
_hooks: list[Any] = []


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Check whether the step of an optimizer cannot be called without a function that computes the loss."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    step = getattr(type(optimizer), "step", None)  # the class's: schedulers replace the object's
    _, *others = inspect.signature(step).parameters.values() if step is not None else (None,)
    return any(each.default is each.empty and each.kind not in variadic for each in others)


def refuse_joint_steps(params: Iterable[torch.nn.Parameter]) -> None:
    """Refuse, from now on, steps that take a closure on ``params``, those that a rank of a pipeline has."""
    for param in params:
        _in_stages[param] = True
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse))


@torch.compiler.disable
def _refuse(optimizer: torch.optim.Optimizer, args: PyTree, kwargs: PyTree) -> None:
    """Refuse a step on a part of the model's parameters as if they were all.

    Raises:
        RunError: it takes a closure, and other ranks have other parameters.
    """
    if not any(param in _in_stages for group in optimizer.param_groups for param in group["params"]):
        return
    if needs_closure(optimizer):
        raise RunError(
            f"{type(optimizer).__name__}.step(closure) looks at all parameters at once, and in a pipeline each rank "
            "has those of its stages: it would step elsewhere than on one device. Train without stages (mesh= or the "
            "number of ranks, without stages= and schedule=), or with an optimizer that steps on each parameter by "
            "itself, such as torch.optim.AdamW"
        )


__all__ = ["needs_closure", "refuse_joint_steps"]
