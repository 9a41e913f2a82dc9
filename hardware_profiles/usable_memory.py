"""What a process may allocate of a device's memory, and what its context takes of it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

from .errors import ProfileError
from .model import Cluster, Device
from .reader import ProfileErrors, Table, read_document

_FILE = Path(__file__).parent / "data" / "usable_memory.toml"

CONTEXT_BYTES = 1.47e9
"""Bytes of a GPU that a training process takes beside torch's allocator: the CUDA context and the code of the
libraries. On one H200 ``device_used`` less ``max_reserved`` is 1,466 MB on 5 of 8 models, 0.80 to 1.47 GB on all
(hardware_profiles/measured/h200/first_hour.json)."""
COUNT_MARGIN = 0.03
"""By how much a step may have more than is counted, as a share of the count, for a plan still to fit: on the same H200
eight models had -1.3% to +4.5% more, the mean +0.9% and all but one at most 2.1%."""
UNKNOWN_FRACTION = 0.9
"""Of a device of which nothing is known but its data sheet a plan may fill so much: the rest is for the driver, the
context, communication, the allocator's gaps and what is not counted."""


class Budget(NamedTuple):
    """What a plan may fill of a device, and what the rest is for; in bytes.

    Attributes:
        usable_bytes: that the driver gives; of a device that is not known, that its data sheet names.
        reserved_bytes: of the process's context and libraries, and what its software takes for communication.
        margin: the larger of the allocator's gaps and of the count's own error, as a share of what is counted. They do
            not add up: an allocator that runs out of memory gives its unused blocks back before it fails.
        limit_bytes: what the counted peak of a step may be at most.
        is_known: whether the driver's number is known; else the limit is a fixed share of the data sheet's.
    """

    usable_bytes: float
    reserved_bytes: float
    margin: float
    limit_bytes: float
    is_known: bool


@functools.cache
def usable_memory() -> dict[str, float]:
    """Bytes by the name of the device, from data/usable_memory.toml."""
    failures = ProfileErrors("data/usable_memory.toml")
    root = Table(read_document(_FILE), "", failures)
    usable = {}
    for name in root.data:
        table = root.table(name)
        usable[name] = table.number("gib", positive=True) * 2**30
        table.text("source")
        table.close()
    failures.raise_if_any()
    return usable


def budget_of(cluster: Cluster, device: Device) -> Budget:
    """What a plan may fill of one device of a cluster under the cluster's software.

    Raises:
        ProfileError: the software reserves more than the device has.
    """
    software, usable = cluster.software, usable_memory().get(device.name)
    if usable is None:
        limit = UNKNOWN_FRACTION * device.memory_bytes
        budget = Budget(device.memory_bytes, 0.0, 0.0, limit, False)
    else:
        reserved = max(CONTEXT_BYTES, software.reserved_bytes)
        margin = max(COUNT_MARGIN, software.fragmentation)
        budget = Budget(usable, reserved, margin, (usable - reserved) / (1 + margin), True)
    if budget.limit_bytes <= 0:
        raise ProfileError(cluster.name, [
            f"software '{software.name}' reserves {software.reserved_bytes / 2**30:.2f} GiB of a device, and "
            f"{device.name} has {budget.usable_bytes / 2**30:.2f} GiB: nothing is left for a step; lower its "
            "reserved_bytes, or give a memory limit"
        ])  # fmt: skip
    return budget


def is_gpu(device: Device) -> bool:
    """Whether a device is one of the accelerators whose memory a driver gives, and whose kernels are torch's for
    GPUs."""
    return device.name in usable_memory()
