"""Models that read values of tensors in Python, as popular ones do: what is refused says the line and what to write."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar import capture, parallelize
from autopar.comparison import compare_with_eager
from autopar.errors import CaptureError, RunError

X = torch.randn(8, 4)


class Queue(nn.Module):
    """MoCo's queue of keys, with a pointer that is read, or computed with."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.encode, self.reads = nn.Linear(4, 4), reads
        self.register_buffer("queue", torch.randn(4, 32))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.encode(x)
        loss = (keys @ self.queue.clone()).square().mean()
        with torch.no_grad():
            if self.reads:
                at = int(self.pointer)
                self.queue[:, at : at + 8] = keys.T
                self.pointer[0] = (at + 8) % 32
            else:
                self.queue.index_copy_(1, (self.pointer + torch.arange(8)) % 32, keys.T)
                self.pointer.add_(8).remainder_(32)
        return loss


class Norm(nn.Module):
    def __init__(self, momentum: float | None = 0.1, again: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.again = nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=momentum), again

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: Any = checkpoint(self.part, x, use_reentrant=False) if self.again else self.part(x)
        return out.square().mean()


class Skip(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.layer, self.reads = nn.Linear(4, 4), reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.distributions.Bernoulli(torch.tensor([0.5])).sample()
        if torch.equal(drawn, torch.ones(1)) if self.reads else (drawn == torch.ones(1)).all():
            x = self.layer(x)
        return self.layer(x).square().mean()


class Masked(nn.Module):
    """torch's encoder, which reads a mask to see whether it is causal, unless it is told."""

    def __init__(self, is_causal: bool | None) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 1)
        self.is_causal = is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(2, 2).masked_fill(x[:2, :2] > 9.0, -1.0)
        return self.encoder(x.reshape(4, 2, 4), mask=mask, is_causal=self.is_causal).square().mean()


class Policy(nn.Module):
    """A policy gradient by torch.distributions, which look at their arguments unless they are told not to."""

    def __init__(self, checks: bool | None) -> None:
        super().__init__()
        self.layer, self.checks = nn.Linear(4, 3), checks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.distributions.Categorical(logits=self.layer(x), validate_args=self.checks)
        return -chosen.log_prob((x[:, 0] > 0).long()).mean() - 0.01 * chosen.entropy().mean()


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Queue(True), r"at .*test_refused_reading.py:\d+\n  a number that is read from a tensor(.|\n)*index_copy_"),
    ],
    ids=["a pointer"],
)
def test_what_is_read_is_refused_with_what_to_write(model: nn.Module, text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        capture(model, X)


@pytest.mark.parametrize(
    "model",
    [
        Queue(False), Norm(), Norm(None), Skip(False), Skip(True), Masked(False), Masked(None), Policy(False),
        Policy(None),
    ],
    ids=[
        "a pointer", "momentum", "no momentum", "equal", "torch.equal", "a mask", "a mask that is looked at",
        "a distribution", "a distribution that looks",
    ],
)  # fmt: skip
def test_what_is_to_be_written_instead_is_captured(model: nn.Module) -> None:
    assert compare_with_eager(capture(model, X), model, (X,), {}).same


def test_statistics_under_activation_checkpointing_are_refused_with_both_ways_out() -> None:
    model = Norm(again=True)
    text = r"counts every batch twice(.|\n)*pass recompute= to parallelize .*verify_capture=False"
    with pytest.raises(CaptureError, match=text):
        compare_with_eager(capture(model, X), model, (X,), {})


class Moved(nn.Module):
    """Has a layer in the precision that it wants (the router of Switch Transformers)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer = self.layer.to(self.dtype)
        return self.layer(x.to(self.dtype)).square().mean()


def test_a_module_that_is_moved_where_it_is() -> None:
    model = Moved(torch.float32)
    assert compare_with_eager(capture(model, X), model, (X,), {}).same


def test_a_module_whose_parameters_would_become_others() -> None:
    with pytest.raises(CaptureError, match=r"calls Linear.to\(torch.float64\), at test_refused_reading.py:\d+"):
        capture(Moved(torch.float64), X)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "gone"])
def test_a_norm_without_momentum_cannot_be_given_one_in_silence(kept: bool) -> None:
    model = Norm(None)
    module = parallelize(model, 1, X)
    if not kept:
        del model
        gc.collect()
    module.norm.momentum = None
    module(X)
    with pytest.raises(RunError, match=r"'norm.momentum' (is 0.1, and )?was None when the model was captured"):
        module.norm.momentum = 0.1
        module(X)
    module.norm.momentum = None
    module(X)
    assert int(module.norm.num_batches_tracked) == 2


class Folded(nn.Module):
    """A series that is folded by its strongest periods, as TimesNet does; they differ from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix = nn.Linear(4, 4), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        rows, length, width = x.shape
        strongest = torch.fft.rfft(x, dim=1).abs().mean((0, 2))[1:].topk(2).indices + 1
        folded = []
        for period in length // strongest.detach().numpy():
            y = x[:, : length // period * period].reshape(rows, length // period, period, width)
            folded.append(self.mix(y.permute(0, 3, 1, 2)).square().mean())
        return torch.stack(folded).sum()


class PerRow(nn.Module):
    """A number of rows, which depends on data, divided by another number that does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[x[:, 0] > 0]
        share = chosen.shape[0] // (x > 0).sum().item()
        return self.layer(x).square().mean() * share


@pytest.mark.parametrize(
    ("kind", "shape", "text"),
    [
        (Folded, (4, 12, 4), r"is computed with, at test_refused_reading.py:\d+: "),
        (PerRow, (8, 4), r"together with a size that depends on values too, at test_refused_reading.py:\d+: "),
    ],
)
def test_sizes_that_follow_from_data_are_refused_with_their_line(
    kind: type[nn.Module], shape: tuple[int, ...], text: str
) -> None:
    with pytest.raises(CaptureError, match=text):
        capture(kind(), (torch.randn(shape),))
