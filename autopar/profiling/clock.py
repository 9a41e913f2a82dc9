"""Seconds that a device works, for measuring ops there: a processor's thread, or an accelerator's stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Lap = Callable[[], float]
"""Gives the seconds since it was made."""


class Clock:
    """Measures what a rank does on its device.

    On a processor the seconds of an op are those that the calling thread has worked. On an accelerator they are those
    between two events of the current stream around it, begun when the device had nothing to do: of a short op, the time
    that the host takes to launch it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device)

    def work(self) -> Lap:
        """Of what is called from now on, on the device."""
        if self.module is None:
            start = time.thread_time()
            return lambda: time.thread_time() - start
        begin, end = (self.module.Event(enable_timing=True) for _ in range(2))
        self.module.synchronize()
        begin.record()

        def worked() -> float:
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return worked

    def wall(self) -> Lap:
        """Until all that is called from now on has happened, messages of other ranks included."""
        self._done()
        start = time.perf_counter()

        def passed() -> float:
            self._done()
            return time.perf_counter() - start

        return passed

    def _done(self) -> None:
        if self.module is not None:
            self.module.synchronize()


__all__ = ["Clock"]
