"""Normalizations and softmax. Cut along the normalized dims they need statistics across ranks.

The mean over everything is the mean of the pieces' means, each by its part of the elements, and the variance the mean
of ``variance + (mean - global mean)^2``: no difference of large numbers is formed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import spmd_types as spmd
import torch

from autopar.rules.families.batch_norm_across import batch_norm_across, collectives_of_batch_norm
from autopar.rules.families.single_rows import batch_norm_of_rows, instance_norm_of_rows
from autopar.rules.lowering_helpers.collective_helpers import average, greatest, numbers, total
from autopar.rules.lowering_helpers.local_shard import Cuts, Sizes, axes_of, some_have_none, with_one
from autopar.rules.notation import Comm, Lowering, Rule, line
from autopar.rules.operator_call import Call, In
from autopar.rules.registry import T, prove_with, rule, sample
from autopar.words.trees import PyTree

NORMALIZED = ("n0", "n1", "n2")
"""The factors of the dims that layer and RMS norm normalize."""

_LEAD = ("b", "s", "t", "u", "w")


def _half(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


def _moments(
    x: torch.Tensor, dims: Sequence[int], cut: Cuts, sizes: Sizes, factors: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the mean and biased variance over ``dims``, which are cut along ``factors``, with the dims kept."""
    if any(some_have_none(cut, sizes, factor) for factor in factors):  # torch.var_mean warns where there is nothing
        local_mean = numbers(x.mean(list(dims), keepdim=True), cut, sizes, factors)
        local_var = numbers((x - local_mean).square().mean(list(dims), keepdim=True), cut, sizes, factors)
    else:
        local_var, local_mean = torch.var_mean(x, list(dims), correction=0, keepdim=True)
    mean = average(local_mean, cut, sizes, factors)
    return mean, average(local_var + (local_mean - mean).square(), cut, sizes, factors)


def layer_norm_across(
    x: torch.Tensor, shape: Sequence[int], weight: Any = None, bias: torch.Tensor | None = None, eps: float = 1e-5,
    *_: Any, cut: Cuts,
    sizes: Sizes = None,
) -> torch.Tensor:
    """Compute ``aten.layer_norm`` with normalized dims cut."""
    # x [... n], weight [n], bias [n] -> [... n]; local n
    dims = range(-len(shape), 0)
    z = x.float() if _half(x.dtype) else x
    mean, var = _moments(z, dims, cut, sizes, NORMALIZED)
    y = (z - mean) * torch.rsqrt(var + eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype)


def rms_norm_across(
    x: torch.Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None, *, cut: Cuts,
    sizes: Sizes = None,
) -> torch.Tensor:
    """Compute ``aten.rms_norm`` with normalized dims cut."""
    # x [... n], weight [n] -> [... n]; local n
    z = x.float() if _half(x.dtype) else x
    mean = average(z.square().mean(list(range(-len(shape), 0)), keepdim=True), cut, sizes, NORMALIZED)
    y = z * torch.rsqrt(mean + (torch.finfo(z.dtype).eps if eps is None else eps))
    return (y if weight is None else y * weight).to(x.dtype)


def _normalized(call: Call, distributed: Any, n_stats: int) -> Rule:
    n_norm, n = len(call.args[1]), len(call.ins[0].shape)
    norm = [f"n{i}" for i in range(n_norm)]
    lead = _LEAD[: n - n_norm]
    x = " ".join([*lead, *norm])
    item = max(4, call.out.item_bytes)
    return line(
        ", ".join([x, *[" ".join(norm)] * (len(call.ins) - 1)]) + " -> " + x,
        call,
        lowerings=(Lowering(distributed, frozenset(norm), tuple(
            Comm(f, "all_reduce", lead, item, backward) for f in norm for backward in (False, True)
            for _ in range(n_stats)
        ), uneven=True),),
        kind="reduce",
        curve="rms_norm" if "rms" in call.target else "norm",
        saves=(0, 1) if len(call.ins) > 1 else (0,),
    )  # fmt: skip


