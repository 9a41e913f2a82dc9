"""Saves that do not end: killed at any moment, on a full disk, beside other jobs, or when the script ends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autopar
from autopar import RunError
from autopar.runtime.checkpoints import folder_owner
from autopar.runtime.checkpoints.durable_files import SummedFile
from autopar.runtime.checkpoints.saves_in_folder import MANIFEST, read_on
from autopar.runtime.checkpoints.stored_shards import ShardsToWrite
from autopar.runtime.ranks.ended import end_rank

FORK = multiprocessing.get_context("fork")


class Run:
    """A model and an optimizer of which every number is the same."""

    def __init__(self, folder: Path, keep: int | None = 2, size: int = 8) -> None:
        self.model = nn.Linear(size, size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self.model(torch.ones(1, size)).sum().backward()
        self.optimizer.step()
        self.checkpoint = autopar.Checkpoint(folder, self.model, self.optimizer, keep=keep)

    def tensors(self) -> list[torch.Tensor]:
        params = list(self.model.parameters())
        return [*params, *(self.optimizer.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq"))]

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(value)

    def value(self) -> float:
        """The number; all have it."""
        first = float(self.tensors()[0].detach().flatten()[0])
        assert all((tensor == first).all() for tensor in self.tensors())
        return first


def in_child(does: Callable[[], Any]) -> int:
    """The status of a process that does something; minus the signal that ended it."""
    process = FORK.Process(target=does)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name != folder_owner.OWNER)


# --- killed ----------------------------------------------------------------------------------------------------------


CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


def killed_before(change: int, folder: Path) -> Callable[[], None]:
    """Have this process be killed before its so-manieth change of the folder; count them all if it is negative."""
    count = 0

    def here() -> None:
        nonlocal count
        if count == change:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def hook(event: str, args: Any) -> None:
        if event in CHANGES and isinstance(args[0], str | os.PathLike) and str(folder) in str(args[0]):
            here()

    real = SummedFile.write

    def write(self: SummedFile, data: Any) -> int:
        here()
        return real(self, data)

    sys.addaudithook(hook)
    SummedFile.write = write  # type: ignore[method-assign]
    return lambda: (folder.parent / "count").write_text(str(count), encoding="ascii") and None


def saves(kind: str, folder: Path, change: int) -> None:
    """What is saved before, and then the save that is killed."""
    run = Run(folder, keep=1)
    if kind != "first":
        run.fill(1)
        run.checkpoint.save(1)
    run.fill(2)
    done = killed_before(change, folder)
    run.checkpoint.save(1 if kind == "again" else 2, wait=kind != "async")
    run.checkpoint.wait()
    done()


KINDS = {"first": {0: None, 2: 2.0}, "next": {1: 1.0, 2: 2.0}, "again": {1: (1.0, 2.0)}, "async": {1: 1.0, 2: 2.0}}
"""What loads after the kill: by the step the number, or one of two; step 0 stands for nothing."""


def changes_of(kind: str, folder: Path) -> int:
    folder.mkdir(parents=True)
    assert in_child(lambda: saves(kind, folder, -1)) == 0
    return int((folder.parent / "count").read_text(encoding="ascii"))


def check_killed(kind: str, folder: Path, change: int) -> None:
    folder.mkdir(parents=True)
    assert in_child(lambda: saves(kind, folder, change)) == -signal.SIGKILL
    reader = Run(folder)
    step = reader.checkpoint.load() or 0
    assert step in KINDS[kind], step
    wanted: Any = KINDS[kind][step]
    if wanted is not None:
        assert reader.value() in (wanted if isinstance(wanted, tuple) else (wanted,))
    run = Run(folder, keep=2)  # the job that goes on
    assert (run.checkpoint.load() or 0) == step
    run.fill(3)
    run.checkpoint.save(3)
    assert entries(folder) == [f"step-{k:08d}" for k in (step, 3) if k], "what the dead one left is gone"
    assert reader.checkpoint.load() == 3 and reader.value() == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_is_killed_leaves_a_whole_one(tmp_path: Path, kind: str) -> None:
    """At six moments of each kind, the last ones among them, where names change."""
    count = changes_of(kind, tmp_path / "count" / "run")
    assert count > 20
    for change in [*range(count // 4, count - 4, count // 4), *range(count - 4, count)]:
        check_killed(kind, tmp_path / str(change) / "run", change)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_that_is_killed_at_any_moment_leaves_a_whole_one(tmp_path: Path, kind: str) -> None:
    for change in range(changes_of(kind, tmp_path / "count" / "run")):
        check_killed(kind, tmp_path / str(change) / "run", change)


# --- disks -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_after(writes: int, number: int = errno.ENOSPC) -> Iterator[None]:
    """A disk on which there is room for so many writes."""
    real, count = SummedFile.write, 0

    def write(self: SummedFile, data: Any) -> int:
        nonlocal count
        count += 1
        if count > writes:
            self.error = self.error or OSError(number, os.strerror(number))
            raise self.error
        return real(self, data)

    with mock.patch.object(SummedFile, "write", write):
        yield


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_on_which_no_save_has_room_is_one_error(tmp_path: Path, wait: bool, number: int) -> None:
    run = Run(tmp_path)
    for writes in (0, 1, 30, 100):
        with full_after(writes, number), pytest.raises(RunError, match=os.strerror(number)) as caught:
            run.checkpoint.save(1, wait=wait)
            run.checkpoint.wait()
        assert "could not be saved to" in str(caught.value)
        if number != errno.EIO and number != errno.EROFS:
            assert "bytes, and" in str(caught.value) and "were free there; make room" in str(caught.value)
        assert not any(tmp_path.iterdir()), "nothing is left, and no lock of who has saved nothing"
    run.fill(5)
    run.checkpoint.save(1, wait=wait)
    run.checkpoint.wait()
    with full_after(40, number), pytest.raises(RunError):
        run.checkpoint.save(2, wait=wait)
        run.checkpoint.wait()
    assert entries(tmp_path) == ["step-00000001"] and run.checkpoint.load() == 1 and run.value() == 5


def test_a_small_disk(tmp_path: Path) -> None:
    """A real one, where this may be mounted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(tmp_path).encode(), b"tmpfs", 0, b"size=3m"):
        pytest.skip("no file system may be mounted here")
    try:
        run = Run(tmp_path / "run", size=300)  # 1.1 MB
        for step in range(1, 6):
            if step < 3:
                run.checkpoint.save(step, wait=step % 2 == 0)
                continue
            with pytest.raises(RunError, match="No space left on device"):
                run.checkpoint.save(step, wait=step % 2 == 0)
                run.checkpoint.wait()
            assert entries(tmp_path / "run") == ["step-00000001", "step-00000002"]
        assert Run(tmp_path / "run", size=300).checkpoint.load() == 2
    finally:
        libc.umount2(str(tmp_path).encode(), 2)


