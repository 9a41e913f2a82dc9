"""Losses. A mean is a mean over the whole batch: local terms divided by the global count, pending as a sum."""

from __future__ import annotations

import math
from functools import partial
from math import prod
from typing import Any

import spmd_types as spmd
import torch

from autopar.rules.local_calls import resolve
from autopar.rules.lowering_helpers.collective_helpers import greatest, pending, total
from autopar.rules.lowering_helpers.local_shard import (
    Cuts,
    Sizes,
    all_of,
    axes_except,
    axes_of,
    first,
    n_shards,
    with_one,
)
from autopar.rules.notation import Comm, Lowering, Rule, line
from autopar.rules.operator_call import Call, In
from autopar.rules.registry import T, prove_with, rule, sample
from autopar.words.placements import INVARIANT
from autopar.words.trees import PyTree

NONE, MEAN, SUM = 0, 1, 2
ROWS = "nxyz"
"""The factors of the dims of a loss per row: n is the first, the others stand behind the classes."""


def _finish(
    loss: torch.Tensor, count: torch.Tensor | None, reduction: int, dtype: torch.dtype, cut: Cuts, sizes: Sizes
) -> torch.Tensor:
    """Reduce the losses of the local rows; ``count`` is this rank's part of what a mean divides by (None: its rows)."""
    if reduction == NONE:
        return loss.to(dtype)
    rows = axes_except(cut, "v")
    n: Any = 1
    if reduction != SUM:
        n = prod(map(partial(_all_rows, cut, sizes), ROWS, loss.shape)) if count is None else total(count, rows, spmd.R)
    return pending((loss.sum() / n).to(dtype), rows)


def _all_rows(cut: Cuts, sizes: Sizes, factor: str, n: int) -> int:
    return all_of(n, cut, sizes, factor)


def cross_entropy_across(
    x: torch.Tensor, target: Any, weight: Any = None, reduction: int = MEAN, ignore_index: int = -100,
    label_smoothing: float = 0.0, *, cut: Cuts, sizes: Sizes = None,
) -> torch.Tensor:  # fmt: skip
    """Compute ``aten.cross_entropy_loss`` with rows cut, classes cut, or both."""
    # x [n v], [b v ...] or [v]; target the same without v (class numbers), or like x (probabilities)
    dtype, x = x.dtype, x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    weight = None if weight is None else weight.to(x.dtype)
    if target.is_floating_point():
        loss = torch.nn.functional.cross_entropy(x, target, weight, reduction="none", label_smoothing=label_smoothing)
        return _finish(loss, None, reduction, dtype, cut, sizes)
    valid = target != ignore_index
    count = valid.sum() if weight is None else (weight[target.clamp(min=0)] * valid).sum()
    if not cut.get("v"):
        loss = torch.nn.functional.cross_entropy(
            x, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )
    else:
        loss = _vocabulary_cross_entropy(x, target, label_smoothing, cut, sizes).masked_fill(~valid, 0)
    return _finish(loss, count, reduction, dtype, cut, sizes)


def _vocabulary_cross_entropy(
    x: torch.Tensor, target: torch.Tensor, smoothing: float, cut: Cuts, sizes: Sizes
) -> torch.Tensor:
    """Compute the loss per row, whole on every rank: two all-reduces of a few numbers a row, none in the backward."""
    axes = axes_of(cut, "v")
    dim = 0 if x.dim() == 1 else 1
    z = x - greatest(with_one(x, dim, -math.inf, cut, sizes, "v").amax(dim, keepdim=True), axes)
    parts = [torch.exp(z).sum(dim), _picked(z, target, dim, cut, sizes)]
    if smoothing:
        parts.append(z.sum(dim))
    sums = total(torch.stack(parts), axes, spmd.I).unbind(0)
    log_sum = torch.log(sums[0])
    loss = log_sum - sums[1]
    if not smoothing:
        return loss
    return loss * (1 - smoothing) + (log_sum - sums[2] / all_of(x.shape[dim], cut, sizes, "v")) * smoothing


