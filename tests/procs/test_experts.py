"""Routed experts on two real ranks, cut by expert, by rows and by features: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
from procs.experts import WRITTEN
from procs.in_turn import several

from autopar.runtime.ranks.launch import run_local

CUTS: dict[str, dict[str, Any]] = {
    "by expert": {"constraints": {"*:expert_block*": {"expert": "e"}}},
    "by rows": {"constraints": {"*:expert_block*": {"expert": "s"}}},
    "rows travel": {"constraints": {"*:expert_block*": {"expert": "travel"}}},
    "by features": {"constraints": {"*:expert_block*": {"expert": "ffn"}}},
    "in stages": {"stages": 2, "microbatches": 1, "schedule": "1f1b"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) for n in ("mixtral_batched", "deepseek_v3", "switch")]
)
def test_trains_as_one_process(name: str) -> None:
    for rank in run_local(several, 2, "experts", {name: ("all_cuts", name, CUTS)}):
        assert all(worst < 1e-6 for worst in rank[name].values())  # losses are computed in single precision


@pytest.mark.slow
def test_experts_without_rows_have_no_gradient() -> None:
    cuts = {
        "rows travel": CUTS["rows travel"],
        "ZeRO": {"constraints": {"*:expert_block*": {"expert": "s"}}, "params": {"*experts*weight": "S0 step"}},
        "in microbatches": {"stages": 2, "microbatches": 2, "schedule": "1f1b"},
    }
    for rank in run_local(several, 2, "experts", {"loops": ("all_cuts", "loops", cuts)}):
        assert all(worst < 1e-6 for worst in rank["loops"].values()), rank


@pytest.mark.parametrize(
    "ways", [("rows travel",), pytest.param(("by rows", "by features"), marks=pytest.mark.slow)], ids="-".join
)
def test_balance_is_that_of_the_whole_batch(ways: tuple[str, ...]) -> None:
    """In one process it is tried in all of them: ``tests/unit/test_balanced_experts.py``."""
    cuts = {how: CUTS[how] for how in ways}
    for rank in run_local(several, 2, "experts", {"balanced": ("all_cuts", "balanced", cuts)}):
        assert all(worst < 1e-6 for worst in rank["balanced"].values()), rank


@pytest.mark.parametrize("names", [WRITTEN[:2], pytest.param(WRITTEN[2:], marks=pytest.mark.slow)], ids="-".join)
def test_layers_as_people_write_them(names: tuple[str, ...]) -> None:
    cuts = {"rows travel": {"constraints": {"*expert_block*": {"expert": "travel"}}}}
    for rank in run_local(several, 2, "experts", {name: ("all_cuts", name, cuts) for name in names}):
        assert all(worst < 1e-9 for model in rank.values() for worst in model.values()), rank


def test_rows_travel_to_more_experts_on_one_rank() -> None:
    cuts = {"rows travel": {"constraints": {"*expert_block*": {"expert": "travel"}}}}
    for rank in run_local(several, 2, "experts", {"uneven": ("all_cuts", "uneven", cuts)}):
        assert all(worst < 1e-9 for worst in rank["uneven"].values()), rank


@pytest.mark.slow
def test_experts_on_four_ranks() -> None:
    cuts = {how: CUTS[how] for how in ("rows travel", "by features")}
    cases = {name: ("all_cuts", name, cuts) for name in ("mixtral_batched", "deepseek_v3", "switch")}
    for rank in run_local(several, 4, "experts", cases):
        assert all(worst < 1e-6 for model in rank.values() for worst in model.values())


def assert_computed_beside(results: dict[str, Any]) -> None:
    """Of each rank: the same numbers, and products between the beginning of each collective and its end."""
    for name, result in results.items():
        assert result["same"] and result["worst"] < 1e-9, name
        with_others, alone = result["events"]
        assert with_others.count("begin") == alone.count("begin") == 4, with_others  # there and back, in both passes
        for number in range(4):
            begin = [k for k, event in enumerate(with_others) if event == "begin"][number]
            assert with_others[begin + 1] == "product", with_others
            begin = [k for k, event in enumerate(alone) if event == "begin"][number]
            assert alone[begin + 1] == "wait", alone


@pytest.mark.parametrize("name", ["SharedExpert", pytest.param("SharedExpertFirst", marks=pytest.mark.slow)])
def test_shared_experts_are_computed_while_rows_travel(name: str) -> None:
    for rank in run_local(several, 2, "experts", {name: ("beside", name)}):
        assert_computed_beside(rank)


@pytest.mark.slow
def test_shared_experts_beside_rows_on_four_ranks() -> None:
    for rank in run_local(several, 4, "experts", {"SharedExpert": ("beside", "SharedExpert")}):
        assert_computed_beside(rank)


def assert_exchanged(ranks: list[dict[str, Any]]) -> None:
    """Each way gives the numbers of one process; those that keep the order of rows the same to the last bit."""
    for rank in ranks:
        for name, results in rank.items():
            for way, (worst, same) in results.items():
                assert worst < 1e-6, (name, way)
                other_order = any("+" in axis or "@" in axis for axis in way)  # or sums with zeros among them
                assert same or other_order, (name, way)


def test_chunks_change_no_bit() -> None:
    ways = [("travel",), ("travel/2",), ("travel@max",), ("travel/2@max",)]
    assert_exchanged(run_local(several, 2, "experts", {"balanced": ("exchanged", "balanced", (2,), ways)}))


@pytest.mark.slow
def test_chunks_and_bounds_of_other_experts() -> None:
    ways = [("travel",), ("travel/2",), ("travel/2@max",)]
    cases = {name: ("exchanged", name, (2,), ways) for name in ("mixtral_batched", "deepseek_v3", "switch", "Counts")}
    assert_exchanged(run_local(several, 2, "experts", cases))


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("mixtral_batched", marks=pytest.mark.slow)])
def test_experts_over_two_axes(name: str) -> None:
    """Attention has two ranks of tensor parallelism, experts four."""
    ways = [("travel", "travel"), ("travel", "travel+"), ("travel", "travel+@max")]
    assert_exchanged(run_local(several, 4, "experts", {name: ("exchanged", name, (2, 2), ways)}))


def test_rows_above_a_bound_are_an_error() -> None:
    for rank in run_local(several, 2, "experts", {"exceeded": ("exceeded",)}):
        assert (
            "of this rank's 16 rows to each rank of axis 'expert' is exceeded, and no row is dropped"
            in rank["exceeded"]
        )


def test_products_run_while_other_chunks_travel() -> None:
    """All chunks are sent before a product, and the first one's results before the last one's rows are waited for."""
    for rank in run_local(several, 2, "experts", {"": ("in_chunks",)}):
        log = rank[""]
        assert log.count("begin") == 8  # two chunks, there and back, in both passes
        for half in (log[: len(log) // 2], log):
            first = half.index("begin")
            assert half[first + 1] == "begin"
        begins = [k for k, event in enumerate(log) if event == "begin"]
        waits = [k for k, event in enumerate(log) if event == "wait"]
        assert waits[0] < begins[2] < waits[1]  # the first results go home while other rows still travel
