"""Samples of what one rank was called with, and of the parameters that it holds: computed on the device.

The host need not wait for them: they can be gathered from all ranks and copied while it goes on.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar.runtime.ranks.collectives import all_gather_flat
from autopar.runtime.ranks.streams import OnHost
from autopar.words.placements import State

SAMPLE = 4096
"""Elements of a tensor whose places count, too, and of which sums are made."""
PARTS = 32
"""Sums of parts of a sample of floating point numbers that are compared."""
LOCAL_BATCH = "own rows"
"""Marks what is the same among the ranks with the same rows, one of each group of a pipeline."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = 0x1E3779B97F4A7C15
"""An odd number with its bits all over the place."""

Sample = tuple[str, str, tuple[int, ...], Any, Any]
Copy = tuple[str, tuple[tuple[int, int, int], ...]]
"""A parameter's name, and which piece of it: of each mesh axis that cuts it the dim, the axis's size and the place."""
Values = tuple[list[Sample], dict[Copy, tuple[int, Any]]]
"""The samples of inputs; checksums and samples of parameters."""


class Outline(NamedTuple):
    """The description of one rank's numbers.

    Attributes:
        inputs: how messages and pins call each, its shape, and among which ranks it is the same.
        copies: the pieces of parameters.
        near: for each input and then for each copy, whether there are sums of it, beside the checksum.
    """

    inputs: tuple[tuple[str, str, tuple[int, ...], Any], ...]
    copies: tuple[Copy, ...]
    near: tuple[bool, ...]

    @property
    def lengths(self) -> tuple[int, int]:
        """The lengths of the checksums (after that of the form itself), and of the sums."""
        return 1 + len(self.near), sum(self.near) * (PARTS + 1)

    @property
    def checksum(self) -> int:
        """A checksum of the description."""
        return zlib.crc32(repr(self).encode())

    def values(self, bits: Sequence[int], sums: Sequence[float]) -> Values:
        """Decode the numbers."""
        rows = iter(range(0, len(sums), PARTS + 1))
        taken = []
        for number, near in zip(bits[1:], self.near, strict=False):
            at = next(rows) if near else 0
            taken.append((number, list(sums[at : at + PARTS + 1]) if near else None))
        n = len(self.inputs)
        samples = [
            (*what, number if row is None else row)
            for what, (number, row) in zip(self.inputs, taken[:n], strict=True)
        ]  # fmt: skip
        return samples, dict(zip(self.copies, taken[n:], strict=True))


