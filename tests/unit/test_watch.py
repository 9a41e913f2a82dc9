"""The thread in which a rank looks into the process group's store."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from autopar.runtime.ranks import watch


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    yield
    watch.end_watches()


def until(happens: threading.Event) -> None:
    assert happens.wait(20.0)


def test_all_look_in_one_thread_as_often_as_they_say() -> None:
    threads: set[int] = set()
    seen, done = {"often": 0, "once": 0}, threading.Event()

    def often() -> float | None:
        threads.add(threading.get_ident())
        seen["often"] += 1
        if seen["often"] == 5:
            done.set()
            return None
        return 0.01

    def once() -> float | None:
        threads.add(threading.get_ident())
        seen["once"] += 1
        return None

    watch.watch(often, 0.0)
    watch.watch(once, 0.0)
    until(done)
    assert seen == {"often": 5, "once": 1} and len(threads) == 1 and threading.get_ident() not in threads


def test_one_that_comes_later_is_not_waited_for() -> None:
    done = threading.Event()
    watch.watch(lambda: 60.0, 0.0)
    began = time.monotonic()
    watch.watch(done.set, 0.0)
    until(done)
    assert time.monotonic() - began < 20.0


def test_a_store_that_is_gone_ends_the_looks_of_one_alone() -> None:
    done, left = threading.Event(), []
    broken = iter([dist.DistError("gone"), None])

    def breaks() -> float | None:
        left.append(next(broken))
        raise left[0]

    watch.watch(breaks, 0.0)
    watch.watch(lambda: done.set() or 0.01, 0.05)  # type: ignore[func-returns-value]
    until(done)
    assert len(left) == 1


def test_it_says_that_it_leaves_and_another_one_follows() -> None:
    left, looked = threading.Event(), threading.Event()
    watch.watch(lambda: 0.01, 0.0, left.set)
    first = watch._watches[-1]
    watch.end_watches()
    until(left)
    assert not first.thread.is_alive()
    watch.watch(looked.set, 0.0)
    until(looked)
    assert watch._watches[-1] is not first


def test_a_forked_process_has_a_thread_of_its_own() -> None:
    """And does not wait for a lock that was held when it was forked."""
    watch.watch(lambda: 60.0, 0.0)
    first = watch._watches[-1]
    with first.changed:
        pid = os.fork()
        if not pid:
            looked = threading.Event()
            watch.watch(looked.set, 0.0)
            first.end()
            os._exit(0 if looked.wait(20.0) else 1)
    end = time.monotonic() + 30.0
    done = (0, 0)
    while not done[0] and time.monotonic() < end:
        done = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if not done[0]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert done == (pid, 0)
