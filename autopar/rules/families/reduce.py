"""Reductions: sums and means can be cut along what they sum (pending sums), extremes cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from autopar.rules.families.shape import named
from autopar.rules.lowering_helpers.local_shard import all_of, n_shards
from autopar.rules.notation import Lowering, Rule
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, prove_with, rule, sample
from autopar.words.trees import PyTree

_FIRST = (frozenset({0}),)


def _dims(call: Call, position: int = 1, name: str = "dim") -> list[int]:
    n = len(call.ins[0].shape)
    given = call.arg(position, name)
    if given is None or given == []:
        return list(range(n))
    return [d % n for d in (given if isinstance(given, (list, tuple)) else [given])]


def reduction(call: Call, dims: Sequence[int], keepdim: bool, **rest: Any) -> Rule:
    """Make the rule of a reduction: all dims are factors, and the outputs lack those in ``dims``."""
    sizes, term = named(call.ins[0].shape)
    out = tuple(() if d in dims else f for d, f in enumerate(term) if keepdim or d not in dims)
    outs = (out,) * sum(o is not None for o in call.outs)
    return Rule(sizes, (tuple(term),), outs, kind="reduce", **rest)


@rule(
    "aten.sum.dim_IntList",
    samples=[
        sample(T((4, 6, 8)), [1]), sample(T((4, 6, 8)), [0, 2], True), sample(T((4, 6)), [-1]),
        sample(T((4, 1, 6)), [1, 2]), sample(T((4, 6), "bool", 2), [1]), sample(T((4, 6)), None),
        sample(T((4, 6)), [0], dtype="float32"),
    ],
)  # fmt: skip
def sum_dim(call: Call) -> Rule:
    return reduction(call, _dims(call), bool(call.arg(2, "keepdim", False)), linear=_FIRST)


@rule("aten.sum.default", samples=[sample(T((4, 6, 8))), sample(T((4, 1)))])
def sum_all(call: Call) -> Rule:
    return reduction(call, _dims(call, 9), False, linear=_FIRST)


def mean_of_piece(
    x: torch.Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None,
    cut: Mapping[str, Sequence[str]], names: Sequence[str], sizes: Mapping[str, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return this rank's share of a mean over dims that are cut; the sum over ranks is pending.

    Args:
        names: the factor of every dim of ``x``.
    """
    dims = range(x.dim()) if not dim else [d % x.dim() for d in dim]
    if sizes is not None:  # a rank that has nothing has no mean, but a sum
        whole = prod(all_of(x.shape[d], cut, sizes, names[d]) for d in dims)
        return torch.ops.aten.sum.dim_IntList(x, list(dims), keepdim, dtype=dtype) / whole
    local = torch.ops.aten.mean.dim(x, list(dims), keepdim, dtype=dtype)
    return local / prod(n_shards(cut.get(names[d], ())) for d in dims)


def _mean_names(call: Call, cuts: Mapping[str, int]) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    kwargs = dict(call.kwargs)
    summed = {named(call.ins[0].shape)[1][d][0] for d in _dims(call)}
    if summed & set(cuts):
        kwargs["names"] = [f[0] for f in named(call.ins[0].shape)[1]]
    return call.args, kwargs


@rule(
    "aten.mean.dim", "aten.mean.default",
    samples=[sample(T((4, 6, 8)), [1]), sample(T((4, 6, 8)), [0, 2], True), sample(T((4, 6)), [-1], True),
             sample(T((4, 1, 6)), [1, -1]), sample(T((4, 6)), [0], dtype="float32"), sample(T((4, 6)), None)],
)  # fmt: skip
def mean(call: Call) -> Rule:
    dims = _dims(call) if call.target.endswith("dim") else list(range(len(call.ins[0].shape)))
    sizes, term = named(call.ins[0].shape)
    del sizes
    return reduction(
        call, dims, bool(call.arg(2, "keepdim", False)), linear=_FIRST, localize=_mean_names,
        lowerings=(Lowering(mean_of_piece, frozenset(term[d][0] for d in dims if term[d]), uneven=True),),
    )  # fmt: skip


def _extreme(call: Call, dims: Sequence[int], keepdim: bool, **rest: Any) -> Rule:
    _, term = named(call.ins[0].shape)
    return reduction(call, dims, keepdim, whole=frozenset(term[d][0] for d in dims), **rest)


@rule(
    "aten.amax.default", "aten.amin.default", "aten.logsumexp.default",
    samples=[sample(T((4, 6, 8)), [1]), sample(T((4, 6)), [-1], True)],
)  # fmt: skip
def extreme(call: Call) -> Rule:
    return _extreme(call, _dims(call), bool(call.arg(2, "keepdim", False)), saves=(0,), saves_out=True)


@rule(
    "aten.argmax.default",
    "aten.argmin.default",
    samples=[sample(T((4, 6)), 1), sample(T((4, 6)), 0, True), sample(T((4, 6)), -1)],
)
def arg_extreme(call: Call) -> Rule:
    return _extreme(call, _dims(call), bool(call.arg(2, "keepdim", False)))


@rule("aten.max.dim", "aten.min.dim", samples=[sample(T((4, 6)), 1), sample(T((4, 6, 8)), 0, True)])
def extreme_with_index(call: Call) -> Rule:
    return _extreme(call, _dims(call), bool(call.arg(2, "keepdim", False)), saves_out=True)