class Seen:
    """The arguments of one rank: a sample of every input, and of every parameter that it holds."""

    def __init__(self, device_mesh: DeviceMesh | None = None) -> None:
        self.coordinate = tuple(device_mesh.get_coordinate() or ()) if device_mesh is not None else ()
        self.inputs: list[tuple[str, str, tuple[int, ...], Any]] = []
        self.copies: list[Copy] = []
        self.near: list[bool] = []
        self.bits: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []

    def add(
        self, shown: str, name: str, leaf: torch.Tensor, state: State | None = None, place: int | None = None
    ) -> None:
        """Sample an input; one that is a slice (placed as ``state``) is compared among the ranks that have the same.

        Args:
            shown: what the message calls it; ``name`` is what pins call it.
            place: in a pipeline whose ranks have rows of their own, which of these rows this rank has.
        """
        among: tuple[Any, ...] = () if place is None else (LOCAL_BATCH, place)
        if state is not None:
            among = tuple(c for p, c in zip(state, self.coordinate, strict=True) if p.is_shard)
        self.inputs.append((shown, name, tuple(leaf.shape), among))
        self._sample(leaf, near=leaf.is_floating_point() or leaf.is_complex())

    def add_parameters(self, named: Iterable[tuple[str, torch.Tensor]], first: bool) -> None:
        """Sample this rank's pieces of parameters.

        Args:
            first: no step was made yet.
        """
        for name, param in named:
            local: torch.Tensor = param
            on_processor = param.device.type == "cpu"
            cuts: list[tuple[int, int, int]] = []
            if isinstance(param, DTensor):
                local = param._local_tensor
                on_processor = param.device_mesh.device_type == "cpu"  # gradients of what is on the host are a device's
                place = param.device_mesh.get_coordinate() or ()
                cuts = [
                    (placement.dim, param.device_mesh.size(axis), place[axis])
                    for axis, placement in enumerate(param.placements) if isinstance(placement, Shard)
                ]  # fmt: skip
            self.copies.append((name, tuple(cuts)))
            self._sample(local, near=not first and not on_processor)

    def _sample(self, x: torch.Tensor, near: bool) -> None:
        self.near.append(near)
        self.bits.append(fingerprint(x))
        if near:
            self.sums.append(sums_of(x))

    @property
    def form(self) -> Outline:
        """The description of the numbers."""
        return Outline(tuple(self.inputs), tuple(self.copies), tuple(self.near))

    def arriving(
        self, device: torch.device, group: ProcessGroup | None = None, forms: Sequence[Outline] | None = None
    ) -> Arriving:
        """Begin to copy the numbers to the host, which goes on meanwhile; those of all ranks, if a group is given.

        Args:
            forms: those that the ranks of the group had before; it says how long their numbers are.
        """
        form = self.form
        bits = torch.stack([torch.full((), form.checksum, device=device), *(x.to(device) for x in self.bits)])
        sums = torch.cat([torch.empty(0, dtype=torch.float64, device=device), *(x.to(device) for x in self.sums)])
        self.bits, self.sums = [], []
        if forms is None:
            return Arriving([form], bits.unsqueeze(0), sums.unsqueeze(0))
        gathered = []
        for which, mine in enumerate((bits, sums)):
            room = max(each.lengths[which] for each in forms)
            padded = mine.new_zeros(room)
            padded[: len(mine)] = mine[:room]
            every = mine.new_empty(len(forms) * room)
            all_gather_flat(every, padded, group=group)
            gathered.append(every.view(len(forms), room))
        return Arriving(forms, *gathered)


class Arriving:
    """Numbers of some ranks, [ranks, numbers of each], on their way from the device."""

    def __init__(self, forms: Sequence[Outline], bits: torch.Tensor, sums: torch.Tensor) -> None:
        self.forms, self.numbers = forms, OnHost(bits, sums)

    def values(self) -> list[Values | None]:
        """Return the values of each rank, waiting for them; None for one that had another form."""
        return [
            form.values(bits, sums) if bits[0] == form.checksum else None
            for form, bits, sums in zip(self.forms, *self.numbers.tolist(), strict=True)
        ]


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of all elements as integers, [elements]."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()]) if flat.dtype is not torch.bool else flat.view(torch.uint8)


@torch.no_grad()
def fingerprint(x: torch.Tensor) -> torch.Tensor:
    """Compute a checksum, int64 [], where x is.

    All elements count, and of about 4096 of them also their position.
    """
    flat = _bits(x.detach())
    some = flat[:: max(1, flat.numel() // SAMPLE)].long()
    odd = torch.arange(some.numel(), device=x.device) * 2 + 1
    where = (some * odd * _MIX).sum()
    return where + torch.hash_tensor(flat, dim=0).view(torch.int64) if flat.numel() else where


@torch.no_grad()
def sums_of(x: torch.Tensor) -> torch.Tensor:
    """Sum the parts of a sample, and return their mean size too, float64 [PARTS + 1], on the device of x."""
    flat = (torch.view_as_real(x) if x.is_complex() else x).detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // SAMPLE)].double().nan_to_num()
    parts = torch.nn.functional.pad(flat, (0, -flat.numel() % PARTS)).view(PARTS, -1)
    return torch.cat([parts.sum(1), parts.abs().sum().unsqueeze(0) / PARTS])
