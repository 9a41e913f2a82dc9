"""Which inputs have the rows of a batch, and where these cannot be taken apart: by what the graph does with them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.capture.batch_factor import inputs_with_rows
from autopar.errors import CaptureError, RunError

ROWS = 4


class Model(nn.Module):
    """Two layers, and a loss that a case writes."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.words = nn.Linear(8, 8), nn.Linear(8, 4), nn.Embedding(32, 8)
        self.bag, self.case = nn.EmbeddingBag(32, 8, mode="sum"), forward

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.case(self, *inputs)  # type: ignore[no-any-return]

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))


def _x(k: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, 8)), generator=torch.Generator().manual_seed(k), dtype=torch.float64)


def _i(k: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape or (ROWS,), generator=torch.Generator().manual_seed(k + 50))


def _documents(m: Model, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    h = m.words(ids)
    doc = torch.bucketize(torch.arange(ids.numel()), ends, right=True).view(ids.shape)
    return F.scaled_dot_product_attention(h, h, h, attn_mask=doc[:, :, None] == doc[:, None, :]).square().mean()


def _ends(k: int, n: int) -> torch.Tensor:
    inner = torch.randperm(ROWS * 8 - 1, generator=torch.Generator().manual_seed(k))[: n - 1] + 1
    return torch.cat([inner.sort().values, torch.tensor([ROWS * 8])])


WORKS: dict[str, tuple[Any, Any, list[int]]] = {
    "rows and labels": (lambda m, x, y: F.cross_entropy(m.down(m.hidden(x)), y), lambda k: (_x(k), _i(k, 4)), [0, 1]),
    "priors of as many classes": (
        lambda m, x, y, prior: F.cross_entropy(m.down(m.hidden(x)) + prior, y),
        lambda k: (_x(k), _i(k, 4), torch.zeros(4).double() if k == 0 else _x(k, 4)), [0, 1],
    ),
    "weights of as many classes": (
        lambda m, x, y, w: (F.cross_entropy(m.down(m.hidden(x)), y, reduction="none") * w[y]).mean(),
        lambda k: (_x(k), _i(k, 4), torch.ones(4).double() if k == 0 else _x(k, 4).abs()), [0, 1],
    ),
    "class weights of the loss": (
        lambda m, x, y, w: F.cross_entropy(m.down(m.hidden(x)), y, w),
        lambda k: (_x(k), _i(k, 4), torch.ones(4).double() if k == 0 else _x(k, 4).abs()), [0, 1],
    ),
    "positions of as many steps": (
        lambda m, ids, at: m.hidden(m.words(ids) + m.words(at)).square().mean(),
        lambda k: (_i(k, 32, ROWS, 4), torch.arange(4) + k), [0],
    ),
    "a matrix of as many lines": (
        lambda m, x, a: (m.down(m.hidden(x)) @ a).square().mean(), lambda k: (_x(k), _x(k + 9, 4, 4)), [0],
    ),
    "a mask over as many steps": (
        lambda m, x, mask: (m.hidden(x) * mask[:, None]).sum(1).square().mean(),
        lambda k: (_x(k, ROWS, 4, 8), torch.ones(4).double() if k == 0 else _x(k, 4)), [0],
    ),
    "the last token of each row": (
        lambda m, ids, at: m.down(m.words(ids))[torch.arange(ids.shape[0]), at].square().mean(),
        lambda k: (_i(k, 32, ROWS, 6), _i(k, 6)), [0, 1],
    ),
    "positions that forward makes": (
        lambda m, ids: (m.words(ids) + m.words(torch.arange(ids.shape[1]))[None]).square().mean(),
        lambda k: (_i(k, 32, ROWS, ROWS),), [0],
    ),
    "rows behind other dims": (
        lambda m, x: m.hidden(x).transpose(0, 1).reshape(-1, 8).square().mean(), lambda k: (_x(k, ROWS, 3, 8),), [0],
    ),
    "a table of names": (
        lambda m, x, named: F.mse_loss(m.hidden(x), named["target"]) + (m.down(m.hidden(x)) * named["scale"]).mean(),
        lambda k: (_x(k), {"target": _x(k + 1), "scale": _x(k + 2, 4)}), [0, 1],
    ),
}  # fmt: skip
"""Models, their batches (number 0 is a dummy), and which leaves have rows."""

REFUSED: dict[str, tuple[Any, Any, str]] = {
    "as many documents as rows": (_documents, lambda k: (_i(k, 32, ROWS, 8), _ends(k, ROWS)), r"args\[1\]"),
    "more documents than rows": (_documents, lambda k: (_i(k, 32, ROWS, 8), _ends(k, 7)), r"args\[1\]"),
    "one document": (_documents, lambda k: (_i(k, 32, ROWS, 8), _ends(k, 1)), r"args\[1\]"),
    "partners in the batch": (
        lambda m, x, partner: (m.hidden(x) - m.hidden(x)[partner]).square().mean(),
        lambda k: (_x(k), torch.tensor([0, 1, 0, 1] if k == 0 else [2, 3, 1, 0])), r"args\[1\].*args\[0\]",
    ),
    "partners by index_select": (
        lambda m, x, partner: (m.hidden(x) - m.hidden(x).index_select(0, partner)).square().mean(),
        lambda k: (_x(k), _i(k, ROWS)), r"args\[1\].*args\[0\]",
    ),
    "edges of a graph": (
        lambda m, x, edges: m.down(torch.zeros_like(x).index_add(0, edges[1], m.hidden(x)[edges[0]])).square().mean(),
        lambda k: (_x(k), _i(k, ROWS, 2, 9)), r"args\[1\]",
    ),
    "as many edges as nodes": (
        lambda m, x, a, b: m.down(torch.zeros_like(x).index_add(0, b, m.hidden(x)[a])).square().mean(),
        lambda k: (_x(k), _i(k, ROWS), _i(k + 1, ROWS)), r"args\[1\]",
    ),
    "offsets of bags": (
        lambda m, ids, offsets, y: F.mse_loss(m.down(m.bag(ids, offsets))[:, 0], y),
        lambda k: (_i(k, 32, 10), torch.tensor([0, 2, 4, 6]), _x(k, ROWS)), r"args\[1\]",
    ),
    "offsets of bags beside rows": (
        lambda m, user, ids, offsets: m.down(m.words(user) + m.bag(ids, offsets)).square().mean(),
        lambda k: (_i(k, 32), _i(k, 32, 10), torch.tensor([0, 3, 5, 8])), r"args\[2\]",
    ),
    "lengths of a list of patches": (
        lambda m, n, patches, y: F.mse_loss(
            torch.zeros(ROWS, 8, dtype=y.dtype).index_add(
                0, torch.repeat_interleave(torch.arange(ROWS), n, output_size=patches.shape[0]), m.hidden(patches)
            )[:, 0], y,
        ),
        lambda k: (torch.tensor([2, 2, 2, 2]), _x(k, 8, 8), _x(k, ROWS)), r"args\[0\]",
    ),
    "sums of lengths": (
        lambda m, x, lengths: (m.hidden(x) * lengths.cumsum(0)[:, None]).square().mean(),
        lambda k: (_x(k), _i(k, 5)), r"args\[1\]",
    ),
}  # fmt: skip
"""Models, their batches, and the inputs that the message names."""


@pytest.mark.parametrize("name", WORKS)
def test_inputs_with_rows(name: str) -> None:
    forward, batch, wanted = WORKS[name]
    captured = capture(Model(forward).double(), batch(1))
    found = inputs_with_rows(captured.graph, ROWS)
    assert found.is_proved
    assert [i for i, n in enumerate(captured.inputs) if n in found.rows] == wanted


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("parts", [2, 4])
def test_a_step_in_microbatches_is_that_of_the_batch(name: str, parts: int) -> None:
    """The example is a dummy, which would hide what later batches show; of four microbatches each has one row."""
    forward, batch, _ = WORKS[name]
    model = Model(forward).double()
    alone = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, batch(0), microbatches=parts)
    for k in range(3):
        pm.zero_grad()
        alone.zero_grad()
        loss, wanted = pm.train_step(*batch(k)), alone(*batch(k))
        wanted.backward()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
        for parameter, other in ((p, alone.get_parameter(n)) for n, p in pm.named_parameters()):
            if other.grad is not None:
                torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_counts_rows_is_refused_by_name(name: str) -> None:
    forward, batch, named = REFUSED[name]
    with pytest.raises(CaptureError, match=rf"{named}[\s\S]*microbatches=1"):
        autopar.parallelize(Model(forward).double(), 1, batch(0), microbatches=2)