def _picked(x: torch.Tensor, target: torch.Tensor, dim: int, cut: Cuts, sizes: Sizes) -> torch.Tensor:
    """Return ``x`` at the target class where this rank holds it, else 0."""
    local = target - first(cut, sizes, "v", x, dim)
    inside = (local >= 0) & (local < x.shape[dim])
    x = with_one(x, dim, 0.0, cut, sizes, "v")
    return torch.gather(x, dim, (local * inside).unsqueeze(dim)).squeeze(dim).masked_fill(~inside, 0)


def nll_across(
    x: torch.Tensor, target: Any, weight: Any = None, reduction: int = MEAN, ignore_index: int = -100, *, cut: Cuts,
    sizes: Sizes = None,
) -> torch.Tensor:
    """Compute ``aten.nll_loss_nd`` with rows cut, classes cut, or both."""
    valid = target != ignore_index
    dim = 0 if x.dim() == 1 else 1
    if not cut.get("v"):
        loss = torch.nn.functional.nll_loss(x, target, weight, ignore_index=ignore_index, reduction="none")
    else:
        axes = axes_of(cut, "v")
        loss = -total(_picked(x, target, dim, cut, sizes), axes, spmd.I).masked_fill(~valid, 0)
    count = valid.sum() if weight is None else (weight[target.clamp(min=0)] * valid).sum()
    return _finish(loss, count, reduction, x.dtype, cut, sizes)


def _class_loss(call: Call, distributed: Any, gathers: bool) -> Rule:
    shape = call.ins[0].shape
    reduction = call.arg(3, "reduction", MEAN)
    weighted = isinstance(call.arg(2, "weight"), In)
    probabilities = call.ins[1].is_float
    rows = list(ROWS[: len(shape) - 1])
    x = " ".join([*rows[:1], "v", *rows[1:]])
    target = x if probabilities else " ".join(rows)
    out = " ".join(rows) if reduction == NONE else ""
    v_whole = weighted or probabilities
    across = [*(rows if reduction == MEAN or probabilities else []), *([] if v_whole else ["v"])]
    item = max(4, call.ins[0].item_bytes)
    smoothed = bool(call.arg(5, "label_smoothing", 0.0)) if gathers else False
    n_sums = 1 if not gathers else 3 if smoothed else 2
    comm = [Comm(f, "all_reduce", (), item) for f in rows if reduction == MEAN]
    if not v_whole:
        comm += [Comm("v", "all_reduce", tuple(rows), item)] if gathers else []
        comm.append(Comm("v", "all_reduce", tuple(rows), n_sums * item))  # the sums of a row travel together
    return line(
        f"{x}, {target}{', v' if weighted else ''} -> {out}",
        call,
        whole="v" if v_whole else "",
        lowerings=(Lowering(distributed, frozenset(across), tuple(comm), uneven=True),),
        out_as={"v": (INVARIANT,)},
        kind="reduce",
        curve="loss",
        saves=(0, 1),  # cross-entropy keeps the log-softmax, of the size of its input
        flops=4.0 if gathers else 0.0,
    )


_IDS = T((8,), "int64", high=4)


@rule(
    "aten.cross_entropy_loss.default",
    samples=[
        sample(T((8, 4)), _IDS),
        sample(T((8, 4)), _IDS, None, MEAN, 1),
        sample(T((8, 4)), _IDS, None, SUM, 1, 0.1),
        sample(T((8, 4)), _IDS, None, NONE, 1, 0.1),
        sample(T((8, 4)), _IDS, None, MEAN, 2, 0.1),
        sample(T((8, 4)), _IDS, T((4,), grad=False), MEAN, 1, 0.1),
        sample(T((2, 4, 4)), T((2, 4), "int64", high=4), None, MEAN, 1),
        sample(T((2, 4, 4)), T((2, 4), "int64", high=4), None, NONE),
        sample(T((2, 4, 2, 2)), T((2, 2, 2), "int64", high=4), T((4,), grad=False)),
        sample(T((4,)), T((), "int64", high=4)),
        sample(T((8, 4)), T((8, 4), grad=False), None, MEAN, -100, 0.1),
        sample(T((2, 4, 4)), T((2, 4, 4)), None, SUM),
    ],
)
def cross_entropy(call: Call) -> Rule:
    return _class_loss(call, cross_entropy_across, gathers=True)


