"""The collectives that programs call: ``spmd_types`` functions with plain arguments, so that programs print as Python.

``axis`` is the name of a mesh axis, looked up in the ambient ``spmd_types.set_current_mesh``. Each function changes the
placement of ``x`` on that axis in one step; its backward is the adjoint step (see :mod:`autopar.placements`).
"""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch

from autopar.placements import Placement, shard_dim

_TYPE = {"R": spmd.R, "I": spmd.I, "P": spmd.P}


def _typed(placement: Placement) -> Any:
    dim = shard_dim(placement)
    return _TYPE[placement] if dim is None else spmd.S(dim)


class _ContiguousGradient(torch.autograd.Function):
    """The identity whose gradient is contiguous, as all-reduces want their input: a gradient can come expanded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.contiguous()


def _contiguous_gradient(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad and not spmd.is_type_checking():
        return _ContiguousGradient.apply(x)
    return x


def all_gather(x: torch.Tensor, axis: str, dim: int, to: str) -> torch.Tensor:
    """``S<dim>`` -> ``to`` (``R`` or ``I``)."""
    return spmd.all_gather(x, axis, src=spmd.S(dim), dst=_TYPE[to])


def all_reduce(x: torch.Tensor, axis: str, to: str) -> torch.Tensor:
    """``P`` -> ``to`` (``R`` or ``I``)."""
    return _contiguous_gradient(spmd.all_reduce(x.contiguous(), axis, src=spmd.P, dst=_TYPE[to]))


def reduce_scatter(x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    """``P`` -> ``S<dim>``."""
    return spmd.reduce_scatter(x, axis, src=spmd.P, dst=spmd.S(dim))


def all_to_all(x: torch.Tensor, axis: str, src: int, dst: int) -> torch.Tensor:
    """``S<src>`` -> ``S<dst>``."""
    return spmd.all_to_all(x, axis, src=spmd.S(src), dst=spmd.S(dst))


def shard(x: torch.Tensor, axis: str, dim: int, of: str) -> torch.Tensor:
    """``of`` (``R`` or ``I``) -> ``S<dim>``: each rank keeps its slice."""
    return spmd.convert(x, axis, src=_TYPE[of], dst=spmd.S(dim))


def convert(x: torch.Tensor, axis: str, src: str, dst: str) -> torch.Tensor:
    """The steps without communication in the forward that keep the local shape, and ``S`` -> ``P``."""
    source = _typed(src)
    return _contiguous_gradient(spmd.convert(x, axis, src=source, dst=_TYPE[dst], expert_mode=True))


FRESH: frozenset[Any] = frozenset({all_gather, all_reduce, reduce_scatter, all_to_all})
"""Those whose result is memory of its own, on an axis of more than one rank."""


def step(src: str, dst: str) -> tuple[object, tuple[object, ...]]:
    """``(function, arguments after the axis)`` for one step from ``src`` to ``dst``."""
    from_dim, to_dim = shard_dim(src), shard_dim(dst)
    if from_dim is not None and to_dim is not None:
        return all_to_all, (from_dim, to_dim)
    if from_dim is not None and dst != "P":
        return all_gather, (from_dim, dst)
    if to_dim is not None:
        return (reduce_scatter, (to_dim,)) if src == "P" else (shard, (to_dim, src))
    if src == "P":
        return all_reduce, (dst,)
    return convert, (src, dst)