@pytest.mark.parametrize("name", itertools.islice(REFUSED, 0, None, 3))
def test_what_counts_rows_runs_at_once_and_is_refused_in_a_step_of_several(name: str) -> None:
    forward, batch, named = REFUSED[name]
    model = Model(forward).double()
    alone = copy.deepcopy(model)
    pm = autopar.parallelize(model, 1, batch(0))
    torch.testing.assert_close(pm.train_step(*batch(1)), alone(*batch(1)).detach(), rtol=1e-12, atol=1e-12)
    doubled = tuple(torch.cat([x, x]) for x in batch(0))
    with pytest.raises((RunError, CaptureError), match=named):
        pm.train_step(*doubled, microbatches=2)


def test_a_search_takes_what_counts_rows_at_once() -> None:
    forward, batch, _ = REFUSED["partners in the batch"]
    plan = autopar.plan(Model(forward).double(), "local-x1", batch(0), stages=1)
    assert plan.microbatches == 1
    assert [note for note in plan.notes if "counts rows" in note]


def test_the_caller_says_which_inputs_have_rows() -> None:
    forward, batch, _ = WORKS["priors of as many classes"]
    for rows in (["x0", 1], [0, 1]):
        model = Model(forward).double()
        if "x0" in rows:
            with pytest.raises(CaptureError, match=r"input_rows names 'x0', which is no tensor .*args\[2\]"):
                autopar.parallelize(model, 1, batch(0), microbatches=2, input_rows=rows)
            continue
        pm = autopar.parallelize(model, 1, batch(0), microbatches=2, input_rows=rows)
        wanted = Model(forward).double()(*batch(1))
        torch.testing.assert_close(pm.train_step(*batch(1)), wanted.detach(), rtol=1e-12, atol=1e-12)


