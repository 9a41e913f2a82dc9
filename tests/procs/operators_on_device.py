"""Every operator on an emulated accelerator, in a new process: torch's autograd counts devices when it starts."""

from __future__ import annotations

import random
import traceback
from collections.abc import Sequence

import torch
import torch.distributed as dist
from accelerator import NAME, Accelerator, OnDevice, register

import autopar.rules  # noqa: F401
from autopar.rules.axis_options import Option
from autopar.rules.local_calls import is_told_device, local_call
from autopar.rules.lowering_helpers.lowering_trial import trial
from autopar.rules.proving.many_ranks import piece
from autopar.rules.proving.proof import Case, strategies_of
from autopar.rules.registry import SAMPLES
from autopar.rules.saved_tensors import filled
from autopar.torch_private import pytree
from autopar.words.meshes import Mesh

ONE = Mesh.of(data=2)
WHOLE = Mesh.of(data=1)
READS = {"autopar.branch.default": "which side of a branch on a random number is run, the host has to know"}
"""Operators that read, and why."""
FUSED = {"aten.lstm.input", "aten.gru.input"}
"""Off the processor torch takes kernels for whole cells, which only real GPUs have."""


def on_device(accelerator: Accelerator, case: Case, picked: Sequence[Option], mesh: Mesh) -> str:
    """Where a call of the first rank leaves the device, forward or backward."""
    local = local_call(case.call, case.rule, picked, mesh, site=3)
    sizes = mesh.size_of
    tensors: list[torch.Tensor] = []
    for i, (value, grad) in enumerate(zip(case.tensors, case.grads, strict=True)):
        state = tuple(option.ins[i] for option in picked)
        tensors.append(OnDevice(piece(value, state, mesh, 0).detach().clone()).requires_grad_(grad))
    with trial(sizes):
        args, kwargs = filled(local, tensors, sizes, NAME)
        kwargs = {name: torch.full((), 11, device=NAME) if name == "seed" else x for name, x in kwargs.items()}
        if is_told_device(case.call):
            kwargs["device"] = torch.device(NAME)
        with accelerator.watching() as seen:
            outs = [x for x in pytree.tree_leaves(local.fn(*args, **kwargs)) if isinstance(x, torch.Tensor)]
            if any(x.requires_grad for x in outs):
                torch.autograd.backward([x.sum() for x in outs if x.requires_grad])
    elsewhere = [x for x in outs if not isinstance(x, OnDevice)]
    return "; ".join(seen) or ("a result is elsewhere" if elsewhere else "")


def check(target: str, number: int, most: int = 1000) -> None:
    register()
    case = Case(target, SAMPLES[target][number])
    with Accelerator() as accelerator:
        for mesh in (WHOLE, ONE):
            every = strategies_of(case, mesh)
            for picked in random.Random(number).sample(every, min(most, len(every))):
                waits = on_device(accelerator, case, picked, mesh)
                assert not waits or target in READS, (picked, waits)


def check_all(targets: Sequence[str], every_sample: bool) -> dict[str, str]:
    """What is wrong with which of the operators.

    Args:
        every_sample: all options of all samples; else two of the first.
    """
    dist.destroy_process_group()  # simulated ranks have one of their own
    wrong = {}
    for target in sorted({*targets} - FUSED):
        try:
            for number in range(len(SAMPLES[target]) if every_sample else 1):
                check(target, number, most=1000 if every_sample else 2)
        except Exception:
            wrong[target] = traceback.format_exc()
    return wrong
