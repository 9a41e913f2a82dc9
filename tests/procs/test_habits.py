"""What people do in training scripts, on two real ranks with cuts forced: it works, or there is one clear error."""

from __future__ import annotations

import re
from typing import Any

import pytest
from procs import habits
from procs.in_turn import marked, selected, several

from autopar.runtime.ranks.launch import run_local

PATH = "where a checkpoint goes"
NUMBERS: dict[str, tuple[Any, ...]] = {
    **{f"an optimizer made before, {kind}, {'pipeline' if piped else 'cut'}": ("optimizer_before", kind, piped)
       for kind, piped in (("sgd", False), ("momentum", False), ("adamw", False), ("amsgrad", True), ("named", False),
                           ("named", True), ("adamw", True))},
    **{f"load_state_dict, {'pipeline' if piped else 'cut'}{', assign' if assign else ''}": ("loaded", piped, assign)
       for piped in (False, True) for assign in (False, True)},
    **{f"training = False, {'pipeline' if piped else 'cut'}": ("mode_by_hand", piped) for piped in (False, True)},
    **{f"clipped gradients, {'pipeline' if piped else 'cut'}": ("clips", piped) for piped in (False, True)},
    **{f"a run resumed, {how}, {'pipeline' if piped else 'cut'}": ("resumed", piped, how, PATH)
       for how in ("state_dict", "dcp", "full") for piped in (False, True)},
    **{f"a run resumed, {how}, pipeline of blocks with a buffer": ("resumed", True, how, PATH, habits.MaskedNet)
       for how in ("state_dict", "full")},
    **{f"a ZeRO-3 parameter seen through {how}": ("viewed", how) for how in habits.VIEWS},
    **{f"layers left out at random, {how}, {k} microbatches": ("left_out", how, k) for how, k in habits.LEFT_OUT},
    **{f"weights written in forward, {'pipeline' if piped else 'cut'}": ("writes", piped) for piped in (False, True)},
    "weights written in forward, ZeRO": ("stored_and_written",),
    "a stage without parameters": ("stage_without_parameters",),
    "an optimizer made before, ZeRO": ("optimizer_before", "adamw", False, {"*.weight": "S0 use", "*.bias": "S0 step"}),
}  # fmt: skip
"""Cases that train as in eager mode."""
SLOW = {
    "load_state_dict, pipeline, assign", "load_state_dict, cut", "a run resumed, full, cut", "a run resumed, dcp, cut",
    "a run resumed, state_dict, pipeline", "a run resumed, full, pipeline of blocks with a buffer",
    "an optimizer made before, named, cut", "an optimizer made before, amsgrad, pipeline",
    "an optimizer made before, sgd, cut", "an optimizer made before, momentum, cut",
    "an optimizer made before, adamw, pipeline", "load_state_dict, pipeline", "a run resumed, full, pipeline",
    "a run resumed, state_dict, cut", "clipped gradients, cut", "training = False, pipeline",
    "half, pipeline", "float, cut", "cuda, pipeline", "eval step, cut",
} | {
    f"layers left out at random, {how}, {k} microbatches"
    for how, k in habits.LEFT_OUT if how != "pipeline"
}  # fmt: skip

WORDS = {
    "eval step": "RunError: the module is in eval mode, so a step would train without dropout; call train",
    "half": "RunError: the program was made for cpu and its dtypes, and would need torch.float64 on cpu turned into",
    "float": "RunError: the program was made for cpu",
    "cuda": "RunError: the program cannot be moved from cpu",
}
ERRORS: dict[str, tuple[tuple[Any, ...], str]] = {
    **{
        f"{what}, {'pipeline' if piped else 'cut'}": (("refused", what, piped), text)
        for what, text in WORDS.items()
        for piped in (False, True)
    },
    "torch's clip_grad_norm_, pipeline": (
        ("refused", "clip", True),
        "RunError: torch's norm of the gradients of a pip",
    ),
    "torch's total norm, pipeline": (("refused", "total norm", True), "RunError: torch's norm of the gradients of a"),
    **{
        f"other {what} on another rank": (("differing", what), f"AutoparError: {what} differs between ranks: it is ")
        for what in habits.DIFFERING
        if what not in ("wrong type on one", "rows of a local example")
    },
    "an example of one's own rows with fewer on one rank": (
        ("differing", "rows of a local example"),
        r"AutoparError: example_inputs differs between ranks: .*\[8 6\] on rank 0 and .*\[5 6\] on rank 1; with "
        r"batch='local' calls may have other rows on every rank, .* cut it to as many as",
    ),
    "a wrong type on one rank": (
        ("differing", "wrong type on one"),
        "AutoparError: (on rank 1: )?cuts is 'down'; give",
    ),
    "an optimizer left behind, cut": (("old_optimizer", False), "RunError: parameter 'up.weight' of before"),
    "an optimizer left behind, pipeline": (("old_optimizer", True), "RunError: .*parallelize.model, ..., optimizer="),
}
"""Cases that are refused, and what is said."""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of all cases on two ranks, in one start of processes."""
    more: dict[str, tuple[Any, ...]] = {"a buffer by hand": ("buffer_by_hand",)}
    more |= {f"{where} fail on {rank}": ("built", where, rank) for where in habits.BUILDS for rank in (0, 1)}
    path = str(tmp_path_factory.mktemp("checkpoints"))
    numbers = {
        name: tuple(f"{path}/{i}" if arg is PATH else arg for arg in call)
        for i, (name, call) in enumerate(NUMBERS.items())
    }
    calls = {**more, **numbers, **{name: call for name, (call, _) in ERRORS.items()}}
    return run_local(several, 2, "habits", selected(request, calls, SLOW))


def test_a_buffer_put_in_by_hand(found: list[dict[str, Any]]) -> None:
    for difference, text in (rank["a buffer by hand"] for rank in found):
        assert difference < 1e-9 and text.startswith("RunError: buffer 'weight' was replaced by another one that"), text


@pytest.mark.parametrize("where", habits.BUILDS)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_build_its_stage_stops_the_others(
    found: list[dict[str, Any]], where: str, failing: int
) -> None:
    texts, seconds = zip(*(rank[f"{where} fail on {failing}"] for rank in found), strict=True)
    assert texts[failing] == "RuntimeError: out of memory"
    assert texts[1 - failing] == f"AutoparError: on rank {failing}: out of memory"
    assert max(seconds) < 60, "a rank waited for its timeout"


@pytest.mark.parametrize("name", marked(NUMBERS, SLOW))
def test_it_trains_as_in_eager_mode(found: list[dict[str, Any]], name: str) -> None:
    assert max(rank[name] for rank in found) < 1e-9, [rank[name] for rank in found]


@pytest.mark.parametrize("name", marked(ERRORS, SLOW))
def test_it_is_refused(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        assert re.match(ERRORS[name][1], rank[name], re.DOTALL), rank[name]
