"""Compiled stages run their backward in halves where the schedule does, with the same gradients to the bit."""

from __future__ import annotations

from typing import Any

import pytest
from procs.pipelines import peaks
from procs.split_backwards import MICROBATCHES, breaks_off, halves, under_autocast

from autopar.runtime.ranks.launch import run_local

PER_USE = {"params": {"*": "S0 use"}, "constraints": {"*": {"data": "b"}}, "cuts": ["layers.2"]}


def check(found: dict[str, Any], steps: int, stages: int) -> None:
    tied = {"embed.weight"} if stages > 1 else set()  # one rank has all its gradients, and adds them up at once
    assert found["eager"] == [] and {name for _, name in found["1f1b"]} <= tied, found
    assert found["gradients"] and found["none"], found  # layers that are left out have none
    assert found["halves"] == steps * MICROBATCHES * stages


@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("zb-v", marks=pytest.mark.slow)])
def test_halves_of_compiled_stages(schedule: str) -> None:
    """A tied weight, a norm, user Functions, hooks, layers that are left out; gradients of an input."""
    options, stages = ({"cuts": ["layers.2"]}, 1) if schedule == "zb-h1" else ({}, 2)
    for found in run_local(halves, 2, schedule, options, 2, stages == 1, timeout=200):
        check(found, 2, stages)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"precision": "bf16-mixed"}], ids=["float64", "bf16-mixed"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_parameters_that_are_gathered_for_each_use(schedule: str, more: dict[str, Any]) -> None:
    """Each half gathers what it reads."""
    options = {**PER_USE, **more}
    if schedule == "zb-v":
        options.pop("cuts")
    for found in run_local(halves, 4, schedule, options, 3, timeout=200):
        check(found, 3, 2 if schedule == "zb-v" else 1)


@pytest.mark.slow
def test_a_step_after_some_that_broke_off_in_a_half() -> None:
    assert run_local(breaks_off, 2, timeout=200) == [[], []]


def test_halves_under_autocast() -> None:
    """Casts are those of the program in both halves, as in a whole backward."""
    assert run_local(under_autocast, 2, timeout=100) == [[[], []]] * 2


@pytest.mark.slow
def test_the_first_half_keeps_what_the_second_reads_and_no_more() -> None:
    """Autograd keeps the whole graph of a microbatch until its second half."""
    of_ways = [run_local(peaks, 3, "gpt2", "zb-h1", 6, {"rows": 12}, compiled, timeout=200) for compiled in (0, 1)]
    for (eager, _, _), (compiled, predicted, at) in zip(*of_ways, strict=True):
        assert compiled < 0.92 * eager and -0.05 < compiled / predicted - 1 < 0.06, (eager, compiled, predicted, at)
