"""Tensors that a model keeps beside its parameters and buffers: right for as long as they stay, and guarded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar

X = torch.linspace(-1, 1, 32).reshape(4, 8)
SCALE = {"value": torch.tensor(2.0)}
WEIGHT = nn.Parameter(torch.ones(8))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Plain(nn.Module):
    """A tensor as a plain attribute, one in a dict, one in a list, one in a global."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.t = torch.tensor(2.0)
        self.d = {"t": torch.full((8,), 0.5)}
        self.l = [torch.ones(8)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * self.t * self.d["t"] + self.l[0] * SCALE["value"]


class Teacher(nn.Module):
    """A second network in a list, so that it is no part of the model, as in self-distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.hidden = [nn.Linear(8, 8)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            aim = self.hidden[0](x)
        return self.up(x) - aim


class ListedTwice(nn.Module):
    """A parameter that is registered, and used by way of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(8))
        self.all = [self.w]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.all[0]


class Stranger(nn.Module):
    """A parameter that is not registered, wherever it is."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.where = where
        self.inside: Any = {"list": [nn.Parameter(torch.ones(8))], "module": [nn.Linear(8, 8)], "global": None,
                            "leaf": torch.ones(8).requires_grad_()}[where]  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if self.where == "module":
            return self.inside[0](y)
        if self.where == "global":
            return y * WEIGHT
        return y * (self.inside[0] if self.where == "list" else self.inside)


@pytest.mark.parametrize("make", [Plain, Teacher, ListedTwice])
def test_as_in_eager(make: Callable[[], nn.Module]) -> None:
    model = make()
    pm = autopar.parallelize(copy.deepcopy(model), 1, X, loss_fn=loss_of)
    loss, reference = pm(X + 1), loss_of(model(X + 1))
    assert torch.allclose(loss, reference, rtol=1e-6)
    loss.backward()
    reference.backward()
    mine = dict(pm.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.allclose(mine[name].grad, parameter.grad, rtol=1e-5), name


@torch.no_grad()
def _written(model: Plain) -> None:
    model.t.fill_(3.0)


def _replaced(model: Plain) -> None:
    model.t = torch.tensor(3.0)


def _in_dict(model: Plain) -> None:
    model.d["t"] = torch.full((8,), 0.25)


def _in_list(model: Plain) -> None:
    model.l[0] = torch.zeros(8)


@pytest.mark.parametrize(
    ("change", "said"),
    [(_written, "'t' is a tensor of shape .* written to since"), (_replaced, "'t' is another"), (_in_dict, "'d' is"),
     (_in_list, "'l' is")],
)  # fmt: skip
def test_a_change_is_seen(change: Callable[[Plain], None], said: str) -> None:
    model = Plain()
    pm = autopar.parallelize(model, 1, X, loss_fn=loss_of)
    pm(X)
    change(model)
    with pytest.raises(autopar.AutoparError, match=said):
        pm(X)


def test_a_change_of_a_global_is_seen() -> None:
    pm = autopar.parallelize(Plain(), 1, X, loss_fn=loss_of)
    before = SCALE["value"]
    try:
        SCALE["value"] = torch.tensor(5.0)
        with pytest.raises(autopar.AutoparError, match=r"'SCALE' of test_plain_tensors\.py"):
            pm(X)
    finally:
        SCALE["value"] = before
    pm(X)


def test_a_hidden_teacher_that_moves_is_seen() -> None:
    model = Teacher()
    pm = autopar.parallelize(model, 1, X, loss_fn=loss_of)
    pm(X)
    with torch.no_grad():
        for parameter in model.hidden[0].parameters():
            parameter.lerp_(torch.ones_like(parameter), 0.1)
    with pytest.raises(autopar.AutoparError, match="written to since"):
        pm(X)


@pytest.mark.parametrize("where", ["list", "module", "global", "leaf"])
def test_a_parameter_that_nobody_registered_is_refused(where: str) -> None:
    with pytest.raises(autopar.CaptureError, match="requires grad and is no parameter of the model"):
        autopar.capture(Stranger(where), X, loss_fn=loss_of)
