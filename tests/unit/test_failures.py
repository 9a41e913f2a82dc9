"""What ranks say of one that failed, ended or is late: the three ranks of a store, in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.ranks import ended, failures, store_names, watch
from autopar.runtime.ranks.failures import Failures
from autopar.torch_private import default_store

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35551")
LATE = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation")
MISUSED = RuntimeError("ProcessGroupGloo: Invalid scalar type")
ENDED = "has ended outside of this module's steps"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Failures]]:
    store = dist.HashStore()
    monkeypatch.setattr(failures, "NEWS_SECONDS", 0.05)
    monkeypatch.setattr(failures, "default_store", lambda: store)
    monkeypatch.setattr(ended, "default_store", lambda: store)
    monkeypatch.setattr(ended, "_kept", {})
    monkeypatch.setattr(failures, "default_timeout_seconds", lambda: 1.0)
    made = []
    for rank in range(3):
        monkeypatch.setattr(store_names, "_numbers", {})
        with mock.patch.object(dist, "get_rank", return_value=rank):
            made.append(Failures(range(3)))
    yield made
    for each in made:
        failures._of_all_modules.discard(each)


def ends(rank: Failures, with_error: BaseException | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", with_error, raising=False)
    rank.note_end()


def said(rank: Failures, error: BaseException) -> str:
    """What the error of a step says in which a rank meets ``error``."""
    with pytest.raises(type(error) if error is MISUSED else RunError) as raised, rank.during("the forward of call 8"):
        raise error
    return str(raised.value)


def test_one_that_waited_is_not_the_culprit(ranks: list[Failures]) -> None:
    first, second = said(ranks[2], LOST), said(ranks[0], LOST)
    assert f"a rank {ENDED}; nothing is heard of rank 0, 1; its own output says why\n  rank 2 waited for it" in first
    assert f"a rank {ENDED}" in second and "rank 0 waited for it in the forward of call 8" in second
    assert "failed" not in first + second and "rank 2 waited" not in second


@pytest.mark.parametrize(
    ("error", "how"),
    [(KeyboardInterrupt(), ": KeyboardInterrupt: \n"), (ValueError("bad batch"), ": ValueError: bad batch\n"),
     (None, "; its own output says why\n")],
)  # fmt: skip
def test_one_that_ends_between_steps_is_named(
    ranks: list[Failures], monkeypatch: pytest.MonkeyPatch, error: BaseException | None, how: str
) -> None:
    ends(ranks[1], error, monkeypatch)
    for rank in (2, 0):
        text = said(ranks[rank], LOST)
        assert text.startswith(f"rank 1 {ENDED}{how}  rank {rank} waited for it in the forward of call 8: "), text


def test_ranks_that_end_because_another_did_say_nothing(ranks: list[Failures], monkeypatch: pytest.MonkeyPatch) -> None:
    ends(ranks[2], LOST, monkeypatch)  # in a collective of the user's own
    said(ranks[1], LOST)
    ends(ranks[1], RunError("from that step"), monkeypatch)
    assert said(ranks[0], LOST).startswith(f"a rank {ENDED}; nothing is heard of rank 2; ")


def test_a_rank_that_is_late(ranks: list[Failures]) -> None:
    assert said(ranks[0], LATE).startswith(
        "a rank did not come to this step within the time-out of the process group; nothing is heard of rank 1, 2\n"
    )


@pytest.mark.parametrize("error", [ArithmeticError("trouble"), MISUSED])
def test_what_fails_within_a_step_is_that_ranks_own(ranks: list[Failures], error: Exception) -> None:
    with pytest.raises(type(error)), ranks[1].during("the backward of call 8"):
        raise error
    how = f"rank 1 failed in the backward of call 8: {type(error).__name__}: {error}"
    for rank in (2, 0):
        text: Callable[[str], str] = f"{how}\n  rank {rank} waited for it in the forward of call 8: {{}}".format
        assert said(ranks[rank], LOST) == text(LOST)


def test_a_process_that_is_gone_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as killed when it is missed for the second time, unless it has said something by then."""
    store, began = dist.HashStore(), {11: "100", 12: "200", 13: "300"}
    monkeypatch.setattr(ended, "default_store", lambda: store)
    monkeypatch.setattr(ended, "_kept", {"world": None, "machine": "here"})
    monkeypatch.setattr(ended, "_begun", lambda pid: began.get(pid, ""))
    there = dist.PrefixStore("autopar/ended", store)
    there.set("on here", "0:11:100;1:12:200;2:13:300;3:14:;")
    assert ended.killed([0, 1, 2, 3]) == {}
    began[12] = "999"  # another process has its number now
    del began[13]
    assert ended.killed([0, 1, 2]) == {}
    there.set("2", "has ended")
    assert ended.killed([0, 1, 2]) == {1: ended.WITHOUT_A_WORD}
    assert ended.ended([0, 1, 2]) == {1: ended.WITHOUT_A_WORD, 2: "has ended"}


