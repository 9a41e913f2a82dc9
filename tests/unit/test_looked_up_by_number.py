"""Modules in a ModuleDict, or attributes, whose names are written with the number of a tensor: ``f"expert_{e}"``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.comparison import compare_with_eager
from autopar.errors import CaptureError


class Experts(nn.Module):
    """The loop over the experts that were hit, of NLLB-MoE and Switch, in a file of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(8, 8) for i in range(4)})
        self.drop = nn.Dropout(0.2)

    def key(self, e: torch.Tensor) -> str:
        return f"expert_{e[0]}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        mask = nn.functional.one_hot(chosen, 4).permute(2, 1, 0)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            idx, top = torch.where(mask[e].squeeze(0))
            y = self.drop(self.experts[self.key(e)](x[None, top].reshape(-1, 8)) * p[top, idx, None])
            out.index_add_(0, top, y)
        return out.square().mean()


class ByItem(Experts):
    def key(self, e: torch.Tensor) -> str:
        return "expert_" + str(e.item())


class ByInt(Experts):
    def key(self, e: torch.Tensor) -> str:
        return f"expert_{int(e):d}"


class ByFormat(Experts):
    def key(self, e: torch.Tensor) -> str:
        return "expert_{:d}".format(e[0])  # noqa: UP032


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        for i in range(4):
            setattr(self, f"expert_{i}", nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e in chosen.unique():
            rows = torch.where(chosen == e)[0]
            out[rows] = getattr(self, f"expert_{e}")(x[rows]) * p[rows, None]
        return out.square().mean()


@pytest.mark.parametrize("kind", [Experts, ByItem, ByInt, ByFormat, Attributes])
def test_experts_by_their_names(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(16, 8)
    captured = capture(model, (x,))
    assert compare_with_eager(captured, model, (torch.randn(16, 8),), {}).same


def test_a_batch_that_hits_other_experts() -> None:
    model, x = Experts().eval(), torch.randn(16, 8)
    pm: Any = autopar.parallelize(copy.deepcopy(model), 1, (x,))
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([50.0, 0.0, 40.0, 0.0]))
        pm.router.bias.copy_(torch.tensor([50.0, 0.0, 40.0, 0.0]))
    assert float(pm(x)) == pytest.approx(float(model(x)), rel=1e-5)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({f"task_{i}": nn.Linear(8, 8) for i in range(3)})

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return self.heads[f"task_{task}"](x).square().mean()


class OfDataHeads(Heads):
    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return self.heads[f"task_{x.argmax() % 3}"](x).square().mean()


def test_the_head_of_the_example_is_checked_at_every_call() -> None:
    model, x = Heads(), torch.randn(4, 8)
    with pytest.warns(UserWarning, match="are those of this batch"):
        captured = capture(model, (x, torch.tensor(1)))
    assert compare_with_eager(captured, model, (x, torch.tensor(1)), {}).same
    assert [bool(way.kwargs.get("pinned")) for way in captured.graph.ways] == [True]


def test_a_head_by_what_is_computed_is_refused_with_its_line() -> None:
    expected = r"(?s)looks something up by the value of a tensor.*test_looked_up_by_number\.py"
    with pytest.raises(CaptureError, match=expected):
        capture(OfDataHeads(), (torch.randn(4, 8), torch.tensor(1)))


class Logging(nn.Module):
    """A text that nobody looks anything up by is no question."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.said = nn.Linear(8, 8), ""

    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x).square().mean()
        _ = f"loss {h}"
        return h


def test_text_of_a_loss_is_no_question() -> None:
    model, x = Logging(), torch.randn(4, 8)
    assert not capture(model, (x,)).graph.ways
