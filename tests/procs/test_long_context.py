"""Attention along a sequence that is cut, with real processes: gathered keys and the ring beside one device."""

from __future__ import annotations

import pytest
from procs.long_context import compare
from procs.test_train import check, of

from autopar.runtime.ranks.launch import run_local
from autopar.words.meshes import Mesh

TOLERANCE = 1e-9


def pieces_equal_the_whole(n: int) -> None:
    for of_rank in run_local(compare, n, 24, timeout=300):
        assert {what: worst for what, worst in of_rank.items() if not worst < TOLERANCE} == {}


def test_three_ranks() -> None:
    pieces_equal_the_whole(3)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_other_numbers_of_ranks(n: int) -> None:
    pieces_equal_the_whole(n)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_models_train_as_on_one_device(n: int) -> None:
    """Causal, with heads that share keys, under a sliding window, both ways."""
    check(n, [
        of(name, Mesh.of(data=n), options={"constraints": {"*:scaled_dot_product_attention": {"data": way}}})
        for name in ("gpt2", "llama", "mistral") for way in ("ring", "q")
    ])  # fmt: skip
