"""Results of operators that wait in the memory of the host from forward to backward, copied beside compute.

After its last reader a result is copied to the host, and its memory is freed when the result that is given up
:data:`AHEAD` results later has had its last reader, or at the end of the forward: the copy has so long to be done
before the device waits for it. In the backward, which asks for results in the reverse order, a result's memory is taken
and its copy started when the one :data:`AHEAD` later is first asked for; the last ones at the beginning of the
backward. So at most :data:`AHEAD` copies of a direction are under way, when memory is freed and taken depends on no
clock, and a plan counts it to the byte (:mod:`autopar.planner.intra_op.memory.moments`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch

from autopar.errors import RunError
from autopar.lower.freed_tensors import EMPTIED, Freed, on_host
from autopar.lower.host_copies import BUFFERS, Copy, bytes_of, copier
from autopar.plans.memory_decisions import OFFLOAD, MemoryDecision, decision
from autopar.torch_private import FakeTensor
from cost_models.host_link import HostCopies

AHEAD = 2
"""Results whose copies may be under way at once in each direction."""
HERE, LEAVING, AWAY, COMING = "here", "leaving", "away", "coming"


class Offloaded(Freed):
    """A result whose values wait in the memory of the host.

    Attributes:
        where: on the device, on the way to the host, there, or on the way back.
        before: the result that was given up :data:`AHEAD` results earlier, whose copy back is started when this one is
            asked for.
    """

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__(whole)
        self.where = HERE
        self.before: Offloaded | None = None
        self.buffers: list[torch.Tensor] = []
        self.copies: list[Copy] = []
        self.fake: list[torch.Tensor] | None = None
        weakref.finalize(self, _give_back, self.buffers).atexit = False  # of a graph that is dropped

    # -- the way out

    def leave(self) -> None:
        """Start the copy to the host; :meth:`gone` frees the memory."""
        self.where = LEAVING
        if any(isinstance(x, FakeTensor) for x in self.values):
            self.fake = [on_host(x) for x in self.values]
        else:
            for x in self.values:
                source = bytes_of(x)
                self.buffers.append(BUFFERS.take(source.numel(), x.device.type != "cpu"))
                self.copies.append(copier(x.device, to_host=True).start(self.buffers[-1], source))

    def follow(self, before: Freed | None) -> None:
        """Free the memory of the result before, which is copied back when this one is asked for."""
        if isinstance(before, Offloaded):
            before.gone()
            self.before = before

    def gone(self) -> None:
        """Free the memory behind the end of the copy to the host."""
        if self.where == LEAVING:
            self._arrive()
            self._empty()

    # -- the way back

    def come(self, *_: object) -> None:
        """Take memory and start the copy to the device, if the values are at the host."""
        if self.where == LEAVING:
            self.gone()
        if self.where != AWAY or not (self.buffers or self.fake):
            return
        self.where, self.empty = COMING, False
        EMPTIED.difference_update(self.addresses)
        with torch.no_grad():
            for storage, n_bytes in zip(self.storages, self.n_bytes, strict=True):
                storage.resize_(n_bytes)
            for x, buffer in zip(self.values, self.buffers, strict=False):
                self.copies.append(copier(x.device, to_host=False).start(bytes_of(x), buffer))
            for x, values in zip(self.values, self.fake or (), strict=False):
                x.copy_(values)

    def fill(self, *_: object) -> None:
        """Wait for the values, and start the copy of those that are asked for after the next ones."""
        if self.where == HERE:
            return
        self.come()
        if self.where == AWAY:
            raise RunError(
                "a second backward asks for an activation that waited in the memory of the host for the first one; "
                "call the first one with retain_graph=True, or plan with offload='none'"
            )
        self._arrive()
        self.where = HERE
        if self.before is not None:
            self.before.come()

    def free(self, *_: object) -> None:
        """Free the memory again: the backward of the maker runs, and the values are still at the host."""
        if self.where in (LEAVING, COMING):
            self._arrive()
        if self.where != AWAY:
            self._empty()

    def let_go(self) -> None:
        """Give the buffers back: no reader needs the values any more."""
        if self.where in (LEAVING, COMING):
            self._arrive()
            self.where = HERE
        _give_back(self.buffers)
        self.fake = None

    def _arrive(self) -> None:
        """Wait for the copies under way."""
        for copy in self.copies:
            copy.wait()
        self.copies = []

    def _empty(self) -> None:
        self.where = AWAY
        super().free()


def _give_back(buffers: list[torch.Tensor]) -> None:
    while buffers:
        BUFFERS.give_back(buffers.pop())


@torch.compiler.disable
def settle(last: Sequence[Offloaded | None], outputs: Sequence[object]) -> None:
    """End the forward: free what is still on its way to the host, and let the backward begin with its way back.

    Args:
        last: the results that were given up last, :data:`AHEAD` of them at most, in this order.
        outputs: of the program; the backward begins at one of them.
    """
    leaving = [freed for freed in last if freed is not None]
    for freed in leaving:
        freed.gone()
    if leaving:
        begin = partial(_begin, leaving[::-1])
        for x in outputs:
            if isinstance(x, torch.Tensor) and x.grad_fn is not None:
                x.grad_fn.register_prehook(begin)


def _begin(leaving: Sequence[Offloaded], *_: object) -> None:
    for freed in leaving:
        freed.come()


def out_and_in(copies: HostCopies, n_bytes: int) -> tuple[float, float]:
    """Return the seconds of the copies of a result to the host and back, each alone on its direction."""
    return copies.to_host(n_bytes), copies.to_device(n_bytes)


decision(MemoryDecision(OFFLOAD, "waiting in the memory of the host", freed=Offloaded, copies=out_and_in, ahead=AHEAD))
