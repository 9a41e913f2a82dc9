"""Linear layers in eight bits: activations, weights and gradients are cast with scales, and multiplied so.

``autopar::narrow_linear`` is what a policy such as ``fp8-mixed`` makes of ``aten.linear``, ``addmm``, ``mm`` and
``matmul``. With ``q(.)`` for a cast and its scale (:mod:`autopar.rules.lowering_helpers.narrow_numbers`)::

    y  = q(x) q(w)^T + bias        dx = q(dy) q(w)        dw = q(dy)^T q(x)        dbias = sum of dy

Where a scale is that of a tensor that is cut, ranks first agree on its largest value, so that a plan on any mesh
computes what one device does but for the order of sums. With a scale for each row, a row that is whole needs nothing;
its gradients of weights are ``dy^T x`` of wide numbers (Hopper's kernels have scales along the summed dim only).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from spmd_types import rules as types

from autopar.rules.lowering_helpers.collective_helpers import greatest_constant, pending, sends_on
from autopar.rules.lowering_helpers.local_shard import Cuts, Sizes, axes_of
from autopar.rules.lowering_helpers.narrow_numbers import (
    dtypes_of,
    largest,
    narrowed,
    narrowed_and_turned,
    product,
    scale_of,
)
from autopar.rules.notation import Comm, Lowering, Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, rule, sample
from autopar.torch_private import each_rank, reached
from autopar.words.narrow_products import FORMATS, NARROW_LINEAR, NarrowFormat
from autopar.words.tracing import is_traced
from autopar.words.trees import Context

_LEAD = ("b", "s", "t", "u", "w")
_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("narrow_linear(Tensor x, Tensor weight, Tensor? bias, str format, bool transposed=False) -> Tensor")
Groups = tuple[tuple[str, Any], ...]
"""Axes and their process groups."""


@dataclass(frozen=True)
class _Way:
    """The casts of a product, and over which ranks their largest values are taken.

    Attributes:
        numbers: the format.
        transposed: the weight is [k n].
        of_x, of_weight, of_grad: over which ranks the largest value of each is taken.
        of_weight_back: the same for a weight whose gradient's product has scales of other rows.
    """

    numbers: NarrowFormat
    transposed: bool
    of_x: Groups = ()
    of_weight: Groups = ()
    of_grad: Groups = ()
    of_weight_back: Groups = ()

    @property
    def dim(self) -> int | None:
        """The dim along which a scale reaches; None for the whole tensor."""
        return -1 if self.numbers.scales == "row" else None


def _each(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes for each simulated rank; a compiler, which has none, sees it as it is."""
    return fn if is_traced() else each_rank(fn)  # type: ignore[no-any-return]


