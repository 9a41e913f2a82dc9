"""Results of a call: plain, whole tensors in the caller's autograd graph."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import RunError
from autopar.runtime.parameters.state import joined, local_shard
from autopar.runtime.ranks.ended import ended, say_at_exit
from autopar.runtime.ranks.pulse import wait_elsewhere
from autopar.torch_private import (
    DisableTorchFunctionSubclass,
    default_store,
    default_timeout_seconds,
    make_wrapper_subclass,
    pytree,
)
from autopar.words.placements import REPLICATED, State
from autopar.words.trees import Context, PyTree

IN_SHARDS = (
    "this output is in pieces on the ranks, so all ranks must read it, at the same place in the program; read it on "
    "every rank (and print on one), or pin it whole: placements={<output number>: 'I'}, one placement per mesh axis"
)
_MADE: dict[tuple[int, ...], Any] = {}
POLL_SECONDS = 0.002
ENDED_SECONDS = 0.5
"""How often a rank that waits looks whether the one that it waits for has ended."""


AT_EXCHANGE = "its next call, number "
"""Where a rank is that waits for others before a call."""


class CollectiveLog:
    """The collective actions of the ranks, in order, so that a reader knows whether all read."""

    def __init__(self, ranks: Sequence[int], timeout_seconds: float | None = None) -> None:
        key = tuple(ranks)
        number = next(_MADE.setdefault(key, itertools.count()))
        name = f"autopar/{'-'.join(map(str, key)) if len(key) < 9 else hash(key)}/{number}"
        self.store = dist.PrefixStore(name, default_store())
        self.rank, self.others = dist.get_rank(), [r for r in key if r != dist.get_rank()]
        self.timeout = timeout_seconds or default_timeout_seconds()
        say_at_exit()
        self.count = 0
        self.exchanges = 0
        """The exchanges of numbers of rows (:mod:`.uneven_rows`), to which this rank has come."""
        self.broken_off: Callable[[], str] = str
        """What is known of a rank that has broken off a step of the module, and so comes to no meeting; or empty."""
        self.read: deque[str] = deque(maxlen=4)  # an accelerator's collectives let a rank run ahead of one reading

    def note(self, what: str) -> None:
        """Note that this rank begins something in which ranks wait for each other."""
        self.count += 1
        self.store.set(str(self.rank), f"{self.count}|{what}|{';'.join(self.read)}")

    def note_waiting(self) -> None:
        """Note that this rank waits for the others at an exchange, before what follows."""
        self.store.set(str(self.rank), f"{self.count + 1}|{AT_EXCHANGE}{self.exchanges}|{';'.join(self.read)}")

    def meet(self, verb: str, what: str, why: str) -> None:
        """Wait until every rank comes to ``what``, such as ``output 1 of call 3`` (without ``|`` and ``;``).

        Args:
            verb: what this rank does there, for messages: it ``reads`` that.
            why: what to say to a rank that is alone with it.

        Raises:
            RunError: another rank comes to something else, has ended, or comes to nothing before the time is out.
            RuntimeError: it has broken off a step; whoever runs steps says which and where.
        """
        mine = f"{self.count + 1} {what}"
        self.read.append(mine)
        self.note(what)
        began = looked = time.monotonic()
        for other_rank in self.others:
            while True:
                how_ended = elsewhere = ""
                if time.monotonic() - looked > ENDED_SECONDS:  # before its last word is read, which it may come after
                    looked, how_ended = time.monotonic(), ended([other_rank]).get(other_rank, "")
                    elsewhere = wait_elsewhere([other_rank])
                has_come = self.store.check([str(other_rank)])
                count, at, read = self.store.get(str(other_rank)).decode().split("|") if has_come else ("0", "", "")
                if mine in read.split(";"):
                    break
                if at.startswith(AT_EXCHANGE) and int(at.removeprefix(AT_EXCHANGE)) <= self.exchanges:
                    count = "0"  # this rank was there, too, so the other one goes on from it
                if broken_off := self.broken_off():
                    self.count -= 1
                    self.read.pop()
                    raise RuntimeError(broken_off)
                late = time.monotonic() - began > self.timeout
                if int(count) >= self.count or late or how_ended or elsewhere:
                    self.count -= 1
                    self.read.pop()
                    done = f"has not come in {self.timeout:g} s" if late else f"is at {at}"
                    if elsewhere:
                        done = elsewhere.removeprefix(f"rank {other_rank} ")
                    if how_ended:
                        done, why = how_ended, f"do this on every rank, before one leaves; {why}"
                    raise RunError(f"rank {self.rank} {verb} {what}, rank {other_rank} {done}: {why}")
                time.sleep(POLL_SECONDS)


_ABOUT = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "grad",
                 "output_nr", "is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "itemsize", "nbytes")
) | {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.element_size, torch.Tensor.is_floating_point,
    torch.Tensor.is_complex, torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.register_hook,
    torch.Tensor.retain_grad, torch.Tensor.__len__, torch.Tensor.__hash__, torch.is_floating_point, torch.is_complex,
    torch.numel, torch.Tensor.nelement, torch.Tensor.is_same_size, torch.Tensor.get_device,
}  # fmt: skip
"""What can be asked of a tensor without its values."""


class Unread(torch.Tensor):
    """A whole tensor that is put together from the ranks' pieces when its values are first used.

    Whatever is done with it is done with the plain tensor; only shape, dtype and the like are known before.
    """

    _local: torch.Tensor
    _state: State
    _mesh: DeviceMesh
    _meet: Callable[[], None]
    _plain: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, state: State, shape: Sequence[int], device_mesh: DeviceMesh, meet: Callable[[], None]
    ) -> Unread:
        """Make the output around this rank's shard, without communication."""
        unread = make_wrapper_subclass(cls, tuple(shape), dtype=local.dtype, device=local.device)
        unread._local, unread._state, unread._mesh, unread._meet, unread._plain = local, state, device_mesh, meet, None
        return unread  # type: ignore[no-any-return]

    @torch.compiler.disable
    def whole(self) -> torch.Tensor:
        """Return the plain tensor, in the caller's autograd graph; the first call is a collective."""
        if self._plain is None:
            self._meet()
            with DisableTorchFunctionSubclass(), torch.enable_grad():
                self._plain = _Read.apply(self)
        assert self._plain is not None
        return self._plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        if func in _ABOUT:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(Unread, Unread.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: PyTree = (), kwargs: PyTree = None) -> PyTree:  # type: ignore[override]
        """Handle what C++ code does without Python, such as collectives: below autograd, on the values."""
        args, kwargs = pytree.tree_map_only(Unread, lambda x: Unread.whole(x).detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, unread: Unread) -> torch.Tensor:
        return joined(unread._local, unread._state, unread.shape, unread._mesh).clone()

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class _Pending(torch.autograd.Function):
    """A gradient that is whole on every rank, where ranks' gradients are to be added up: one of them gives it."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, gives: bool) -> torch.Tensor:
        ctx.gives = gives
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad if ctx.gives else torch.zeros_like(grad), None


def with_pending(x: torch.Tensor, state: State, device_mesh: DeviceMesh) -> torch.Tensor:
    """Mark an output in ``state`` so that its gradient may be replicated also where it counts as pending (``R``)."""
    pending = [axis for axis, p in enumerate(state) if p is REPLICATED and device_mesh.size(axis) > 1]
    if not (pending and x.requires_grad):
        return x
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    return _Pending.apply(x, not any(coordinate[axis] for axis in pending))  # type: ignore[no-any-return]


class _Spread(torch.autograd.Function):
    """A rank's piece of an output becomes the whole, unread."""

    @staticmethod
    def forward(
        ctx: Context, local: torch.Tensor, state: State, shape: Sequence[int], mesh: DeviceMesh,
        meet: Callable[[], None],
    ) -> Unread:  # fmt: skip
        ctx.state, ctx.device_mesh = state, mesh
        return Unread(local.detach(), state, shape, mesh, meet)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Convert a replicated gradient to the form that this rank's shard takes."""
        return local_shard(grad, ctx.state, ctx.device_mesh).contiguous(), None, None, None, None


def unread(
    local: torch.Tensor, state: State, shape: Sequence[int], device_mesh: DeviceMesh, meet: Callable[[], None]
) -> torch.Tensor:
    """Return the whole tensor of ``shape`` with shard ``local`` in ``state``, gathered when it is read.

    Args:
        meet: called before that; waits for the other ranks.
    """
    return _Spread.apply(local, state, tuple(shape), device_mesh, meet)  # type: ignore[no-any-return]
