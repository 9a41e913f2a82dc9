"""A change of how parameters are stored: the layout of another bucket (:mod:`autopar.parallelizing.bucket_plans`).

The ``Parameter`` objects stay; their values and gradients move. An optimizer's state follows at the optimizer's next
step, since only then it is known which parameters have any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.plans.plan import ParamChoice
from autopar.runtime.parameters.state import torch_placements
from autopar.words.trees import PyTree

_moved: Any = WeakIdKeyDictionary()
"""Parameters whose layout has changed since they were made."""
_hooks: list[Any] = []


def relaid(params: Mapping[str, torch.nn.Parameter], choices: Mapping[str, ParamChoice]) -> int:
    """Store parameters as a plan says; every rank of their mesh calls it.

    Args:
        params: the parameters of a module, by name.
        choices: the choices of the plan.

    Returns:
        how many had to move.
    """
    moved = 0
    for name, choice in choices.items():
        param = params.get(name)
        if not isinstance(param, DTensor):
            continue
        wanted = tuple(torch_placements(choice.stored))
        if tuple(param.placements) == wanted:
            continue
        for tensor in (param, param.grad):
            if isinstance(tensor, DTensor):
                _move(tensor, wanted)
        _moved[param] = True
        moved += 1
    if moved and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_state_follows))
    return moved


@torch.no_grad()
def _move(tensor: DTensor, placements: tuple[Any, ...]) -> None:
    """Redistribute the values of a DTensor, which stays the same object."""
    there: Any = DTensor.redistribute(tensor.detach(), tensor.device_mesh, placements)  # type: ignore[arg-type]
    local = there._local_tensor
    tensor._local_tensor = local.clone() if local._base is not None else local.contiguous()
    tensor._spec = there._spec


def _state_follows(optimizer: torch.optim.Optimizer, args: PyTree, kwargs: PyTree) -> None:
    """Redistribute an optimizer's state of a parameter like the parameter, before a step."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in _moved:
                continue
            for value in optimizer.state.get(param, {}).values():
                same_kind = isinstance(value, DTensor) and value.shape == param.shape
                if same_kind and value.placements != param.placements:
                    _move(value, tuple(param.placements))
