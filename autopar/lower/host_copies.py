"""Copies between a device and the memory of its host that run beside compute, on streams of their own.

Each direction of a device has a stream, so that copies of a direction run one after another, in the order in which they
were started. A copy begins when what the caller's stream has launched so far is done, and the caller's stream waits for
its end where it asks for it (:meth:`Copy.wait`): by events of the device, never by the host. Processors have no such
streams: their copies are done when they were started, unless :func:`using` names another :class:`Copier`.

Buffers in the memory of the host are pinned where the device is a GPU, and are used again (:class:`HostBuffers`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from autopar.allocations import elsewhere


class Copy(Protocol):
    """A copy that was started."""

    def wait(self) -> None:
        """Let everything that the caller launches from now on wait for the end of the copy."""


class Copier(Protocol):
    """Copies in one direction of one device."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Start a copy of bytes, which begins when what the caller launched so far is done."""
        ...


class CopyDone:
    """A copy that is done."""

    def wait(self) -> None:
        """Do nothing."""


class AtOnce:
    """Copies that are done when they were started, as on processors."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Copy now."""
        with elsewhere():  # an operator that writes returns what it writes to, a buffer of the host or what was counted
            target.copy_(source)
        return CopyDone()


class CopyOnStream:
    """A copy on a stream of its own, at whose end an event was recorded."""

    def __init__(self, device: torch.device, event: Any) -> None:
        self.device, self.event = device, event

    def wait(self) -> None:
        """Let the caller's stream wait for the copy."""
        torch.get_device_module(self.device).current_stream(self.device).wait_event(self.event)


class OnStream:
    """Copies on one stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.get_device_module(device).Stream(device=device)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Start a copy behind what the caller's stream has launched."""
        module = torch.get_device_module(self.device)
        self.stream.wait_stream(module.current_stream(self.device))
        with module.stream(self.stream):
            target.copy_(source, non_blocking=True)
            event = self.stream.record_event()
        for x in (target, source):
            if x.device.type == self.device.type:
                x.record_stream(self.stream)  # it may be freed before it was waited for, where a graph is dropped
        return CopyOnStream(self.device, event)


_MADE: dict[tuple[torch.device, bool], Copier] = {}
_INSTEAD: list[tuple[Copier, Copier]] = []


def copier(device: torch.device, *, to_host: bool) -> Copier:
    """Return what copies from a device to its host, or back."""
    if _INSTEAD:
        return _INSTEAD[-1][0 if to_host else 1]
    if device.type in ("cpu", "meta") or not hasattr(torch.get_device_module(device), "Stream"):
        return AtOnce()
    key = device, to_host
    if key not in _MADE:
        _MADE[key] = OnStream(device)
    return _MADE[key]


@contextlib.contextmanager
def using(to_host: Copier, to_device: Copier) -> Iterator[None]:
    """Copy by these in this scope, on all threads: autograd calls hooks on threads of its own."""
    _INSTEAD.append((to_host, to_device))
    try:
        yield
    finally:
        _INSTEAD.pop()


class HostBuffers:
    """Buffers in the memory of the host, by size; those that were given back are used again.

    All buffers together never have more bytes than were in use at once: before one of a new size is made, free ones of
    other sizes are dropped, as they are left by batches of other shapes and by models that are gone.

    Attributes:
        n_bytes: of all buffers, those in use included.
    """

    def __init__(self) -> None:
        self.n_bytes = self._used = self._most = 0
        self._free: dict[tuple[int, bool], list[torch.Tensor]] = {}
        self._noted: list[torch.Tensor] | None = None
        self._lock = threading.RLock()  # a graph that is collected while a buffer is taken gives its own ones back

    @contextlib.contextmanager
    def noted(self) -> Iterator[list[torch.Tensor]]:
        """Note the buffers that are taken in this scope, for one who goes on to use them after they were given back."""
        before, self._noted = self._noted, []
        try:
            yield self._noted
        finally:
            self._noted = before

    def take(self, n_bytes: int, pinned: bool) -> torch.Tensor:
        """Return a buffer of bytes."""
        buffer = self._take(n_bytes, pinned)
        if self._noted is not None:
            self._noted.append(buffer)
        return buffer

    def _take(self, n_bytes: int, pinned: bool) -> torch.Tensor:
        with self._lock:
            self._used += n_bytes
            self._most = max(self._most, self._used)
            free = self._free.get((n_bytes, pinned))
            if free:
                return free.pop()
            self.n_bytes += n_bytes
            self._drop(self.n_bytes - self._most)
        with elsewhere():
            return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keep a buffer for another use; nothing reads it any more but what was launched before."""
        with self._lock:
            self._used -= buffer.numel()
            self._free.setdefault((buffer.numel(), buffer.is_pinned()), []).append(buffer)

    def _drop(self, n_bytes: int) -> None:
        """Drop free buffers of so many bytes at least, or all of them."""
        while n_bytes > 0 and (sizes := [size for size, free in self._free.items() if free]):
            n_bytes -= sizes[0][0]
            self.n_bytes -= sizes[0][0]
            self._free[sizes[0]].pop()


BUFFERS = HostBuffers()


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a tensor's storage as one dim."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())  # type: ignore[call-overload, no-any-return]
