"""Ranks without a launcher that ends them all when one dies: each answers for itself, or does not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.ranks.launch import _context, _environment


def _meet() -> None:
    """All ranks have joined the group: one that ends at once would otherwise take away a peer that still connects."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"joined/{dist.get_rank()}", "")
    store.wait([f"joined/{rank}" for rank in range(dist.get_world_size())])


def _rank(pipe: Any, rank: int, env: dict[str, str], does: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _meet()
    pipe.send(does(*args))
    pipe.recv()  # it stays until all have answered
    os._exit(0)


@contextmanager
def started(n: int, target: Callable[..., None], *args: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """Pipes to ``n`` processes, and these: ``target(pipe, rank, env, *args)``; they are killed in the end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    pipes: list[Any] = []
    processes: list[Any] = []
    context = _context(None)
    try:
        with _environment(shared):
            for rank in range(n):
                here, there = context.Pipe()
                process = context.Process(target=target, args=(there, rank, shared, *args), daemon=True)
                process.start()
                there.close()
                pipes.append(here)
                processes.append(process)
        yield pipes, processes
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store


def answers(
    n: int, does: Callable[..., Any], args: tuple[Any, ...], seconds: float, silent: int | None = None
) -> list[Any]:
    """What ``does(*args)`` gives on each of ``n`` ranks; None of one that gives nothing within that time, or dies.

    Args:
        does: a function at the top of a module.
        silent: a rank that stays without an answer, and is not waited for.
    """
    with started(n, _rank, does, args) as (pipes, _):
        given: list[Any] = [None] * n
        end, left = time.monotonic() + seconds, [pipe for rank, pipe in enumerate(pipes) if rank != silent]
        while left and time.monotonic() < end:
            for pipe in wait(left, timeout=max(0.0, end - time.monotonic())):
                left.remove(pipe)  # type: ignore[arg-type]
                try:
                    given[pipes.index(pipe)] = pipe.recv()  # type: ignore[arg-type, union-attr]
                except EOFError:
                    continue
        return given
