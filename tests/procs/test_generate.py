"""``generate`` on real ranks: the tokens of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from procs.in_turn import LONG, marked, selected, several

from autopar.runtime.ranks.launch import run_local

EXAMPLE = Path(__file__).parents[2] / "examples" / "continuous_batching.py"
TENSOR, HEADS = {"tensor": 2}, {"tensor": "h"}
BOTH, ROWS_AND_HEADS = {"data": 2, "tensor": 2}, {"data": "b", "tensor": "h"}
DRAWN = "greedy", "sampled"
CALLS: dict[str, tuple[Any, ...]] = {
    "gpt2 heads": ("tokens", "gpt2", TENSOR, HEADS, None, *DRAWN, "beams"),
    "llama heads": ("tokens", "llama", TENSOR, HEADS, None, *DRAWN),
    "mixture heads": ("tokens", "mixture", TENSOR, HEADS, None, *DRAWN),
    "windows heads": ("tokens", "windows", TENSOR, HEADS, None, *DRAWN),
    "t5 heads": ("tokens", "t5", TENSOR, HEADS, None, *DRAWN, "beams"),
    "whisper heads": ("tokens", "whisper", TENSOR, HEADS, None, *DRAWN),
    "gpt2 stages": ("tokens", "gpt2", None, None, 2, *DRAWN, "beams"),
    "llama stages": ("tokens", "llama", None, None, 2, *DRAWN),
    "mixture stages": ("tokens", "mixture", None, None, 2, *DRAWN),
    "t5 stages": ("tokens", "t5", None, None, 2, *DRAWN),
    "whisper stages": ("tokens", "whisper", None, None, 2, *DRAWN),
    "plain": ("plain_tokens", None),
    "plain stages": ("plain_tokens", 2),
    "without values": ("without_values",),
    "refused": ("refused",),
    "batching": ("batching", str(EXAMPLE)),
}  # fmt: skip
SLOW = {
    "llama heads", "mixture heads", "windows heads", "whisper heads", "llama stages", "mixture stages", "t5 stages",
    "whisper stages", "plain stages", "without values",
}  # fmt: skip
HEADS_HERE = {"gpt2": 2, "llama": 1, "mixture": 1, "windows": 1, "t5": 2, "whisper": 2}
"""Heads of keys of a rank, where two share them."""
ON_FOUR = {name: ("tokens", name, BOTH, ROWS_AND_HEADS, None, *DRAWN) for name in HEADS_HERE}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_local(several, 2, "generate", selected(request, CALLS, SLOW), timeout=LONG)


@pytest.mark.parametrize("case", marked([key for key, (name, *_) in CALLS.items() if name == "tokens"], SLOW))
def test_tokens_are_those_of_one_device(found: list[dict[str, Any]], case: str) -> None:
    name, how = case.split()
    for rank in found:
        assert all(rank[case]["same"].values()), rank[case]
        assert rank[case]["distinct"] > 3
        if how == "heads":
            assert {shape[1] for shape in rank[case]["caches"]} == {HEADS_HERE[name]}
            assert not rank[case]["names"]


@pytest.mark.parametrize("case", marked(["plain", "plain stages"], SLOW))
def test_plain_models_generate(found: list[dict[str, Any]], case: str) -> None:
    assert all(all(rank[case]) for rank in found)


@pytest.mark.parametrize("case", marked(["without values"], SLOW))
def test_a_model_from_the_meta_device_generates(found: list[dict[str, Any]], case: str) -> None:
    assert all(rank[case] for rank in found)


def test_what_caches_cannot_hold_is_refused_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank in found:
        longer, wider, assisted, right = rank["refused"]
        assert "need 208 places, and the cache has 96" in longer
        assert "12 sequences at once" in wider and "the cache has 4" in wider
        assert "prompt_lookup_num_tokens of generate cannot be had" in assisted
        assert right == "True"


def test_the_example_of_continuous_batching_gives_the_tokens_of_each_request_alone(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert len(rank["batching"]) > 4 and all(rank["batching"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR)
def test_rows_and_heads_are_cut(name: str) -> None:
    for rank in run_local(several, 4, "generate", {"": ON_FOUR[name]}, timeout=LONG):
        assert all(rank[""]["same"].values())
        assert {shape[:2] for shape in rank[""]["caches"]} == {(2, HEADS_HERE[name])}
