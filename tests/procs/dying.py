"""Ranks of which one dies, or leaves, within ``parallelize``, and no launcher that ends the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import autopar
from autopar.runtime import presence
from autopar.runtime.launch import _context, _environment
from autopar.runtime.registering import Placing

CULPRIT = 1


def die() -> None:
    """As the system does where memory is out."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    """As Ctrl-C does, on one rank alone; the process stays."""
    raise KeyboardInterrupt("on this rank alone")


def run_out() -> None:
    """What torch raises where a GPU's memory is out."""
    raise torch.OutOfMemoryError("out of memory, on purpose")


HOW: dict[str, Callable[[], None]] = {"killed": die, "exits": lambda: os._exit(3), "leaves": leave, "memory": run_out}
WHERE = ("tracing", "loading", "first value")


class Net(torch.nn.Module):
    """Two layers; what ``does`` says happens while it is traced."""

    def __init__(self, does: Callable[[], None] | None) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.does = does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.does is not None:
            self.does()
        return self.second(torch.relu(self.first(x))).square().mean()


def within(how: str, where: str, stages: int | None) -> tuple[float, str]:
    """Seconds until this rank has an error within ``parallelize``, and the error."""
    presence.SILENCE_SECONDS, presence.BEAT_SECONDS = 3.0, 0.3
    culprit = dist.get_rank() == CULPRIT
    does = HOW[how] if culprit else None
    model = Net(does if where == "tracing" else None)
    options: dict[str, Any] = {} if stages is None else {"stages": stages, "schedule": "1f1b", "microbatches": 2}

    def does_instead(*args: Any, **kwargs: Any) -> Any:
        assert does is not None
        does()

    name = {"loading": "parameters", "first value": "__init__"}.get(where, "")
    start = time.monotonic()
    try:
        with mock.patch.object(Placing, name, does_instead) if name and culprit else mock.MagicMock():
            autopar.parallelize(model, dist.get_world_size(), (torch.ones(4, 8),), **options)
    except (Exception, KeyboardInterrupt) as error:
        return time.monotonic() - start, f"{type(error).__name__}: {error}"
    return time.monotonic() - start, ""


def _rank(pipe: Any, rank: int, env: dict[str, str], how: str, where: str, stages: int | None) -> None:
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipe.send(within(how, where, stages))
    pipe.recv()  # it stays until all have answered
    os._exit(0)


def answers(n: int, how: str, where: str, stages: int | None, seconds: float) -> list[tuple[float, str] | None]:
    """What :func:`within` gives on every rank; None of one that gives nothing within that time, or dies."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    pipes, processes = [], []
    context = _context(None)
    try:
        with _environment(shared):
            for rank in range(n):
                here, there = context.Pipe()
                process = context.Process(
                    target=_rank, args=(there, rank, shared, how, where, stages), daemon=True
                )
                process.start()
                there.close()
                pipes.append(here)
                processes.append(process)
        found: list[tuple[float, str] | None] = [None] * n
        end, left = time.monotonic() + seconds, list(pipes)
        while left and time.monotonic() < end:
            for pipe in wait(left, timeout=max(0.0, end - time.monotonic())):
                left.remove(pipe)  # type: ignore[arg-type]
                try:
                    found[pipes.index(pipe)] = pipe.recv()  # type: ignore[arg-type, union-attr]
                except EOFError:
                    continue
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store
