"""Packed sequences are the padded batches that they came from: torch's numbers, rows that may be cut, and checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_trial import trial
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from zoo import Case

from autopar import parallelize
from autopar.capture import capture
from autopar.comparison.in_process_ranks import run_step
from autopar.comparison.program_vs_eager import inputs_of, one_device, state_of
from autopar.errors import AutoparError, CaptureError, RunError
from autopar.lower.emit import lower
from autopar.runtime.stages.branch_checks import WaysTaken

ROWS, STEPS, WIDTH, CLASSES = 4, 6, 8, 4


class Tagger(nn.Module):
    """Packs its embeddings in the ways that people do, and reads the outputs and the last states."""

    def __init__(self, net: nn.RNNBase, form: str) -> None:
        super().__init__()
        self.form, self.embed, self.net = form, nn.Embedding(16, WIDTH), net
        self.head = nn.Linear((getattr(net, "proj_size", 0) or WIDTH) * (2 if net.bidirectional else 1), CLASSES)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        if self.form == "sorted":
            lengths, order = lengths.sort(descending=True)
            x, labels = x[order], labels[order]
        given = lengths.tolist() if self.form == "list" else lengths.cpu()
        packed = pack_padded_sequence(x, given, batch_first=True, enforce_sorted=self.form == "sorted")
        packed, states = self.net(packed)
        states = states if isinstance(states, tuple) else (states,)
        loss = sum((i + 1) * state.square().mean() for i, state in enumerate(states))
        if self.form == "rows":
            seen = PackedSequence(packed.data.tanh(), packed.batch_sizes, *packed[2:])
            packed_labels = pack_padded_sequence(labels, lengths, batch_first=True, enforce_sorted=False)
            return loss + functional.cross_entropy(self.head(seen.data), packed_labels.data)
        if self.form == "viewed":
            by_time, _ = pad_packed_sequence(packed)
            return loss + self.head(by_time.view(-1, by_time.shape[-1])).square().mean()
        more = {"total_length": STEPS + 1} if self.form == "longer" else {}
        outputs, counts = pad_packed_sequence(packed, batch_first=True, padding_value=0.5, **more)
        counted = torch.arange(outputs.shape[1]) < counts[:, None]
        scores = self.head(outputs)[:, :STEPS].transpose(1, 2)
        return loss + outputs.square().mean() * counted.sum() + functional.cross_entropy(scores, labels)


def batch(seed: int, longest: int = STEPS) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (ROWS,), generator=g)
    lengths[seed % ROWS] = longest
    return torch.randint(16, (ROWS, STEPS), generator=g), lengths, torch.randint(CLASSES, (ROWS, STEPS), generator=g)


def tagger(net: nn.RNNBase, form: str) -> Tagger:
    torch.manual_seed(0)
    return Tagger(net, form)


@pytest.mark.parametrize(
    "form, net",
    [
        ("unsorted", nn.LSTM(WIDTH, WIDTH, 2, bidirectional=True)),
        pytest.param("sorted", nn.LSTM(WIDTH, WIDTH, proj_size=4, bias=False), marks=pytest.mark.slow),
        pytest.param("list", nn.GRU(WIDTH, WIDTH, bidirectional=True), marks=pytest.mark.slow),
        ("longer", nn.RNN(WIDTH, WIDTH, bidirectional=True)),
        ("rows", nn.LSTM(WIDTH, WIDTH)),
        pytest.param("viewed", nn.GRU(WIDTH, WIDTH), marks=pytest.mark.slow),
    ],
)
def test_packed_sequences_are_those_of_torch_and_are_cut(form: str, net: nn.RNNBase) -> None:
    case = Case(form, tagger(net, form), batch(1), {}, "mean", (batch(2), {}))
    steps = {result["step"]: result for result in trial(case, stages=False)}
    assert all(step["ok"] for step in steps.values()), steps
    assert steps["planned"]["cut"] == pytest.approx(1.0) and steps["planned"]["rank"] < 0.3


def _called(model: nn.Module, example: Any, args: Any) -> None:
    captured = capture(model, example)
    graph, plan = captured.graph, one_device(captured.graph)
    inputs = inputs_of(captured, args, {})
    done = run_step(graph, plan, lower(graph, plan), *state_of(captured, model), inputs)
    WaysTaken(graph).look({name: (value, None) for name, value in done.buffers.items()})  # type: ignore[misc]


def test_lengths_that_fit_no_batch_are_errors_of_the_call() -> None:
    model = tagger(nn.GRU(WIDTH, WIDTH), "unsorted")
    _called(model, batch(1), batch(2))
    with pytest.raises(RunError, match=r"packed sequence in '<model>' at test_packed.py:\d+: in this call no row is"):
        _called(model, batch(1), batch(2, longest=STEPS - 1))
    ids, lengths, labels = batch(2)
    with pytest.raises(RunError, match="a length is below 1, or above the number of steps"):
        _called(model, batch(1), (ids, lengths.where(torch.arange(ROWS) > 0, 0), labels))


@pytest.mark.parametrize(
    "read, what",
    [
        (lambda packed: packed.data, r"packed rows .* that the model returns[\s\S]*pad_packed_sequence"),
        (lambda packed: packed.data.mean(), r"'mean' of a packed sequence[\s\S]*leave the padding out of the loss"),
        (lambda packed: packed.data.sum() / packed.data.shape[0], "'sum' of a packed sequence"),
        (lambda packed: packed.batch_sizes.sum(), "'sum' of a packed sequence"),
        (lambda packed: packed.data @ packed.data.T, "'__get__' of a packed sequence|'T' of a packed sequence"),
    ],
)
def test_what_depends_on_the_number_of_packed_rows_is_refused(read: Any, what: str) -> None:
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.LSTM(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return read(self.net(pack_padded_sequence(x, lengths, enforce_sorted=False))[0])

    with pytest.raises(CaptureError, match=what):
        capture(Packs(), (torch.randn(STEPS, ROWS, WIDTH), torch.tensor([6, 2, 3, 4])))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(WIDTH, WIDTH)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        rows = batch["rows"]
        packed = rows if isinstance(rows, PackedSequence) else pack_padded_sequence(*rows, enforce_sorted=False)
        return self.net(packed)[1].square().mean()


def test_packed_inputs_are_refused_with_what_to_pass_instead() -> None:
    packed = pack_sequence([torch.randn(n, WIDTH) for n in (3, 5)], enforce_sorted=False)
    refusal = r"input example_inputs\[0\]\['rows'\] is a PackedSequence(.|\n)* forward\(\)"
    with pytest.raises(CaptureError, match=refusal):
        parallelize(Reader(), 1, ({"rows": packed},))
    with pytest.raises(CaptureError, match=r"input args\[0\]\['rows'\] is a PackedSequence"):
        capture(Reader(), ({"rows": packed},))
    model = Reader()
    module = parallelize(model, 1, ({"rows": (torch.randn(5, 2, WIDTH), torch.tensor([3, 5]))},))
    with pytest.raises(AutoparError, match="is a PackedSequence"):
        module({"rows": packed})
