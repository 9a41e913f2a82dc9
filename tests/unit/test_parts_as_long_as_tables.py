"""Parts of a batch that are as long as something else: as a table, as one rank's rows, as one row."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.capture import capture
from autopar.capture.in_parts import captured_in_parts, in_parts_of
from autopar.capture.row_flows import MEAN

CLASSES = 4


class Net(nn.Module):
    """A layer [b 8] -> [b 4], and what ``give`` makes of the result."""

    def __init__(self, give: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.give = nn.Linear(8, CLASSES), give

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.give(self.first(x), *others)


def _batch(rows: int, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, 8, dtype=torch.float64), torch.randint(0, CLASSES, (rows,)), *others


def _trains_as_eager_mode(model: nn.Module, batches: list[tuple[torch.Tensor, ...]], **options: Any) -> None:
    model = model.double()
    eager = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, batches[0], **options)
    for number, batch in enumerate(batches):
        for p in (*pm.parameters(), *eager.parameters()):
            p.grad = None
        torch.manual_seed(number)
        loss = pm.train_step(*batch)
        torch.manual_seed(number)
        whole = eager(*batch)
        whole.backward()
        torch.testing.assert_close(loss, whole.detach(), rtol=1e-9, atol=1e-11)
        for mine, theirs in zip(pm.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-11)


def _mean_by_rows(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, labels, reduction="sum") / len(out)


@pytest.mark.parametrize("ranks", [2, 4])
def test_as_many_microbatches_as_ranks_divide_by_the_rows_of_the_batch(ranks: int) -> None:
    """A microbatch has as many rows as one rank then, and so the same number in its graph."""
    model = Net(_mean_by_rows).double()

    def take(call: Any) -> Any:
        return capture(model, *call[:2])

    one = captured_in_parts(take, (_batch(4), {}, ()), 2, model, ranks=ranks)
    assert in_parts_of(one).found.loss == MEAN


def test_a_loss_that_is_another_graph_for_the_whole_batch_divides_by_its_rows() -> None:
    def give(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return _mean_by_rows(out if len(out) > 4 else out.tanh().atanh(), labels)

    for microbatches in (2, 4):
        _trains_as_eager_mode(Net(give), [_batch(8), _batch(8), _batch(5)], microbatches=microbatches)


def test_weights_of_classes_as_many_as_the_rows_of_a_microbatch() -> None:
    def give(out: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, labels, weight=weight)

    weights = [torch.rand(CLASSES, dtype=torch.float64) for _ in range(3)]
    batches = [_batch(rows, weight) for rows, weight in zip((8, 8, 5), weights, strict=True)]
    _trains_as_eager_mode(Net(give), batches, microbatches=2)


def test_a_table_as_long_as_the_batch_of_all_ranks_is_whole() -> None:
    model = Net(lambda out, labels, table: F.cross_entropy(out, labels) + (table * out[0, 0]).pow(2).mean()).double()

    def take(call: Any) -> Any:
        return capture(model, *call[:2])

    one = captured_in_parts(take, (_batch(4, torch.randn(8, dtype=torch.float64)), {}, ()), 2, model, ranks=2)
    assert [node.out.shape for _, node in one.graph.of_kind("input")][:3] == [(4, 8), (4,), (8,)]


def test_labels_that_forward_draws_are_told_of() -> None:
    """How many there are in the batch is not known ahead of a step: each microbatch divides by its own."""

    def give(out: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, torch.where(torch.rand(len(out)) < 0.3, out.argmax(-1), -100))

    with pytest.warns(UserWarning, match="it is random, so the two are not compared"):
        pm = autopar.parallelize(Net(give), 1, (torch.randn(64, 8),), microbatches=2)
    assert torch.isfinite(pm.train_step(torch.randn(64, 8)))


def test_rows_that_are_mixed_by_random_numbers_are_told_of() -> None:
    class Mixed(Net):
        def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            share = torch.rand(len(x), 1)
            return self.give(self.first(share * x + (1 - share) * x.roll(1, 0)), *others)

    batch = torch.randn(8, 8), torch.randint(0, CLASSES, (8,))
    with pytest.warns(UserWarning, match=r"it is random, so the two are not compared.*at roll"):
        autopar.parallelize(Mixed(F.cross_entropy), 1, batch, microbatches=2)


def test_noise_of_rows_alone_is_not_told_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        autopar.parallelize(
            Net(lambda out: (out + torch.randn_like(out)).pow(2).mean()), 1, (torch.randn(8, 8),), microbatches=2
        )


class Recurrent(nn.Module):
    """Noise with the rows in another dim than the first, and a number for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x * torch.rand(1, dtype=x.dtype))[0]
        return out.pow(2).mean()


def test_a_last_microbatch_of_one_row_draws_what_that_row_draws() -> None:
    batches = [(torch.randn(rows, 6, 8, dtype=torch.float64),) for rows in (8, 5, 8)]
    _trains_as_eager_mode(Recurrent(), batches, microbatches=2, random="torch")
    _trains_as_eager_mode(Recurrent(), batches, microbatches=8, random="torch")
