"""Branches on data: the way of the example is followed, and a flag goes up where a call would take another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import Captured, capture
from autopar.capture.microbatches import taken_of_batch
from autopar.comparison import compare_with_eager
from autopar.comparison.in_process_ranks import run_step
from autopar.comparison.program_vs_eager import inputs_of, one_device, state_of
from autopar.errors import CaptureError, RunError
from autopar.lower.emit import lower
from autopar.runtime.stages.branch_checks import WaysTaken
from autopar.words.graph import WAY


class Looking(nn.Module):
    """Looks at its labels, at what its layers make, and at numbers that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4))
        self.head, self.calls = nn.Linear(8, 10), 0

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if labels.max() >= 10:
            raise ValueError("labels must be below 10")
        assert (ids >= 0).all()
        torch._check(ids.max().item() < 10)
        h = self.embed(ids) * scale
        for layer in self.layers:
            h = layer(h)
            if (h > 100).any():
                h = h.clamp(-100, 100)
        if 0 < labels.min().item() + 1 and not torch.equal(h, h + 1):
            h = h * 2
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def batch(seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 10, (2, 5), generator=g)
    return ids, ids.roll(1, 1), torch.tensor(scale)


def flags(captured: Captured, model: nn.Module, args: Any) -> dict[str, bool]:
    """Which are up after a call, by their lines."""
    graph, plan = captured.graph, one_device(captured.graph)
    weights, buffers = state_of(captured, model)
    done = run_step(graph, plan, lower(graph, plan), weights, buffers, inputs_of(captured, args, {}))
    return {node.name: bool(done.buffers[node.name]) for node in graph.ways}


def test_the_way_of_the_example_is_followed() -> None:
    torch.manual_seed(0)
    model = Looking()
    before = copy.deepcopy(model.state_dict())
    captured = capture(model, batch())
    assert [way.kwargs["answer"] for way in captured.graph.ways] == [False, True, True, *[False] * 4, True, False]
    assert all(way.source.startswith("test_ways.py:") for way in captured.graph.ways)
    assert compare_with_eager(captured, model, batch(1), {}).same
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_flag_goes_up_where_a_batch_takes_another_way() -> None:
    torch.manual_seed(0)
    model = Looking()
    captured = capture(model, batch())
    assert not any(flags(captured, model, batch(1)).values())
    up = [name for name, is_up in flags(captured, model, batch(1, 1e6)).items() if is_up]
    assert up == [f"{WAY}{n}" for n in (3, 4, 5, 6)]


def test_an_example_that_takes_the_other_way_is_followed_too() -> None:
    model = Looking()
    captured = capture(model, batch(scale=1e6))
    # the layers behind the first stay small
    assert sum(node.target == "aten.clamp.default" for node in captured.graph.nodes) == 1
    assert compare_with_eager(captured, model, batch(1, 1e6), {}).same


def test_without_values_the_way_that_raises_nothing_is_taken() -> None:
    model = Looking().to("meta")
    captured = capture(model, [x.to("meta") for x in batch()])
    assert [way.kwargs["answer"] for way in captured.graph.ways][:3] == [False, True, True]


