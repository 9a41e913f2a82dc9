"""``copy.deepcopy`` of a parallel module: another one, with parameters and buffers of its own.

Averaged weights (``torch.optim.swa_utils.AveragedModel``, ``ModelEma``) begin with a copy of the model. It is built
anew, by the same plan and on the same ranks, all of which must copy; then it takes the values. Grouped parameters of an
optimizer that is copied with the module follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BY_HAND = (
    "averages of the weights can be kept by hand, {name: p.detach().clone() for name, p in pm.named_parameters()} and "
    "average[name].lerp_(p.detach(), 0.1), and put in for a while with p.data = average[name]"
)


Build = Callable[[Callable[[str], torch.Tensor]], Any]


def copied(pm: Any, memo: dict[int, Any], build: Build) -> Any:
    """A copy of ``pm``.

    Args:
        build: makes a module like ``pm`` with given whole values by name.
    """
    shapes: dict[str, torch.Tensor] = dict(pm.named_parameters(remove_duplicate=False))
    shapes.update(pm.named_buffers(remove_duplicate=False))

    def blank(name: str) -> torch.Tensor:  # one element, seen as many
        return torch.zeros((), dtype=shapes[name].dtype).expand(shapes[name].shape)

    new = build(blank)
    memo[id(pm)] = new
    with torch.no_grad():
        for name, value in (*pm.named_parameters(), *pm.named_buffers()):
            owner, key = new.owner_of(name)
            mine = (owner._parameters if key in owner._parameters else owner._buffers)[key]
            mine.copy_(value)
            memo[id(value)] = mine
            if isinstance(value, torch.nn.Parameter):
                mine.requires_grad_(value.requires_grad)
    return new


__all__ = ["BY_HAND", "copied"]
