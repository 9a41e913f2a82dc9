"""Seeds of random operators: one for each forward, the same on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_GOLDEN = 0x9E3779B97F4A7C15
"""The golden ratio as a 64-bit fraction: multiples of it are far apart."""


def mixed_seed(seed: int, call: int) -> int:
    """The seed of random ops in one forward: another one for every forward, the same on every rank."""
    return (seed + call * _GOLDEN) % (1 << 62)


def agreed_seed(device_mesh: DeviceMesh, device: torch.device) -> int:
    """Rank 0's ``torch.initial_seed()``, on every rank."""
    seed = torch.tensor([torch.initial_seed() % (1 << 62)], dtype=torch.int64, device=device)
    if device_mesh.size() > 1:
        for axis in range(device_mesh.ndim):
            group = device_mesh.get_group(axis)
            dist.broadcast(seed, group=group, group_src=0)
    return int(seed.item())


__all__ = ["agreed_seed", "mixed_seed"]
