"""What scripts ask for beside a plain step, on an accelerator: the CPU's numbers, and the host waits for nothing."""

from __future__ import annotations

import pytest
from procs.features_on_device import FEATURES, another_way, features

from autopar.runtime.ranks.launch import run_local
from autopar.runtime.stages.async_host_reads import AHEAD

QUICK = ["labels in stages", "terms"]


def check(names: list[str]) -> None:
    for found in run_local(features, 2, names, timeout=600):
        for name, (worst, seen) in found.items():
            assert worst <= 1e-5 and not seen, (name, worst, seen)


def test_features() -> None:
    check(QUICK)


@pytest.mark.slow
def test_other_features() -> None:
    check([name for name in FEATURES if name not in QUICK])


def test_another_way_is_heard_in_one_call_of_all_ranks() -> None:
    """However far each device is; what a rank hears sooner than another would break off that one's call."""
    for heard, text, worst in run_local(another_way, 2, timeout=100):
        assert heard == 4 + AHEAD and f"in the call {AHEAD} calls before this one it is True" in text, (heard, text)
        assert "optimizer steps too" in text and worst < 1e-9
