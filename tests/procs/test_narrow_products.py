"""Products in eight bits on two and four real ranks and in stages: the curve of the policy on one device."""

from __future__ import annotations

from typing import Any

import pytest
from procs import narrow_products
from procs.in_turn import LONG, several

from autopar.runtime.ranks.launch import run_local

STEPS = 104
EXACT: dict[str, tuple[Any, ...]] = {
    f"{name} {layout}": ("curve", name, layout, STEPS)
    for name, layout in (
        ("exact", "data"), ("exact", "tensor"), ("exact", "stages"), ("exact gathers", "zero"),
        ("exact rows", "tensor"), ("exact", "split backward"),
    )
}  # fmt: skip
MIXED: dict[str, tuple[Any, ...]] = {
    f"{name} {layout}": ("curve", name, layout, STEPS)
    for name, layout in (("mixed", "data"), ("mixed gathers", "zero"), ("mixed rows", "tensor"))
}
FOUR: dict[str, tuple[Any, ...]] = {
    f"{name} both": ("curve", name, "both", STEPS) for name in ("exact", "exact gathers", "exact rows")
}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    calls = {**EXACT, **MIXED, "sent": ("sent",), "compiled": ("compiled",)}
    return run_local(several, 2, "narrow_products", calls, timeout=LONG)


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_local(several, 4, "narrow_products", FOUR, timeout=LONG)


def apart(curves: tuple[list[float], list[float]]) -> tuple[float, float]:
    """The largest and the mean relative difference of two curves, which fall."""
    mine, alone = curves
    assert len(mine) == STEPS and alone[-1] < 0.4 * alone[0]
    found = [abs(a - b) / b for a, b in zip(mine, alone, strict=True)]
    return max(found), sum(found) / len(found)


@pytest.mark.parametrize("how", list(EXACT))
def test_the_curve_of_one_device_to_the_last_digits(two: list[dict[str, Any]], how: str) -> None:
    """In float64, where another order of sums changes 1e-16 and hardly a number is rounded otherwise for that."""
    assert apart(two[0][how])[0] < 1e-9


@pytest.mark.parametrize("how", list(FOUR))
def test_the_curve_of_one_device_on_two_axes(four: list[dict[str, Any]], how: str) -> None:
    assert apart(four[0][how])[0] < 1e-9


@pytest.mark.parametrize("how", list(MIXED))
def test_the_curve_of_one_device_in_bfloat16(two: list[dict[str, Any]], how: str) -> None:
    """Sums in bfloat16 in another order differ by 2^-9, as they do without products in eight bits."""
    worst, mean = apart(two[0][how])
    assert worst < 3e-2 and mean < 6e-3


def test_weights_of_narrow_products_are_gathered_in_a_byte_an_element(two: list[dict[str, Any]]) -> None:
    elements = 2 * narrow_products.WIDTH**2 * (3 + 1 + 4 + 4)
    wide, narrow, planned = two[0]["sent"]
    assert wide - narrow == elements // 2  # of bfloat16's two bytes one, on the half that a rank sends
    assert planned == (2 * elements, elements)


def test_compiled_programs_on_two_ranks(two: list[dict[str, Any]]) -> None:
    for plain, compiled in two[0]["compiled"]:
        assert plain == compiled
