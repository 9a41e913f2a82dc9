"""Checks that traced branches still hold in the calls of a program."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.errors import RunError
from autopar.runtime.stages.async_host_reads import AHEAD, ToHost
from autopar.words.graph import Graph
from autopar.words.placements import State

PACKED = {
    "lengths": (
        "a length is below 1, or above the number of steps of the padded batch",
        "leave out rows without steps, and pad every batch at least to its longest row",
    ),
    "longest": (
        "no row is as long as the padded batch, and pad_packed_sequence would make a shorter one, whose size depends "
        "on the lengths",
        "pad each batch to its longest row, or ask for the number of steps: pad_packed_sequence(..., "
        "total_length=x.size(1)) of a batch x that is batch_first, x.size(0) of another",
    ),
    "labels": ("the labels of packed rows have other lengths than the rows", "pack both by the same lengths"),
}
"""What must not be so of packed sequences, by what the flag says of it; and what to do."""


class WaysTaken:
    """The flags by which a program reports that a call left the traced branches."""

    def __init__(self, graph: Graph) -> None:
        self.flags = graph.ways
        self.written = graph.written
        """Buffers that a call writes: it has written them when its flags are read."""
        self.on_their_way = ToHost()

    def look(self, buffers: Mapping[str, tuple[torch.Tensor, State]]) -> None:
        """Read the flags of the call that was made, or of one before it.

        Raises:
            RunError: one of them is up; all are taken down, so that the next call can go on.
        """
        if not self.flags:
            return
        flags = [buffers[node.name][0] for node in self.flags]
        for values in self.on_their_way.sent(torch.stack(flags)):
            self._read(values, flags)

    def _read(self, up: list[bool], flags: list[torch.Tensor]) -> None:
        if not any(up):
            return
        late = flags[0].device.type != "cpu"
        when = f"the call {AHEAD} calls before this one" if late else "this call"
        self.on_their_way.forget()
        for flag in flags:
            flag.zero_()
        node = self.flags[up.index(True)]
        if "fault" in node.kwargs:
            what, do = PACKED[node.kwargs["fault"]]
            raise RunError(
                f"the packed sequence in '{node.module or '<model>'}' at {node.source}: in {when} {what}\n  "
                f"{do}{self._left_behind(late)}"
            )
        if "pinned" in node.kwargs:
            raise RunError(
                f"the model's code in '{node.module or '<model>'}' at {node.source} reads numbers or a mask that "
                "depend on the batch, and sizes follow from them: the program has those of the batch that it was "
                f"captured with; in {when} they are others\n  work on all rows and weight what is not selected with "
                "zero (torch.where, ignore_index=), or select before the model is called" + self._left_behind(late)
            )
        answer = node.kwargs["answer"]
        raise RunError(
            f"the model's code branches on data in '{node.module or '<model>'}' at {node.source}, and the program "
            f"follows the side on which the condition is {answer}, as with the batch that it was captured with; in "
            f"{when} it is {not answer}\n  if this batch is meant, compute both sides and choose with torch.where, "
            "or parallelize with an example batch that takes the way of all others"
            f"{self._left_behind(late)}"
        )

    def _left_behind(self, late: bool) -> str:
        """Describe the state that is left to who catches the error and goes on.

        Args:
            late: there were calls since then.
        """
        said = ""
        if late:
            said = "\n  what was computed since then, optimizer steps too, has used its numbers: go on from before it"
        if not self.written:
            return said
        shown = ", ".join(self.written[:4]) + (", ..." if len(self.written) > 4 else "")
        return (
            f"{said}\n  the call has written to buffers ({shown}), as on the side that was followed; before going on, "
            "load the values of before it, if they matter"
        )
