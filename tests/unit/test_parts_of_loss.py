"""A step in microbatches trains by the mean of their losses: who loses something by it hears so."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.capture.in_parts import captured_in_parts
from autopar.comparison.parts_of_loss import difference_by_parts

LABELS = torch.tensor([1, -100, -100, -100, 2, 0, 3, 1])


class Net(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.body(x), labels)


def _contrast(out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out @ out.t(), torch.arange(len(out)))


def _balance(out: Tensor) -> Tensor:
    """As routers of experts are taught: products of means over the batch."""
    chosen = F.one_hot(out.topk(1).indices[:, 0], out.shape[1]).float().mean(0)
    return (chosen * out.softmax(1).mean(0)).sum()


SAME = {
    "mean over rows": lambda out, labels: F.cross_entropy(out, labels.clamp(min=0)),
    "rows that do not count": F.cross_entropy,
    "penalty": lambda out, labels: out.square().mean() + 3.0,
    "sum": lambda out, labels: F.cross_entropy(out, labels.clamp(min=0), reduction="sum"),
    "terms over rows and over labels": lambda out, labels: F.cross_entropy(out, labels) + out.square().mean(),
}
OTHER = {
    "rows compared with each other": _contrast,
    "a small part of it": lambda out, labels: F.cross_entropy(out, labels.clamp(min=0)) + 1e-2 * _balance(out),
}


def _said(loss: Any, dtype: torch.dtype = torch.float32) -> str:
    model, batch = Net(loss).to(dtype), (torch.randn(8, 6, dtype=dtype), LABELS)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    part = captured_in_parts(
        lambda example: capture(model, *example[:2]), (batch, {}, ()), 2, model
    )  # fmt: skip
    drawn = torch.random.get_rng_state()
    said = difference_by_parts(part, model, (batch, {}, ()), 2)
    assert model.training and model.body[2].training
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    return said


@pytest.mark.parametrize("name", SAME)
def test_a_mean_over_rows_is_the_same(name: str) -> None:
    assert _said(SAME[name]) == ""


@pytest.mark.parametrize("name", OTHER)
def test_another_loss_is_told_about(name: str) -> None:
    assert "as the mean of 2 microbatches" in _said(OTHER[name])


@pytest.mark.parametrize("name", SAME)
def test_a_mean_over_rows_is_the_same_in_double_precision(name: str) -> None:
    assert _said(SAME[name], torch.float64) == ""


def test_double_precision_explains_less() -> None:
    """Weights that take no gradient may be in single precision, as shares of rows mostly are."""
    said = _said(lambda out, labels: F.cross_entropy(out, labels.clamp(min=0)) + 1e-4 * _balance(out), torch.float64)
    whole, mean = re.findall(r"(\d\.\d+) (?:for the whole batch|as the mean)", said)
    assert whole != mean


def test_a_random_loss_is_not_judged() -> None:
    assert _said(lambda out, labels: (out * torch.rand_like(out)).sum()) == ""


def test_parallelize_warns() -> None:
    batch = (torch.randn(8, 6), LABELS)
    with pytest.warns(UserWarning, match="it is no mean over rows"):
        autopar.parallelize(Net(OTHER["rows compared with each other"]), 1, batch, microbatches=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = Net(SAME["penalty"])
        plain.body[1] = nn.Identity()
        autopar.parallelize(plain, 1, batch, microbatches=2)


def test_batch_norms_in_microbatches_are_told_of_once() -> None:
    batch = (torch.randn(8, 6), LABELS)
    with pytest.warns(UserWarning, match=r"batch norms \(1: 'body\.1'\) take statistics of one microbatch at a time"):
        pm = autopar.parallelize(Net(SAME["penalty"]), 1, batch, microbatches=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm.train_step(*batch)
        whole = autopar.parallelize(Net(SAME["penalty"]), 1, batch)
        whole.train_step(*batch)
    with pytest.warns(UserWarning, match="with 2 microbatches the numbers are other ones"):
        whole.train_step(*(torch.cat([x, x]) for x in batch))


def test_a_plan_has_what_parallelize_warns_of() -> None:
    batch = (torch.randn(8, 6), LABELS)
    planned = autopar.plan(Net(OTHER["rows compared with each other"]), "local-x1", batch, microbatches=2, stages=1)
    assert [note for note in planned.notes if "batch norms (1: 'body.1')" in note]
    assert [note for note in planned.notes if "it is no mean over rows" in note]
    whole = autopar.plan(Net(OTHER["rows compared with each other"]), "local-x1", batch, microbatches=1, stages=1)
    assert whole.notes == ()
