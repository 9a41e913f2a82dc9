"""Every public argument of capture, plan and parallelize, given things of the wrong types: right, or an AutoparError
that names the argument."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.dataclass_nodes import know_dataclasses
from autopar.parallelizing import arguments
from autopar.runtime.ranks.devices import same_device
from autopar.words.meshes import Mesh

X = torch.zeros(4, 4)


class Something:
    """Is nothing that anyone asked for."""

    def __repr__(self) -> str:
        return "Something()"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (self.up(x) * scale).square().mean()


WRONG: dict[str, Any] = {
    "None": None, "True": True, "minus one": -1, "zero": 0, "nan": float("nan"), "half": 0.5, "infinite": float("inf"),
    "text": "no such thing", "no text": "", "bytes": b"abc", "empty tuple": (), "empty list": [], "numbers": [1, 2],
    "texts": ["a", "b"], "nothings": [None], "pair": ("a", 1), "empty dict": {}, "dict": {"a": 1},
    "by number": {1: "a"}, "dict of dicts": {"a": {"b": None}}, "set": {1}, "tensor": torch.zeros(2),
    "class": nn.Linear, "module": nn.Linear(1, 1), "function": lambda: None, "something": Something(),
    "path": Path("no/such/file"), "mesh": Mesh.of(data=2),
    "array": torch.zeros(2).numpy(), "dtype": torch.float32, "optimizer class": torch.optim.SGD,
    "optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), "complex": 1j, "huge": 10**30,
}  # fmt: skip

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "capture": (autopar.capture, {"model": Net(), "inputs": X}),
    "plan": (autopar.plan, {"model": Net(), "cluster": "local-x2", "inputs": X, "mesh": "data=2"}),
    "plan in stages": (autopar.plan, {"model": Net(), "cluster": "local-x2", "inputs": X, "stages": 1}),
    "parallelize": (autopar.parallelize, {"model": Net(), "mesh": 1, "example_inputs": X}),
}
OF_PIPELINES = ("mesh", "microbatches", "stages", "schedule", "cuts", "memory_limit")
ROWS = [
    (call, name) for call, (fn, _) in CALLS.items() for name in inspect.signature(fn).parameters
    if call != "plan in stages" or name in OF_PIPELINES
]  # fmt: skip


@pytest.mark.parametrize(("call", "name"), [
    pytest.param(call, name, id=f"{call}-{name}", marks=[pytest.mark.slow] if k % 2 else [])
    for k, (call, name) in enumerate(ROWS)
])  # fmt: skip
def test_wrong_types(call: str, name: str) -> None:
    fn, right = CALLS[call]
    if name == "model":
        right = {**right, "cluster": "local-x2"} if "plan" in call else right
    for kind, wrong in WRONG.items():
        try:
            fn(**{**right, "model": Net(), name: wrong})
        except autopar.AutoparError as error:
            assert len(str(error)) > 20, (kind, error)
        except Exception as error:
            raise AssertionError(f"{name} = {kind}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"optimizer": torch.optim.SGD},
            r"optimizer is <class .*SGD'> \(a class; make one of the model's parameters\)",
        ),
        ({"optimizer": 3}, "optimizer is 3; give adamw, adam, adamw8bit, sgd, sgd_momentum, muon, or a torch.optim"),
        ({"cuts": "up"}, "cuts is 'up'; give a list"),
        ({"stages": 2.0}, "stages is 2.0; give a number of groups"),
        ({"schedule": 3}, "schedule is 3; give a schedule's name"),
        ({"targets": 3}, "targets is 3; give a tuple"),
        ({"captured": Net()}, "captured is .*; give what capture"),
        ({"time_limit": "soon"}, "time_limit is 'soon'; give seconds"),
        ({"memory_limit": True}, "memory_limit is True; give bytes"),
        ({"recompute": [3]}, r"recompute is \[3\]; give a list of patterns"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_words(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(autopar.AutoparError, match=said):
        autopar.plan(Net(), "local-x2", X, **{"mesh": "data=2", **wrong})


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (lambda out, t: (out - t).square().mean(1), r"loss_fn returned a float32 tensor of shape \(4,\); it must"),
        (lambda out, t: (out - t).square().mean().item(), "loss of Linear with its loss_fn does not require"),
        (lambda out, t: 3.0, "loss_fn returned 3.0"),
        (lambda out, t: None, "loss_fn returned None"),
        (lambda out, t: (out > t).sum(), r"though the model has parameters that do: gt \(aten.gt.Tensor\)"),
        (lambda out, t: (out - t).square().mean().detach(), r"its gradient ends in .* by detach\(\)"),
        (lambda out, t: (out - t).square().mean().reshape(1), r"of shape \(1,\)"),
    ],
    ids=["vector", "number", "constant", "nothing", "count", "detached", "one element"],
)
def test_loss_functions_that_return_no_loss(loss_fn: Any, said: str) -> None:
    for call in (
        lambda: autopar.capture(nn.Linear(4, 4), X, loss_fn=loss_fn, targets=X),
        lambda: autopar.parallelize(nn.Linear(4, 4), 1, X, loss_fn=loss_fn, targets=X),
    ):
        with pytest.raises(autopar.CaptureError, match=said):
            call()


def test_a_model_without_forward_is_told_how_to_get_one() -> None:
    class Agent(nn.Linear):
        forward = nn.Module.forward

        def value(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    said = r"Agent has no forward\(\), .*\n  write one that calls the method to train by"
    with pytest.raises(autopar.CaptureError, match=said):
        autopar.parallelize(Agent(4, 1), 1, X)


def test_a_frozen_model_may_have_a_loss_without_gradient() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    pm = autopar.parallelize(copy.deepcopy(model), 1, X, loss_fn=nn.functional.mse_loss, targets=X + 1)
    assert torch.allclose(pm(X, X + 1), nn.functional.mse_loss(model(X), X + 1))


def test_parallel_modules_inside() -> None:
    inner = autopar.parallelize(nn.Linear(4, 4), 1, X)
    with pytest.raises(autopar.CaptureError, match="its module 'body' is a parallel module already"):
        autopar.parallelize(nn.Sequential(torch.nn.modules.container.OrderedDict(body=inner)), 1, X)
    with pytest.raises(autopar.CaptureError, match="the model is a parallel module already"):
        autopar.plan(inner, "local-x2", X)


def test_parts_and_parameters_of_a_parallel_module() -> None:
    model, other = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)
    other.weight = model[0].weight
    autopar.parallelize(model, 1, X)
    said = "is part of a model that is parallelized already, '0' of a Sequential"
    with pytest.raises(autopar.CaptureError, match=f"the model {said}"):
        autopar.parallelize(model[0], 1, X)
    with pytest.raises(autopar.CaptureError, match=f"its module '1' {said}"):
        autopar.parallelize(nn.Sequential(nn.Tanh(), model[0]), 1, X)
    for _ in range(2):
        said = r"'weight' is also in a model that was parallelized \('0.weight' there\)"
        with pytest.raises(autopar.CaptureError, match=said):
            autopar.parallelize(other, 1, X)
        other.weight = model[0].weight  # the new one


def test_descriptions_are_equal_where_arguments_are() -> None:
    same = arguments._described
    assert same([torch.zeros(2, 3), 1]) == same([torch.ones(2, 3), 1]) != same([torch.ones(2, 3), 2])
    assert same(lambda: 1) == same(lambda: 1)
    assert same(object()) == same(object())
    assert same({"a": X}) != same({"b": X})
    assert len(same("x" * 1000)) < 250 and same("x" * 1000) != same("x" * 999 + "y")


def test_devices_of_one_kind_are_told_apart() -> None:
    """An input on another accelerator of the same kind is not where the program is."""
    assert same_device(torch.device("cpu"), torch.device("cpu", 0))
    assert same_device(torch.device("cuda", 1), torch.device("cuda", 1))
    assert not same_device(torch.device("cuda", 0), torch.device("cuda", 1))
    assert not same_device(torch.device("cpu"), torch.device("cuda", 0))


def test_outputs_that_are_no_tensors_are_named() -> None:
    class Cache:
        """As transformers' models return it, of keys and values for later tokens."""

    class Cached(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).sum(), Cache()

    with pytest.raises(autopar.CaptureError, match=r"(?s)it returns a Cache, which is no tensor.*use_cache = False"):
        autopar.capture(Cached(4, 4), (torch.zeros(2, 4),))


def test_dataclasses_that_hold_each_other_come_to_an_end() -> None:
    @dataclasses.dataclass
    class Linked:
        other: Any = None

    first = Linked()
    first.other = [Linked(first)]
    know_dataclasses({"x": first})


@pytest.mark.parametrize("how", ["wrapped", "a part", "in place"])
def test_a_model_that_was_compiled_is_refused(how: str) -> None:
    model: nn.Module = Net()
    if how == "wrapped":
        model = torch.compile(model, backend="eager")
    elif how == "a part":
        model.up = torch.compile(model.up, backend="eager")
    else:
        model.compile(backend="eager")
    where = "its module 'up'" if how == "a part" else "the model"
    with pytest.raises(autopar.AutoparError, match=f"{where} was compiled by torch.compile.*compile=True"):
        autopar.parallelize(model, 1, X)
