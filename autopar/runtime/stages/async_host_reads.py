"""Numbers of a device that the host wants to see, but not to wait for."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from autopar.runtime.ranks.streams import OnHost

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
        self.coming: deque[OnHost] = deque()

    def sent(self, numbers: torch.Tensor) -> list[list[Any]]:
        """Send ``numbers``, [n]; what has arrived by now, in the order in which it was sent."""
        if numbers.device.type == "cpu":
            return [numbers.tolist()]
        self.coming.append(OnHost(numbers))
        there = []
        while len(self.coming) > AHEAD:
            there += self.coming.popleft().tolist()
        return there

    def forget(self) -> None:
        """Drop what is pending."""
        self.coming.clear()
