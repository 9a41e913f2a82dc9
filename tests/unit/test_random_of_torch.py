"""``random="torch"``: a program draws what the model draws in eager mode, or is refused by name."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.rules.families.torch_draws import WholeDraw

X, Y = (torch.randn(4, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in (0, 1))


class Given(nn.Module):
    def __init__(self, drawing: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drawing = nn.Linear(16, 16), drawing
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.drawing(self.layer(x)), y)


class Layers(nn.Module):
    """Layers of torch that draw, and a region under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.lstm = nn.LSTM(16, 16, 2, dropout=0.3, batch_first=True)
        self.drop = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.lstm(self.layer(x))[0]
        return F.mse_loss(torch.utils.checkpoint.checkpoint(self.drop, x, use_reentrant=False), y)


def dropouts(h: Tensor) -> Tensor:
    h = F.dropout(h.transpose(0, 1), 0.2).transpose(0, 1)
    h = F.dropout1d(F.alpha_dropout(h, 0.1, True), 0.3)
    return F.feature_alpha_dropout(F.dropout(h.reshape(-1, 16), 0.2).view_as(h), 0.2, True) + F.dropout(h, 1.0)


def noise(h: Tensor) -> Tensor:
    h = h * torch.rand(len(h), 1, 16, dtype=h.dtype) + torch.randn_like(h) * torch.rand((), dtype=h.dtype)
    h = h + torch.normal(h.detach(), 0.1) + torch.normal(0.0, 1.0, (len(h), 6, 16), dtype=h.dtype)
    h = h * torch.empty_like(h).uniform_(-1, 1) + torch.empty_like(h).normal_(0, 0.1)
    h = h + torch.empty_like(h).exponential_(2.0) + torch.empty_like(h).log_normal_(0.0, 0.5)
    return h + torch.empty_like(h).geometric_(0.4) + torch.empty_like(h).cauchy_().clamp(-1, 1)


def choices(h: Tensor) -> Tensor:
    h = h * torch.linspace(0, 1, 10, dtype=h.dtype)[torch.randint(2, 10, (len(h),))][:, None, None]
    h = h * torch.bernoulli(h.detach().sigmoid()) + torch.bernoulli(h.detach(), 0.3)
    h = h + torch.zeros_like(h).bernoulli_(0.4)
    weights = h.detach().sigmoid().flatten(0, 1)
    for replacement, n in ((True, 3), (False, 3), (True, 1)):
        h = h + torch.multinomial(weights, n, replacement).to(h.dtype).mean(-1).view(len(h), 6, 1)
    h = h + torch.distributions.Categorical(logits=h.detach()).sample()[..., None]
    return F.gumbel_softmax(h[:, torch.randperm(6)], 0.5)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropouts": lambda: Given(dropouts), "noise": lambda: Given(noise), "choices": lambda: Given(choices),
    "layers": Layers,
}  # fmt: skip


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_eager_modes_numbers(name: str, k: int) -> None:
    torch.manual_seed(7)
    eager = MODELS[name]()
    torch.manual_seed(7)
    wanted = [float(eager(X, Y).detach()) for _ in range(2)]
    stands = torch.get_rng_state()
    pm = autopar.parallelize(MODELS[name](), 1, (X, Y), random="torch", microbatches=k)
    torch.manual_seed(7)
    assert [float(pm.train_step(X, Y)) for _ in range(2)] == pytest.approx(wanted, rel=1e-9)
    assert torch.equal(torch.get_rng_state(), stands)


def test_in_eval_mode_and_in_other_shapes() -> None:
    """Eval mode draws what is drawn there; another number of rows and a copy draw what the model does."""
    model = Given(lambda h: F.dropout(h, 0.3, training=False) + torch.randn_like(h))
    drops = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4)).double()
    for pm, eager, given in (
        (autopar.parallelize(copy.deepcopy(model), 1, (X, Y), random="torch"), model, (X[:3], Y[:3])),
        (copy.deepcopy(autopar.parallelize(copy.deepcopy(drops), 1, X, random="torch")), drops, (X[:2],)),
    ):
        for training in (True, False, True):
            found: list[Tensor] = []
            for m in (pm, eager):
                torch.manual_seed(3)
                found += [m.train(training)(*given).detach(), torch.rand(2)]
            torch.testing.assert_close(found[0], found[2], rtol=1e-9, atol=1e-12)
            assert torch.equal(found[1], found[3])


class Skips(nn.Module):
    """Leaves its layer out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if torch.rand(()) < 0.5:
            x = self.layer(x)
        return F.mse_loss(self.layer(x), y)


def unused(h: Tensor) -> Tensor:
    torch.rand(5)
    return F.dropout(h, 0.2)


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "a branch": (Skips, {}, r"branches on a random number .*test_random_of_torch.py"),
    "Python's numbers": (lambda: Given(lambda h: h * random.random()), {}, r"draw 1 of 0 there is none, .*uniform_"),
    "a draw that nobody reads": (lambda: Given(unused), {}, r"draw 1 of 2 there is float32\[5\] by uniform_"),
    "an order of all rows": (
        lambda: Given(lambda h: h[torch.randperm(len(h))]), {"microbatches": 2}, "randperm.*it is not known",
    ),
    "buckets": (
        lambda: Given(lambda h: F.dropout(h, 0.2)), {"shapes": "buckets", "buckets": [(4, 6)]}, "goes with no buckets=",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:forward draws from random")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(what: str) -> None:
    make, options, pattern = REFUSED[what]
    with pytest.raises(AutoparError, match=pattern):
        autopar.parallelize(make(), 1, (X, Y), random="torch", **options)


def test_whole_draws_of_a_batch() -> None:
    """In the memory layout of a microbatch's draw, with the rows of the batch; not in a tensor with gaps."""
    draw = WholeDraw("normal_", (), (3, 2, 5), (5, 15, 1), "float64", ((1, 1, 2, 1),))
    whole = draw.of_batch(8)
    assert (whole.shape, whole.strides) == ((3, 8, 5), (5, 15, 1))
    assert draw.of_batch(None) is draw
    with pytest.raises(ValueError, match="part of a tensor"):
        draw._replace(strides=(5, 30, 1)).of_batch(8)
    with pytest.raises(ValueError, match="not known"):
        draw._replace(rows=None).of_batch(8)


@pytest.mark.parametrize("mode", ["sharded", "torch"])
def test_a_state_of_another_generator_is_told_of(mode: str) -> None:
    pm = autopar.parallelize(Given(dropouts), 1, (X, Y), random=mode)
    before = torch.get_rng_state()
    for other in (torch.tensor([7, 3]), torch.zeros(16, dtype=torch.uint8)):
        with pytest.warns(UserWarning, match="go on as torch's generator stands now"):
            pm.load_state_dict({**pm.state_dict(), "_extra_state": other})
    assert torch.equal(torch.get_rng_state(), before)
