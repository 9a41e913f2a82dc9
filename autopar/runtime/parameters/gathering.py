"""Parameters that are gathered together, and when their gathered copies have memory.

:mod:`autopar.runtime.parameters.prefetch` says when each unit is started, needed and done with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch

from autopar.runtime.parameters.host_memory import HostCarrier
from autopar.runtime.parameters.narrow_gathers import NarrowWire, agree
from autopar.runtime.parameters.redistribution import ReshardStep, apply, padded_to, stacked, unstack
from autopar.runtime.parameters.state import HeldParam
from autopar.runtime.ranks.collectives import all_gather_flat
from autopar.torch_private import all_gather_single, preserve_version_counter

UNIT_BYTES = 8 << 20
"""Small parameters are gathered together up to this size."""


class Unit:
    """Parameters that are gathered together, in one collective where each needs just one over the same ranks."""

    def __init__(self, held_params: Sequence[HeldParam]) -> None:
        self.held_params = list(held_params)
        self.per_use = held_params[0].per_use
        self.together = coalesces(held_params[0]) and all(same_gather(held_params[0], h) for h in held_params)
        alone = gather_of(held_params[0]) if self.together and len(held_params) == 1 else None
        self.direct = alone is not None and alone.cut.is_first_and_even(alone.n) and held_params[0].wire is None
        self.work: Any = None
        self.flat: torch.Tensor | None = None
        self.ready = False
        self.waiting = 0
        self.carrier = held_params[0].carrier
        self.is_carried_only = all(held_param.is_carried_only for held_param in held_params)
        for held_param in self.held_params:
            held_param.unit = self

    @property
    def comes_early(self) -> bool:
        """Whether it is copied from the host into memory that is there all the time, so that nothing is to wait for."""
        return self.is_carried_only and not self.per_use

    def expire(self) -> None:
        """Expire gathered values, which may differ from those stored: in-place updates of a DTensor leave no trace."""
        if self.ready or self.work is not None:
            self.finish_work()
            self.ready = False
        for wire in self._wires():
            wire.scale = None

    def _wires(self) -> list[NarrowWire]:
        return [held_param.wire for held_param in self.held_params if held_param.wire is not None]

    def _agree(self) -> None:
        """Agree with the other ranks on scales, unless that was done in this step."""
        if any(wire.scale is None for wire in self._wires()):
            agree(self._wires(), [held_param.piece for held_param in self.held_params if held_param.wire is not None])

    @torch.no_grad()
    def start(self) -> None:
        """Begin to gather, unless that is done or under way."""
        if self.ready or self.work is not None:
            return
        if self.per_use:
            for held_param in self.held_params:
                n = prod(held_param.used_shape) * held_param.leaf.element_size()
                held_param.leaf.untyped_storage().resize_(n)
        self._agree()
        if self.carrier is not None:
            self._carry_in(self.carrier)
        elif self.together:
            self._start_gather()

    def _carry_in(self, carrier: HostCarrier) -> None:
        """Begin to copy in what is stored on the host, and to gather it."""
        with carrier.coming_in():
            if self.together:
                self._start_gather()
            elif self.is_carried_only:
                for held_param in self.held_params:
                    assert held_param.local is not None
                    held_param.leaf.data.copy_(held_param.local, non_blocking=True)
                self.work = carrier.begun()
            else:
                return  # a few collectives, one after another, where it is needed

    def _start_gather(self) -> None:
        reshard_step = gather_of(self.held_params[0])
        if self.direct:
            # .data has a version counter of its own: a backend may write, and count, at any time until it is waited for
            out, piece = self.held_params[0].leaf.data, self.held_params[0].piece
            self.work = all_gather_flat(out, piece.contiguous(), group=reshard_step.group, async_op=True)
            return
        pieces = _in_a_row(self.held_params, [held_param.sent for held_param in self.held_params])
        self.flat = pieces.new_empty(reshard_step.n, pieces.numel())
        self.work = all_gather_flat(self.flat.view(-1), pieces, group=reshard_step.group, async_op=True)

    @torch.no_grad()
    def fetch(self) -> None:
        """Gather the values into the leaves."""
        if self.ready:
            return
        self.start()
        if self.is_carried_only:
            self.finish_work()
            self.ready = True
            return
        if not self.together:
            for held_param in self.held_params:
                x = held_param.sent
                for reshard_step in held_param.reshard_steps:
                    x = apply(reshard_step.forward, x, reshard_step)
                with preserve_version_counter(held_param.leaf):
                    held_param.leaf.copy_(held_param.received(x))
            self.ready = True
            return
        flat = self.flat
        self.finish_work()
        if flat is not None:
            for held_param, arrived in _apart(self.held_params, flat):
                reshard_step = gather_of(held_param)
                part = held_param.received(arrived)
                with preserve_version_counter(held_param.leaf):
                    if reshard_step.cut.size % reshard_step.n:
                        cut = reshard_step.cut
                        held_param.leaf.copy_(unstack(part, cut.dim).narrow(cut.dim, 0, cut.size))
                    else:
                        stacked(held_param.leaf, reshard_step.cut.dim, reshard_step.n).copy_(part)
        self.ready = True

    def finish_work(self) -> None:
        """Wait for the pending gather, if there is one."""
        if self.work is not None:
            self.work.wait()
        self.work, self.flat = None, None

    def drop(self) -> None:
        """Wait for a gather under way, and forget it with what it gathered."""
        with contextlib.suppress(RuntimeError):  # it may have failed
            self.finish_work()
        self.work, self.flat, self.ready = None, None, False
        self._empty()

    def free(self) -> None:
        """Give the gathered memory back (lifetime ``use`` only)."""
        if self.per_use and (self.ready or self.work is not None):
            self.finish_work()
            self.ready = False
            self._empty()

    def _empty(self) -> None:
        """Free the memory for values that are gathered for one use."""
        for held_param in self.held_params if self.per_use else ():
            held_param.leaf.untyped_storage().resize_(0)


def coalesces(held_param: HeldParam) -> bool:
    """Check that the parameter needs one gather and nothing else that changes values."""
    kinds = [reshard_step.forward for reshard_step in held_param.reshard_steps if reshard_step.forward != "none"]
    return kinds == ["gather"]


def gather_of(held_param: HeldParam) -> ReshardStep:
    """Return the reshard step that gathers a parameter that :func:`coalesces`."""
    return next(reshard_step for reshard_step in held_param.reshard_steps if reshard_step.forward == "gather")


def same_gather(a: HeldParam, b: HeldParam) -> bool:
    """Check that two parameters may share a gather, or are copied from the host together."""
    if a.is_carried_only and b.is_carried_only:
        return a.choice.lifetime == b.choice.lifetime
    if not (coalesces(a) and coalesces(b)) or a.choice.lifetime != b.choice.lifetime:
        return False
    ga, gb = gather_of(a), gather_of(b)
    formats = [(held_param.dtype, held_param.wire is None) for held_param in (a, b)]
    return ga.group is gb.group and formats[0] == formats[1] and a.carrier is b.carrier


def gathered_together(held_params: Sequence[HeldParam], sent: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gather what ranks send of parameters that :func:`coalesces`, in one functional collective."""
    first, arrived = gather_of(held_params[0]), []
    flat = all_gather_single(_in_a_row(held_params, sent), 0, first.group).view(first.n, -1)
    for held_param, part in _apart(held_params, flat):
        cut = gather_of(held_param).cut
        whole = unstack(part, cut.dim)
        arrived.append(whole if cut.size == whole.shape[cut.dim] else whole.narrow(cut.dim, 0, cut.size))
    return arrived


