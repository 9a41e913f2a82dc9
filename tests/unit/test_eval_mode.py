"""What eval() does to operators that are told whether they are in training; see autopar.capture.evaluation."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar


@pytest.fixture(autouse=True)
def alone():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Recurrent(nn.Module):
    """A recurrent layer [batch, time, 8], and the mean square of what a linear layer makes of its results."""

    def __init__(self, kind: str, n_layers: int, dropout: float = 0.0, both_ways: bool = False) -> None:
        super().__init__()
        self.rnn = getattr(nn, kind)(8, 6, n_layers, batch_first=True, dropout=dropout, bidirectional=both_ways)
        self.out = nn.Linear(12 if both_ways else 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0]).square().mean()


class Changed(nn.Module):
    """``change(x, self.training)`` behind a linear layer."""

    def __init__(self, change: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(8, 8), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self.linear(x), self.training).square().mean()


MODELS = {
    "lstm": lambda: Recurrent("LSTM", 1),
    "lstm of two layers both ways": lambda: Recurrent("LSTM", 2, both_ways=True),
    "gru": lambda: Recurrent("GRU", 2),
    "rnn": lambda: Recurrent("RNN", 1),
    "lstm with dropout between its layers": lambda: Recurrent("LSTM", 2, dropout=0.5),
    "gru with dropout between its layers, both ways": lambda: Recurrent("GRU", 3, dropout=0.5, both_ways=True),
    "alpha dropout": lambda: Changed(lambda x, training: F.alpha_dropout(x, 0.5, training)),
    "feature alpha dropout": lambda: Changed(lambda x, training: F.feature_alpha_dropout(x, 0.5, training)),
    "instance norm": lambda: nn.Sequential(nn.InstanceNorm1d(5, track_running_stats=True), Recurrent("LSTM", 1)),
    "batch norm without statistics": lambda: nn.Sequential(
        nn.BatchNorm1d(5, track_running_stats=False), Recurrent("GRU", 1)
    ),
}


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.parametrize("name", [*MODELS, "dropout after the only layer"])
def test_eval_mode_is_the_models(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]() if name in MODELS else Recurrent("LSTM", 1, dropout=0.5)
    x, other = torch.randn(4, 5, 8), torch.randn(3, 5, 8)
    reference = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, x)
    pm(x).backward()
    reference(x)  # statistics of batches are counted alike
    pm.eval(), reference.eval()
    with torch.no_grad():
        for batch in (x, other):
            torch.testing.assert_close(pm(batch), reference(batch))
    pm.train()
    assert torch.isfinite(pm(x))


@pytest.mark.parametrize("kind", ["dropout", "alpha_dropout", "attention"])
def test_dropout_that_ignores_the_mode_stays_on(kind: str) -> None:
    """As it does in the model: nothing in ``F.dropout(x, 0.5)`` says whether the model is in training."""

    def drop(x: torch.Tensor, training: bool) -> torch.Tensor:
        if kind == "attention":
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return getattr(F, kind)(x, 0.5, True)

    torch.manual_seed(0)
    x = torch.randn(4, 5, 8)
    pm = autopar.parallelize(nn.Sequential(nn.Dropout(0.5), Changed(drop)), 1, x)
    pm.eval()
    with torch.no_grad():
        assert len({pm(x).item() for _ in range(4)}) > 1


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_dropout_between_recurrent_layers(kind: str) -> None:
    """In training: with a dropout that drops nothing it is torch's, with another it draws anew in each call."""
    torch.manual_seed(0)
    model = Recurrent(kind, 3, dropout=1e-12, both_ways=True).double()
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    reference = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, x)
    loss, wanted = pm(x), reference(x)
    loss.backward(), wanted.backward()
    torch.testing.assert_close(loss, wanted)
    gradients = dict(pm.named_parameters())
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad)
    drawing = autopar.parallelize(Recurrent(kind, 2, dropout=0.5).double(), 1, x)
    assert len({drawing(x).item() for _ in range(4)}) == 4


class Norms(nn.Module):
    """Two batch norms behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.first, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.linear(x)).tanh()).square().mean()


class FrozenNorm(Norms):
    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.first.eval()
        return self


def said_by_train(pm: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pm.train()
        pm.train()
    return [str(w.message) for w in caught if "train()" in str(w.message)]


def test_a_train_of_the_models_own_is_called_before_parallelize_or_missed_aloud() -> None:
    x = torch.randn(4, 6)
    [said] = said_by_train(autopar.parallelize(FrozenNorm(), 1, x))
    assert "FrozenNorm.train() of the model is not called" in said and "before parallelize" in said
    model = FrozenNorm().train()
    reference = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, x)
    assert said_by_train(pm) == []
    pm.eval()
    for step in range(2):
        pm.train()
        reference.train()
        torch.testing.assert_close(pm(x), reference(x), msg=f"step {step}")
    torch.testing.assert_close(pm.second.running_mean, reference.second.running_mean)
    assert not pm.first.running_mean.any()


def test_parts_that_stay_in_eval_mode_are_told_of_once() -> None:
    x, model = torch.randn(4, 6), Norms()
    assert said_by_train(autopar.parallelize(model, 1, x)) == []
    model.first.eval()
    pm = autopar.parallelize(model, 1, x)
    [said] = said_by_train(pm)
    assert said.startswith("train(): 'first' stay in eval mode") and "model.train() before parallelize" in said
    assert said_by_train(pm) == []
