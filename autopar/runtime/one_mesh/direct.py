"""A step on a mesh of one device, where the program reads the stored parameters themselves.

A call of the module is then a part of the caller's autograd graph like any other. A step of several microbatches has
more to promise: hooks of parameters get its whole gradient, and one that breaks half-way leaves gradients as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autopar.runtime.gradients.step_gradients import has_hooks
from autopar.runtime.parameters.state import HeldParam, give


@contextlib.contextmanager
def stand_ins(slots: Sequence[tuple[int, HeldParam]], template: list[Any]) -> Iterator[None]:
    """Give the program stand-ins, which share the parameters' memory and collect the gradients of a step.

    Args:
        slots: where parameters stand in ``template``, the inputs of the program.
    """
    collecting: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    for slot, held_param in slots:
        if held_param.leaf.requires_grad:
            template[slot] = held_param.leaf.detach().requires_grad_()
            collecting.append((held_param.param, template[slot]))
    try:
        yield
    finally:
        for slot, held_param in slots:
            template[slot] = held_param.leaf
    hooked = [(param, leaf.grad) for param, leaf in collecting if leaf.grad is not None and has_hooks(param)]
    for param, leaf in collecting:
        if leaf.grad is not None and not has_hooks(param):
            give(param, leaf.grad)
    if hooked:
        torch.autograd.backward([param for param, _ in hooked], [grad for _, grad in hooked])
