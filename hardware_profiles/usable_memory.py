"""Memory of a device that a process can allocate, and the part that its context takes."""

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
"""The fraction of a device known by its data sheet alone that a plan may fill: the rest is for the driver, the context,
communication, the allocator's gaps and what is not counted."""


class Budget(NamedTuple):
    """The memory limit of a plan on a device, and the use of the rest, in bytes.

    Attributes:
        usable_bytes: what the driver reports; of an unknown device the data sheet's number.
        reserved_bytes: bytes of the process's context and libraries, and the software's communication buffers.
        margin: the larger of the allocator's fragmentation and the count's own error, as a share of the counted bytes.
            They do not add up: an allocator that runs out of memory releases its unused blocks before it fails.
        limit_bytes: upper limit of the counted peak of a step.
        is_known: True if the driver's number is known; else the limit is a fixed share of the data sheet's.
    """

    usable_bytes: float
    reserved_bytes: float
    margin: float
    limit_bytes: float
    is_known: bool


@functools.cache
def usable_memory() -> dict[str, float]:
    """Return bytes by the name of the device, from data/usable_memory.toml."""
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


def driver_bytes(device: Device) -> float:
    """Return the bytes that the driver reports of a device; of an unknown one the data sheet's."""
    return usable_memory().get(device.name, device.memory_bytes)


def budget_of(cluster: Cluster, device: Device) -> Budget:
    """Return the memory budget of one device of a cluster under the cluster's software.

    Software that reserves more than the device has raises ProfileError.
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
    """Return True for an accelerator whose memory a driver reports and whose kernels are torch's for GPUs."""
    return device.name in usable_memory()
