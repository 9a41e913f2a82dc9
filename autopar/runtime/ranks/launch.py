"""Ranks on this machine: ``run_local(fn, n)`` starts n processes that form a gloo process group, and cleans up.

Tests, examples and the command line use it; on a cluster it is ``torchrun`` that starts the ranks. torch's own starters
(``torch.multiprocessing.start_processes``, and torchrun's on top of it) give back no results, report the first failure
whether it is the cause or a neighbour's broken connection, and keep no time limit: these are what this module adds.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, RunError
from autopar.runtime.ranks.attempts import separate_attempts
from autopar.runtime.ranks.ended import end_rank
from autopar.words.trees import PyTree

GRACE_SECONDS = 2.0
PRELOADED = [
    "torch.distributed.tensor", "torch.export._trace", "torch._dynamo", "torch.distributed._local_tensor",
    "spmd_types", "highspy", "networkx", "numpy", "rich", "typer", "autopar.api",
]  # fmt: skip
"""What is imported once for all ranks; more may be added before the first start."""
KEPT_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""Has glibc keep freed memory up to 1 GiB: else large gradients are given back and paged in anew, or not, by chance.

A backward of ResNet-18's last stage took 24 or 55 ms.
"""


def run_local(
    fn: Callable[..., Any],
    n: int,
    *args: PyTree,
    timeout: float = 300.0,
    env: dict[str, str] | None = None,
    threads: int = 1,
    backend: str = "gloo",
) -> list[Any]:
    """Run ``fn(*args)`` on ``n`` new processes with a process group.

    Args:
        fn: a function that a fresh interpreter can import (defined at the top of a module).
        n: how many ranks, 1 or more.
        args: what ``fn`` is called with on every rank, pickled.
        timeout: seconds for everything, process start included; also the timeout of every collective.
        env: more environment variables for the ranks.
        threads: torch threads per rank.
        backend: the backend of the process group; one for GPUs (``cpu:gloo,cuda:nccl``) has each rank take its own.

    Returns:
        What ``fn`` returned on each rank, in order of ranks; it must be possible to pickle it.

    Raises:
        RunError: a rank raised (the message holds its traceback, or the text of an AutoparError), died, or the time is
            over. No process survives.
    """
    if n < 1:
        raise RunError(f"cannot start {n} ranks; give 1 or more")
    store = _loopback_store()
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": str(threads),
    }  # fmt: skip
    if sys.platform.startswith("linux"):
        shared["GLOO_SOCKET_IFNAME"] = "lo"
        shared |= {name: os.environ.get(name, value) for name, value in KEPT_HEAP.items()}
    shared.update(env or {})
    context = _context(env, backend)
    processes: list[Any] = []
    pipes: dict[Connection, int] = {}
    deadline = time.monotonic() + timeout
    try:
        with _environment(shared):
            _start_server(context)
            told = shared | {"PYTHONPATH": os.environ.get("PYTHONPATH")}
            for rank in range(n):
                here, there = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank,
                    args=(there, fn, args, rank, told, timeout, threads, backend),
                    daemon=False,  # which may not start processes of its own, such as a data loader's workers
                )
                process.start()
                there.close()
                processes.append(process)
                pipes[here] = rank
        return _collect(processes, pipes, deadline, timeout, n)
    finally:
        _end(processes)
        for pipe in pipes:
            pipe.close()
        del store


