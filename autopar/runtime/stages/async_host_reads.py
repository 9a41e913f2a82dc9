"""Numbers of a device that the host wants to see, but not to wait for."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from autopar.runtime.ranks.streams import current_stream

AHEAD = 2
"""Calls whose numbers may be on their way."""


class ToHost:
    """Copies numbers to the host while it goes on; it reads them when they have come, at one of the next calls.

    On the CPU they are there at once. On an accelerator the host reads those of :data:`AHEAD` calls before, which the
    device has long computed. It does not read sooner what has come sooner: ranks whose devices are not equally fast
    would see the numbers of one call in different calls, and what follows from them, such as an error, would not be the
    same on all ranks.
    """

    def __init__(self) -> None:
        self.coming: deque[tuple[Any, torch.Tensor]] = deque()

    def sent(self, numbers: torch.Tensor) -> list[list[Any]]:
        """Send ``numbers``, [n]; what has arrived by now, in the order in which it was sent."""
        if numbers.device.type == "cpu":
            return [numbers.tolist()]
        device = numbers.device
        on_host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=device.type == "cuda")
        on_host.copy_(numbers, non_blocking=True)
        arrived = torch.get_device_module(device).Event()
        arrived.record(current_stream(device))  # of that device, whichever is the current one
        self.coming.append((arrived, on_host))
        there = []
        while len(self.coming) > AHEAD:
            event, values = self.coming.popleft()
            event.synchronize()
            there.append(values.tolist())
        return there

    def forget(self) -> None:
        """Drop what is pending."""
        self.coming.clear()
