"""Loops over experts as people write them in plain torch: rows that a mask selects."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cut_experts import cut_equally
from torch import nn

import autopar
from autopar.capture.graph.expert_counts import number_of_choices
from autopar.errors import CaptureError
from autopar.rules.experts.expert_block import BLOCK

HIDDEN, EXPERTS = 8, 4
Mix = Callable[["Experts", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Experts(nn.Module):
    """Tokens by one of the loops below; the router prefers one expert, so that another has no rows."""

    def __init__(self, mix: Mix, of_each: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.mix, self.of_each = mix, of_each
        with torch.no_grad():
            self.gate.weight[0] = 0.0
            self.gate.weight[1:3] *= 0.01

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        scores = self.gate(tokens) - torch.tensor([100.0, 0, 0, 0], dtype=x.dtype)  # the first is never picked
        weights, picked = F.softmax(scores, -1).topk(self.of_each, -1)
        return F.mse_loss(self.mix(self, tokens, weights, picked).view_as(x), y)


def by_nonzero(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        places = (picked == e).nonzero()
        if places.numel() == 0:
            continue
        rows, which = places[:, 0], places[:, 1]
        out.index_add_(0, rows, m.experts[e](x[rows]) * weights[rows, which].unsqueeze(-1))
    return out


def by_where(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows, which = torch.where(picked == e)
        out[rows] += weights[rows, which, None] * expert(x[rows])
    return out


def by_masks(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = picked[:, 0] == e
        if mask.any():
            out[mask] = expert(x[mask]) * weights[mask]
    return out


def by_counts(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = picked[:, 0] == e
        if mask.sum() > 0:
            out[mask] += expert(x[mask]).mul_(weights[mask])
    return out


def as_mixtral_did(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    mask = F.one_hot(picked, num_classes=EXPERTS).permute(2, 1, 0)
    for e in range(EXPERTS):
        which, rows = torch.where(mask[e])
        current = x[None, rows].reshape(-1, x.shape[-1])
        out.index_add_(0, rows, (m.experts[e](current) * weights[rows, which, None]).to(x.dtype))
    return out


def with_a_factor(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = picked[:, 0] == e
        out[mask] = expert(x[mask]) * (e + 1)
    return out


def with_a_factor_if_any(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = (picked == e).any(-1)
        if mask.any():
            out[mask] = expert(x[mask]) * (e + 1)
    return out


def reading_between(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows, which = torch.where(picked == e)
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, which, None])
        weights = weights + out.mean()
    return out


UNALIKE = ("with_a_factor", "reading_between")
LOOPS: dict[str, tuple[Mix, int]] = {
    "nonzero": (by_nonzero, 2), "where": (by_where, 2), "masks": (by_masks, 1), "counts": (by_counts, 1),
    "mixtral": (as_mixtral_did, 2), "with_a_factor": (with_a_factor, 1), "reading_between": (reading_between, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_loops_over_experts(name: str) -> None:
    model = Experts(*LOOPS[name]).double()
    x, y = (torch.randn(4, 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    captured = autopar.capture(model, (x, y))
    assert not [node for node in captured.graph.nodes if node.target.startswith("way")], "a branch that is none"
    assert sum(node.target == BLOCK for node in captured.graph.nodes) == (name not in UNALIKE)
    cut_equally(model, (x, y), "data=2,tensor=2", captured=captured)


def test_each_loop_stands_in_its_own_module() -> None:
    """By which constraints, loads and pins name it."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Experts(*LOOPS["where"]) for _ in range(2))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x, y) + self.layers[1](x, y)

    x, y = (torch.randn(4, 4, HIDDEN) for _ in range(2))
    nodes = autopar.capture(Layers(), (x, y)).graph.nodes
    assert [node.module for node in nodes if node.target == BLOCK] == ["layers.0", "layers.1"]


