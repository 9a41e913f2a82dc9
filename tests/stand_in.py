"""A stand-in for a device with a memory of its own beside the host's: a processor's core with a link to the host.

Plans for it may offload; what it has of memory is counted by :class:`autopar.allocations.Allocations`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.lower import host_copies
from autopar.torch_private import TorchDispatchMode
from hardware_profiles import Cluster, HostLink, load_cluster

FAST, SLOW = 1e12, 1e6


def stand_in(n: int = 1, rate: float = FAST, latency: float = 0.0, flops: float = 1.0) -> Cluster:
    """Return a cluster of cores whose way to the memory of their host has some bytes per second."""
    cluster = load_cluster(f"local-x{n}")
    link = HostLink("stand-in", rate, rate, 1.0, 1, latency, 1e12, 1e15, 1, "a test's")
    devices = {
        device: replace(device, name="stand-in", host=link,
                        peak_flops={name: flops * peak for name, peak in device.peak_flops.items()})
        for device in dict.fromkeys(cluster.devices)
    }  # fmt: skip
    return replace(cluster, name=f"stand-in-x{n}", devices=tuple(devices[device] for device in cluster.devices))


@dataclass(frozen=True)
class Traced:
    """One copy or computation on the trace, in seconds of the clock."""

    what: str
    begin: float
    end: float


class SlowCopies:
    """Copies in one direction by a thread of its own, each as long as a link of some bytes per second would take.

    Args:
        trace: gets an entry for every copy.
    """

    def __init__(self, what: str, rate: float, trace: list[Traced]) -> None:
        self.what, self.rate, self.trace = what, rate, trace
        self.waited = 0.0
        self.orders: queue.SimpleQueue[tuple[torch.Tensor, torch.Tensor, _Ticket] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def start(self, target: torch.Tensor, source: torch.Tensor) -> _Ticket:
        ticket = _Ticket(self)
        self.orders.put((target, source, ticket))
        return ticket

    def end(self) -> None:
        self.orders.put(None)
        self.thread.join(timeout=60)

    def _run(self) -> None:
        while (order := self.orders.get()) is not None:
            target, source, ticket = order
            begin = time.perf_counter()
            time.sleep(source.numel() / self.rate)
            target.copy_(source)
            self.trace.append(Traced(self.what, begin, time.perf_counter()))
            ticket.done.set()


class _Ticket:
    def __init__(self, copies: SlowCopies) -> None:
        self.copies, self.done = copies, threading.Event()

    def wait(self) -> None:
        begin = time.perf_counter()
        assert self.done.wait(timeout=60), "a copy never came"
        self.copies.waited += time.perf_counter() - begin


@contextlib.contextmanager
def slow_link(rate: float) -> Iterator[tuple[SlowCopies, SlowCopies, list[Traced]]]:
    """Copy to the host and back by threads, at some bytes per second."""
    trace: list[Traced] = []
    out, back = SlowCopies("out", rate, trace), SlowCopies("in", rate, trace)
    try:
        with host_copies.using(out, back):
            yield out, back, trace
    finally:
        out.end()
        back.end()


class Clock(TorchDispatchMode):
    """A clock that goes on where products are computed, and where something is waited for.

    Attributes:
        now: seconds since the beginning.
        trace: products and copies, in the order in which they were started.
    """

    def __init__(self, flops_per_second: float) -> None:
        super().__init__()
        self.rate, self.now = flops_per_second, 0.0
        self.trace: list[Traced] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "mm" in func._schema.name:
            a, b = [x for x in args if isinstance(x, torch.Tensor) and x.dim() == 2][-2:]
            spent = 2 * a.shape[0] * a.shape[1] * b.shape[1] / self.rate
            self.trace.append(Traced("compute", self.now, self.now + spent))
            self.now += spent
        return result


class TimedCopies:
    """Copies in one direction on a link with a clock: they are made at once, and waited for until the clock says so."""

    def __init__(self, what: str, rate: float, clock: Clock) -> None:
        self.what, self.rate, self.clock = what, rate, clock
        self.free = self.waited = 0.0

    def start(self, target: torch.Tensor, source: torch.Tensor) -> _Until:
        begin = max(self.clock.now, self.free)
        self.free = begin + source.numel() / self.rate
        self.clock.trace.append(Traced(self.what, begin, self.free))
        target.copy_(source)
        return _Until(self, self.free)


@dataclass(frozen=True)
class _Until:
    copies: TimedCopies
    end: float

    def wait(self) -> None:
        clock = self.copies.clock
        self.copies.waited += max(0.0, self.end - clock.now)
        clock.now = max(clock.now, self.end)


@contextlib.contextmanager
def timed_link(rate: float, flops_per_second: float) -> Iterator[tuple[TimedCopies, TimedCopies, Clock]]:
    """Copy to the host and back on a clock that products move on."""
    clock = Clock(flops_per_second)
    out, back = TimedCopies("out", rate, clock), TimedCopies("in", rate, clock)
    with host_copies.using(out, back), clock:
        yield out, back, clock
