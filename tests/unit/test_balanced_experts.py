"""Losses, statistics and biases that balance experts are of the whole batch, however it and the experts are cut."""

from __future__ import annotations

import pytest
import torch
from balanced_experts import balanced
from cut_experts import cut_equally

import autopar
from autopar.comparison.program_vs_eager import one_device, state_of, train


@pytest.mark.parametrize(("mesh", "cut"), [
    ("data=2,expert=2", {"data": "s", "expert": "travel"}),
    pytest.param("data=2,expert=2", {"data": "travel", "expert": "travel"}, marks=pytest.mark.slow),
    pytest.param("data=2,tensor=2", {"data": "travel", "tensor": "ffn"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_balance_is_that_of_the_whole_batch(mesh: str, cut: dict[str, str]) -> None:
    model, args = balanced()
    model, args = model.double(), tuple(x.double() for x in args)
    captured = autopar.capture(model, args)
    pins = {"*:expert_block*": cut}
    plan, _ = cut_equally(model, args, mesh, pins, captured=captured, placements={"x": "S0,R"})
    weights, buffers = state_of(captured, model)
    inputs = {"x": args[0], "y": args[1]}
    mine = train(captured, plan.stages[0], weights, buffers, inputs).buffers
    theirs = train(captured, one_device(captured.graph), weights, buffers, inputs).buffers
    for name in ("bias", "rows", "mean"):
        assert torch.allclose(mine[name], theirs[name], rtol=1e-12, atol=1e-12), name
    assert theirs["rows"].sum() == 2 * 4 * 6 * 2 and theirs["bias"].abs().max() > 0


def test_parts_of_the_batch_are_told_of() -> None:
    """In microbatches each would have statistics of its own: the planner takes one, and says why."""
    model, args = balanced()
    found = autopar.plan(model, "local-x2", args)
    assert found.microbatches == 1
    assert any("buffers" in note for note in found.notes), found.notes