# --- other jobs ------------------------------------------------------------------------------------------------------


def reads_on(folder: Path, stop: Any) -> None:
    while not stop.is_set():
        run = Run(folder)
        step = run.checkpoint.load()
        assert step is None or run.value() == step


def test_readers_leave_a_save_alone_and_have_one_to_read(tmp_path: Path) -> None:
    stop = FORK.Event()
    reader = FORK.Process(target=reads_on, args=(tmp_path, stop))
    reader.start()
    try:
        run = Run(tmp_path, keep=1)
        for step in range(1, 61):
            run.fill(step)
            run.checkpoint.save(step, wait=step % 2 == 0)
        run.checkpoint.wait()
    finally:
        stop.set()
        reader.join(30)
    assert reader.exitcode == 0 and run.checkpoint.steps()[-1] == 60 and len(run.checkpoint.steps()) < 4
    run.checkpoint.save(61)
    assert run.checkpoint.steps() == [61]


def test_a_step_that_is_saved_again_takes_no_room_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for value in (1, 2, 3):
        run.fill(value)
        run.checkpoint.save(7)
        assert entries(tmp_path) == ["step-00000007"]
    with read_on(tmp_path / "step-00000007"):  # this one is not removed while somebody reads it
        run.fill(4)
        run.checkpoint.save(7)
        earlier, _ = entries(tmp_path)
        assert earlier.startswith(".removed-step-00000007") and (tmp_path / earlier / "checkpoint.json").exists()
    assert run.checkpoint.load() == 7 and run.value() == 4


def test_one_job_at_a_time_saves_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_owner, "WAIT_SECONDS", 0.3)
    saved, stop = FORK.Event(), FORK.Event()

    def other_job() -> None:
        run = Run(tmp_path)
        run.fill(1)
        run.checkpoint.save(1)
        (tmp_path / ".step-00000009-unfinished").mkdir()
        saved.set()
        stop.wait(30)
        os.kill(os.getpid(), signal.SIGKILL)

    other = FORK.Process(target=other_job)
    other.start()
    assert saved.wait(30)
    run = Run(tmp_path)
    assert run.checkpoint.load() == 1 and run.value() == 1
    for wait in (True, False):
        with pytest.raises(RunError, match=rf"process {other.pid} on .* saves in {tmp_path}, and this is process "):
            run.checkpoint.save(2, wait=wait)
    assert entries(tmp_path) == [".step-00000009-unfinished", "step-00000001"], "who may be alive loses nothing"
    stop.set()
    other.join(30)
    run.checkpoint.save(2)
    assert entries(tmp_path) == ["step-00000001", "step-00000002"]


def test_several_checkpoints_of_a_process_are_one_job(tmp_path: Path) -> None:
    first, second = Run(tmp_path, keep=None), Run(tmp_path, keep=None)
    started, go = threading.Event(), threading.Event()
    real = ShardsToWrite.write

    def slow(self: ShardsToWrite, plan: Any) -> Any:
        started.set()
        assert go.wait(30)
        return real(self, plan)

    with mock.patch.object(ShardsToWrite, "write", slow):
        first.checkpoint.save(1, wait=False)
        assert started.wait(30)
    second.checkpoint.save(2)
    go.set()
    first.checkpoint.wait()
    assert entries(tmp_path) == ["step-00000001", "step-00000002"]
    del first
    second.checkpoint.save(3)
    assert (tmp_path / folder_owner.OWNER).exists()
    del second
    assert not (tmp_path / folder_owner.OWNER).exists()


