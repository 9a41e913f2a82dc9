"""Parameters in the memory of the host: values come in before their use, gradients go out as they become ready.

What is stored is in (pinned) memory of the host, and with it what optimizers make like it: their state. So the user's
own optimizer steps there. The device has a copy of the values, for a step or for one use.

Copies run on a stream for each direction, beside compute. They are not the streams of activations
(:mod:`autopar.lower.host_copies`): what comes in is gathered and cast on the same stream, and those would wait for
that. Streams wait for each other; the host waits for gradients once, when the step's are handed to the parameters. What
goes out is kept until it has arrived, at most :data:`IN_FLIGHT_BYTES` at a time: then compute waits for the oldest
copy. On a processor, whose memory is the host's, copies are made at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from autopar.allocations import elsewhere
from autopar.errors import RunError
from autopar.lower.host_copies import Copy, CopyDone, CopyOnStream

BATCH_BYTES = 8 << 20
"""Gradients that go out together have at least so many bytes."""
IN_FLIGHT_BYTES = 64 << 20
"""Bytes of gradients on their way to the host, for which the device has memory at the same time."""

MANY_BYTES = 256 << 20
"""Bytes of parameters on which one thread takes a noticeable part of a step."""
_stored: Any = WeakIdKeyDictionary()
"""Parameters that are stored in the memory of the host."""


def pinned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return values of the host in memory that ``device`` copies without waiting; as they are for a processor."""
    return values if device.type == "cpu" else _on_host(values, device).copy_(values)


def note(param: torch.nn.Parameter, device: torch.device) -> None:
    """Remember that a parameter of a module on ``device`` is stored on the host."""
    _stored[param] = True
    if device.type != "cpu" and param.requires_grad:
        _count_bytes(param)


def check_reaches(device_mesh: DeviceMesh) -> None:
    """Refuse to store on the host what ranks could not send each other from there.

    Raises:
        RunError: the process group has no backend for tensors on processors.
    """
    config = dist.get_backend_config() if dist.is_initialized() and device_mesh.size() > 1 else "cpu:"
    if "cpu:" not in config and config != dist.Backend.GLOO:
        raise RunError(
            f"the plan stores parameters in the memory of the host, and the process group is for {config}, which sends "
            "nothing from there (norms of gradients, checkpoints): make the group with a backend for both, such as "
            "init_process_group('cpu:gloo,cuda:nccl')"
        )


_total = 0
_said = False


def _count_bytes(param: torch.nn.Parameter) -> None:
    """Warn once where one thread is to step on many bytes."""
    global _total, _said
    local = getattr(param, "_local_tensor", param)
    _total += local.numel() * local.element_size()
    if _total > MANY_BYTES and torch.get_num_threads() == 1 and (os.cpu_count() or 1) > 1 and not _said:
        _said = True
        warnings.warn(
            f"the optimizer steps on the host, and torch has one thread there (torchrun sets OMP_NUM_THREADS=1), of "
            f"{os.cpu_count()} cores: a step takes several times as long as it must. Set OMP_NUM_THREADS to the cores "
            "of the machine over the ranks on it, and give the optimizer fused=True",
            stacklevel=2,
        )


def is_on_host(param: torch.Tensor) -> bool:
    """Check whether a parameter is stored in the memory of the host by a plan."""
    return param in _stored


def _on_host(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    with elsewhere():
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=device.type == "cuda")


@functools.cache
def carrier_of(device: torch.device) -> HostCarrier:
    """Return what copies between a device and its host, one for each device."""
    return HostCarrier(device)


class _GradientBatch:
    """Gradients that are copied to the host together; ``arrived`` is None until that has begun."""

    def __init__(self, carrier: HostCarrier) -> None:
        self.carrier = carrier
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.n_bytes = 0
        self.arrived: Any = None


class GradientToHost(NamedTuple):
    """A gradient in the memory of the host, and what it is copied with; None where it was copied at once."""

    values: torch.Tensor
    batch: _GradientBatch | None

    def wait(self) -> torch.Tensor:
        """Return the values once they are there."""
        if self.batch is not None:
            self.batch.carrier.begin(self.batch)
            self.batch.arrived.synchronize()
        return self.values


class HostCarrier:
    """The copies between one device and its host.

    Args:
        device: the device on which programs run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_way: deque[_GradientBatch] = deque()
        self.n_bytes = 0
        self.filling: _GradientBatch | None = None
        self.streams: dict[str, Any] = {}

    def _stream(self, way: str) -> Any:
        if way not in self.streams:
            self.streams[way] = torch.get_device_module(self.device).Stream(self.device)
        return self.streams[way]

    @contextlib.contextmanager
    def coming_in(self) -> Iterator[None]:
        """Enclose copies to the device, and what is to be done with them beside compute.

        They begin when all is done that was launched before: it may use the memory into which they write.
        """
        if self.device.type == "cpu":
            yield
            return
        module = torch.get_device_module(self.device)
        stream = self._stream("in")
        stream.wait_stream(module.current_stream(self.device))
        with module.stream(stream):
            yield

    def begun(self) -> Copy:
        """Return what waits for the copies that were begun last in :meth:`coming_in`."""
        return CopyDone() if self.device.type == "cpu" else CopyOnStream(self.device, self._stream("in").record_event())

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device of values on the host, on the current stream."""
        return torch.empty(values.shape, dtype=values.dtype, device=self.device).copy_(values, non_blocking=True)

    def to_host(self, grad: torch.Tensor) -> GradientToHost:
        """Copy a gradient to the host, soon: small ones go together."""
        values = _on_host(grad, self.device)
        if self.device.type == "cpu":
            return GradientToHost(values.copy_(grad), None)
        batch = self.filling = self.filling or _GradientBatch(self)
        batch.pairs.append((values, grad))
        batch.n_bytes += grad.numel() * grad.element_size()
        if batch.n_bytes >= BATCH_BYTES:
            self.begin(batch)
        return GradientToHost(values, batch)

    def begin(self, batch: _GradientBatch) -> None:
        """Begin to copy a batch, unless that is done."""
        if batch.arrived is not None:
            return
        self.filling = None if self.filling is batch else self.filling
        now, stream = torch.get_device_module(self.device).current_stream(self.device), self._stream("out")
        stream.wait_stream(now)
        with torch.get_device_module(self.device).stream(stream):
            for values, grad in batch.pairs:
                values.copy_(grad, non_blocking=True)
        batch.arrived = stream.record_event()
        self.on_way.append(batch)  # the memory of its gradients is used again when they have arrived
        self.n_bytes += batch.n_bytes
        while self.n_bytes > IN_FLIGHT_BYTES and len(self.on_way) > 1:
            self._let_go(now)

    def settle(self) -> None:
        """Begin all copies, and give up what went out; work that is launched later on this stream comes after them."""
        if self.filling is not None:
            self.begin(self.filling)
        if self.on_way:
            now = torch.get_device_module(self.device).current_stream(self.device)
            while self.on_way:
                self._let_go(now)

    def _let_go(self, now: Any) -> None:
        batch = self.on_way.popleft()
        now.wait_event(batch.arrived)
        self.n_bytes -= batch.n_bytes
        batch.pairs = []
