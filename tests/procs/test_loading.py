"""A rank needs its own part of a model while the values come, and a parameter or two beside it."""

from __future__ import annotations

from typing import Any

import pytest
from procs.in_turn import LONG
from procs.loading import ONE, WHOLE, peak

from autopar.runtime.ranks.launch import run_local

STAGES = {"stages": 2, "schedule": "1f1b", "microbatches": 2}
RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc keeps no memory of freed tensors, so what a process has in memory is what it uses."""


def check(n: int, meta: bool, options: dict[str, Any]) -> None:
    ranks = run_local(peak, n, meta, options, timeout=LONG, env=RETURNS_MEMORY)
    assert sum(own for _, own, _ in ranks) >= WHOLE
    assert len({total for _, _, total in ranks}) == 1, "the ranks have other values"
    for rank, (most, own, _) in enumerate(ranks):
        assert most < own + 3 * ONE, (rank, most / ONE, own / ONE)


@pytest.mark.slow
@pytest.mark.parametrize("options", [STAGES, {"params": {"*": "S0 use"}}])
@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("n", [2, 4])
def test_all(n: int, meta: bool, options: dict[str, Any]) -> None:
    check(n, meta, options)
