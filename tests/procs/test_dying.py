"""A rank that dies or leaves within ``parallelize``, without a launcher: the others end with an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from procs.dying import CULPRIT, HOW, IN_STEPS, WHERE, alone, before, in_step, within
from procs.unlaunched import answers

STAGES = (None, 3)


def check(how: str, where: str, stages: int | None) -> None:
    found = answers(3, within, (how, where, stages), 90.0, CULPRIT if how == "stopped" else None)
    if how in ("killed", "exits", "stopped"):
        assert found[CULPRIT] is None
    for rank, answer in enumerate(found):
        if rank == CULPRIT:
            continue
        assert answer is not None, f"rank {rank} still waits"
        seconds, text = answer
        words = {
            "killed": "has ended", "exits": "has ended", "stopped": "has not been heard of for",
            "leaves": f"rank {CULPRIT} left parallelize by KeyboardInterrupt: on this rank alone",
            "memory": f"on rank {CULPRIT}: ",
        }[how]  # fmt: skip
        assert f"rank {CULPRIT}" in text and words in text and seconds < 10, (rank, seconds, text)


def test_a_rank_that_is_killed_while_it_traces() -> None:
    check("killed", "tracing", None)


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("how", HOW)
def test_all(how: str, where: str, stages: int | None) -> None:
    check(how, where, stages)


def check_heard(answered: list[tuple[float, str] | None], words: str, most: float) -> None:
    assert answered[CULPRIT] is None
    for rank, answer in enumerate(answered):
        if rank == CULPRIT:
            continue
        assert answer is not None, f"rank {rank} still waits"
        seconds, text = answer
        assert words in text and seconds < most, (rank, seconds, text)


def test_a_rank_that_ends_before_it_comes_to_parallelize() -> None:
    check_heard(answers(3, before, ("exits",), 60.0), f"rank {CULPRIT}, which has ended", 10)


def test_a_rank_that_is_killed_while_others_wait_to_read() -> None:
    check_heard(answers(3, in_step, ("killed", "reading", None), 60.0), f"rank {CULPRIT} has ended without a word", 10)


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("where", IN_STEPS)
@pytest.mark.parametrize("how", ["killed", "exits"])
def test_a_rank_that_is_gone_in_a_step(how: str, where: str, stages: int | None) -> None:
    if where == "reading" and stages is not None:
        pytest.skip("what a pipeline gives is whole")
    check_heard(answers(3, in_step, (how, where, stages), 90.0), f"rank {CULPRIT} has ended without a word", 12)


STOPPED = f"rank {CULPRIT} has not been heard of for"


def test_a_rank_that_is_stopped_between_steps() -> None:
    check_heard(answers(3, in_step, ("stopped", "between steps", None), 60.0, CULPRIT), STOPPED, 20)


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("where", IN_STEPS)
def test_a_rank_that_is_stopped_in_a_step(where: str, stages: int | None) -> None:
    if where == "reading" and stages is not None:
        pytest.skip("what a pipeline gives is whole")
    check_heard(answers(3, in_step, ("stopped", where, stages), 90.0, CULPRIT), STOPPED, 20)


def check_alone(what: str, stages: int | None, folder: str) -> None:
    called, _, then = what.partition(", then ")
    for rank, answer in enumerate(answers(2, alone, (what, stages, folder), 60.0)):
        assert answer is not None, f"rank {rank} still waits"
        seconds, text = answer
        if rank and then:
            continue  # it waits in a collective of the script's own, which goes on with rank 0
        why = "waits in torch.distributed.barrier (dying.py:" if then else "rank 1 is at "
        assert f"rank 0 calls {called}()" in text and why in text and seconds < 15, (rank, seconds, text)


@pytest.mark.parametrize("what", ["full_state_dict", "Checkpoint.save"])
def test_a_call_of_all_ranks_that_only_rank_0_makes(what: str, tmp_path: Path) -> None:
    check_alone(what, None, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("stages", (None, 2))
@pytest.mark.parametrize(
    "what",
    [
        "full_state_dict", "load_full_state_dict", "full_optimizer_state_dict", "save_safetensors",
        "full_state_dict, then a barrier", "Checkpoint.save", "Checkpoint.load",
    ],
)  # fmt: skip
def test_any_call_of_all_ranks_that_only_rank_0_makes(what: str, stages: int | None, tmp_path: Path) -> None:
    check_alone(what, stages, str(tmp_path))
