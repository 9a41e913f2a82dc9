"""Calls that are padded to one of a few shapes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.errors import AutoparError, CaptureError, RunError

SIZES = [(4, 6), (2, 12)]


class Reader(nn.Module):
    """A small language model; what it is refused for can be asked for."""

    def __init__(self, causal: bool = True, ignored: int | None = -100, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.causal, self.ignored = causal, ignored
        self.embed, self.places = nn.Embedding(11, 8), nn.Embedding(12, 8)
        self.qkv, self.up, self.head = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 11)
        self.norm = nn.BatchNorm1d(16) if norm else nn.LayerNorm(16)
        self.drop = nn.Dropout(0.0)
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        h = self.embed(x) + self.places(torch.arange(x.shape[1]))
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        h = self.up(h).relu()
        logits = self.head(self.drop(self.norm(h.flatten(0, 1)).view_as(h)))
        if labels is None:
            return logits
        if self.ignored is None:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(min=0)), logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=self.ignored), logits


def words(rows: int, length: int, number: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, (rows, length), generator=torch.Generator().manual_seed(100 * number + rows + length))


def spread(model: nn.Module, example: Any, **options: Any) -> Any:
    return autopar.parallelize(model, 1, example, shapes="buckets", buckets=SIZES, **options)


@pytest.mark.parametrize("ignored", [-100, -1])
def test_padded_calls_train_as_on_one_device(ignored: int) -> None:
    model = Reader(ignored=ignored)
    alone = copy.deepcopy(model)
    example = words(3, 5)
    pm = spread(model, {"x": example, "labels": example})  # one tensor, padded in two ways
    for number, size in enumerate([(4, 6), (3, 5), (1, 12), (2, 7), (4, 1)]):
        x = words(*size, number)
        labels = torch.where(x == 3, ignored, x)
        (loss, logits), (wanted, wanted_logits) = pm(x, labels=labels), alone(x, labels)
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
        torch.testing.assert_close(logits, wanted_logits, rtol=1e-12, atol=1e-12)
        (loss + logits.square().mean()).backward()
        (wanted + wanted_logits.square().mean()).backward()
        for name, parameter in pm.named_parameters():
            torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, rtol=1e-10, atol=1e-12)
    assert pm._autopar.programs.captures == 1  # one program for each bucket
    x = words(3, 4)
    torch.testing.assert_close(pm(x), alone(x), rtol=1e-12, atol=1e-12)
    twin = copy.deepcopy(pm)
    torch.testing.assert_close(twin(x), alone(x), rtol=1e-12, atol=1e-12)
    assert twin._autopar.programs.captures == 0  # padded to the bucket whose program it began with
    loss = pm.train_step(words(3, 9)[:2], words(2, 9))
    torch.testing.assert_close(loss, alone(words(3, 9)[:2], words(2, 9))[0].detach(), rtol=1e-12, atol=0)


def test_microbatches_of_padded_calls_count_by_their_labels() -> None:
    model = Reader()
    alone = copy.deepcopy(model)
    pm = spread(model, (words(4, 6), words(4, 6)), microbatches=2)
    for rows in (3, 2, 1):  # the second microbatch has one row, and then none that counts
        x, y = words(rows, 5), words(rows, 5, 1)
        alone.zero_grad()
        pm.zero_grad()
        loss, wanted = pm.train_step(x, y), alone(x, y)[0]
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=0)
        for name, parameter in pm.named_parameters():
            torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, rtol=1e-10, atol=1e-12)


def test_a_loss_outside_sees_no_padding() -> None:
    model = Reader()
    alone = copy.deepcopy(model)
    pm = spread(model, (words(3, 5),))
    x = words(3, 4)
    assert pm(x).shape == (3, 4, 11)
    pm(x).square().mean().backward()
    alone(x).square().mean().backward()
    for name, parameter in pm.named_parameters():
        torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, rtol=1e-10, atol=1e-12)


REFUSED = {
    "attention to all": (Reader(causal=False), "takes padded positions for others"),
    "a loss over all rows": (Reader(ignored=None), r"changes the loss: .* and .* padded"),
    "statistics of the batch": (Reader(norm=True), r"batch norms \(norm\) take statistics of padded rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_do_not_bear_padding_are_refused(name: str) -> None:
    model, text = REFUSED[name]
    with pytest.raises(CaptureError, match=text):
        spread(model, (words(3, 5), words(3, 5)))


def test_calls_that_fit_no_bucket() -> None:
    pm = spread(Reader(), (words(3, 5),))
    with pytest.raises(RunError, match=r"a call of 3 rows of length 7 fits none of the buckets \(2 x 12, 4 x 6\)"):
        pm(words(3, 7))
    with pytest.raises(RunError, match=r"fits none of the buckets"):
        spread(Reader(), (words(5, 5),))
    with pytest.raises(AutoparError, match="shapes is 'any' and buckets has 1 shapes"):
        autopar.parallelize(Reader(), 1, (words(3, 5),), buckets=[(4, 6)])
