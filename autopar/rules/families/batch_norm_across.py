"""Batch norm in training with the batch or space cut: statistics of the whole batch on every rank.

One exchange in each direction: ranks gather the mean and the variance of what each has, and put them together in the
way of Chan, Golub and LeVeque, so no difference of large numbers is formed; in the backward the two sums over all rows
travel as one. That is what ``torch.nn.SyncBatchNorm`` does. What a rank computes itself are torch's own kernels, those
of a norm whose statistics are given.

Where several axes cut, each puts the statistics of its ranks together, the innermost cut of a dim first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from spmd_types import rules as types
from spmd_types.types import R, V

from autopar.rules.families.single_rows import with_stride_in_order
from autopar.rules.lowering_helpers.collective_helpers import gathered_constant, sends_on, summed_constant
from autopar.rules.lowering_helpers.local_shard import all_of, weights_on
from autopar.rules.notation import Comm
from autopar.torch_private import each_rank, preserve_version_counter, reached
from autopar.words.placements import axis_and_block
from autopar.words.tracing import is_traced
from autopar.words.trees import Context

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Way:
    """Over which ranks the statistics are taken.

    Attributes:
        axes: the axes that cut the batch or space, in the order in which their ranks' statistics are put together.
        groups: their process groups.
        weights: for each axis what part of the elements each of its ranks has, [ranks]; None if all have as many.
        n: elements of a channel, on all ranks.
    """

    axes: tuple[str, ...]
    groups: tuple[Any, ...]
    weights: tuple[torch.Tensor | None, ...]
    n: int
    eps: float


# --- what one rank computes


def _precise(x: torch.Tensor) -> torch.Tensor:
    return with_stride_in_order(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x)


def _moments(x: torch.Tensor) -> torch.Tensor:
    """Compute the mean and biased variance of each channel, [2 c]; zeros if there is nothing."""
    z = _precise(x)
    if not x.numel():
        return z.new_zeros(2, x.shape[1])
    if x.is_meta or is_traced():  # for which the kernel below has no other form
        var, mean = torch.var_mean(z, [0, *range(2, x.dim())], correction=0)
    else:  # a quarter of var_mean's time on the CPU
        mean, var = torch.batch_norm_update_stats(z, None, None, 0.0)
    return torch.stack([mean, var])


def _together(moments: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Combine the moments [ranks 2 c] of several ranks into those [2 c] of all their elements."""
    means, variances = moments.unbind(1)
    if weights is None:
        mean = means.mean(0)
        return torch.stack([mean, (variances + (means - mean).square()).mean(0)])
    weights = weights.to(moments.dtype).unsqueeze(1)
    mean = (means * weights).sum(0)
    return torch.stack([mean, ((variances + (means - mean).square()) * weights).sum(0)])


