"""Optimizers made before parallelize: moved with all they hold, or refused at their first step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.runtime.optimizers.user_optimizers import name_of

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))  # no dims: its state looks like a count of steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).relu()) * self.scale - x).square().mean()


MADE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.01),
    "lbfgs, not begun": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}


def steps(model: Any, optimizer: torch.optim.Optimizer, n: int) -> list[float]:
    found = []
    for _ in range(n):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(X)
            loss.backward()
            return loss

        found.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("kind", MADE)
def test_it_goes_on_as_if_nothing_had_happened(kind: str) -> None:
    """Groups, options, state and the scheduler, two steps before parallelize and three after."""
    losses = []
    for move in (False, True):
        model = Net()
        one = "lbfgs" in kind
        groups = model.parameters() if one else [{"params": model.up.parameters(), "weight_decay": 0.1},
                                                 {"params": [*model.down.parameters(), model.scale]}]  # fmt: skip
        optimizer = MADE[kind](groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        before = [] if one else steps(model, optimizer, 2)
        if not one:
            scheduler.step()
        used: Any = autopar.parallelize(model, 1, X, optimizer=optimizer) if move else model
        after = steps(used, optimizer, 2)
        scheduler.step()
        losses.append(before + after + steps(used, optimizer, 1))
        assert [float(group["lr"]) for group in optimizer.param_groups] == [
            float(group["initial_lr"]) * (0.5 if one else 0.25) for group in optimizer.param_groups
        ]
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, used.parameters()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_step_with_old_parameters_is_refused() -> None:
    model = Net()
    old, optimizer = list(model.parameters()), torch.optim.AdamW(model.parameters())
    pm = autopar.parallelize(model, 1, X)
    pm(X).backward()
    with pytest.raises(autopar.RunError, match=r"(?s)parameter 'scale' of before .*\(grad\).*optimizer=opt"):
        optimizer.step()
    late = torch.optim.SGD(old, lr=1.0)
    with pytest.raises(autopar.RunError, match="make optimizers, averages and lists of parameters after"):
        late.step()
    mixed = torch.optim.SGD(pm.parameters(), lr=0.1)
    mixed.step()
    mixed.add_param_group({"params": old[:1]})
    with pytest.raises(autopar.RunError, match=r"parameter 'scale' of before parallelize is used"):
        mixed.step()


def test_parameters_of_other_models_stay() -> None:
    model, other = Net(), nn.Linear(6, 6)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    pm = autopar.parallelize(model, 1, X, optimizer=optimizer)
    assert optimizer.param_groups[0]["params"] == [*pm.parameters(), *other.parameters()]
    before = other.weight.detach().clone()
    pm(X).backward()
    other(X).square().mean().backward()
    optimizer.step()
    assert not torch.equal(before, other.weight)


def test_a_copy_may_train_beside() -> None:
    model = Net()
    alone = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, X)
    for used in (pm, alone):
        optimizer = torch.optim.SGD(used.parameters(), lr=0.1)
        steps(used, optimizer, 1)
    assert torch.allclose(dict(pm.named_parameters())["up.weight"], alone.up.weight)


class Odd(torch.optim.SGD):
    """Keeps what a move cannot know."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lr=0.1)
        self.slow = {p: p.detach().clone() for p in params}


def test_what_cannot_be_moved_is_refused_before_anything_changes() -> None:
    model = Net()
    with pytest.raises(autopar.AutoparError, match="keeps the model's parameters in its attribute 'slow'"):
        autopar.parallelize(model, 1, X, optimizer=Odd(model.parameters()))
    with pytest.raises(autopar.AutoparError, match="2 parameters, none of which is one of the model's 5"):
        autopar.parallelize(model, 1, X, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()))
    factored = torch.optim.Adafactor(model.parameters())
    model(X).backward()
    factored.step()
    with pytest.raises(autopar.AutoparError, match=r"state 'row_var' of 'up.weight' in this Adafactor has shape"):
        autopar.parallelize(model, 1, X, optimizer=factored)
    factored.step()  # nothing was replaced


def test_a_step_that_computes_the_loss_itself() -> None:
    """``train_step`` has no closure for it; the caller's own may call ``train_step``."""
    eager = Net()
    pm = autopar.parallelize(copy.deepcopy(eager), 1, X)
    ours, theirs = (torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2) for model in (pm, eager))
    for given in (ours, [torch.optim.SGD(pm.parameters()), ours]):
        with pytest.raises(autopar.AutoparError, match=r"step\(\) of LBFGS in optimizer= needs a closure") as error:
            pm.train_step(X, optimizer=given)
        assert "\n" not in str(error.value) and error.value.__cause__ is None

    for scheduled in (ours, adamw := torch.optim.AdamW(pm.parameters(), lr=0.0)):
        torch.optim.lr_scheduler.ConstantLR(scheduled, 1.0)  # which replaces the object's step
    pm.train_step(X, optimizer=adamw)
    with pytest.raises(autopar.AutoparError, match="needs a closure"):
        pm.train_step(X, optimizer=ours)

    def closure() -> torch.Tensor:
        ours.zero_grad()
        return pm.train_step(X)  # type: ignore[no-any-return]

    assert [float(ours.step(closure)) for _ in range(3)] == pytest.approx(steps(eager, theirs, 3))


def test_names_for_the_planner() -> None:
    params = [nn.Parameter(torch.zeros(2))]
    found = {kind: name_of(make(params)) for kind, make in MADE.items()}
    assert (found["sgd"], found["momentum"], found["adamw"], found["adagrad"]) == (
        "sgd", "sgd_momentum", "adamw", "sgd_momentum",
    )  # fmt: skip
    assert autopar.plan(Net(), "local-x2", X, mesh="data=2", optimizer=MADE["momentum"](params)).optimizer == (
        "sgd_momentum"
    )
