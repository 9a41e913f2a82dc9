"""Seconds of copies between a device and the memory of its host, and how much of them compute hides.

A device copies in both directions at once, each on a stream of its own, beside compute. What one device reaches depends
on what the others of its machine do: some share the wire into the host, all share its memory. Copies that plans make
are made by all devices of a machine in the same moments, so prices take them so.

A copy takes ``latency + bytes / rate``. In a phase (the forwards, or the backwards, of a step) with ``a`` seconds of
copies out and ``b`` of copies in, each counted alone, the link is busy for ``min(a, b) / f + |a - b|`` seconds, with
``f`` the part of its rate that a direction keeps while the other copies: ``g * min(a, b)`` less than one after another,
with ``g = 2 - 1 / f``. What exceeds the compute of the phase is waited for.

Activations and parameters use the same link. Copies of activations have an order (:func:`copy_waits`); those of
parameters hide in the seconds that these leave (:class:`HostLinkUse`), so a pass never takes less than its link is
busy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hardware_profiles import Cluster, Device, HostLink, ProfileError

MEMORY_FRACTION = 0.8
"""Part of a memory's nominal bandwidth that streams reach, as STREAM does on two-socket servers."""


@dataclass(frozen=True)
class HostCopies:
    """Copies of one device of a machine in which several devices copy alike.

    Attributes:
        link: the device's way to the host.
        devices: devices of the machine that copy at once.
    """

    link: HostLink
    devices: int = 1

    def _rate(self, alone: float) -> float:
        """Return the bytes per second of one direction, while the other devices of the machine copy as much."""
        return min(alone / min(self.devices, self.link.shared_by), self.memory_rate)

    @property
    def to_host_rate(self) -> float:
        """Bytes per second to the host."""
        return self._rate(self.link.to_host_bytes_per_second)

    @property
    def to_device_rate(self) -> float:
        """Bytes per second to the device."""
        return self._rate(self.link.to_device_bytes_per_second)

    def to_host(self, n_bytes: float, copies: int = 1) -> float:
        """Return the seconds of copies to the host, one after another, nothing coming in."""
        return copies * self.link.latency_seconds + n_bytes / self.to_host_rate

    def to_device(self, n_bytes: float, copies: int = 1) -> float:
        """Return the seconds of copies to the device, one after another, nothing going out."""
        return copies * self.link.latency_seconds + n_bytes / self.to_device_rate

    @property
    def both_fraction(self) -> float:
        """Part of its rate that each direction keeps while the other copies, the host's memory included."""
        return min(self.link.both_fraction, self.memory_rate / (self.to_host_rate + self.to_device_rate))

    @property
    def both_gain(self) -> float:
        """Part of the shorter direction's seconds that is saved while both directions copy at once."""
        return 2 - 1 / self.both_fraction

    @property
    def memory_bytes(self) -> float:
        """The share of the host's memory that one device may fill, in bytes."""
        return self.link.memory_bytes / min(self.devices, self.link.memory_devices)

    @property
    def threads(self) -> int:
        """Cores of the host for one device, all devices at once; 0 where they are not known."""
        return self.link.cores // min(self.devices, self.link.memory_devices)

    @property
    def memory_rate(self) -> float:
        """Bytes per second at which the host reads or writes its memory for one device, all devices at once."""
        return MEMORY_FRACTION * self.link.memory_bytes_per_second / min(self.devices, self.link.memory_devices)


def has_host(device: Device) -> bool:
    """Return True if something may be moved from the device to the memory of a host."""
    return device.host is not None


def host_copies(device: Device, devices: int = 1) -> HostCopies:
    """Return the copies of a device of a machine in which ``devices`` copy at once.

    Raises:
        ProfileError: the way from the device to the memory of its host is not known, or there is none.
    """
    if device.host is None:
        raise ProfileError("host link", [no_host(device)])
    return HostCopies(device.host, devices)


def no_host(device: Device) -> str:
    """Return the message about a device without a memory of a host."""
    return (
        f"device {device.name} has no memory of a host that is known here: for a GPU, add its PCIe "
        f'(host_link = "pcie5") or a table [devices.{device.name}.host] to the cluster file '
        "(hardware_profiles/README.md); a process on a CPU lives in the host's memory already"
    )


def host_of(cluster: Cluster, device: Device) -> HostCopies:
    """Return the copies of a device of a cluster, all devices of a machine at once.

    Raises:
        ProfileError: as :func:`host_copies`.
    """
    return host_copies(device, devices_of_a_host(cluster))


