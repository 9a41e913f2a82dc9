"""What eval() does to operators that are told whether they are in training; see autopar.capture.evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from procs.in_turn import marked
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
@pytest.mark.parametrize("name", marked(
    [*MODELS, "dropout after the only layer"],
    ("lstm of two layers both ways", "gru", "rnn", "lstm with dropout between its layers",
     "batch norm without statistics"),
))  # fmt: skip
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


@pytest.mark.parametrize("kind", ["LSTM", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("GRU", "RNN"))])
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


class Counts(nn.Module):
    """Counts calls in both modes, and moves a centre in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = self.linear(x)
        if self.training:
            self.centre.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return (out - self.centre).square().mean()


@pytest.mark.parametrize("begins", [True, False])
def test_a_graph_of_eval_modes_own(begins: bool) -> None:
    """It is captured by the next call; both programs are kept."""
    x, model = torch.randn(4, 6), Counts().train(begins)
    reference = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, x)
    for mode in (True, False, True, False):
        pm.train(mode), reference.train(mode)
        torch.testing.assert_close(pm(x), reference(x))
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(pm.get_buffer(name), buffer)
    assert pm._autopar.programs is not None and pm._autopar.programs.captures == 1
    twin = copy.deepcopy(pm)
    twin.train(), reference.train()
    torch.testing.assert_close(twin(x), reference(x))


def test_a_graph_of_eval_modes_own_is_refused_where_calls_are_not_followed() -> None:
    pm = autopar.parallelize(Counts(), 1, torch.randn(4, 6), shapes="fixed")
    with pytest.raises(autopar.RunError, match=r"something else.*writes to 'calls'; parallelize model.eval"):
        pm.eval()
    assert pm.training


def test_eval_mode_that_cannot_be_captured_is_refused_at_once() -> None:
    class Prints(Counts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training and float(self.calls) > 2:
                return super().forward(x)
            return self.linear(x).square().mean()

    pm = autopar.parallelize(Prints(), 1, torch.randn(4, 6))
    with pytest.raises(autopar.RunError, match=r"cannot be captured in eval mode[\s\S]*test_eval_mode.py"):
        pm.eval()
    assert pm.training and pm(torch.randn(4, 6)).isfinite()


def test_modes_of_parts() -> None:
    """Dropout that stays on in eval mode, norms in eval mode in training; the whole's train() takes them along."""
    x, model = torch.randn(16, 6), nn.Sequential(nn.Dropout(0.5), Norms())
    reference = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, x)
    pm.eval()
    pm[0].train()
    assert len({pm(x).item() for _ in range(3)}) == 3 and not pm[1].first.training
    for module in (pm, reference):
        module.train()
        module[0].eval()
        module[1].second.eval()
    torch.testing.assert_close(pm(x), reference(x))
    assert pm[1].first.running_mean.any() and not pm[1].second.running_mean.any()
    pm.train()
    assert all(part.training for part in pm.modules())


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


def test_a_train_of_the_models_own_is_called() -> None:
    """Also where the modes that it sets were not those of parallelize."""
    x = torch.randn(4, 6)
    for model in (FrozenNorm(), FrozenNorm().train()):
        reference = copy.deepcopy(model)
        pm = autopar.parallelize(model, 1, x)
        for mode in (True, False, True):
            pm.train(mode)
            reference.train(mode)
            torch.testing.assert_close(pm(x), reference(x))
            assert [m.training for m in pm.modules()] == [m.training for m in reference.modules()]
        torch.testing.assert_close(pm.second.running_mean, reference.second.running_mean)
        assert not pm.first.running_mean.any()


class Counting(Norms):
    """A model with a ``train`` of its own that leaves the modes as torch's sets them, as transformers' models have."""

    def train(self, mode: bool = True) -> Counting:
        self.switched = mode
        super().train(mode)
        return self


class FreezesInTraining(Norms):
    def train(self, mode: bool = True) -> FreezesInTraining:
        super().train(mode)
        self.first.requires_grad_(False)
        return self


def test_what_a_train_of_the_models_own_sets_is_set() -> None:
    x = torch.randn(4, 6)
    pm = autopar.parallelize(Counting(), 1, x)
    pm.eval()
    assert pm.switched is False
    pm = autopar.parallelize(FreezesInTraining(), 1, x)
    pm.train()(x).backward()
    assert not pm.first.weight.requires_grad and pm.first.weight.grad is None and pm.second.weight.grad is not None


def test_parts_in_eval_mode_are_trained_by_train_as_on_the_model() -> None:
    x, model = torch.randn(4, 6), Norms()
    model.first.eval()
    reference = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, x)
    for step in range(2):
        torch.testing.assert_close(pm(x), reference(x), msg=f"step {step}")
        pm.train(), reference.train()
    torch.testing.assert_close(pm.first.running_mean, reference.first.running_mean)
