"""Ranks that have ended: each says so in the process group's store when its process exits, or others find it gone.

A rank that is through with its script comes to no meeting any more. Without its word, one that goes on alone (it
evaluates, generates or saves after the loop, ``if rank == 0:``) would wait for it until a time-out of half an hour.

The process group may have been ended before, and the store, where it is another rank's, may be gone. So it is one
request, which does not wait for an answer, and the store is kept for it; not on the rank that may hold the store
itself, whose port would stay in use, and whose end all others see as a lost connection.

A rank that is killed (by the system, where memory is out) says nothing. But every rank that may meet others has written
down which process it is; whoever waits looks whether the processes of its own machine are still there, and writes down
which is not, for those on other machines.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch.distributed as dist

from autopar.torch_private import default_store

SHOWN = 2000
"""Characters of the error that ended a rank that are shown."""
WITHOUT_A_WORD = (
    "has ended without a word: it was killed, or a library ended it; the system's log says if memory was out"
)
SILENT = "has not been heard of for"
_ANY, _KILLED = "any", "killed"
_PREFIX = "autopar/ended"
_kept: dict[str, Any] = {}


def say_at_exit() -> None:
    """Make this rank report its end when it ends, and let others notice if it cannot.

    Called by whoever may meet others in the store.
    """
    if _kept.get("pid") != os.getpid():  # a forked process is no rank: what was registered before is not its own
        Finalize(None, say, exitpriority=0)
    holds_store = dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    new = _kept.get("world") is not dist.group.WORLD or _kept.get("pid") != os.getpid()
    _kept.update(pid=os.getpid(), rank=dist.get_rank(), store=None if holds_store else default_store())
    _kept["world"] = dist.group.WORLD
    if new and (machine := _machine()):
        _kept["machine"] = machine
        processes: Any = dist.PrefixStore(_PREFIX, default_store())
        processes.append(f"on {machine}", f"{dist.get_rank()}:{os.getpid()}:{_begun(os.getpid())};")


def say() -> None:
    """Report that this rank ends, with the error that ended the script if there was one."""
    store = _kept.get("store")
    if store is None and dist.is_initialized():
        store = default_store()
    if store is None or _kept.get("pid") != os.getpid():
        return
    error = getattr(sys, "last_value", None)
    how = f" by {type(error).__name__}: {str(error)[:SHOWN]}" if error is not None else ""
    with contextlib.suppress(dist.DistError, RuntimeError):
        ends: Any = dist.PrefixStore(_PREFIX, store)
        ends.multi_set([str(_kept["rank"]), _ANY], [f"has ended{how}", "so"])


def say_unmet() -> None:
    """Report that this process ends, to ranks it never met, such as before ``parallelize``."""
    if dist.is_initialized() and dist.get_world_size() > 1 and _kept.get("pid") != os.getpid():
        _kept.update(pid=os.getpid(), rank=dist.get_rank(), store=None)
        say()


_first: list[Callable[[], None]] = []


def before_end(does: Callable[[], None]) -> None:
    """Make a rank of :func:`~autopar.runtime.ranks.launch.run_local` do something before its result counts.

    Such as finishing a save in a thread: the process is ended soon after.
    """
    if does not in _first:
        _first.append(does)


def end_rank() -> None:
    """Do what is to be done before this rank ends.

    Raises:
        Exception: it went wrong.
    """
    for does in _first:
        does()


def ended(ranks: Sequence[int]) -> dict[int, str]:
    """Map those of ``ranks`` that have ended to how they ended; two requests to the store while none has."""
    store = dist.PrefixStore(_PREFIX, default_store())
    _look_here(store, ranks)
    if not store.check([_ANY]):
        return {}
    return {rank: store.get(str(rank)).decode() for rank in ranks if store.check([str(rank)])}


def killed(ranks: Sequence[int]) -> dict[int, str]:
    """Map those of ``ranks`` that ended without a report, or are silent, to how they ended."""
    store = dist.PrefixStore(_PREFIX, default_store())
    _look_here(store, ranks)
    if not store.check([_KILLED]):
        return {}
    return {rank: how for rank, how in ended(ranks).items() if how.startswith((WITHOUT_A_WORD, SILENT))}


def say_silent(rank: int, seconds: float) -> None:
    """Write down that nothing was heard of a rank for so long, whose process may be there."""
    how = (
        f"{SILENT} {seconds:.0f} s: its process was stopped (SIGSTOP, a debugger), or its machine or network hangs, or "
        "a library holds Python's lock; AUTOPAR_SILENCE_SECONDS sets how long to wait"
    )
    _write_gone(dist.PrefixStore(_PREFIX, default_store()), rank, how)


def _write_gone(store: dist.Store, rank: int, how: str) -> None:
    store.compare_set(str(rank), "", how)
    store.set(_KILLED, "so")
    store.set(_ANY, "so")


def _look_here(store: dist.Store, ranks: Sequence[int]) -> None:
    """Write down which ranks of this machine are gone without a word, when that is seen for the second time."""
    key = f"on {_kept.get('machine', '')}"
    if _kept.get("world") is not dist.group.WORLD or "machine" not in _kept or not store.check([key]):
        return
    gone: set[str] = _kept.setdefault("gone", set())
    last = {entry.partition(":")[0]: entry for entry in store.get(key).decode().split(";")[:-1]}
    for entry in last.values():  # one that has come again, after a restart say, is its last process
        rank, pid, begun = entry.split(":")
        if int(rank) not in ranks or _begun(int(pid)) == begun or store.check([rank]):
            continue
        if entry not in gone:  # its own word may be on its way: until the next look
            gone.add(entry)
        else:
            _write_gone(store, int(rank), WITHOUT_A_WORD)


def _machine() -> str:
    """Return an identifier of the processes that this one can see; empty if that is not known."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _begun(pid: int) -> str:
    """Return when a process began, in the system's ticks; empty if there is none, or it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""