@rule("aten.median.dim", "aten.kthvalue.default", "aten.cummax.default", "aten.cummin.default",
      samples=[sample(T((4, 6)), 1), sample(T((4, 6)), -1, True)])  # fmt: skip
def ordered(call: Call) -> Rule:
    at = 2 if "kthvalue" in call.target else 1
    if call.target.startswith("aten.cum"):
        sizes, term = named(call.ins[0].shape)
        whole = frozenset(term[call.arg(1, "dim") % len(term)])
        return Rule(sizes, (tuple(term),), (tuple(term),) * 2, "reduce", whole, saves_out=True)
    return _extreme(call, _dims(call, at), bool(call.arg(at + 1, "keepdim", False)), saves_out=True)


@rule("aten.prod.dim_int", samples=[sample(T((4, 6)), 1), sample(T((4, 6, 8)), -2, True)])
def product(call: Call) -> Rule:
    return _extreme(call, _dims(call), bool(call.arg(2, "keepdim", False)), saves=(0,), saves_out=True)


@rule("aten.count_nonzero.dim_IntList", "aten.count_nonzero.default", samples=[sample(T((4, 6), "int64", 3), [1])])
def count_nonzero(call: Call) -> Rule:
    return reduction(call, _dims(call), False)


@rule("aten.any.dim", "aten.all.dim", samples=[sample(T((4, 6), "bool", 2), 1)])
def any_dim(call: Call) -> Rule:
    return _extreme(call, _dims(call), bool(call.arg(2, "keepdim", False)))


@rule("aten.any.default", "aten.all.default", "aten.max.default", "aten.min.default", "aten.prod.default",
      "aten.std.default", "aten.var.default", "aten.median.default",
      samples=[sample(T((4, 6), "bool", 2))])  # fmt: skip
def extreme_all(call: Call) -> Rule:
    return _extreme(call, range(len(call.ins[0].shape)), False, saves=(0,))


@rule("aten.var.correction", "aten.std.correction", "aten.var.dim", "aten.std.dim",
      "aten.var_mean.correction", "aten.std_mean.correction",
      samples=[sample(T((4, 6, 8)), [1], correction=1, keepdim=True)])  # fmt: skip
def variance(call: Call) -> Rule:
    keep = bool(call.arg(3, "keepdim", False)) if call.target.endswith(".dim") else bool(call.kwargs.get("keepdim"))
    return _extreme(call, _dims(call), keep, saves=(0,), saves_out="std" in call.target)


@rule("aten.linalg_vector_norm.default", samples=[sample(T((4, 6)), 2, [1], True)])
def vector_norm(call: Call) -> Rule:
    return _extreme(call, _dims(call, 2), bool(call.arg(3, "keepdim", False)), saves=(0,), saves_out=True)


@rule("aten.norm.ScalarOpt_dim", samples=[sample(T((4, 6)), 2, [1], True), sample(T((4, 6)), None, [-1])])
def norm(call: Call) -> Rule:
    return _extreme(call, _dims(call, 2), bool(call.arg(3, "keepdim", False)), saves=(0,), saves_out=True)


@rule(
    "aten.cumsum.default",
    "aten.cumprod.default",
    "aten.logcumsumexp.default",
    samples=[sample(T((4, 6)), 1), sample(T((4, 6, 8)), 0), sample(T((4, 6), "int64", 9), -1)],
)
def cumsum(call: Call) -> Rule:
    sizes, term = named(call.ins[0].shape)
    linear = _FIRST if call.out.is_float and call.target == "aten.cumsum.default" else ()
    return Rule(
        sizes, (tuple(term),), (tuple(term),), "reduce", frozenset(term[call.arg(1, "dim") % len(term)]), linear
    )


for _target in ("amin.default", "logsumexp.default"):
    prove_with(f"aten.{_target}", sample(T((4, 6, 8)), [1]))
prove_with("aten.argmin.default", sample(T((4, 6)), 1))
prove_with("aten.min.dim", sample(T((4, 6)), 1))
prove_with("aten.all.dim", sample(T((4, 6), "bool", 2), 1))
prove_with("aten.all.default", sample(T((4, 6), "bool", 2)))
for _target in ("max.default", "min.default", "mean.default"):
    prove_with(f"aten.{_target}", sample(T((4, 6))))
prove_with("aten.std.correction", sample(T((4, 6)), [1], correction=1))
for _target in ("var.dim", "std.dim"):
    prove_with(f"aten.{_target}", sample(T((4, 6)), [1]), sample(T((4, 6)), [1], True, True))
prove_with("aten.kthvalue.default", sample(T((4, 6)), 2, 1), sample(T((4, 6)), 2, 0, True))
prove_with("aten.count_nonzero.default", sample(T((4, 6), "int64", 3)))
for _target in ("prod.default", "std.default", "var.default", "median.default"):
    prove_with(f"aten.{_target}", sample(T((4, 6))))
for _target in ("var_mean.correction", "std_mean.correction"):
    prove_with(f"aten.{_target}", sample(T((4, 6)), [1], correction=0), sample(T((4, 6)), [-1], keepdim=True))
for _target in ("cumprod.default", "logcumsumexp.default", "cummax.default", "cummin.default"):
    prove_with(f"aten.{_target}", sample(T((4, 6)), 1), sample(T((4, 6)), -2))