def _scale(x: torch.Tensor, dim: int | None, dtype: torch.dtype, over: Groups) -> torch.Tensor:
    most = _each(largest)(x, dim)
    for axis, group in over:
        most = greatest_constant(most, axis, group)
    return _each(scale_of)(most, dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _weight(weight: torch.Tensor, way: _Way) -> torch.Tensor:
    return weight.t() if way.transposed else weight


def _forward(
    x: torch.Tensor, of_x: torch.Tensor, weight: torch.Tensor, of_weight: torch.Tensor, way: _Way
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product [..., n], and the narrow input turned [k rows]; the wide one where the backward wants that."""
    forward, _ = dtypes_of(way.numbers)
    if way.numbers.wide_weights:
        qx, kept = narrowed(_rows(x), _rows(of_x), forward), x
    else:
        qx, kept = narrowed_and_turned(_rows(x), of_x, forward)
    qw = narrowed(_weight(weight, way), of_weight, forward)
    y = product(qx, _rows(of_x) if of_x.dim() else of_x, qw, of_weight, x.dtype, fast=True)
    return y.view(*x.shape[:-1], qw.shape[0]), kept


def _backward(
    grad: torch.Tensor, of_grad: torch.Tensor, kept: torch.Tensor, of_x: torch.Tensor | None, weight: torch.Tensor,
    of_weight: torch.Tensor, way: _Way, of_input: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of the input (``of_input``; else what came) and of the weight.

    Args:
        kept: of the input, what the forward kept; if ``of_x`` is None, the wide one.
    """
    forward, back = dtypes_of(way.numbers)
    g, wide = _rows(grad), grad.dtype
    if of_x is None:
        qg, turned = narrowed(g, _rows(of_grad), back), g
    else:
        qg, turned = narrowed_and_turned(g, of_grad, back)
    dx = grad
    if of_input:
        qw = narrowed(_weight(weight, way).t(), of_weight, forward)
        dx = product(qg, _rows(of_grad) if of_grad.dim() else of_grad, qw, of_weight, wide)
        dx = dx.view(*grad.shape[:-1], qw.shape[0])
    if of_x is None:
        x = _rows(kept)
        return dx, x.t() @ g if way.transposed else g.t() @ x
    if way.transposed:
        return dx, product(kept, of_x, turned, of_grad, wide)
    return dx, product(turned, of_grad, kept, of_x, wide)


class _NarrowLinear(torch.autograd.Function):
    """``x [..., k]`` times ``weight [n, k]``, each narrow: ``[..., n]`` in the dtype of ``x``."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, weight: torch.Tensor, way: _Way) -> torch.Tensor:
        forward, _ = dtypes_of(way.numbers)
        of_x = _scale(x, way.dim, forward, way.of_x)
        of_weight = _scale(_weight(weight, way), way.dim, forward, way.of_weight)
        y, kept = _each(_forward)(x, of_x, weight, of_weight, way)
        ctx.way = way
        if way.numbers.wide_weights:
            ctx.save_for_backward(x, weight)
        else:
            ctx.save_for_backward(kept, weight, of_x, of_weight)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def spmd_typecheck(*, x: torch.Tensor, weight: torch.Tensor, way: _Way) -> Any:
        lead = "bstuwxyz"[: x.dim() - 1]
        return types.einsum(f"{lead}k,{'kn' if way.transposed else 'nk'}->{lead}n", x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: torch.Tensor) -> Any:
        way: _Way = ctx.way
        forward, back = dtypes_of(way.numbers)
        kept, weight, *scales = ctx.saved_tensors
        of_x, of_weight = scales or (None, None)
        of_input = ctx.needs_input_grad[0] and reached(ctx.next_functions[0][0])
        if of_weight is None:  # of other rows than the forward's
            turned = _each(torch.t)(_weight(weight, way))
            of_weight = _scale(turned, way.dim, forward, way.of_weight_back)
        of_grad = _scale(grad, way.dim, back, way.of_grad)
        dx, dw = _each(_backward)(grad, of_grad, kept, of_x, weight, of_weight, way, of_input)
        return (dx if of_input else None), dw, None


@torch.library.impl(_library, "narrow_linear", "CompositeImplicitAutograd")  # type: ignore[untyped-decorator]
def narrow_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, format: str, transposed: bool = False
) -> torch.Tensor:
    """Return ``x @ weight.t() + bias`` of narrow numbers.

    Args:
        x: [..., k], the result [..., n] in its dtype.
        weight: [n, k], or [k, n] if ``transposed``.
        bias: [n], wide.
        format: a name of :data:`~autopar.words.narrow_products.FORMATS` that runs.
    """
    y = _NarrowLinear.apply(x, weight, _Way(FORMATS[format], transposed))
    return y if bias is None else torch.add(y, bias)  # type: ignore[no-any-return]


def narrow_linear_across(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, format: str, transposed: bool = False, *,
    cut: Cuts, sizes: Sizes = None,
) -> torch.Tensor:  # fmt: skip
    """Compute :func:`narrow_linear` with rows, features or the summed dim cut, with the scales of whole tensors."""
    numbers = FORMATS[format]

    def over(*factors: str) -> Groups:
        return tuple((axis, sends_on(axis)) for axis in axes_of(cut, *factors))

    rows = [factor for factor in cut if factor not in ("n", "k")]
    if numbers.scales == "row":
        way = _Way(numbers, transposed, over("k"), over("k"), over("n"), over("n"))
    else:
        way = _Way(numbers, transposed, over(*rows, "k"), over("n", "k"), over(*rows, "n"))
    y = pending(_NarrowLinear.apply(x, weight, way), axes_of(cut, "k"))
    return y if bias is None else torch.add(y, bias)


def _collectives(numbers: NarrowFormat, lead: Sequence[str]) -> tuple[Comm, ...]:
    """Return the collectives of :func:`narrow_linear_across`: maxima of a number, or of one for each row."""
    if numbers.scales == "row":
        rows = tuple(lead)
        return (
            Comm("k", "all_reduce", rows, 4), Comm("k", "all_reduce", ("n",), 4),
            Comm("n", "all_reduce", rows, 4, backward=True), Comm("n", "all_reduce", ("k",), 4, backward=True),
        )  # fmt: skip
    there = [*(Comm(f, "all_reduce", (), 4) for f in (*lead, "k")), *(Comm(f, "all_reduce", (), 4) for f in "nk")]
    return (*there, *(Comm(f, "all_reduce", (), 4, backward=True) for f in (*lead, "n")))


@rule(
    NARROW_LINEAR,
    samples=[
        sample(x, w, *([T((12,))] if bias else [None]), name, transposed)
        for name in ("fp8", "fp8-row")
        for x, w, bias, transposed in (
            (T((4, 8)), T((12, 8)), False, False), (T((2, 4, 8)), T((12, 8)), True, False),
            (T((4, 8)), T((8, 12)), True, True),
        )
    ],
)  # fmt: skip
def narrow_linear_rule(call: Call) -> Rule:
    n_lead = len(call.ins[0].shape) - 1
    lead = list(_LEAD[:n_lead])
    x, weight = " ".join([*lead, "k"]), "k n" if call.arg(4, "transposed", False) else "n k"
    has_bias = len(call.ins) > 2
    numbers = FORMATS[call.arg(3, "format")]
    return line(
        f"{x}, {weight}{', n' if has_bias else ''} -> {' '.join([*lead, 'n'])}", call, kind="matmul", flops=2.0,
        additive=[2] if has_bias else [], saves=(0, 1) if numbers.wide_weights else (1,), whole_gradients=True,
        lowerings=(
            Lowering(narrow_linear_across, frozenset({*lead, "n", "k"}), _collectives(numbers, lead), uneven=True),
        ),
    )  # fmt: skip
