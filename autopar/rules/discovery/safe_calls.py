"""Operators called with arguments that may crash them, without harm to this process.

Kernels need not check the sizes that they are given: oneDNN's LSTM ends the process on weights of another size. So
sizes are tried first on tensors without values, where that is possible, without oneDNN, and everything in a forked
process, which has the operators of the caller's own that no other process would know.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from autopar.rules.local_calls import resolve
from autopar.rules.proving.proof import invoke
from autopar.words.trees import PyTree

REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError)
"""What operators raise on arguments that they do not take."""
SECONDS = 60.0
"""How long one operator is tried."""

Result = TypeVar("Result")


class NotTried(Exception):
    """A forked process gave no result; the message says why, to follow the operator's name."""


def outputs(
    target: str, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], tensors: Sequence[torch.Tensor]
) -> list[Any]:
    """Call an operator and list its outputs.

    Raises:
        one of REFUSALS: it does not take these arguments.
    """
    _on_meta(target, args, kwargs, tensors)
    result = invoke(resolve(target), args, kwargs, tensors)
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _on_meta(
    target: str, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], tensors: Sequence[torch.Tensor]
) -> None:
    empty = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors]
    try:
        with torch.no_grad():
            invoke(resolve(target), tuple(map(moved, args)), {name: moved(v) for name, v in kwargs.items()}, empty)
    except NotImplementedError:
        pass
    except RuntimeError as error:
        if "device" not in str(error):  # one that makes tensors of its own on the CPU: nothing of sizes
            raise


def moved(value: PyTree) -> PyTree:
    """Return an argument for tensors without values, with devices replaced by theirs."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(moved, value))
    return torch.device("meta") if isinstance(value, torch.device) else value


def in_a_fork(fn: Callable[[], Result]) -> Result:
    """Run ``fn()`` in a forked process, in a thread of its own, and return its result, which must be picklable.

    None of the caller's modes (no gradients, tensors without values, autocast) is on.

    Raises:
        NotTried: the process died, took too long or raised, or there are no forks on this system.
    """
    if not hasattr(os, "fork") or sys.platform == "darwin":
        raise NotTried("is not tried: trials run in a forked process, and this system cannot fork")
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _child(fn, reader, writer)
    os.close(writer)
    try:
        data = _read(reader, time.monotonic() + SECONDS)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if data is None:
        raise NotTried(f"was tried for {SECONDS:g} s without a result")
    if not data:
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        raise NotTried(f"ended the process in which it was tried ({how})")
    ok, value = pickle.loads(data)
    if not ok:
        raise NotTried(f"could not be tried: {value}")
    return value  # type: ignore[no-any-return]


def _read(reader: int, end: float) -> bytes | None:
    """Read all that is written; None if that takes until ``end``."""
    parts: list[bytes] = []
    while (left := end - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            part = os.read(reader, 1 << 16)
            if not part:
                return b"".join(parts)
            parts.append(part)
    return None


def _child(fn: Callable[[], Any], reader: int, writer: int) -> None:
    """Run ``fn`` and exit the process without the caller's exit handlers or output of kernels."""
    try:
        import faulthandler
        import resource

        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for ending in (signal.SIGINT, signal.SIGTERM):  # the caller hears them, and ends this process
            signal.signal(ending, signal.SIG_IGN)
        os.close(reader)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        torch.set_num_threads(1)  # the caller's threads are not here
        torch.backends.mkldnn.set_flags(_enabled=False)
        said: list[Any] = []
        alone = threading.Thread(target=lambda: said.append(_said(fn)))
        alone.start()
        alone.join()
        data = pickle.dumps(said[0])
        while data:
            data = data[os.write(writer, data) :]
    finally:
        os._exit(0)


def _said(fn: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, fn()
    except BaseException as error:
        return False, f"{type(error).__name__}: {str(error)[:200]}"
