"""What a row of the batch draws depends on its place in the batch, not on the number of microbatches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.rules.families.sharded_random import kept, seed_at, uniform

X, Y = (torch.randn(4, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in (0, 1))


class Given(nn.Module):
    """A layer, and what is drawn behind it."""

    def __init__(self, drawing: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drawing = nn.Linear(16, 16).double(), drawing

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.drawing(self.layer(x)), y)


class Labelled(Given):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.drawing(self.layer(x)).transpose(1, 2), y, ignore_index=-1)


def several(h: Tensor) -> Tensor:
    """Rows in the first dim, in the second, in one dim with the length, and none for a mask of all of them."""
    h = F.dropout(h, 0.2) * torch.rand(len(h), dtype=h.dtype)[:, None, None]
    h = F.dropout(h.transpose(0, 1), 0.1).transpose(0, 1)
    h = h * torch.linspace(0, 1, 10, dtype=h.dtype)[torch.randint(0, 10, (len(h),))][:, None, None]
    h = h * torch.bernoulli(torch.full((6, 16), 0.5, dtype=h.dtype))
    return F.dropout(h.reshape(-1, 16), 0.2).view_as(h)


def recurrent(h: Tensor) -> Tensor:
    state, states = torch.zeros_like(h[:, 0]), []
    for t in range(h.shape[1]):
        state = F.dropout(torch.tanh(state + h[:, t]), 0.3)
        states.append(state)
    return torch.stack(states, 1)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "several": several,
    "recurrent": recurrent,
    "channels": lambda h: F.alpha_dropout(F.dropout1d(h, 0.3), 0.2, True),
    "gumbel": lambda h: F.gumbel_softmax(h, 0.5),
    "distributions": lambda h: h * torch.distributions.Bernoulli(0.3).sample(h.shape)
    + torch.distributions.Normal(h.detach(), 1.0).rsample(),
    "categories": lambda h: h + torch.distributions.Categorical(logits=h.detach()).sample()[..., None],
}


def first_loss(drawing: Callable[[Tensor], Tensor], k: int) -> float:
    pm = autopar.parallelize(copy.deepcopy(Given(drawing)), 1, (X, Y), microbatches=k)
    torch.manual_seed(7)
    return float(pm.train_step(X, Y))


@pytest.mark.parametrize("name", CASES)
def test_microbatches_do_not_change_what_is_drawn(name: str) -> None:
    of_one, *others = (first_loss(CASES[name], k) for k in (1, 2, 4))
    assert others == pytest.approx([of_one] * 2, rel=1e-12)


@pytest.mark.parametrize("random", ["sharded", "torch"])
def test_totals_of_the_batch_do_not_change_what_is_drawn(random: str) -> None:
    """A loss of labels reads their number in the whole batch, an input more than in one microbatch."""
    labels = (Y[..., 0] * 4).long().clamp(-1, 3)
    losses = []
    for k in (1, 2, 4):
        model = Labelled(lambda h: F.dropout(h, 0.3))
        pm = autopar.parallelize(model, 1, (X, labels), microbatches=k, random=random)
        torch.manual_seed(7)
        losses.append(float(pm.train_step(X, labels)))
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-12)


def test_rows_that_microbatches_do_not_divide() -> None:
    """A last microbatch with fewer rows is a program of its own, and draws what its rows draw in the whole batch."""
    losses = []
    x, y = torch.cat([X, X[:1]]), torch.cat([Y, Y[:1]])
    for k in (1, 2):
        pm = autopar.parallelize(Given(several), 1, (x, y) if k == 1 else (X, Y), microbatches=k)
        torch.manual_seed(7)
        losses.append(float(pm.train_step(x, y)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_a_draw_whose_rows_are_not_known_is_told_of() -> None:
    with pytest.warns(UserWarning, match="randperm.*each microbatch draws numbers of its own"):
        first_loss(lambda h: h[:, torch.randperm(6)][torch.randperm(len(h))], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        first_loss(lambda h: h[:, torch.randperm(6)], 1)


def test_where_rows_are() -> None:
    def drawn(h: Tensor) -> Tensor:
        h = h + torch.randn(6, len(h), 16, dtype=h.dtype).transpose(0, 1)
        return h * torch.rand(16, dtype=h.dtype) + F.dropout(h.flatten(0, 1), 0.5).view_as(h)

    graph = capture(Given(drawn), (X, Y)).graph
    rows = {node.name: node.rows for node in graph.nodes if node.target.startswith(("aten.rand", "aten.dropout"))}
    assert list(rows.values()) == [((1, 1, 4, 1),), (), ((0, 1, 4, 6),)]


def test_microbatches_of_several_ranks_rows() -> None:
    """Where ranks have rows of their own, a microbatch has some of each: 0 1 4 5, and 2 3 6 7."""
    seed, device = torch.tensor(5), torch.device("cpu")
    drawn = uniform(seed, (3, ((0, 1, 8, 1),)), (8, 5), ((), ()), device, torch.float64)
    for first, rows in ((0, [0, 1, 4, 5]), (2, [2, 3, 6, 7])):
        part = uniform(seed_at(seed, first, 2, 4), (3, ((0, 1, 4, 1),)), (4, 5), ((), ()), device, torch.float64)
        assert torch.equal(part, drawn[rows])


@pytest.mark.parametrize("shape", [(5, 24), (24, 5), (24,), (5, 24, 2)])
def test_a_row_inside_of_a_dim(shape: tuple[int, ...]) -> None:
    """Of [2 groups, 4 rows, length 3] in one dim."""
    seed, device, d = torch.tensor(5), torch.device("cpu"), shape.index(24)
    shards = ((),) * len(shape)
    whole = kept(0.5, seed, (3, ((d, 2, 4, 3),)), shape, shards, device)
    cut = tuple(12 if n == 24 else n for n in shape)
    parts = [kept(0.5, seed_at(seed, k, 2, 2), (3, ((d, 2, 2, 3),)), cut, shards, device) for k in (0, 2)]
    together = torch.cat([part.unflatten(d, (2, 2, 3)) for part in parts], d + 1).flatten(d, d + 2)
    assert torch.equal(together, whole)
    assert 0.2 < whole.double().mean() < 0.8


class BesideATable(nn.Module):
    """Drops elements of a table that is as long as the batch: its rows are not those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:  # [b 4], [t 4] -> []
        return (self.dropout(self.linear(x)) @ self.dropout(table).t()).square().mean()


def test_a_table_as_long_as_the_batch_is_drawn_for_once() -> None:
    torch.manual_seed(1)
    batch = tuple(torch.randn(8, 4, dtype=torch.float64) for _ in range(2))
    losses = []
    for microbatches in (1, 2, 4):
        torch.manual_seed(0)
        pm = autopar.parallelize(BesideATable().double(), 1, batch, microbatches=microbatches)
        torch.manual_seed(5)
        losses.append(float(pm.train_step(*batch)))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)