def _loopback_store() -> dist.TCPStore:
    """Return a store that only processes of this machine reach; torch's own socket listens on all interfaces.

    Whoever can write into the store of a process group can have its ranks connect elsewhere.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1024)
        port = listening.getsockname()[1]
        descriptor = listening.detach()  # the store's from now on
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def backend_of(device: str) -> str:
    """Return the backend of a process group for processes on `device`: ``cpu`` or ``cuda``."""
    return "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl"


def _context(env: Mapping[str, str] | None, backend: str = "gloo") -> Any:
    """Return the context that starts ranks: forked from a server process that has imported torch and autopar only.

    A fresh interpreter for every rank imports them again, which takes 2.5 CPU-seconds, one of them autopar's. Variables
    of the caller's own may have to be there at the start of the interpreter, so with them, and if there is no fork,
    ranks are spawned. So are those on GPUs: one library among those that the server imports that asks whether there is
    a GPU would begin CUDA's driver there, and no forked process can use it then.
    """
    if env or "cuda" in backend or not sys.platform.startswith("linux"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


def _start_server(context: Any) -> None:
    """Start the server, if ranks are forked and it does not run.

    It gets this process's ``sys.path``; otherwise it might find another copy of autopar.
    """
    if context.get_start_method() == "forkserver":
        with _environment({"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
            forkserver.ensure_running()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Any:
    """Set variables that must be there when a child starts, such as OMP_NUM_THREADS, which its first import reads."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    """Set environment variables, and take away those that are None."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _collect(processes: list[Any], pipes: dict[Connection, int], deadline: float, timeout: float, n: int) -> list[Any]:
    results: dict[int, Any] = {}
    open_pipes = dict(pipes)
    failures: dict[int, str] = {}
    while open_pipes and not failures:
        left = deadline - time.monotonic()
        ready = wait(list(open_pipes), timeout=max(left, 0.0))
        if not ready:
            missing = sorted(open_pipes.values())
            raise RunError(f"{n} local ranks did not finish within {timeout:g} s; still running: {missing}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            _receive(pipe, rank, processes[rank], results, failures)
    if failures:
        # the rank that failed first often takes its neighbours down: hear what arrives at once, report the cause
        end = time.monotonic() + 0.5
        while open_pipes and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(open_pipes), timeout=left):
                assert isinstance(pipe, Connection)
                rank = open_pipes.pop(pipe)
                _receive(pipe, rank, processes[rank], results, failures)
        causes = {r: text for r, text in failures.items() if not _is_consequence(text)}
        rank = min(causes or failures)
        raise RunError(f"rank {rank} of {n} failed:\n{failures[rank]}")
    return [results[rank] for rank in range(n)]


def _is_consequence(text: str) -> bool:
    last = text.strip().splitlines()[-1]
    return any(word in last for word in ("Connection closed by peer", "Connection reset", "Broken pipe", "gloo/"))


def _receive(pipe: Connection, rank: int, process: Any, results: dict[int, Any], failures: dict[int, str]) -> None:
    try:
        ok, value = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        process.join(GRACE_SECONDS)
        code = process.exitcode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        failures[rank] = f"the process {how} without a result"
        return
    if ok:
        results[rank] = value
    else:
        failures[rank] = value


def _end(processes: list[Any]) -> None:
    """End what still runs: a little time to finish, then terminate, then kill."""
    end = time.monotonic() + GRACE_SECONDS
    for process in processes:
        if process.exitcode is None and not any(p.exitcode not in (None, 0) for p in processes):
            process.join(max(0.0, min(end - time.monotonic(), 0.5)))
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _end_with_launcher() -> None:
    """End this rank when the process that has called :func:`run_local` ends, however it does.

    The kernel ends a rank with its parent. That is the launcher only where ranks are spawned: forked ones are children
    of the server, which lives as long as one of them does. So a thread waits for the end of the launcher itself, of
    which the rank has a pipe. The server, which nobody holds any more, ends by itself.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def follow() -> None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, daemon=True, name="end with the launcher").start()


def _rank(
    pipe: Connection, fn: Callable[..., Any], args: PyTree, rank: int, env: Mapping[str, str | None], timeout: float,
    threads: int, backend: str,
) -> None:  # fmt: skip
    # the rank's own processes, a data loader's workers, start as they do under torchrun
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    gc.freeze()  # what is imported stays: a walk through it for garbage copies its pages, which ranks share
    _end_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # a rank that dies of a signal shows where, on its standard error
    _set({**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(threads)
    try:
        if "cuda" in backend:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        separate_attempts()
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
        result = fn(*args)
        end_rank()
        payload = pickle.dumps((True, result))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        if isinstance(error, AutoparError):  # says all that the user can do about it
            text = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            text += f"\nthe rank called exit({error.code})"
        payload = pickle.dumps((False, text))
        pipe.send_bytes(payload)
        pipe.close()
        sys.stdout.flush()
        os._exit(1)  # a process group with a dead member may hang on its way down
    if dist.is_initialized():
        dist.barrier()
    pipe.send_bytes(payload)  # all have come to the end: what is left is the backend's own tidying up
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