def copies_of(cluster: Cluster, device: Device) -> HostCopies | None:
    """Return :func:`host_of` a device; None if it has no host."""
    return host_of(cluster, device) if has_host(device) else None


def devices_of_a_host(cluster: Cluster, ranks: Iterable[int] | None = None) -> int:
    """Return the most devices that one machine of a cluster has among some ranks (all, if not given)."""
    count: dict[int, int] = {}
    for rank in range(cluster.n_devices) if ranks is None else ranks:
        node = cluster.node_of[rank]
        count[node] = count.get(node, 0) + 1
    return max(count.values(), default=1)


class Moved(NamedTuple):
    """A tensor that is copied to the host in the forward and back in the backward.

    Attributes:
        out_seconds, in_seconds: of its copies, alone.
        last: position of its last reader in the forward: then the copy out is started.
        asked: position of the first reader of the backward, among those of the forward.
    """

    out_seconds: float
    in_seconds: float
    last: int
    asked: int


class HostLinkUse(NamedTuple):
    """What activations do on the link in the forward and in the backward of a microbatch: without any, nothing.

    Attributes:
        waits: seconds that each pass waits for their copies.
        copied: seconds of their copies, alone: to the host in the forward, to the device in the backward.
        left: seconds of each pass, its waits included, in which the link is not busy with them.
        gain: the link's :attr:`HostCopies.both_gain`.
    """

    waits: tuple[float, float] = (0.0, 0.0)
    copied: tuple[float, float] = (0.0, 0.0)
    left: tuple[float, float] = (math.inf, math.inf)
    gain: float = 0.0

    def room(self, backward: bool, coming: float, going: float) -> float:
        """Return how many seconds of copies of parameters pass beside a pass, of so many in and out, each alone."""
        going, coming = going + (not backward) * self.copied[0], coming + backward * self.copied[1]
        return self.left[backward] + self.gain * min(going, coming)


UNUSED = HostLinkUse()
"""No activation is copied."""


def link_use(
    link: HostCopies, moved: Sequence[Moved], forward: Sequence[float], backward: Sequence[float], ahead: int
) -> HostLinkUse:
    """Return what moved tensors do on a link; arguments are those of :func:`copy_waits`."""
    there, back = copy_waits(moved, forward, backward, ahead)
    out, home = sum(tensor.out_seconds for tensor in moved), sum(tensor.in_seconds for tensor in moved)
    # rounding: the link may be busy all along
    left = max(0.0, sum(forward) + there - out), max(0.0, sum(backward) + back - home)
    return HostLinkUse((there, back), (out, home), left, link.both_gain)


def copy_waits(
    moved: Sequence[Moved], forward: Sequence[float], backward: Sequence[float], ahead: int
) -> tuple[float, float]:
    """Return the seconds that the forward and the backward of a microbatch wait for copies.

    The copies of a direction run one after another. The forward waits for the copy out of a tensor at the last reader
    of the one ``ahead`` tensors later, or at its end. The copy in of a tensor is started when the one ``ahead`` later
    is asked for, or at the beginning of the backward.

    Args:
        moved: in the order in which they leave.
        forward, backward: seconds that each operator computes, in the order of the forward.
    """
    leaving: dict[int, list[int]] = {}
    asking: dict[int, list[int]] = {}
    for number, tensor in enumerate(moved):
        leaving.setdefault(tensor.last, []).append(number)
        asking.setdefault(tensor.asked, []).append(number)
    now, free, ends, there = 0.0, 0.0, [0.0] * len(moved), 0.0
    for place, seconds in enumerate(forward):
        now += seconds
        for number in leaving.get(place, ()):
            free = ends[number] = max(now, free) + moved[number].out_seconds
            if number >= ahead and (late := ends[number - ahead] - now) > 0:
                there, now = there + late, now + late
    there += max(0.0, free - now)
    now, free, back, begun = 0.0, 0.0, 0.0, [False] * len(moved)

    def begin(number: int) -> None:
        nonlocal free
        if number >= 0 and not begun[number]:
            begun[number] = True
            free = ends[number] = max(now, free) + moved[number].in_seconds

    for number in reversed(range(max(0, len(moved) - ahead), len(moved))):
        begin(number)
    for place in reversed(range(len(backward))):
        for number in asking.get(place, ()):
            begin(number)
            if (late := ends[number] - now) > 0:
                back, now = back + late, now + late
            begin(number - ahead)
        now += backward[place]
    return there, back
