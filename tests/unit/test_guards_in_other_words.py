"""Branches that only work on the rows of an expert, in the words that people have for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.comparison import compare_with_eager
from autopar.errors import CaptureError


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p, chosen = self.router(x).softmax(-1).topk(2, -1)
        return self.mixed(x, p, chosen, torch.zeros_like(x)).square().mean()

    def mixed(self, x: torch.Tensor, p: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class LenIsZero(Experts):
    def mixed(self, x, p, chosen, out):
        for e in range(4):
            r, w = torch.where(chosen == e)
            if len(r) == 0:
                continue
            out.index_add_(0, r, self.experts[e](x[r]) * p[r, w, None])
        return out


class NamedNumber(Experts):
    def mixed(self, x, p, chosen, out):
        for e in range(4):
            r, w = torch.where(chosen == e)
            n = r.numel()
            if n == 0:
                continue
            out.index_add_(0, r, self.experts[e](x[r]) * p[r, w, None])
        return out


class NamedAnswer(Experts):
    def mixed(self, x, p, chosen, out):
        for e in range(4):
            r, w = torch.where(chosen == e)
            has_rows = r.shape[0] > 0
            if has_rows and self.training:
                out.index_add_(0, r, self.experts[e](x[r]) * p[r, w, None])
        return out


class InAnd(Experts):
    def mixed(self, x, p, chosen, out):
        for e, expert in enumerate(self.experts):
            r, w = torch.where(chosen == e)
            if expert is not None and r.numel() > 0:
                out.index_add_(0, r, expert(x[r]) * p[r, w, None])
        return out


class InOr(Experts):
    def mixed(self, x, p, chosen, out):
        for e, expert in enumerate(self.experts):
            r, w = torch.where(chosen == e)
            if (
                expert is None
                or not r.numel()
            ):  # fmt: skip
                continue
            out.index_add_(0, r, expert(x[r]) * p[r, w, None])
        return out


class WithElse(Experts):
    def mixed(self, x, p, chosen, out):
        for e in range(4):
            r, w = torch.where(chosen == e)
            if len(r) == 0:
                pass
            else:
                out.index_add_(0, r, self.experts[e](x[r]) * p[r, w, None])
        return out


class Assigned(Experts):
    def mixed(self, x, p, chosen, out):
        for e in range(4):
            r, w = torch.where(chosen == e)
            if 0 < (n := len(r)):  # noqa: F841
                out.index_add_(0, r, self.experts[e](x[r]) * p[r, w, None])
        return out


class OfAMask(Experts):
    def mixed(self, x, p, chosen, out):
        for e in range(4):
            m = (chosen == e).any(-1)
            n = m.sum().item()
            if n == 0 or self.on is None:
                continue
            out[m] += self.experts[e](x[m]) * (p * (chosen == e)).sum(-1)[m, None]
        return out


class NotAny(Experts):
    def mixed(self, x, p, chosen, out):
        for e in range(4):
            m = (chosen == e).any(-1)
            if not m.any() or not self.on:
                continue
            out[m] += self.experts[e](x[m]) * (p * (chosen == e)).sum(-1)[m, None]
        return out


class OfCounts(Experts):
    def mixed(self, x, p, chosen, out):
        counts = torch.bincount(chosen.flatten(), minlength=4)
        for e in range(4):
            if counts[e] == 0 or e > 10:
                continue
            r, w = torch.where(chosen == e)
            out.index_add_(0, r, self.experts[e](x[r]) * p[r, w, None])
        return out


@pytest.mark.parametrize(
    "kind",
    [LenIsZero, NamedNumber, NamedAnswer, InAnd, InOr, WithElse, Assigned, OfAMask, NotAny, OfCounts],
)
def test_no_rows_count_as_nothing_in_any_words(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(8, 8)
    captured = capture(model, (x,))
    assert not captured.graph.ways
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([50.0, 0.0, 40.0, 0.0]))
    assert compare_with_eager(captured, model, (torch.randn(8, 8),), {}).same


class CountsThem(Experts):
    """Does something else too."""

    def mixed(self, x, p, chosen, out):
        k = 0
        for e in range(4):
            r, w = torch.where(chosen == e)
            if len(r) == 0 or self.on is None:
                continue
            k = k + 1
            out.index_add_(0, r, self.experts[e](x[r]) * p[r, w, None])
        return out * k


class MoreThanThree(Experts):
    def mixed(self, x, p, chosen, out):
        for e in range(4):
            r, w = torch.where(chosen == e)
            n = len(r)
            if n > 3 and self.on:
                out.index_add_(0, r, self.experts[e](x[r]) * p[r, w, None])
        return out


@pytest.mark.parametrize("kind", [CountsThem, MoreThanThree])
def test_a_branch_that_is_more_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match="branches on the value of a tensor"):
        capture(kind(), (torch.randn(8, 8),))


class MoreOfAMask(Experts):
    def mixed(self, x, p, chosen, out):
        for e in range(4):
            m = (chosen == e).any(-1)
            if m.sum() > 3:
                out[m] += self.experts[e](x[m]) * (p * (chosen == e)).sum(-1)[m, None]
        return out


def test_a_branch_on_how_many_rows_a_mask_has_is_checked_at_every_call() -> None:
    model, x = MoreOfAMask(), torch.randn(8, 8)
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([50.0, 0.0, 40.0, 0.0]))
    captured = capture(model, (x,))
    assert [way.kwargs["answer"] for way in captured.graph.ways] == [True, False, True, False]
    assert compare_with_eager(captured, model, (x,), {}).same
