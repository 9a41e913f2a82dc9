"""Experts that take turns on a CPU: what all of them at once make, and the same gradients."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from autopar.rules.experts import expert_by_expert
from autopar.rules.experts.expert_block import _GATED, _SAMPLE
from autopar.rules.experts.expert_program import body_of, computed

SHAPES = {
    _SAMPLE: [(4, 4, 6), (4, 6, 2)],
    _GATED: [(4, 4, 8), (4, 4, 2), (4, 2)],
}
ROUTINGS = {
    "all have rows": [0, 1, 2, 3, 3, 1, 0, 2], "empty": [3, 3, 1, 3, 1, 1, 3, 3],
    "no expert": [-1, 4, 2, 0, 9, 2, 2, -3], "nobody": [-1, 4, 9, 4, 9, -2, -2, -3],
}  # fmt: skip


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("text", SHAPES, ids=["plain", "gated"])
def test_turns_give_what_one_call_gives(text: str, routing: str) -> None:
    expert = torch.tensor(ROUTINGS[routing])
    has_expert = ((expert >= 0) & (expert < 4)).unsqueeze(1)
    torch.manual_seed(0)
    given = [torch.randn(8, 4, dtype=torch.float64), *(torch.randn(s, dtype=torch.float64) for s in SHAPES[text])]
    sides = []
    for least, turns in ((0, routing != "nobody"), (2**40, False)):
        tensors = [x.clone().requires_grad_() for x in given]
        with (
            mock.patch.object(expert_by_expert, "LEAST_BYTES", least),
            mock.patch.object(expert_by_expert._Product, "apply", wraps=expert_by_expert._Product.apply) as product,
        ):
            made = computed([*tensors, expert], body_of(text)) * has_expert  # others are left out by who calls it
            gradients = torch.autograd.grad((made * made.detach().cos()).sum(), tensors, allow_unused=True)
        assert bool(product.call_count) == turns
        sides.append([made.detach(), *(x if g is None else g for x, g in zip(map(torch.zeros_like, given), gradients,
                                                                              strict=True))])  # fmt: skip
    for mine, theirs in zip(*sides, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