@rule(
    "aten.nll_loss_nd.default",
    "aten.nll_loss.default",
    "aten.nll_loss2d.default",
    samples=[
        sample(T((8, 4)), _IDS, None, MEAN, 1),
        sample(T((8, 4)), _IDS, T((4,), grad=False), SUM),
        sample(T((8, 4)), _IDS, None, NONE, 2),
        sample(T((2, 4, 2, 2)), T((2, 2, 2), "int64", high=4), None, MEAN, 3),
    ],
)
def nll(call: Call) -> Rule:
    return _class_loss(call, nll_across, gathers=False)


prove_with("aten.nll_loss.default", sample(T((8, 4)), _IDS))
prove_with("aten.nll_loss2d.default", sample(T((2, 4, 2, 2)), T((2, 2, 2), "int64", high=4)))

# elementwise losses and the position of their argument ``reduction``
_ELEMENTWISE = {
    "aten.mse_loss.default": 2,
    "aten.l1_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.huber_loss.default": 2,
    "aten.soft_margin_loss.default": 2,
    "aten.kl_div.default": 2,
    "aten.binary_cross_entropy.default": 3,
    "aten.binary_cross_entropy_with_logits.default": 4,
    "aten.poisson_nll_loss.default": 5,
}


@rule(*_ELEMENTWISE)
def elementwise(call: Call) -> Rule:
    position = _ELEMENTWISE[call.target]
    reduction = call.arg(position, "reduction", MEAN)
    op = resolve(call.target)
    ins = ", ".join(["..."] * len(call.ins))
    factors = line(f"{ins} -> {'...' if reduction == NONE else ''}", call).sizes
    n_all = prod(factors.values())

    def mean_across(*args: PyTree, cut: Cuts, sizes: Sizes = None, **kwargs: PyTree) -> torch.Tensor:
        """Return this rank's mean, weighted by its share of all elements."""
        axes = axes_except(cut)
        if sizes is None:
            return pending(op(*args, **kwargs) / n_shards(axes), axes)
        summed, keywords = Call(call.target, args, kwargs, call.ins, call.outs).replaced(position, "reduction", SUM)
        return pending(op(*summed, **keywords) / n_all, axes)

    return line(
        f"{ins} -> {'...' if reduction == NONE else ''}",
        call,
        lowerings=(Lowering(mean_across, frozenset(factors), uneven=True),) if reduction == MEAN else (),
        kind="pointwise" if reduction == NONE else "reduce",
        saves=tuple(range(len(call.ins))),
    )


_PAIR = (T((4, 8)), T((4, 8)))
for _target in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
    prove_with(f"aten.{_target}.default", *(sample(*_PAIR, reduction) for reduction in (NONE, MEAN, SUM)))
prove_with("aten.soft_margin_loss.default", sample(T((4, 8)), T((4, 8), grad=False)))
prove_with("aten.kl_div.default", sample(*_PAIR, MEAN, log_target=True), sample(*_PAIR, SUM, log_target=True))
prove_with(
    "aten.binary_cross_entropy_with_logits.default",
    sample(*_PAIR),
    sample(*_PAIR, T((4, 8), grad=False), None, SUM),
    sample(*_PAIR, None, T((8,), grad=False), MEAN),
)
prove_with("aten.poisson_nll_loss.default", sample(*_PAIR, True, False, 1e-8, MEAN))

prove_with(
    "aten.binary_cross_entropy.default",
    sample(T((4, 6), low=0.1, high=0.9), T((4, 6), low=0.1, high=0.9, grad=False)),
    sample(T((4, 6), low=0.1, high=0.9), T((4, 6), low=0.1, high=0.9, grad=False), None, 2),
)
