"""Whether all ranks were called with the same batch, and have the same parameters.

Programs take their slices of a batch that every rank has whole. Who passes each rank's own rows, as with
``DistributedSampler``, would lose the rest in silence; so ranks compare what they were called with, in the first three
calls and then in the tenth, hundredth, thousandth and so on. A sample of each tensor is compared, integers by a
checksum, floating point numbers by sums that bear rounding (they may come from a layer in front, on other devices).

In the same calls ranks compare the parameters, or pieces of them, of which they hold copies. These began equal, and got
equal gradients; so copies that differ were written by each rank on its own, such as with random numbers of another
seed, and nothing would ever bring them together. On the CPU, and in the first call on any device, they are equal to the
bit. Accelerators have operators that add in no fixed order, so that copies of what every rank computes for itself may
come apart a little; there a difference beyond rounding is a warning.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar.errors import AutoparError, RunError
from autopar.placements import State, is_shard
from autopar.runtime.dtensor_fixes import note_on

SAMPLE = 4096
"""Elements of a tensor that are looked at."""
PARTS = 32
"""Sums of parts of a sample of floating point numbers that are compared."""
ROUNDING = 1e-2
"""How far these may be apart, as a share of the sample's mean size."""

Taken = TypeVar("Taken")
Sample = tuple[str, str, tuple[int, ...], Any, Any]
Copy = tuple[str, tuple[tuple[int, int, int], ...]]
"""A parameter's name, and which piece of it: of each mesh axis that cuts it the dim, the axis's size and the place."""


def is_checked(call: int) -> bool:
    """Whether call number ``call`` (from 1) is compared."""
    return call in (2, 3) or str(call).rstrip("0") == "1"


class Seen:
    """What one rank was called with: a sample of every input."""

    def __init__(self, device_mesh: DeviceMesh | None = None) -> None:
        self.coordinate = tuple(device_mesh.get_coordinate() or ()) if device_mesh is not None else ()
        self.samples: list[Sample] = []
        self.copies: dict[Copy, tuple[int, Any]] = {}

    def add(self, shown: str, name: str, leaf: torch.Tensor, state: State | None = None) -> None:
        """Sample an input; one that is a slice (placed as ``state``) is compared among the ranks that have the same.

        Args:
            shown: what the message calls it; ``name`` is what pins call it.
        """
        among = () if state is None else tuple(c for p, c in zip(state, self.coordinate, strict=True) if is_shard(p))
        self.samples.append((shown, name, tuple(leaf.shape), among, sampled(leaf)))

    def add_parameters(self, named: Iterable[tuple[str, torch.Tensor]], first: bool) -> None:
        """Sample this rank's pieces of parameters.

        Args:
            first: no step was made yet.
        """
        for name, param in named:
            local: torch.Tensor = param
            cuts: list[tuple[int, int, int]] = []
            if isinstance(param, DTensor):
                local = param._local_tensor
                place = param.device_mesh.get_coordinate() or ()
                cuts = [
                    (placement.dim, param.device_mesh.size(axis), place[axis])
                    for axis, placement in enumerate(param.placements) if isinstance(placement, Shard)
                ]  # fmt: skip
            near = None if first or local.device.type == "cpu" else sampled(local)
            self.copies[name, tuple(cuts)] = checksum(local), near


