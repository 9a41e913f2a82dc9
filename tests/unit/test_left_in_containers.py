"""Lists and dicts that stand in attributes and that a forward fills: as on the model after each call, or refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError, RunError


class Keeps(nn.Module):
    """Keeps what it computes, as ``how`` says, in a list and a dict that were made in ``__init__``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how
        self.log: list[Any] = []
        self.losses: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x).tanh()
        size, rough = out.abs().mean(), out.square().mean()
        if self.how == "dict":
            self.losses["size"] = size
            self.losses.update(rough=rough)
        elif self.how == "cleared":
            self.log.clear()
            self.log.append(size)
            self.log.append(rough)
            return x + sum(self.log)
        elif self.how == "appended":
            self.log.append(size)
            self.log.extend([rough])
        elif self.how == "at most three":
            if len(self.log) > 2:
                self.log.pop(0)
            self.log.append(size)
        elif self.how == "the last one is read":
            if self.log:
                size = size + self.log[-1]
            self.log.append(size)
        elif self.how == "only once":
            self.losses.setdefault("size", size)
        elif self.how == "tensors":
            self.losses["out"] = out
        return x + out


class Stack(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Keeps(how) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def kept(model: Any) -> list[torch.Tensor]:
    return [value for block in model.blocks for value in (*block.log[-2:], *block.losses.values())]


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("how", ["dict", "cleared", "appended"])
def test_they_are_filled_as_on_the_model(how: str, emptied: bool) -> None:
    """The script reads them, trains by them, holds on to them, and may empty them."""
    torch.manual_seed(0)
    model = Stack(how)
    reference = copy.deepcopy(model)
    pm: Any = autopar.parallelize(model, 1, torch.randn(5, 8))
    assert kept(pm) == []
    filled = "losses" if how == "dict" else "log"
    held = getattr(pm.blocks[0], filled)
    for rows in (5, 5, 3, 5):
        x = torch.randn(rows, 8)
        for module in (pm, reference):
            module.zero_grad()
            if emptied:
                for block in module.blocks:
                    block.log.clear()
                    block.losses.clear()
            (module(x).mean() + sum(kept(module))).backward()
        torch.testing.assert_close(kept(pm), kept(reference))
        for (name, p), q in zip(pm.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=name)
    assert held is getattr(pm.blocks[0], filled) and held
    setattr(pm.blocks[0], filled, [])
    assert getattr(pm.blocks[0], filled) == []


@pytest.mark.parametrize("how", ["at most three", "the last one is read", "only once"])
def test_what_the_next_call_reads_is_refused(how: str) -> None:
    with pytest.raises(CaptureError, match=r"keeps a tensor of one call in an attribute, which the next call reads:\n"):
        autopar.parallelize(Stack(how), 1, torch.randn(5, 8))


def test_larger_tensors_are_not_read() -> None:
    pm: Any = autopar.parallelize(Stack("tensors"), 1, torch.randn(5, 8))
    pm(torch.randn(5, 8))
    with pytest.raises(RunError, match=r"forward sets the attribute 'blocks.0.losses' of the model"):
        print(pm.blocks[0].losses)


class Sums(nn.Module):
    """Its methods read what forward leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.losses, self.wide = nn.Linear(8, 8), [], None
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.losses.append(y.abs().mean())
        self.last, self.wide = y.square().mean(), y
        return y.mean()

    def popped(self) -> torch.Tensor:
        result = sum(self.losses) + 2 * self.last  # type: ignore[operator]
        self.losses = []
        return result

    def widest(self) -> torch.Tensor:
        return self.wide.abs().max()  # type: ignore[attr-defined]

    def two_widest(self) -> torch.Tensor:
        return 2 * self.widest()

    def streamed(self) -> Iterator[float]:
        yield self.last.item()  # type: ignore[union-attr]
        yield self.widest().item()


def test_methods_read_what_calls_have_left() -> None:
    torch.manual_seed(0)
    eager, x = Sums().double(), torch.randn(4, 8, dtype=torch.float64)
    pm: Any = autopar.parallelize(copy.deepcopy(eager), 1, x)
    for _ in range(3):
        for each in (eager, pm):
            each.zero_grad()
            (each(x) + each.popped()).backward()
        torch.testing.assert_close(pm.layer.weight.grad, eager.layer.weight.grad, rtol=1e-12, atol=0)
        assert not pm.losses
    numbers = pm.streamed()
    assert next(numbers) == pytest.approx(float(eager.last), rel=1e-12)  # type: ignore[arg-type]
    for reads in (pm.widest, pm.two_widest, lambda: next(numbers)):
        with pytest.raises(RunError, match="forward sets the attribute 'wide' of the model"):
            reads()
