"""Mixed precision on two and four real ranks: the numbers of one device under the same autocast, scaler and policy."""

from __future__ import annotations

from typing import Any

import pytest
from procs import mixed_precision
from procs.in_turn import LONG, marked, selected, several

from autopar.runtime.ranks.launch import run_local

CALLS: dict[str, tuple[Any, ...]] = {
    f"{cut} {'inside' if inside else 'around'}": ("trained", cut, inside)
    for cut in mixed_precision.CUTS for inside in (True, False)
}  # fmt: skip
SCALED: dict[str, tuple[Any, ...]] = {
    f"scaled {cut} {rank}": ("scaled", cut, rank) for cut in ("zero", "tensor") for rank in (None, 0, 1)
}
STEPS: dict[str, tuple[Any, ...]] = {
    f"steps {cut} {name}": ("scaled_steps", cut, name)
    for cut, name in (("zero", "up.weight"), ("stages", "up.weight"), ("stages", "down.weight"))
}
LOW: dict[str, tuple[Any, ...]] = {f"low {cut}": ("low", cut) for cut in mixed_precision.CUTS}

POLICIES: dict[str, tuple[Any, ...]] = {
    f"policy {name} {cut}": ("policy", name, cut) for name in ("bf16-mixed", "wide") for cut in mixed_precision.CUTS
}
POLICIES["policy narrow zero"] = ("policy", "narrow", "zero")
POLICIES |= {f"policy rounded {cut}": ("policy", "rounded", cut) for cut in ("zero", "tensor")}
POLICIES |= {f"policy {name} in stages": ("policy", name, "", (2,), 2) for name in ("wide", "rounded")}
SLOW = {
    "data inside",
    "tensor inside",
    "zero around",
    "scaled zero 1",
    "scaled tensor None",
    "scaled tensor 0",
    "steps zero up.weight",
    "steps stages up.weight",
    "low data",
    "low tensor",
    "policy bf16-mixed data",
    "policy bf16-mixed tensor",
    "policy wide data",
    "policy wide zero",
    "policy rounded tensor",
    "policy wide in stages",
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    calls = {**CALLS, **SCALED, **STEPS, **LOW, **POLICIES, "stages": ("in_stages",)}
    return run_local(several, 2, "mixed_precision", selected(request, calls, SLOW))


@pytest.mark.parametrize("how", marked(CALLS, SLOW))
def test_the_numbers_of_one_device_under_autocast(found: list[dict[str, Any]], how: str) -> None:
    for rank in found:
        low, full, captures = rank[how]
        assert low < 2e-2 and full < 1e-6  # sums in bfloat16 come in another order
        assert captures == (0 if "inside" in how else 1)  # each state of autocast once


def test_a_pipeline_is_called_under_another_autocast(found: list[dict[str, Any]]) -> None:
    for rank in found:
        losses, weights, low = rank["stages"]
        assert losses < 1e-6 and weights < 1e-3 and low > 1e-5


@pytest.mark.parametrize("how", marked(SCALED, SLOW))
def test_a_gradient_scaler_skips_the_step_on_all_ranks_or_on_none(found: list[dict[str, Any]], how: str) -> None:
    for rank in found:
        worst, scale, skipped = rank[how]
        assert skipped is (SCALED[how][2] is not None)
        assert scale == (512.0 if skipped else 1024.0)
        assert worst == 0.0 if skipped else worst < 2.5e-2  # AdamW's first step is lr times the gradient's sign


@pytest.mark.parametrize("how", marked(STEPS, SLOW))
def test_a_step_takes_a_gradient_scaler(found: list[dict[str, Any]], how: str) -> None:
    """The overflow of one stage alone has the other skip its step, too."""
    for rank in found:
        losses, weights, scales, scales_alone = rank[how]
        assert losses < 1e-6 and weights < 1e-6
        assert scales == scales_alone == [2048.0, 1024.0, 2048.0]


@pytest.mark.parametrize("how", marked(LOW, SLOW))
def test_a_model_in_bfloat16_trains_like_on_one_device(found: list[dict[str, Any]], how: str) -> None:
    assert all(rank[how] < 2e-2 for rank in found)


@pytest.mark.parametrize("how", marked(POLICIES, SLOW))
def test_a_policy_is_that_of_one_device(found: list[dict[str, Any]], how: str) -> None:
    for rank in found:
        of_rank = rank[how]
        assert of_rank["worst"] < (2e-2 if "bf16" in how else 1e-6)
        assert of_rank["values"] < (4e-2 if "bf16" in how else 1e-6)
        assert of_rank.get("counted") == of_rank.get("there")


@pytest.mark.slow
def test_policies_on_two_axes() -> None:
    names = [f"{name} {cut}" for name in ("bf16-mixed", "wide", "rounded") for cut in ("data", "tensor")]
    calls = {name: ("policy", *name.split(), (2, 2)) for name in names}
    for rank in run_local(several, 4, "mixed_precision", calls, timeout=LONG):
        for key, of_rank in rank.items():
            assert of_rank["worst"] < (2e-2 if "bf16" in key else 1e-6) and of_rank["counted"] == of_rank["there"]