def _some(x: torch.Tensor, count: int = SAMPLE) -> torch.Tensor:
    """Elements of ``x`` at equal distances, on the CPU."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // count)].cpu()


@torch.no_grad()
def checksum(x: torch.Tensor, count: int = SAMPLE) -> int:
    """Of the bits of about ``count`` elements."""
    return zlib.crc32(_some(x, count).contiguous().view(torch.uint8).numpy().tobytes())


@torch.no_grad()
def sampled(x: torch.Tensor) -> Any:
    """A checksum of a sample, or sums and mean size of its parts."""
    if not (x.is_floating_point() or x.is_complex()):
        return checksum(x)
    flat = _some(x)
    flat = torch.view_as_real(flat).flatten() if x.is_complex() else flat
    parts = flat.double().nan_to_num().chunk(PARTS)
    return [float(part.sum()) for part in parts], float(flat.double().nan_to_num().abs().sum()) / max(1, len(parts))


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return bool(a != b)
    (mine, size), (theirs, other_size) = a, b
    if len(mine) != len(theirs):
        return True
    return any(abs(p - q) > ROUNDING * max(size, other_size) for p, q in zip(mine, theirs, strict=True))


def compare(group: Any, seen: Seen, error: AutoparError | None) -> None:
    """Raise on every rank if ranks were called differently; every rank of ``group`` calls it.

    Args:
        error: what is wrong with this rank's call, which others would wait for in vain.

    Raises:
        RunError: the ranks' batches or parameters differ, or another rank's call is wrong. AutoparError: ``error``.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (seen.samples, seen.copies, None if error is None else str(error)), group=group)
    if error is not None:
        raise error
    for rank, (*_, text) in enumerate(everyone):
        if text is not None:
            raise RunError(f"on rank {rank}: {text}")
    for i in range(len(everyone[0][0])):
        same: dict[Any, tuple[int, Any, Any]] = {}
        for rank, (samples, *_) in enumerate(everyone):
            shown, name, shape, among, sample = samples[i]
            first, first_shape, first_sample = same.setdefault(among, (rank, shape, sample))
            if shape != first_shape or _differ(sample, first_sample):
                raise RunError(
                    f"input {shown} has other values on rank {rank} than on rank {first} (shape {shape}): every rank "
                    "is called with the whole batch and takes its own slice, so rows that only one rank has would be "
                    "lost. Either pass the same batch on every rank (no DistributedSampler, one seed for shuffling "
                    f"and for layers in front), or pin the input, such as placements={{'{name}': 'S0'}} on a mesh of "
                    "one axis, and pass each rank's own rows"
                )
    _compare_parameters([copies for _, copies, _ in everyone])


def _compare_parameters(everyone: list[dict[Copy, tuple[int, Any]]]) -> None:
    """Raise if ranks hold other values of the same piece of a parameter; given what each has, in their order."""
    first_with: dict[Copy, tuple[int, int, Any]] = {}
    for rank, copies in enumerate(everyone):
        for copy, (bits, near) in copies.items():
            first, first_bits, first_near = first_with.setdefault(copy, (rank, bits, near))
            if bits == first_bits:
                continue
            text = (
                f"parameter '{copy[0]}' has other values on rank {rank} than on rank {first}, and both hold the same "
                "piece of it: copies of a parameter begin equal and get equal gradients, so each rank has written its "
                "own values into the parameter or its gradient, such as random numbers after torch.manual_seed(1337 + "
                "rank). Seed all ranks alike where you write to parameters or gradients, or initialize the model "
                "before parallelize; to make the copies equal again, load rank 0's: "
                "autopar.load_full_state_dict(pm, autopar.full_state_dict(pm) or None)"
            )
            if near is None or first_near is None:
                raise RunError(text)
            if _differ(near, first_near):
                warnings.warn(text, stacklevel=8)
                return


class Calls:
    """The calls of one module, some of which the ranks compare.

    Args:
        group: the process group of the module's ranks.
        device_mesh: on which inputs may be slices; None where every rank passes everything.
        alone: there is one rank.
        stages: the meshes on which this rank holds parameters.
    """

    def __init__(
        self, group: Any, device_mesh: DeviceMesh | None, alone: bool, stages: Iterable[DeviceMesh] = ()
    ) -> None:
        self.group, self.device_mesh, self.alone = group, device_mesh, alone
        self.stages = list({id(mesh): mesh for mesh in stages}.values())
        self.count = 0

    def inputs(self, take: Callable[[Seen | None], Taken], parameters: Iterable[tuple[str, torch.Tensor]]) -> Taken:
        """What ``take`` makes of the next call; where that is compared, it samples the inputs.

        Args:
            parameters: this rank's, by name; read where the call is compared.

        Raises:
            RunError: ranks were called differently or hold other parameters, or another rank's call is wrong.
            AutoparError: this one's is.
        """
        self.count += 1
        if not self.alone and (self.count <= 4 or self.count % 10 in (0, 1)):  # scripts log in every so many steps
            for mesh in self.stages:
                note_on(mesh, f"call {self.count} of a module")
        if self.alone or not is_checked(self.count):
            return take(None)
        seen, error = Seen(self.device_mesh), None
        taken: Taken | None = None
        try:
            taken = take(seen)
            seen.add_parameters(parameters, first=self.count == 1)
        except AutoparError as e:
            error = e
        compare(self.group, seen, error)
        assert taken is not None
        return taken


__all__ = ["Calls", "Seen", "checksum", "compare", "is_checked"]
