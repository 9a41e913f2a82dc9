"""Every optimizer of torch, and some that people write, on two real ranks beside one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest
from procs import optimizer_cases as cases
from procs.in_turn import LONG, several

from autopar.runtime.ranks.launch import run_local

LIMIT = 1e-9
KINDS = [*cases.MAKERS]
CALLS: dict[str, tuple[Any, ...]] = {
    **{f"{kind} after": ("trained", kind, "ZeRO-3", False) for kind in KINDS},
    **{f"{kind} before": ("trained", kind, "cut", True) for kind in ("Adafactor", "AdamW", "SGD momentum")},
    **{kind: ("trained", kind, "cut", False) for kind in cases.VARIANTS},
    **{f"{kind} on the host": ("trained", kind, "host", False) for kind in KINDS},
    **{f"{kind} on the host before": ("trained", kind, "host", True) for kind in ("Adafactor", "SGD momentum")},
    **{f"{kind} with parameters on the host": ("trained", kind, "host ZeRO-3", False) for kind in ("AdamW", "Rprop")},
    **{f"Muon {layout}": ("matrices", layout) for layout in cases.LAYOUTS},
    **{f"LBFGS {search}": ("lbfgs", "cut", search) for search in (None, "strong_wolfe")},
    **{f"{kind} by hand, {layout}": ("custom", kind, layout) for kind in cases.CUSTOM for layout in ("cut", "ZeRO-3")},
    **{f"groups and schedulers, {layout}": ("groups", layout) for layout in cases.LAYOUTS},
    **{f"stepped in the backward, {layout}": ("in_backward", layout) for layout in ("cut", "ZeRO-3")},
    **{f"{kind} resumed from one process": ("resumed_whole", kind, "ZeRO-3") for kind in KINDS if " " not in kind},
    **{f"sparse rows, {kind}": ("sparse_rows", kind) for kind in ("SGD", "Adagrad")},
    "sparse rows, whole": ("sparse_rows", "Adagrad", "replicate"),
}
SWEEP: dict[str, tuple[Any, ...]] = {
    **{f"{kind} before, {layout}": ("trained", kind, layout, True) for kind in KINDS for layout in ("cut", "rows")},
    **{f"{kind} after, {layout}": ("trained", kind, layout, False) for kind in KINDS for layout in ("cut", "rows")},
    **{f"{kind} after, ZeRO-3": ("trained", kind, "ZeRO-3", False) for kind in cases.VARIANTS},
}
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hooks on the model's parameters": (
        ("refused", "spread_with_hooks", "cut"), "CaptureError: hooks of parameters' gradients would be lost",
    ),
    "SparseAdam": (
        ("refused", "sparse_rows", "SparseAdam"), "RuntimeError: SparseAdam does not support dense gradients",
    ),
    "LBFGS in stages": (
        ("refused", "lbfgs_in_stages"), "RunError: LBFGS.step(closure) looks at all parameters at once, and in a "
        "pipeline each rank has those of its stages",
    ),
}  # fmt: skip
"""Cases that say what they cannot do."""


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """Of all cases on two ranks, in one start of processes."""
    return run_local(several, 2, "optimizer_cases", {**CALLS, **{name: call for name, (call, _) in REFUSED.items()}})


@pytest.mark.parametrize("name", CALLS)
def test_an_optimizer_steps_as_on_one_device(results: list[dict[str, Any]], name: str) -> None:
    for on_rank in results:
        assert on_rank[name] < LIMIT


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_is_refused(results: list[dict[str, Any]], name: str) -> None:
    for on_rank in results:
        assert on_rank[name].startswith(REFUSED[name][1])


@pytest.mark.slow
def test_every_optimizer_under_every_layout() -> None:
    for on_rank in run_local(several, 2, "optimizer_cases", SWEEP, timeout=LONG):
        assert {name: far for name, far in on_rank.items() if not far < LIMIT} == {}