@rule(
    "aten.layer_norm.default",
    samples=[
        sample(T((4, 2, 8)), [8], T((8,)), T((8,))),
        sample(T((4, 8)), [8]),
        sample(T((4, 8)), [8], T((8,)), None, 1e-3),
        sample(T((4, 2, 4)), [2, 4], T((2, 4)), T((2, 4))),
    ],
)
def layer_norm(call: Call) -> Rule:
    return _normalized(call, layer_norm_across, 2)


@rule(
    "aten.rms_norm.default",
    samples=[
        sample(T((4, 2, 8)), [8], T((8,)), 1e-6),
        sample(T((4, 8)), [8]),
        sample(T((4, 2, 4)), [2, 4], T((2, 4))),
    ],
)
def rms_norm(call: Call) -> Rule:
    return _normalized(call, rms_norm_across, 1)


@rule(
    "aten.group_norm.default",
    samples=[
        sample(T((2, 8, 3, 3)), 4, T((8,)), T((8,))),
        sample(T((2, 8, 6)), 8, T((8,)), T((8,))),
        sample(T((4, 8)), 2),
        sample(T((4, 8, 2)), 1, T((8,)), T((8,))),
    ],
)
def group_norm(call: Call) -> Rule:
    groups = call.args[1]
    space = list("xyz"[: len(call.ins[0].shape) - 2])
    x = " ".join(["b (g c)", *space])

    def localize(call: Call, cuts: Mapping[str, int]) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        return call.replaced(1, "num_groups", groups // cuts.get("g", 1))

    return line(
        ", ".join([x, *["(g c)"] * (len(call.ins) - 1)]) + " -> " + x,
        call,
        sizes={"g": groups},
        whole=" ".join(["c", *space]),
        even="g",
        localize=localize,
        kind="reduce",
        curve="norm",
        saves=(0, 1) if len(call.ins) > 1 else (0,),
    )


_STATS = (T((4,), grad=False), T((4,), grad=False))


@rule(
    "aten.batch_norm.default",
    samples=[
        sample(T((8, 4, 3, 3)), T((4,)), T((4,)), *_STATS, True, 0.1, 1e-5, True),
        sample(T((8, 4)), T((4,)), T((4,)), *_STATS, True, 0.3, 1e-5, True),
        sample(T((4, 4, 6)), None, None, *_STATS, True, 0.1, 1e-3, True),
        sample(T((4, 4, 6)), T((4,)), T((4,)), None, None, True, 0.1, 1e-5, True),
    ],
)
def batch_norm(call: Call) -> Rule:
    training = bool(call.args[5])
    space = list("xyz"[: len(call.ins[0].shape) - 2])
    x = " ".join(["b c", *space])
    item = max(4, call.out.item_bytes)
    across = ["b", *space] if training else []
    weight_at = (call.args[1].position,) if isinstance(call.args[1], In) else ()
    return line(
        ", ".join([x, *["c"] * (len(call.ins) - 1)]) + " -> " + x,
        call,
        lowerings=(
            Lowering(batch_norm_across, frozenset(across), collectives_of_batch_norm(across, item), uneven=True)
            if training else Lowering(batch_norm_of_rows, frozenset("b"), uneven=True),
        ),
        needs_some="c" if training else x,  # torch's kernel divides by the number of rows
        kind="reduce" if training else "pointwise",
        curve="batch_norm" if training else "",
        saves=(0, *weight_at),
    )  # fmt: skip


@rule(
    "aten.instance_norm.default",
    samples=[
        sample(T((4, 4, 3, 3)), T((4,)), T((4,)), None, None, True, 0.1, 1e-5, True),
        sample(T((4, 4, 6)), None, None, None, None, True, 0.1, 1e-5, True),
    ],
)
def instance_norm(call: Call) -> Rule:
    space = list("xyz"[: len(call.ins[0].shape) - 2])
    x = " ".join(["b c", *space])
    updates = any(isinstance(a, In) for a in call.args[3:5]) and bool(call.args[5])
    return line(
        ", ".join([x, *["c"] * (len(call.ins) - 1)]) + " -> " + x,
        call,
        whole=" ".join([*space, *(["b"] if updates else [])]),
        lowerings=() if updates else (Lowering(instance_norm_of_rows, frozenset("b"), uneven=True),),
        needs_some="b c",
        kind="reduce",
        curve="norm",
        saves=(0, 1) if isinstance(call.args[1], In) else (0,),
    )


def softmax_across(x: torch.Tensor, dim: int, dtype: Any = None, *, cut: Cuts, sizes: Sizes = None) -> torch.Tensor:
    """Compute ``aten.softmax`` with its dim cut."""
    axes = axes_of(cut, "n")
    z = x.to(dtype) if isinstance(dtype, torch.dtype) else x.float() if _half(x.dtype) else x
    e = torch.exp(z - greatest(with_one(z, dim, -math.inf, cut, sizes, "n").amax(dim, keepdim=True), axes))
    y = e / total(e.sum(dim, keepdim=True), axes, spmd.R)
    return y if isinstance(dtype, torch.dtype) else y.to(x.dtype)


def log_softmax_across(x: torch.Tensor, dim: int, dtype: Any = None, *, cut: Cuts, sizes: Sizes = None) -> torch.Tensor:
    """Compute ``aten.log_softmax`` with its dim cut."""
    axes = axes_of(cut, "n")
    z = x.to(dtype) if isinstance(dtype, torch.dtype) else x.float() if _half(x.dtype) else x
    z = z - greatest(with_one(z, dim, -math.inf, cut, sizes, "n").amax(dim, keepdim=True), axes)
    y = z - torch.log(total(torch.exp(z).sum(dim, keepdim=True), axes, spmd.R))
    return y if isinstance(dtype, torch.dtype) else y.to(x.dtype)


@rule(
    "aten.softmax.int",
    "aten.log_softmax.int",
    "aten._softmax.default",
    "aten._log_softmax.default",
    samples=[sample(T((4, 2, 8)), -1), sample(T((4, 8)), 0), sample(T((8,)), 0), sample(T((1, 8)), 1)],
)
def softmax(call: Call) -> Rule:
    n = len(call.ins[0].shape)
    dim = call.args[1] % n
    names = [*_LEAD[:dim], "n", *_LEAD[dim : n - 1]]
    x = " ".join(names)
    rest = tuple(f for f in names if f != "n")
    item = max(4, call.out.item_bytes)
    return line(
        f"{x} -> {x}",
        call,
        lowerings=(Lowering(log_softmax_across if "log" in call.target else softmax_across, frozenset("n"), (
            Comm("n", "all_reduce", rest, item),
            Comm("n", "all_reduce", rest, item),
            Comm("n", "all_reduce", rest, item, backward=True),
        ), uneven=True),),
        kind="reduce",
        curve="softmax",
        saves_out=True,
    )


prove_with("aten.log_softmax.int", sample(T((4, 2, 8)), -1), sample(T((8, 4)), 0))
prove_with("aten._softmax.default", sample(T((4, 8)), -1, False))
prove_with("aten._log_softmax.default", sample(T((4, 8)), -1, False))
prove_with(
    "aten.batch_norm.default",
    sample(T((4, 4, 6)), T((4,)), T((4,)), T((4,), grad=False), T((4,), grad=False), False, 0.1, 1e4, True),
)


@rule(
    "aten._weight_norm.default",
    samples=[sample(T((4, 6, 3)), T((4, 1, 1)), 0), sample(T((4, 6, 3)), T((1, 1, 3)), 2)],
)
def weight_norm(call: Call) -> Rule:
    """Make the rule of ``g * v / |v|``, the norm over all dims but one: ``nn.utils.weight_norm``."""
    n, dim = len(call.ins[0].shape), int(call.arg(2, "dim", 0)) % len(call.ins[0].shape)
    names = [f"n{i}" for i in range(n)]
    of_g = " ".join(names[i] if i == dim else "1" for i in range(n))
    text = " ".join(names)
    return line(
        f"{text}, {of_g} -> {text}", call, whole=" ".join(names[:dim] + names[dim + 1 :]), needs_some=names[dim],
        linear=[{1}], kind="reduce", saves=(0, 1),
    )  # fmt: skip


