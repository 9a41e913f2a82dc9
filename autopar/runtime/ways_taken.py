"""Whether Python would have gone, in the calls of a program, the ways that the program follows.

A program raises a flag where a branch on data has another answer than in the example. The flags of a call are the same
on all ranks of its mesh. On the CPU they are read when the call is done; elsewhere they are copied to the host while it
goes on, and read when they have come, at one of the next calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import RunError
from autopar.graph import Graph
from autopar.placements import State

CALLS_AHEAD = 2
"""Calls whose flags may be on their way."""


class WaysTaken:
    """The flags of one program."""

    def __init__(self, graph: Graph) -> None:
        self.flags = graph.ways
        flags = {node.target for node in self.flags}
        self.written = [name for name in graph.updates if name not in flags]
        """Buffers that a call writes: it has written them when its flags are read."""
        self.coming: deque[tuple[Any, torch.Tensor]] = deque()

    def look(self, buffers: Mapping[str, tuple[torch.Tensor, State]]) -> None:
        """Read the flags of the call that was made, or of one before it.

        Raises:
            RunError: one of them is up; all are taken down, so that the next call can go on.
        """
        if not self.flags:
            return
        flags = [buffers[node.name][0] for node in self.flags]
        if flags[0].device.type == "cpu":
            self._read([bool(flag) for flag in flags], flags)
            return
        device = flags[0].device
        on_host = torch.empty(len(flags), dtype=torch.bool, device="cpu", pin_memory=device.type == "cuda")
        on_host.copy_(torch.stack(flags), non_blocking=True)
        arrived = torch.get_device_module(device).Event()
        arrived.record()
        self.coming.append((arrived, on_host))
        while self.coming and (len(self.coming) > CALLS_AHEAD or self.coming[0][0].query()):
            event, values = self.coming.popleft()
            event.synchronize()
            self._read(values.tolist(), flags)

    def _read(self, up: list[bool], flags: list[torch.Tensor]) -> None:
        if not any(up):
            return
        self.coming.clear()
        for flag in flags:
            flag.zero_()
        node = self.flags[up.index(True)]
        answer = node.kwargs["answer"]
        raise RunError(
            f"the model's code branches on data in '{node.module or '<model>'}' at {node.source}, and the program "
            f"follows the side on which the condition is {answer}, as with the batch that it was captured with; in "
            f"this call it is {not answer}\n  if this batch is meant, compute both sides and choose with torch.where, "
            "or parallelize with an example batch that takes the way of all others"
            f"{self._left_behind()}"
        )

    def _left_behind(self) -> str:
        """What is to be known by who catches the error and goes on."""
        if not self.written:
            return ""
        shown = ", ".join(self.written[:4]) + (", ..." if len(self.written) > 4 else "")
        return (
            f"\n  the call has written to buffers ({shown}), as on the side that was followed; before going on, load "
            "the values of before it, if they matter"
        )


__all__ = ["WaysTaken"]