def _in_a_row(held_params: Sequence[HeldParam], sent: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what a rank sends of parameters that are gathered together, one behind the other in one dim."""
    return torch.cat([padded_to(x, h.padded_shape).reshape(-1) for h, x in zip(held_params, sent, strict=True)])


def _apart(held_params: Sequence[HeldParam], flat: torch.Tensor) -> Iterator[tuple[HeldParam, torch.Tensor]]:
    """Yield each parameter with its pieces of all ranks, [ranks, *padded shape], of what was gathered together."""
    offset = 0
    for held_param in held_params:
        m = prod(held_param.padded_shape)
        yield held_param, flat[:, offset : offset + m].view(len(flat), *held_param.padded_shape)
        offset += m


def make_units(held_params: Sequence[HeldParam]) -> list[Unit]:
    """Return the units of the gathered parameters, given in order of first use."""
    units: list[Unit] = []
    run: list[HeldParam] = []
    n_bytes = 0
    for held_param in held_params:
        n = prod(held_param.used_shape) * held_param.dtype.itemsize
        if run and not (same_gather(run[0], held_param) and n_bytes + n <= UNIT_BYTES):
            units.append(Unit(run))
            run, n_bytes = [], 0
        run.append(held_param)
        n_bytes += n
    if run:
        units.append(Unit(run))
    return units
