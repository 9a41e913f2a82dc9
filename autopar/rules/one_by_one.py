"""Operators that torch's simulation of many ranks in one process cannot run where the ranks' pieces differ in size.

Sizes are then objects that hold one number a rank, and code that asks for a plain number fails. Such an operator runs
here for one rank after the other, forward and backward. It communicates nothing. So does ``reshape``, which can be a
view on one rank and has to copy on another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.torch_private import LocalTensor, OpOverload, local_tensor_mode, pytree

NAMES = frozenset({
    "cross_entropy_loss", "cross_entropy", "nll_loss", "nll_loss_nd", "nll_loss2d", "einsum", "var_mean", "sgn", "sign",
    "scaled_dot_product_attention", "matmul", "linear", "reshape", "upsample_nearest1d", "upsample_nearest2d",
    "rms_norm", "cumsum", "cumprod", "upsample_trilinear3d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa", "adaptive_max_pool1d", "upsample_nearest3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d",
})  # fmt: skip


class OneByOne(TorchFunctionMode):
    """Runs the operators of :data:`NAMES` for one rank after the other, where pieces differ in size."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if local_tensor_mode() is not None and _name(func) in NAMES:
            flat, spec = pytree.tree_flatten((args, kwargs))
            if any(isinstance(x, LocalTensor) and _differs(x) for x in flat):
                return one_by_one(func, flat, spec)
        return func(*args, **kwargs)


def _name(func: Any) -> str:
    if isinstance(func, OpOverload):
        return func.overloadpacket.__name__
    return getattr(func, "__name__", "")


def _differs(x: LocalTensor) -> bool:
    return len({tuple(piece.shape) for piece in x._local_tensors.values()}) > 1


def one_by_one(func: Callable[..., Any], flat: list[Any], spec: Any) -> Any:
    """``func`` of flattened arguments, for one rank after the other."""
    at = [i for i, x in enumerate(flat) if isinstance(x, LocalTensor)]
    shape: list[Any] = []
    outs = _EachRank.apply(func, flat, spec, at, shape, *(flat[i] for i in at))
    return pytree.tree_unflatten(list(outs), shape[0])


class _EachRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, func: Any, flat: Any, spec: Any, at: Any, shape: Any, *tensors: LocalTensor) -> Any:
        mode = local_tensor_mode()
        assert mode is not None
        by_rank: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        with mode.disable(), torch.enable_grad():
            for rank in sorted(mode.ranks):
                values = [_of_rank(x, rank) for x in flat]
                leaves = [t._local_tensors[rank].detach().requires_grad_(t.requires_grad) for t in tensors]
                for i, value in zip(at, leaves, strict=True):
                    values[i] = value
                args, kwargs = pytree.tree_unflatten(values, spec)
                outs, out_spec = pytree.tree_flatten(func(*args, **kwargs))
                by_rank[rank] = leaves, outs
        shape.append(out_spec)
        ctx.by_rank, ctx.mode = by_rank, mode
        return tuple(
            LocalTensor({rank: outs[k].detach() for rank, (_, outs) in by_rank.items()}) for k in range(len(outs))
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        by_rank: dict[int, list[torch.Tensor | None]] = {}
        with ctx.mode.disable():
            for rank, (leaves, outs) in ctx.by_rank.items():
                wanted = [x for x in leaves if x.requires_grad]
                pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if o.requires_grad and g is not None]
                got = iter(torch.autograd.grad(
                    [o for o, _ in pairs], wanted, [_of_rank(g, rank) for _, g in pairs], allow_unused=True,
                    retain_graph=True,
                ))  # fmt: skip
                by_rank[rank] = [next(got) if x.requires_grad else None for x in leaves]
            n = len(next(iter(by_rank.values())))
            joined = [
                None
                if any(f[k] is None for f in by_rank.values())
                else LocalTensor({r: f[k] for r, f in by_rank.items()})
                for k in range(n)
            ]
        return (None, None, None, None, None, *joined)


def _of_rank(x: Any, rank: int) -> Any:
    """What one rank has of a value."""
    if isinstance(x, LocalTensor):
        return x._local_tensors[rank]
    if isinstance(x, torch.SymInt):
        return x.node._local_ints[rank]
    return x


__all__ = ["NAMES", "OneByOne", "one_by_one"]