def test_layers_that_go_different_ways_are_not_taken_for_one() -> None:
    class Layer(nn.Module):
        def __init__(self, bias: float) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            nn.init.constant_(self.one.bias, bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.three(self.two(self.one(x)).relu())
            return h.tanh() if self.one.bias.sum() > 0 else h.relu()

    model = nn.Sequential(*[Layer(b) for b in (1.0, 1.0, 1.0, -1.0, 1.0, -1.0)])
    x = torch.randn(3, 4)
    captured = capture(model, (x,))
    assert [way.kwargs["answer"] for way in captured.graph.ways] == [True, True, True, False, True, False]
    assert compare_with_eager(captured, model, (x + 1,), {}).same


def test_a_number_whose_digits_are_wanted_is_refused() -> None:
    class Cuts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[: x.sum().long().item()].sum()

    with pytest.raises(CaptureError, match=r"reads the value of a tensor .* as an index or a size, at test_ways.py"):
        capture(Cuts(), (torch.ones(4, requires_grad=True),))


def test_a_branch_that_raises_on_both_sides_tells_the_first() -> None:
    class Never(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                raise ValueError("too large")
            raise ValueError("too small")

    with pytest.raises(CaptureError, match="too small"):
        capture(Never(), (torch.ones(4, device="meta", requires_grad=True),))


def test_who_goes_on_hears_of_buffers_that_the_call_has_written() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(4, 4), nn.Buffer(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                self.seen.add_(1)
            return self.layer(x).square().mean() * self.seen

    graph = capture(Counts(), (torch.ones(3, 4),)).graph
    up = {node.name: (torch.tensor(True), one_device(graph).buffers[node.target]) for node in graph.ways}
    with pytest.raises(RunError, match=r"has written to buffers \(seen\), as on the side that was followed"):
        WaysTaken(graph).look(up)


def test_a_number_that_is_returned_is_the_tensor() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            out = self.layer(x)
            return {"loss": out.square().mean(), "largest": out.max().item()}

    model, x = Scores(), torch.randn(3, 4)
    assert compare_with_eager(capture(model, (x,)), model, (x + 1,), {}).same


class InPieces(nn.Module):
    """Packed rows, taken apart by lengths that it is given, and put together again by another list."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.mix, self.own = nn.Linear(4, 4), own
        self.register_buffer("lengths", torch.tensor([2, 4]))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        lengths = self.lengths if self.own else lengths
        means = [self.mix(piece).mean(0) for piece in x.split(lengths.tolist())]
        again = torch.repeat_interleave(torch.stack(means), lengths, dim=0)
        return (again * x).sum()


def test_lists_of_integers_that_the_model_is_given_are_followed() -> None:
    torch.manual_seed(0)
    model = InPieces()
    captured = capture(model, (torch.randn(6, 4), torch.tensor([2, 4])))
    assert len(captured.graph.ways) == 2
    assert compare_with_eager(captured, model, (torch.randn(6, 4), torch.tensor([2, 4])), {}).same
    assert not any(flags(captured, model, (torch.randn(6, 4), torch.tensor([2, 4]))).values())
    up = flags(captured, model, (torch.randn(6, 4), torch.tensor([3, 3])))
    assert sorted(up.values()) == [False, True]  # they are as many rows


def test_lists_of_what_the_model_holds_are_followed_while_they_are_the_same() -> None:
    torch.manual_seed(0)
    model, args = InPieces(own=True), (torch.randn(6, 4), torch.tensor([2, 4]))
    captured = capture(model, args)
    assert compare_with_eager(captured, model, (torch.randn(6, 4), torch.tensor([3, 3])), {}).same
    assert not any(flags(captured, model, args).values())
    model.lengths.copy_(torch.tensor([3, 3]))
    assert any(flags(captured, model, args).values())


class _Named(torch.nn.Module):
    """A model whose own parts have the names of the program's flags."""

    def __init__(self) -> None:
        super().__init__()
        self.way, self.part = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.way(x)).square().mean()


def test_parts_of_a_model_may_have_the_names_of_flags() -> None:
    graph = capture(_Named(), (torch.randn(6, 4),)).graph
    assert not graph.ways and not graph.parts and len(graph.updates) == len(graph.written) == 2


class _Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = torch.nn.Linear(4, 2), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, mask = torch.zeros_like(x), self.gate(x).argmax(-1) == 1
        if mask.any():
            out[mask] = self.expert(x[mask])
        return out.square().mean()


def test_what_a_program_notes_is_no_buffer_of_the_model() -> None:
    """Else such a model would be planned with one microbatch, as one that keeps running means."""
    graph = capture(_Experts(), (torch.randn(6, 4),)).graph
    assert graph.parts and not graph.written and not taken_of_batch(graph)


class _Skipped(torch.nn.Module):
    """What has parameters is computed on one side of a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x > 1e3).any():
            x = self.expert(x) + x.mean()
        return x.square().mean()


def test_a_loss_without_a_gradient_names_the_branch_that_was_not_entered() -> None:
    with pytest.raises(CaptureError, match=r"no parameter.*'<model>' at test_ways.py:\d+: the condition is False"):
        capture(_Skipped(), (torch.randn(6, 4),))


class _Lists(torch.nn.Module):
    """Numbers that are read and made tensors again."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor], of_gate: bool) -> None:
        super().__init__()
        self.gate, self.read, self.of_gate = torch.nn.Linear(4, 4), read, of_gate

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        read = self.read((self.gate(x) > 0).sum(-1) if self.of_gate else lengths)
        return (self.gate(x) * read[:, None]).square().mean() * torch.arange(6).mul(read).sum()


MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "LongTensor": lambda n: torch.LongTensor(n.tolist()), "Tensor": lambda n: torch.Tensor(n.tolist()),
    "new_tensor": lambda n: n.new_tensor(n.tolist()), "tensor": lambda n: torch.tensor(n.tolist()),
    "asarray": lambda n: torch.asarray(n.tolist()), "floats": lambda n: torch.tensor((n / 3).tolist()),
}  # fmt: skip


@pytest.mark.parametrize("of_gate", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_tensors_of_numbers_that_were_read_are_right_or_refused(name: str, of_gate: bool) -> None:
    """Nobody compares with eager mode here: each call gives its numbers, in its dtypes, or is refused."""
    torch.manual_seed(0)
    model, x, lengths = _Lists(MADE[name], of_gate).double(), torch.randn(6, 4).double(), torch.arange(6)
    follows = name in ("tensor", "asarray", "floats")
    if of_gate and not follows:
        with pytest.raises(CaptureError, match=r"test_ways.py:\d+"):
            capture(model, (x, lengths))
        return
    pm = autopar.parallelize(copy.deepcopy(model), 1, (x, lengths), verify_capture=False)
    for args in ((x, lengths), (3 * x, lengths)):
        assert torch.equal(pm(*args), model(*args)), name
    if follows:
        assert torch.equal(pm(x, lengths.flip(0)), model(x, lengths.flip(0)))
        return
    with pytest.raises(RunError, match=r"test_ways.py:\d+"):
        pm(x, lengths.flip(0))
