"""Seconds of work on a device: of a CPU thread, or of an accelerator's stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Lap = Callable[[], float]
"""A function that returns the seconds since it was made."""

AHEAD_SECONDS = 1e-3
"""For how long an accelerator is given other work before an op that is measured. The host launches all of the op's
kernels meanwhile, so the device does them without waiting, as in a step whose host is ahead."""
AHEAD_BYTES = 2**26


class Clock:
    """A clock for the device of a rank.

    On a CPU the seconds of an op are those that the calling thread has worked. On an accelerator they are those between
    two events of the current stream around it, with other work queued before, so that the device waits for nobody: in a
    step the host is ahead, or the step takes as long as the host, which no op alone shows.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        if self.module is not None:
            self.ahead = torch.zeros(AHEAD_BYTES // 4, device=device)
            self.times_ahead = 1
            seconds = min(self._ahead_seconds() for _ in range(3))
            self.times_ahead = max(1, round(AHEAD_SECONDS / max(seconds, 1e-7)))

    def work(self) -> Lap:
        """Start a measurement of work on the device; the returned function ends it."""
        if self.module is None:
            start = time.thread_time()
            return lambda: time.thread_time() - start
        begin, end = (self.module.Event(enable_timing=True) for _ in range(2))
        self._work_ahead()
        begin.record()

        def worked() -> float:
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return worked

    def wall(self) -> Lap:
        """Start a measurement of elapsed time, messages of other ranks included; the returned function ends it."""
        self._done()
        start = time.perf_counter()

        def passed() -> float:
            self._done()
            return time.perf_counter() - start

        return passed

    def free(self) -> None:
        """Release the allocator's unused memory."""
        if self.module is not None:
            self.module.empty_cache()

    def _work_ahead(self) -> None:
        for _ in range(self.times_ahead):
            self.ahead.add_(1.0)

    def _ahead_seconds(self) -> float:
        begin, end = (self.module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._work_ahead()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _done(self) -> None:
        if self.module is not None:
            self.module.synchronize()