def test_a_worker_of_a_dead_job_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data loader's worker was forked from it, and lives on."""
    monkeypatch.setattr(folder_owner, "WAIT_SECONDS", 1.0)
    worker = FORK.Value("i", 0)
    if (job := os.fork()) == 0:
        run = Run(tmp_path)
        run.checkpoint.save(1)
        if (pid := os.fork()) == 0:
            time.sleep(20)
            os._exit(0)
        worker.value = pid
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(job, 0)[1] == signal.SIGKILL
    try:
        Run(tmp_path).checkpoint.save(2)
    finally:
        os.kill(worker.value, signal.SIGKILL)
    assert entries(tmp_path) == ["step-00000001", "step-00000002"]


def test_an_owner_whose_lock_was_removed_takes_it_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.checkpoint.save(1)
    shutil.rmtree(tmp_path / folder_owner.OWNER)
    run.checkpoint.save(2)
    name = json.loads((tmp_path / folder_owner.OWNER / folder_owner.LOCK).read_text(encoding="utf-8"))
    assert name["process"] == os.getpid() and run.checkpoint.steps() == [1, 2]


def test_a_file_system_without_locks_is_said(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / ".step-00000009-unfinished").mkdir()
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "Function not implemented")):
        with pytest.warns(UserWarning, match="has no locks"):
            run.checkpoint.save(1)
        run.checkpoint.save(2)
    assert entries(tmp_path) == [".step-00000009-unfinished", "step-00000001", "step-00000002"]


# --- the end of the script -------------------------------------------------------------------------------------------


def test_the_last_save_is_written_though_nobody_waits(tmp_path: Path) -> None:
    def script() -> None:
        real = ShardsToWrite.write

        def slow(self: ShardsToWrite, plan: Any) -> Any:
            time.sleep(0.5)
            return real(self, plan)

        ShardsToWrite.write = slow  # type: ignore[method-assign]
        run = Run(tmp_path)
        run.fill(4)
        run.checkpoint.save(4, wait=False)

    assert in_child(script) == 0
    run = Run(tmp_path)
    assert run.checkpoint.load() == 4 and run.value() == 4


def test_a_last_save_that_fails_is_said_and_the_status_shows_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def script() -> None:
        run = Run(tmp_path)
        run.checkpoint.save(1)
        with full_after(60):
            run.checkpoint.save(2, wait=False)
            while run.checkpoint.pending.thread.is_alive():  # type: ignore[union-attr]
                time.sleep(0.01)

    assert in_child(script) == 1
    assert "could not be saved" in (said := capfd.readouterr().err) and "No space left on device" in said
    assert entries(tmp_path) == ["step-00000001"]


def test_a_last_save_that_fails_is_an_error_of_a_local_rank(tmp_path: Path) -> None:
    """Of ``run_local``, which waits for what its ranks still write before it ends them."""
    run = Run(tmp_path)
    run.checkpoint.save(1)
    with full_after(60):
        run.checkpoint.save(2, wait=False)
        with pytest.raises(RunError, match=r"checkpoint of step 2 could not be saved to .* without wait\(\): No space"):
            end_rank()
    with pytest.raises(RunError, match="No space left on device"):
        run.checkpoint.wait()
    assert entries(tmp_path) == ["step-00000001"]
    end_rank()


def test_a_run_that_went_back_goes_on_where_it_saved_last(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=3)
    for step in (2, 4, 6):
        run.fill(step)
        run.checkpoint.save(step)
    assert run.checkpoint.load(2) == 2
    run.fill(30)
    run.checkpoint.save(3)
    assert run.checkpoint.steps() == [4, 6, 3]
    again = Run(tmp_path, keep=3)
    assert again.checkpoint.load() == 3 and again.value() == 30, "not the line that was left"
    for step in (4, 5, 6):
        again.fill(10 * step)
        again.checkpoint.save(step)
    assert again.checkpoint.steps() == [4, 5, 6]
    assert run.checkpoint.load() == 6 and run.value() == 60


@pytest.mark.parametrize("wait", [True, False])
def test_a_new_run_in_the_folder_of_a_longer_one_keeps_what_it_saves(tmp_path: Path, wait: bool) -> None:
    earlier = Run(tmp_path, keep=3)
    for step in (100, 200, 300):
        earlier.checkpoint.save(step)
    del earlier
    run = Run(tmp_path, keep=3)
    run.fill(1)
    path = run.checkpoint.save(10, wait=wait)
    run.checkpoint.wait()
    assert path.is_dir() and run.checkpoint.steps() == [200, 300, 10]
    assert run.checkpoint.load() == 10 and run.value() == 1
    (path / MANIFEST).write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        run.checkpoint.load()
    assert run.checkpoint.load(300) == 300
