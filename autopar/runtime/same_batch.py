"""Whether all ranks were called with the same batch.

Programs take their slices of a batch that every rank has whole. Who passes each rank's own rows, as with
``DistributedSampler``, would lose the rest in silence; so ranks compare what they were called with, in the first three
calls and then in the tenth, hundredth, thousandth and so on. A sample of each tensor is compared, integers by a
checksum, floating point numbers by sums that bear rounding (they may come from a layer in front, on other devices).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError, RunError
from autopar.placements import State, is_shard

SAMPLE = 4096
"""Elements of a tensor that are looked at."""
PARTS = 32
"""Sums of parts of a sample of floating point numbers that are compared."""
ROUNDING = 1e-2
"""How far these may be apart, as a share of the sample's mean size."""

Taken = TypeVar("Taken")
Sample = tuple[str, str, tuple[int, ...], Any, Any]


def is_checked(call: int) -> bool:
    """Whether call number ``call`` (from 1) is compared."""
    return call in (2, 3) or str(call).rstrip("0") == "1"


class Seen:
    """What one rank was called with: a sample of every input."""

    def __init__(self, device_mesh: DeviceMesh | None = None) -> None:
        self.coordinate = tuple(device_mesh.get_coordinate() or ()) if device_mesh is not None else ()
        self.samples: list[Sample] = []

    def add(self, shown: str, name: str, leaf: torch.Tensor, state: State | None = None) -> None:
        """Sample an input; one that is a slice (placed as ``state``) is compared among the ranks that have the same.

        Args:
            shown: what the message calls it; ``name`` is what pins call it.
        """
        among = () if state is None else tuple(c for p, c in zip(state, self.coordinate, strict=True) if is_shard(p))
        self.samples.append((shown, name, tuple(leaf.shape), among, sampled(leaf)))


@torch.no_grad()
def sampled(x: torch.Tensor) -> Any:
    """A checksum of a sample, or sums and mean size of its parts."""
    flat = x.detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // SAMPLE)].cpu()
    if not (x.is_floating_point() or x.is_complex()):
        return zlib.crc32(flat.contiguous().view(torch.uint8).numpy().tobytes())
    flat = torch.view_as_real(flat).flatten() if x.is_complex() else flat
    parts = flat.double().nan_to_num().chunk(PARTS)
    return [float(part.sum()) for part in parts], float(flat.double().nan_to_num().abs().sum()) / max(1, len(parts))


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return bool(a != b)
    (mine, size), (theirs, other) = a, b
    if len(mine) != len(theirs):
        return True
    return any(abs(p - q) > ROUNDING * max(size, other) for p, q in zip(mine, theirs, strict=True))


def compare(group: Any, seen: Seen, error: AutoparError | None) -> None:
    """Raise on every rank if ranks were called differently; every rank of ``group`` calls it.

    Args:
        error: what is wrong with this rank's call, which others would wait for in vain.

    Raises:
        RunError: the ranks' batches differ, or another rank's call is wrong. AutoparError: ``error``.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (seen.samples, None if error is None else str(error)), group=group)
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(everyone):
        if text is not None:
            raise RunError(f"on rank {rank}: {text}")
    for i in range(len(everyone[0][0])):
        same: dict[Any, tuple[int, Any, Any]] = {}
        for rank, (samples, _) in enumerate(everyone):
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


class Calls:
    """The calls of one module, some of which the ranks compare.

    Args:
        group: gives the process group of the module's ranks.
        device_mesh: on which inputs may be slices; None where every rank passes everything.
        alone: there is one rank.
    """

    def __init__(self, group: Callable[[], Any], device_mesh: DeviceMesh | None, alone: bool) -> None:
        self.group, self.device_mesh, self.alone = group, device_mesh, alone
        self.count = 0

    def inputs(self, take: Callable[[Seen | None], Taken]) -> Taken:
        """What ``take`` makes of the next call; where that is compared, it samples the inputs.

        Raises:
            RunError: ranks were called differently, or another rank's call is wrong. AutoparError: this one's is.
        """
        self.count += 1
        if self.alone or not is_checked(self.count):
            return take(None)
        seen, error = Seen(self.device_mesh), None
        taken: Taken | None = None
        try:
            taken = take(seen)
        except AutoparError as e:
            error = e
        compare(self.group(), seen, error)
        assert taken is not None
        return taken


__all__ = ["Calls", "Seen", "compare", "is_checked"]
