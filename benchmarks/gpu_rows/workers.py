"""Rows in a process of their own, with a limit in seconds; a row that hangs or breaks the device ends only itself.

Importing torch and starting CUDA takes ten seconds, so a process serves many rows, and the one that replaces it is
started ahead.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from gpu_rows.table import Result, Row


def _serve(pipe: Connection, device: str) -> None:
    """Run rows that arrive as ``(module, function, arguments)`` until None arrives."""
    import torch

    os.setsid()  # what a row starts is ended with it
    torch.set_num_threads(max(1, min(8, (os.cpu_count() or 2) // 2)))
    if device != "cpu":
        torch.zeros(1, device=device)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        module, name, args = asked
        try:
            result = getattr(importlib.import_module(module), name)(*args)
        except BaseException as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            said = f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]
            result = Result(said, False, {"traceback": traceback.format_exc()[-6000:]})
        pipe.send(result)
        if result.ok is False:
            return  # a failed CUDA call can poison the process
        if device != "cpu":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()


class _Worker:
    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, device), daemon=False)
        self.process.start()
        there.close()
        self.ready = False

    def wait_ready(self, seconds: float) -> bool:
        if not self.ready and self.pipe.poll(seconds):
            self.ready = self.pipe.recv() == "ready"
        return self.ready

    def end(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.pipe.send(None)
        self.process.join(0.2)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL) if self.ready else self.process.kill()
        self.process.join()
        self.pipe.close()


class Workers:
    """A process for rows and a warm one behind it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._workers = [_Worker(device), _Worker(device)]

    def row(self, name: str, fn: Callable[..., Result], *args: Any, limit: float) -> Row:
        """Run a row. A row over its limit of seconds, or whose process dies, is a failed row."""
        worker = self._workers[0]
        began = time.perf_counter()
        try:
            if not worker.wait_ready(120.0):
                raise TimeoutError("the process did not start within 120 s")
            began = time.perf_counter()
            worker.pipe.send((fn.__module__, fn.__name__, args))
            if not worker.pipe.poll(limit):
                raise TimeoutError(f"not done within its limit of {limit:.0f} s")
            result = worker.pipe.recv()
        except TimeoutError as error:
            result = Result(str(error), False)
        except (EOFError, OSError):
            worker.process.join(5.0)
            result = Result(f"its process ended with code {worker.process.exitcode}", False)
        if result.ok is False:
            self._replace()
        return Row(name, result, time.perf_counter() - began)

    def _replace(self) -> None:
        self._workers.pop(0).end()
        self._workers.append(_Worker(self.device))

    def end(self) -> None:
        for worker in self._workers:
            worker.end()


__all__ = ["Workers"]
