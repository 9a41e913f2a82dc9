"""The versions of a stage's weights that microbatches in flight, or those to come, are computed with.

A version is the leaves that the program reads. An update gives the stored parameters memory of their own first, if
the newest version is still read: what was their memory stays with the leaves, and is freed with the last microbatch
that was computed with them. Parameters that are gathered or cast have copies anyway, and a version has copies of its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import spmd_types as spmd
import torch
from torch.distributed.tensor import DTensor

from autopar.runtime.parameters.state import HeldParam, local_of, version_of
from autopar.runtime.stages.stage import Stage

Leaves = tuple[torch.Tensor, ...]


class WeightVersions:
    """The versions of one stage on this rank.

    Attributes:
        newest: the number of updates so far.
        in_flight: the version of each microbatch between forward and backward.
        leaves: what the program reads in each version that is still needed, in the order of the parameters.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage, self.held = stage, list(stage.held_params.values())
        stage.bind()
        self.newest, self.in_flight = 0, dict[int, int]()
        self._gather()
        self.leaves: dict[int, Leaves] = {0: self._now()}
        self.written = self._writes()

    def use(self, version: int) -> None:
        """Let the program, and the gradients on their way, be of a version."""
        for held_param, leaf in zip(self.held, self.leaves[version], strict=True):
            held_param.leaf = leaf
        for slot, held_param in self.stage.param_slots:
            self.stage.template[slot] = held_param.leaf

    def begin(self, microbatch: int, version: int) -> None:
        """Begin the forward of a microbatch in a version."""
        self.use(version)
        self.in_flight[microbatch] = version

    def end(self, microbatch: int) -> None:
        """Note that the backward of a microbatch is over."""
        del self.in_flight[microbatch]

    def update(self, step: Callable[[], None], coming: int) -> None:
        """Make the next version.

        Args:
            step: steps the parameters, whose gradients are there.
            coming: the version of the next forward.
        """
        self._forget(coming)
        self.use(self.newest)
        if coming <= self.newest or self.newest in self.in_flight.values():
            self._part_from_newest()
        step()
        self.newest += 1
        self.stage.bind()
        self._gather()
        self.leaves[self.newest] = self._now()
        self._forget(coming)
        self.written = self._writes()

    def changed(self) -> str:
        """Return the name of a parameter that was written, or replaced, since the last update; empty if none was."""
        pairs = zip(self.held, self.written, self._writes(), strict=True)
        return next((held_param.name for held_param, before, now in pairs if before != now), "")

    def _forget(self, coming: int) -> None:
        """Forget versions that nothing will be computed with: the newest stays, as what is stored."""
        needed = {self.newest, *self.in_flight.values(), *range(min(coming, self.newest), self.newest)}
        self.leaves = {version: leaves for version, leaves in self.leaves.items() if version in needed}

    @torch.no_grad()
    def _part_from_newest(self) -> None:
        """Leave the memory of the newest version to its leaves."""
        for held_param in {id(each.param): each for each in self.held}.values():
            if held_param.param.requires_grad and held_param.alias:
                _move(held_param.param)
        for held_param in self.held:
            if held_param.param.requires_grad and not held_param.alias:
                held_param.leaf = torch.empty_like(held_param.leaf, requires_grad=True)
                self.stage.gradients.listen(held_param)

    def _gather(self) -> None:
        """Gather and cast what the newest version reads, while it is what is stored."""
        gathers = self.stage.schedule
        with spmd.set_current_mesh(self.stage.device_mesh) if gathers.read else nullcontext():
            gathers.begin(same_step=False)
            for number in sorted(gathers.read):
                gathers.units[number].fetch()

    def _now(self) -> Leaves:
        return tuple(held_param.leaf for held_param in self.held)

    def _writes(self) -> list[tuple[object, ...]]:
        return [_writes_of(held_param) for held_param in self.held]


def _move(param: torch.nn.Parameter) -> None:
    """Give a stored parameter a copy of its memory; it stays the tensor that optimizers know."""
    if isinstance(param, DTensor):
        param._local_tensor = param._local_tensor.clone()
    else:
        param.data = param.data.clone()


def _writes_of(held_param: HeldParam) -> tuple[object, ...]:
    local = local_of(held_param.param)
    return id(held_param.param), local.data_ptr(), local._version, version_of(held_param.param)