@pytest.mark.parametrize("left", ["0:91:100;1:92:100;", "1:92:100;", "1:90:7;1:92:100;0:91:100;"])
def test_processes_of_an_earlier_attempt_are_not_a_ranks_own(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last process that a rank has written down is its own; those before it have ended."""
    store = dist.HashStore()
    monkeypatch.setattr(ended, "default_store", lambda: store)
    monkeypatch.setattr(ended, "_kept", {"world": None, "machine": "here"})
    monkeypatch.setattr(ended, "_begun", lambda pid: "300" if pid in (11, 12) else "")
    dist.PrefixStore("autopar/ended", store).set("on here", f"{left}0:11:300;1:12:300;")
    for _ in range(3):
        assert ended.killed([0, 1]) == {} and ended.ended([0, 1]) == {}


@pytest.mark.parametrize(
    ("how", "told"),
    [("has ended", "has ended"), ("has ended by ValueError: no rows", "has ended by ValueError: no rows"),
     (ended.WITHOUT_A_WORD, ended.WITHOUT_A_WORD)],
)  # fmt: skip
def test_one_that_has_ended_is_not_waited_for_after_a_broken_step(ranks: list[Failures], how: str, told: str) -> None:
    with pytest.raises(ArithmeticError), ranks[0].during("the forward of call 8"):
        raise ArithmeticError("trouble")
    there = dist.PrefixStore("autopar/ended", ended.default_store())
    there.set("1", how)
    there.set("any", "so")
    ranks[0].timeout = 60.0
    with pytest.raises(RunError, match=f"rank 1 {told}; rank 0 waited for it after the forward of call 8 broke off"):
        ranks[0].settle()


@pytest.mark.parametrize(("seconds", "shown"), [(61.2, "61 s"), (4.0, "4 s")])
def test_a_silent_rank_is_heard_of_where_one_that_was_killed_is(
    ranks: list[Failures], seconds: float, shown: str
) -> None:
    ended.say_silent(2, seconds)
    assert ended.killed([0, 1]) == {} and list(ended.killed([0, 1, 2])) == [2]
    assert f"rank 2 has not been heard of for {shown}: its process was stopped" in ranks[0].news()
    there = dist.PrefixStore("autopar/ended", ended.default_store())
    there.set("1", "has ended by ValueError: no rows")
    ended.say_silent(1, seconds)  # it said itself why, before
    assert ended.ended([1]) == {1: "has ended by ValueError: no rows"}


def test_a_world_that_is_ended_while_a_thread_looks_is_no_error(
    ranks: list[Failures], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``destroy_process_group`` between two requests of the watch, which would show a traceback of its thread."""
    monkeypatch.setattr(ended, "default_store", default_store)
    assert not dist.is_initialized() and ranks[0].news() == ""
    step = failures._Step(ranks[0], lambda: None, True)
    step.begin()
    step.end()
    thread = watch._watches[-1].thread
    assert thread.is_alive() and step.look() == failures.QUIET_SECONDS
    watch.end_watches()
    assert not thread.is_alive()
