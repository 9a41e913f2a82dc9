"""The one stream of an accelerator on which a module's step runs.

Three things rest on it that no kernel checks. What a collective gives is there for the stream that waited for it, and
no other. Memory that is given back is used again at once by the stream on which it was taken, while another one may
still read it. And what was gathered for one microbatch is read by the next. So a step runs on the stream that was
current in its first call; hooks of the backward, which autograd calls on the stream of the forward, see to it that they
are there. Between steps the stream may change: the new one waits for the old one, and memory that stays from step to
step is recorded as the new one's, so that it is not used again before that has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from autopar.errors import RunError


def current_stream(device: torch.device) -> Any:
    """Return the current stream of a device; None if there is none, as on processors."""
    if device.type in ("cpu", "meta"):
        return None
    current = getattr(torch.get_device_module(device), "current_stream", None)
    return current(device) if current is not None else None


class OnHost:
    """Copies of tensors in the host's memory, on their way from a device; those of a processor are there at once."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._copies = tensors
        self._arrived: Any = None
        device = tensors[0].device
        if device.type == "cpu":
            return
        pinned = device.type == "cuda"
        self._copies = tuple(
            torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=pinned).copy_(x, non_blocking=True)
            for x in tensors
        )
        self._arrived = torch.get_device_module(device).Event()
        self._arrived.record(current_stream(device))  # of that device, whichever is the current one

    def tolist(self) -> list[Any]:
        """Wait for the copies, and return their numbers as lists."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [x.tolist() for x in self._copies]


class StepStream:
    """The stream of a module's step on one device.

    Args:
        kept: gives the tensors that stay from step to step.
    """

    def __init__(self, device: torch.device, kept: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        self.device, self.kept = device, kept
        self.now: Any = None

    def begin(self, same_step: bool) -> None:
        """Begin a call of the module.

        Args:
            same_step: the call before was a microbatch of the same step, of which gathered copies are used again.

        Raises:
            RunError: a step runs on two streams.
        """
        now, before = current_stream(self.device), self.now
        if before is not None and now != before:
            if same_step:
                raise RunError(
                    f"the microbatches of one step run on two CUDA streams, {before} and {now}: what was gathered on "
                    "the first may not be there yet on the second. Call the module on one stream"
                )
            now.wait_stream(before)
            for x in self.kept():
                if x.device.type == self.device.type and x.untyped_storage().nbytes():
                    x.record_stream(now)
        self.now = now

    def check(self, what: str) -> None:
        """See that the stream that is current is the step's.

        Args:
            what: what is about to happen on it.

        Raises:
            RunError: it is another one.
        """
        if self.now is None:
            return
        now = current_stream(self.device)
        if now != self.now:
            raise RunError(
                f"{what} comes on the stream {now}, and the step runs on {self.now}: it could read what is not there "
                "yet, or memory that is used again. Hold no graph of a step on another stream, and call backward() "
                "of what was computed on one"
            )
