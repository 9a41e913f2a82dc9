"""One record of wishes: whoever asks, checks, writes, splits or shows takes it from there."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.plan import plan as command
from autopar.errors import AutoparError
from autopar.parallelizing import arguments
from autopar.planfile.pins import FORMS
from autopar.planner.inter_op.stage_pins import PARTS
from autopar.plans.pins import Pins
from autopar.plans.plan_options import BY_NAME, PINS, PLAN_OPTIONS, pin_words
from autopar.plans.request import PlanRequest, request_of
from autopar.words.meshes import Mesh

GIVEN: dict[str, Any] = {
    "mesh": "data=2,tensor=2", "constraints": {"up": {"tensor": "n"}}, "params": {"*.weight": "S0, I use"},
    "placements": {"x": "S0,R", 0: "I,I"}, "recompute": ["layers.*"], "memory_limit": "4GiB", "optimizer": "sgd",
    "microbatches": 4, "stages": 2, "schedule": "1f1b", "cuts": ["layers.1"], "max_axes": 2, "time_limit": 5.0,
    "precision": "bf16-mixed", "expert_load": [3, 1], "offload": "activations",
}  # fmt: skip


@pytest.mark.parametrize("function", [autopar.plan, autopar.parallelize])
def test_signatures_have_all_wishes(function: Any) -> None:
    """The public signatures are written out; names and defaults are those of the record."""
    parameters = inspect.signature(function).parameters
    own = {"mesh"} if function is autopar.parallelize else set()  # there it is where the model is spread
    for option in PLAN_OPTIONS:
        if option.name not in own:
            assert parameters[option.name].default == option.default, option.name
    assert "{wishes}" not in function.__doc__


def test_docstrings_tell_of_all_wishes() -> None:
    text = " ".join((autopar.plan.__doc__ or "").split())
    for option in PLAN_OPTIONS:
        assert f"{option.name}: {' '.join(option.told.split())}" in text


def test_the_command_has_all_flags() -> None:
    parameters = inspect.signature(command).parameters
    for flag in (flag for option in PLAN_OPTIONS for flag in option.flags):
        assert parameters[flag.parameter].default is None, flag.names
    assert set(BY_NAME) - {option.name for option in PLAN_OPTIONS if option.flags} == {"max_axes"}


def test_arguments_are_checked_by_the_record() -> None:
    assert all(arguments._CHECKS[option.name] == (option.right, option.wanted) for option in PLAN_OPTIONS)


def test_plans_remember_what_the_record_says() -> None:
    assert {pin.name for pin in PINS} == {field.name for field in dataclasses.fields(Pins)}
    assert {pin.form for pin in PINS} <= set(FORMS)
    assert {pin.name for pin in PINS if pin.stages == "part"} == set(PARTS)


def test_all_wishes_arrive() -> None:
    """Each wish changes what is asked, and each pin is said in words."""
    assert set(GIVEN) == set(BY_NAME)
    everything = request_of(GIVEN)
    for name in GIVEN:
        more = {"mesh": GIVEN["mesh"]} if name in ("placements", "params") else {}
        fewer = {"mesh"} | ({"placements"} if name == "mesh" else set())
        without = {k: v for k, v in GIVEN.items() if k != name and not (name == "mesh" and k in fewer)}
        assert request_of({**more, **without}) != everything, name
    assert all(getattr(everything.pins, pin.name) for option in PLAN_OPTIONS for pin in option.pins)
    assert pin_words(everything.pins) == [
        "2 groups", "mesh data=2 x tensor=2", "cut at layers.1", "schedule 1f1b", "4 microbatches", "up: tensor=n",
        "*.weight: S0,I use", "input x: S0,R", "output 0: I,I", "layers.*: recompute",
        "on the host: activations", "precision bf16-mixed",
        "*: load of 2 experts, 75.0% for the fullest", "at most 4.00 GiB per device",
    ]  # fmt: skip
    assert request_of({}) == PlanRequest() and pin_words(Pins()) == []
    assert pin_words(Pins(layout="tp=2,dp=4", target="megatron")) == ["layout tp=2,dp=4", "for megatron"]


@pytest.mark.parametrize(
    ("given", "whole", "piped", "numbers", "one", "groups"),
    [
        ({}, False, True, (), 1, None), ({}, True, False, None, 1, None),
        ({"stages": 1}, False, True, (), 1, 1), ({"stages": "auto"}, True, True, (), 1, None),
        ({"microbatches": 1}, False, True, None, 1, None), ({"microbatches": 1}, True, False, None, 1, None),
        ({"microbatches": 4}, False, True, None, 4, None), ({"microbatches": 4}, True, False, None, 4, None),
        ({"microbatches": [2, 4]}, True, True, (2, 4), 1, 1), ({"microbatches": "auto"}, True, True, (), 1, 1),
        ({"mesh": "data=2"}, False, False, None, 1, None), ({"mesh": "data=2", "stages": 2}, False, True, (), 1, 2),
        ({"mesh": "data=2", "microbatches": "auto"}, False, True, (), 1, 1),
        ({"schedule": "1f1b"}, True, True, (), 1, None),
    ],
)  # fmt: skip
def test_what_is_searched(
    given: dict[str, Any], whole: bool, piped: bool, numbers: Any, one: int, groups: int | None
) -> None:
    """Everything, unless told otherwise; for a caller that runs the batch at once, and on a mesh, neither stages nor
    microbatches, unless told so."""
    wanted = request_of(given, whole=whole)
    assert (wanted.piped, wanted.numbers, wanted.microbatches, wanted.pins.stages) == (piped, numbers, one, groups)
    assert wanted.everything == (given == {} and not whole)
    assert wanted.pins.microbatches == (one if isinstance(given.get("microbatches"), int) else None)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"microbatches": 0}, "microbatches is 0"), ({"memory_limit": 0.5}, "memory_limit is 0.5"),
        ({"stages": 0}, "stages is 0"), ({"memory_limit": 0}, "memory_limit is 0"), ({"time_limit": 0.0}, "time_limit"),
        ({"placements": {"x": "S0"}}, "give the mesh with it"), ({"max_axes": 0}, "max_axes is 0"),
        ({"constraints": {"up": "n"}}, "give it like"), ({"params": {"a": 3}}, "give it like"),
        ({"memory_limit": "much"}, "is no size"),
    ],
)  # fmt: skip
def test_what_means_nothing_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(AutoparError, match=said):
        request_of(wrong)


def test_a_plan_of_stages_says_where_decisions_are() -> None:
    """What a plan of one stage shows on itself, one of several refuses with the way to it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.square().mean()

    one = autopar.plan(Net(), "local-x2", torch.ones(4, 8), mesh="data=2")
    assert one.mesh == Mesh.of(data=2) and one.params == one.stages[0].params and one.seconds == one.price.seconds
    two = autopar.plan(Net(), "local-x2", torch.ones(4, 8), stages=2, microbatches=2, schedule="1f1b")
    assert two.memory_bytes == max(stage.price.memory_bytes for stage in two.stages)
    assert {stage_edge.source for stage_edge in two.stage_edges} == {0}
    of_one_stage = ("mesh", "ops", "params", "buffers", "inputs", "outputs", "reshard_paths", "price", "solution")
    for name in (*of_one_stage, "recompute"):
        with pytest.raises(autopar.PlanError, match=r"the plan has 2 stages, .*plan.stages\[0\] to plan.stages\[1\]"):
            getattr(two, name)
