"""Every operator and every lowering stays on the device that it is given: nothing is made on the CPU, or read."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from accelerator import NAME, Accelerator, OnDevice, register

import autopar.rules  # noqa: F401
from autopar.rules.axis_options import Option
from autopar.rules.distributed import trial
from autopar.rules.local import is_told_device, local_call
from autopar.rules.many_ranks import piece
from autopar.rules.operator_call import Call
from autopar.rules.proof import Case, strategies_of
from autopar.rules.registry import SAMPLES
from autopar.rules.saved import filled
from autopar.torch_private import pytree

ONE = (("data", 2),)
WHOLE = (("data", 1),)
READS = {"autopar.branch.default": "which side of a branch on a random number is run, the host has to know"}
"""Operators that read, and why."""


def on_device(accelerator: Accelerator, case: Case, picked: Sequence[Option], mesh: tuple[tuple[str, int], ...]) -> str:
    """Where a call of the first rank leaves the device, forward or backward."""
    local = local_call(case.call, case.rule, picked, mesh, site=3)
    sizes = dict(mesh)
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


@pytest.mark.parametrize("target", sorted(SAMPLES))
def test_operators_stay_on_the_device(target: str) -> None:
    check(target, 0, most=2)


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(SAMPLES))
def test_operators_stay_on_the_device_in_all_samples(target: str) -> None:
    for number in range(len(SAMPLES[target])):
        check(target, number)


@pytest.mark.parametrize(
    "target, args",
    [
        ("eye.default", (3,)), ("eye.m", (3, 4)), ("linspace.default", (0.0, 1.0, 3)), ("tril_indices.default", (3, 3)),
        ("logspace.default", (0.0, 1.0, 3)), ("randperm.default", (3,)), ("normal.float_float", (0.0, 1.0, [3])),
        ("zeros.default", ([3],)), ("hann_window.default", (3,)), ("scalar_tensor.default", (3.0,)),
        ("arange.default", (3,)),
    ],
)  # fmt: skip
def test_what_makes_a_tensor_from_nothing_is_told_where(target: str, args: tuple[object, ...]) -> None:
    assert is_told_device(Call(f"aten.{target}", args, {}, (), ()))


def test_what_has_a_tensor_is_where_that_is() -> None:
    spec = Case("aten.relu.default", SAMPLES["aten.relu.default"][0]).call.ins
    assert not is_told_device(Call("aten.zeros_like.default", (), {}, spec, ()))
    assert is_told_device(Call("aten.zeros_like.default", (), {"device": "cpu"}, spec, ()))
    assert not is_told_device(Call("aten.relu.default", (), {}, spec, ()))