def test_rows_of_a_loop_travel_to_their_experts() -> None:
    x, y = (torch.randn(4, 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    cut_equally(Experts(*LOOPS["where"]).double(), (x, y), "expert=2", {"*expert_block*": {"expert": "travel"}})


def across(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = picked[:, 0] == e
        out[mask] = F.softmax(expert(x[mask]), 0)
    return out


def counted(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = picked[:, 0] == e
        chosen = x[mask]
        out[mask] = expert(chosen) * chosen.shape[0]
    return out


def from_a_half(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows = expert(x[picked[:, 0] == e])
        rows[:, :2].mul_(2)
        out[picked[:, 0] == e] = rows
    return out


@pytest.mark.parametrize("mix", [across, counted, from_a_half])
def test_what_is_not_done_row_by_row_is_refused(mix: Mix) -> None:
    x = torch.randn(4, 4, HIDDEN)
    with pytest.raises(CaptureError, match=r"rows that a mask selects.*test_selected_rows.py:\d+"):
        autopar.capture(Experts(mix, 1), (x, x))



def counting(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out, used = torch.zeros_like(x), 0
    for e, expert in enumerate(m.experts):
        mask = picked[:, 0] == e
        if mask.any():
            out[mask] = expert(x[mask]) * weights[mask]
            used = used + 1
    return out * used


def counting_sizes(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out, used = torch.zeros_like(x), 0
    for e, expert in enumerate(m.experts):
        rows = (picked[:, 0] == e).nonzero()[:, 0]
        if rows.numel() == 0:
            continue
        out.index_add_(0, rows, expert(x[rows]) * weights[rows])
        used += 1
    return out * used


def noting(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out, used = torch.zeros_like(x), torch.zeros(EXPERTS, dtype=x.dtype)
    for e, expert in enumerate(m.experts):
        mask = picked[:, 0] == e
        if mask.any():
            out[mask] = expert(x[mask]) * weights[mask]
            used[e] = 1
    return out * used.sum()


@pytest.mark.parametrize("mix", [counting, noting])
def test_a_branch_that_does_more_than_its_rows_is_checked(mix: Mix) -> None:
    """The first expert has no rows in the example: its branch is not entered. Others without are an error."""
    model = Experts(mix, 1).double()
    x, y = (torch.randn(4, 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    pm = autopar.parallelize(copy.deepcopy(model), 1, (x, y))
    assert torch.allclose(pm(x, y), model(x, y), rtol=1e-12)
    with pytest.raises(autopar.RunError, match="branches on data"):
        pm(x[:1, :1].expand_as(x), y)  # all rows go to one expert


def test_a_branch_on_the_number_of_rows_that_does_more_is_refused() -> None:
    x, y = (torch.randn(4, 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    with pytest.raises(CaptureError):
        autopar.capture(Experts(counting_sizes, 1).double(), (x, y))


@pytest.mark.parametrize("name", ["masks", "nonzero", "where", "with_a_factor_if_any"])
def test_experts_without_rows_have_no_gradient_where_they_are_not_run(name: str) -> None:
    mix, of_each = {**LOOPS, "with_a_factor_if_any": (with_a_factor_if_any, 1)}[name]
    model = Experts(mix, of_each).double()
    alone = copy.deepcopy(model)
    x, y = (torch.randn(4, 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    pm = autopar.parallelize(model, 1, (x, y))
    for args in ((x, y), (x[:1, :1].expand_as(x), y)):  # in the second all rows go to as many experts as one needs
        for each in (pm, alone):
            each.zero_grad()
            each(*args).backward()
        mine, theirs = ({n: p.grad for n, p in m.named_parameters()} for m in (pm, alone))
        assert [n for n, g in mine.items() if g is None] == [n for n, g in theirs.items() if g is None]
        assert (name == "where") == all(g is not None for g in theirs.values())
        assert all(g is None or torch.allclose(g, theirs[n], rtol=1e-9) for n, g in mine.items())


def test_a_parameter_that_is_read_beside_its_rows_has_a_gradient() -> None:
    class Decayed(Experts):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            decay = self.experts[0].up.weight.square().sum()  # type: ignore[union-attr, operator]
            return super().forward(x, y) + decay

    x, y = (torch.randn(4, 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    pm = autopar.parallelize(Decayed(by_masks, 1).double(), 1, (x, y))
    pm(x, y).backward()
    first = {n: p.grad is None for n, p in pm.named_parameters() if n.startswith("experts.0")}
    assert [n for n, none in first.items() if not none] == ["experts.0.up.weight"]


class CountingExpert(Expert):
    def __init__(self) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls += 1
        return super().forward(x)


class CountingExperts(Experts):
    """Counts the calls of each expert twice: in the expert, and in a method that the loop calls."""

    def __init__(self, mix: Mix, of_each: int) -> None:
        super().__init__(mix, of_each)
        self.runs: torch.Tensor
        self.experts = nn.ModuleList([CountingExpert() for _ in range(EXPERTS)])
        self.register_buffer("runs", torch.zeros(EXPERTS))

    def run(self, e: int, x: torch.Tensor) -> torch.Tensor:
        self.runs[e] += 1
        return self.experts[e](x)  # type: ignore[no-any-return]


def by_a_method(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = picked[:, 0] == e
        if mask.any():
            out[mask] = m.run(e, x[mask])  # type: ignore[operator]
        m.runs[e] += 100.0  # type: ignore[operator, index]
    return out


def by_a_method_of_rows(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """The question is the number of rows, of which there is no node in the graph."""
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows = (picked[:, 0] == e).nonzero()[:, 0]
        m.runs[e] += 100.0  # type: ignore[operator, index]
        if rows.numel() == 0:
            continue
        y = m.run(e, x[rows])  # type: ignore[operator]
        out.index_add_(0, rows, y)
    return out


def within_another_if(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        rows = (picked[:, 0] == e).nonzero()[:, 0]
        if m.training:
            if rows.numel() == 0:
                continue
        out.index_add_(0, rows, expert(x[rows]))
    return out


@pytest.mark.parametrize(("mix", "of_each"), [
    (by_a_method, 1), (by_a_method_of_rows, 1), (by_nonzero, 2), (within_another_if, 1)
])
def test_what_an_expert_writes_is_written_where_it_has_rows(mix: Mix, of_each: int) -> None:
    model = CountingExperts(mix, of_each).double()
    alone = copy.deepcopy(model)
    x, y = (torch.randn(4, 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    pm = autopar.parallelize(model, 1, (x, y))
    for args in ((x, y), (x[:1, :1].expand_as(x), y)):
        assert torch.allclose(pm(*args), alone(*args), rtol=1e-12)
    mine, theirs = dict(pm.named_buffers()), dict(alone.named_buffers())
    assert all(torch.equal(mine[name], buffer) for name, buffer in theirs.items())
    assert theirs["experts.0.calls"] == 0 and any(b == 1 for n, b in theirs.items() if n.endswith("calls"))


def averaging(m: Experts, x: torch.Tensor, weights: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = picked[:, 0] == e
        rows = expert(x[mask])
        with torch.no_grad():
            m.runs[e].add_(rows.abs().mean())  # type: ignore[index, operator]
        out[mask] = rows
    return out


def test_statistics_across_rows_are_refused_in_regions_without_gradients_too() -> None:
    x = torch.randn(4, 4, HIDDEN)
    with pytest.raises(CaptureError, match=r"mean.* looks across rows that a mask selects"):
        autopar.capture(CountingExperts(averaging, 1), (x, x))


def test_the_best_of_all_elements_is_none_of_a_dim() -> None:
    """``x.argmax()`` counts through all elements; ``x.argmax(-1)`` through those of a row."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 4)
    aten = torch.ops.aten
    of_all, of_rows = (graph.call_function(aten.argmax.default, args) for args in ((x,), (x, -1)))
    assert number_of_choices(of_all) is None and number_of_choices(of_rows) == 4
