"""Results of a call: plain, whole tensors in the caller's autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.runtime.parameters.state import joined, local_shard
from autopar.torch_private import DisableTorchFunctionSubclass, make_wrapper_subclass, pytree
from autopar.words.placements import REPLICATED, State
from autopar.words.trees import Context, PyTree

IN_SHARDS = (
    "this output is in pieces on the ranks, so all ranks must read it, at the same place in the program; read it on "
    "every rank (and print on one), or pin it whole: placements={<output number>: 'I'}, one placement per mesh axis"
)
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
