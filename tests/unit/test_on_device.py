"""Every operator and every lowering stays on the device that it is given: nothing is made on the CPU, or read."""

from __future__ import annotations

import pytest
from procs import operators_on_device

import autopar.rules  # noqa: F401
from autopar.rules.local_calls import is_told_device
from autopar.rules.operator_call import Call
from autopar.rules.proving.proof import Case
from autopar.rules.registry import SAMPLES
from autopar.runtime.ranks.launch import run_local

PARTS = 8
"""Processes in which the operators are tried."""


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_stay_on_the_device(part: int) -> None:
    assert run_local(operators_on_device.check_all, 1, sorted(SAMPLES)[part::PARTS], False) == [{}]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_operators_stay_on_the_device_in_all_samples(part: int) -> None:
    targets = sorted(SAMPLES)[part::PARTS]
    assert run_local(operators_on_device.check_all, 1, targets, True, timeout=3000.0) == [{}]


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