def _with_statistics(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:  # fmt: skip
    """Normalize ``x`` [b c ...] with given statistics [c], in their precision."""
    weight, bias = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
    if not x.numel():
        return torch.zeros_like(_precise(x))
    if x.is_meta:  # where torch's norm makes statistics that nobody needs
        return torch.empty_like(_precise(x))
    return torch.batch_norm(_precise(x), weight, bias, mean, var, False, 0.0, eps, True)


def _with_statistics_backward(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of ``x`` with the statistics held constant, and this rank's two sums [2 c].

    The sums run over this rank's rows: of the gradient times the normalized input, and of the gradient.
    """
    z, grad = _precise(x), _precise(grad)
    if not x.numel():
        return torch.zeros_like(z), z.new_zeros(2, x.shape[1])
    # on GPUs torch's kernel asks the weight for its device, so a norm without one gets ones
    weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    unsaved = mean.new_empty(0)  # on GPUs torch wants statistics of the forward to be there, if only without elements
    of_x, of_weight, of_bias = _aten.native_batch_norm_backward(
        grad, z, weight, mean, var, unsaved, unsaved, False, eps, [True, True, True]
    )
    return of_x, torch.stack([of_weight, of_bias])


def _of_statistics(
    of_x: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: torch.Tensor | None,
    sums: torch.Tensor, way: _Way,
) -> torch.Tensor:  # fmt: skip
    """Return the gradient of ``x`` through the statistics: a norm of ``x`` with other weights."""
    scale = torch.rsqrt(var + way.eps) * (-1 / way.n)
    scale = scale if weight is None else scale * weight.to(scale.dtype)
    weight_of_mean, bias_of_mean = (sums * scale).unbind(0)
    return of_x.add_(_with_statistics(x, mean, var, weight_of_mean, bias_of_mean, way.eps)).to(x.dtype)


# --- the operator


class _BatchNorm(torch.autograd.Function):
    """``(norm of x, mean, variance)`` with the statistics of all ranks of the axes; statistics have no gradients."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, way: _Way
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        moments = each_rank(_moments)(x)
        for axis, group, weights in zip(way.axes, way.groups, way.weights, strict=True):
            moments = _together(gathered_constant(moments, axis, group), weights)
        mean, var = (each.clone() for each in moments.unbind(0))
        y = each_rank(_with_statistics)(x, mean, var, weight, bias, way.eps).to(x.dtype)
        ctx.save_for_backward(x, weight, mean, var)
        ctx.way, ctx.of_bias = way, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, var)
        ctx.set_materialize_grads(False)
        return y, mean, var

    @staticmethod
    def spmd_typecheck(*, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, way: _Way) -> Any:
        letters = "bcxyz"[: x.dim()]
        given = [each for each in (weight, bias) if each is not None]
        y = types.einsum(",".join([letters, *"c" * len(given)]) + "->" + letters, x, *given)
        moments = types.einsum(f"{letters}->c", x)
        for axis in way.axes:
            gathered = types.all_gather(moments, axis, src=V, dst=R)
            moments = types.einsum("nc->c", gathered)
        return y, moments, moments

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: torch.Tensor | None, *_: Any) -> Any:
        if grad is None:
            return None, None, None, None
        way: _Way = ctx.way
        x, weight, mean, var = ctx.saved_tensors
        of_x, sums = each_rank(_with_statistics_backward)(grad, x, mean, var, weight, way.eps)
        of_weight, of_bias = sums.unbind(0)
        of_weight = None if weight is None else of_weight.to(weight.dtype)
        of_bias = None if ctx.of_bias is None else of_bias.to(ctx.of_bias)
        if not ctx.needs_input_grad[0] or not reached(ctx.next_functions[0][0]):  # half a backward: of the weights
            return None, of_weight, of_bias, None
        for axis, group in zip(way.axes, way.groups, strict=True):
            sums = summed_constant(sums, axis, group)
        of_x = each_rank(_of_statistics)(of_x, x, mean, var, weight, sums, way)
        return of_x, of_weight, of_bias, None


def batch_norm_across(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, running_mean: Any, running_var: Any,
    training: bool, momentum: float, eps: float,
    cudnn_enabled: bool = True, *, cut: Mapping[str, Sequence[str]], sizes: Mapping[str, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute ``aten.batch_norm`` in training with the batch or space cut, by the whole batch's statistics."""
    # x [b c ...], others [c] -> [b c ...]
    dims = [0, *range(2, x.dim())]
    n = prod(all_of(x.shape[d], cut, sizes, factor) for d, factor in zip(dims, "bxyz", strict=False))
    inner_first = [
        (factor, k) for factor, axes in cut.items() if factor != "c" for k in reversed(range(len(axes)))
    ]  # fmt: skip
    way = _Way(
        tuple(axis_and_block(cut[factor][k])[0] for factor, k in inner_first),
        tuple(sends_on(cut[factor][k]) for factor, k in inner_first),
        tuple(
            None if sizes is None else weights_on(sizes[factor], cut[factor], k, x.device) for factor, k in inner_first
        ),
        n, eps,
    )  # fmt: skip
    y, mean, var = _BatchNorm.apply(x, weight, bias, way)
    if running_mean is not None:
        with torch.no_grad():
            for running, new in ((running_mean, mean), (running_var, var * (n / (n - 1)))):
                # as torch's own norm does: another call of the module may have saved it, and does not read it
                with preserve_version_counter(running):
                    running.mul_(1 - momentum).add_(new.to(running.dtype) * momentum)
    return y  # type: ignore[no-any-return]


def collectives_of_batch_norm(factors: Sequence[str], item_bytes: int) -> tuple[Comm, ...]:
    """Return the collectives of :func:`batch_norm_across` if any of `factors` is cut.

    Mean and variance are gathered; two sums are reduced in one buffer.
    """
    return tuple(
        comm for factor in factors for comm in (
            Comm(factor, "all_gather", ("c",), 2 * item_bytes, gathers=True),
            Comm(factor, "all_reduce", ("c",), 2 * item_bytes, backward=True),
        )
    )  # fmt: skip