UNEQUAL = {"twice": (8, 4), "more": (8, 12), "half": (4, 8)}


@pytest.mark.parametrize("name", UNEQUAL)
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}], ids=str)
def test_unequal_rows_are_refused(name: str, options: dict[str, int]) -> None:
    forward, batch, _ = WORKS["rows and labels"]
    pm = autopar.parallelize(Model(forward).double(), 1, batch(0), **options)
    x, y = UNEQUAL[name]
    with pytest.raises(RunError, match=rf"args\[0\] has {x} rows and input args\[1\] {y}"):
        pm.train_step(_x(0, x, 8), _i(0, 4, y))


def test_no_microbatches_are_refused() -> None:
    forward, batch, _ = WORKS["rows and labels"]
    pm = autopar.parallelize(Model(forward).double(), 1, batch(0))
    with pytest.raises(RunError, match="microbatches is 0; give 1 or more"):
        pm.train_step(*batch(0), microbatches=0)


def test_a_function_of_sums_that_the_parameters_decide_is_told_of() -> None:
    """In a dummy batch, all of whose rows are alike, the numbers would not show it."""

    def dice(m: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        p, t = m.down(m.hidden(x)).softmax(-1), F.one_hot(y, 4).to(x)
        return 1 - (2 * (p * t).sum(0) / (p + t).sum(0)).mean()

    with pytest.warns(UserWarning, match="a sum over the batch that depends on the parameters"):
        autopar.parallelize(
            Model(dice).double(), 1, (torch.ones(4, 8).double(), torch.zeros(4).long()), microbatches=2
        )
