"""One spelling for each thing: the table of rewrites that :mod:`autopar.capture` applies to every operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.rules.families.histogram import HISTC_OF_INTEGERS
from autopar.words.graph import Ref, Spec

FRESH = frozenset({"aten.clone.default", "aten.lift_fresh_copy.default", "aten.lift_fresh.default"})
"""Operators whose result has the values of their first argument and memory of its own."""

DROPPED = FRESH | {"aten.alias.default", "aten.contiguous.default", "aten.positive.default"}
"""Operators whose result has the values of their first argument."""

_VIEWS = frozenset(
    f"aten.{n}"
    for n in (
        "view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints", "unflatten.int",
        "squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default", "ravel.default", "view_as.default",
        "reshape_as.default",
    )
)  # fmt: skip
_EXPANDS = frozenset({"aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default"})
_FULLS: dict[str, float | None] = {
    "aten.zeros.default": 0, "aten.ones.default": 1, "aten.full.default": None, "aten.new_zeros.default": 0,
    "aten.new_ones.default": 1, "aten.new_full.default": None, "aten.zeros_like.default": 0,
    "aten.ones_like.default": 1,
    "aten.full_like.default": None, "aten.empty.memory_format": 0, "aten.new_empty.default": 0,
    "aten.empty_like.default": 0, "aten.zero.default": 0, "aten.scalar_tensor.default": None, "aten.fill.Scalar": None,
}  # fmt: skip
_CASTS = frozenset({
    "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten.type_as.default",
    "aten._to_copy.default", "aten.to.prim_Device", "aten.cuda.default",
})  # fmt: skip

DROPOUTS = frozenset({
    "aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default",
    "aten.feature_alpha_dropout.default",
})  # fmt: skip

Form = tuple[str, tuple[Any, ...], dict[str, Any]]


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def normalize(
    target: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outs: tuple[Spec | None, ...],
    spec_of: Callable[[Ref], Spec],
) -> Form | None:
    """Return the one spelling of an operator, or None if its result is its first argument.

    Placement of factories (device, layout, pinned memory) is dropped: lowering adds the device.
    """
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory", "memory_format")}
    out = outs[0] if outs else None
    first = spec_of(args[0]) if args and isinstance(args[0], Ref) else None

    def dim(position: int, name: str, default: int = 0) -> int:
        value = args[position] if len(args) > position else kwargs.get(name, default)
        n = len(first.shape) if first else 0
        return value + n if value < 0 else value

    if target in _VIEWS:
        assert out is not None and first is not None
        return None if out.shape == first.shape else ("aten.reshape.default", (args[0], list(out.shape)), {})
    if target in _EXPANDS:
        assert out is not None and first is not None
        return None if out.shape == first.shape else ("aten.expand.default", (args[0], list(out.shape)), {})
    if target in _CASTS:
        assert out is not None and first is not None
        return None if out.dtype == first.dtype else ("aten.to.dtype", (args[0], _dtype(out.dtype)), {})
    if target in _FULLS:
        assert out is not None
        value = _FULLS[target]
        if value is None:
            position = {"aten.new_full.default": 2, "aten.scalar_tensor.default": 0}.get(target, 1)
            value = args[position] if len(args) > position else kwargs["fill_value"]
        return "aten.full.default", (list(out.shape), value), {"dtype": _dtype(out.dtype)}
    if target in ("aten.arange.default", "aten.arange.start", "aten.arange.start_step"):
        assert out is not None
        start, end, step = {1: (0, args[0], 1), 2: (*args[:2], 1), 3: args}[len(args)]  # type: ignore[misc]
        return "aten.arange.start_step", (start, end, step), {"dtype": _dtype(out.dtype)}
    if target in (
        "aten.transpose.int",
        "aten.t.default",
        "aten.numpy_T.default",
        "aten.swapaxes.default",
        "aten.mT.default",
    ):
        assert first is not None
        n = len(first.shape)
        order = list(range(n))
        if target == "aten.numpy_T.default":
            order.reverse()
        elif n >= 2:
            a, b = (
                (dim(1, "dim0"), dim(2, "dim1"))
                if target in ("aten.transpose.int", "aten.swapaxes.default")
                else (n - 2, n - 1)
            )
            order[a], order[b] = order[b], order[a]
        return None if order == list(range(n)) else ("aten.permute.default", (args[0], order), {})
    if target == "aten.permute.default":
        assert first is not None
        order = [d % len(first.shape) for d in args[1]]
        return None if order == list(range(len(order))) else (target, (args[0], order), {})
    if target in ("aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int"):
        assert first is not None
        n = len(first.shape)
        src = [d % n for d in (args[1] if isinstance(args[1], (list, tuple)) else [args[1]])]
        dst = [d % n for d in (args[2] if isinstance(args[2], (list, tuple)) else [args[2]])]
        order = [-1] * n
        for s, d in zip(src, dst, strict=True):
            order[d] = s
        rest = iter(d for d in range(n) if d not in src)
        order = [d if d >= 0 else next(rest) for d in order]
        return "aten.permute.default", (args[0], order), {}
    if target == "aten.slice.Tensor":
        assert first is not None and out is not None
        d = dim(1, "dim")
        n = first.shape[d]
        start = args[2] if len(args) > 2 and args[2] is not None else 0
        end = args[3] if len(args) > 3 and args[3] is not None else n
        step = args[4] if len(args) > 4 else 1
        start = min(max(start + n if start < 0 else start, 0), n)
        end = min(max(end + n if end < 0 else end, start), n)
        return None if (start, end, step) == (0, n, 1) else (target, (args[0], d, start, end, step), {})
    if target == "aten.narrow.default":
        d = dim(1, "dim")
        return normalize("aten.slice.Tensor", (args[0], d, args[2], args[2] + args[3]), {}, outs, spec_of)
    if target in ("aten.chunk.default", "aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default"):
        d = dim(2, "dim")
        sizes = [o.shape[d] for o in outs if o is not None]
        return "aten.split_with_sizes.default", (args[0], sizes, d), {}
    if target in ("aten.select.int", "aten.unbind.int"):
        d = dim(1, "dim")
        index = (args[2] % first.shape[d],) if target == "aten.select.int" and first else ()
        return target, (args[0], d, *index), {}
    if target in ("aten.cat.default", "aten.concat.default", "aten.stack.default"):
        assert out is not None
        d = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(out.shape)
        return target.replace("concat", "cat"), (list(args[0]), d), {}
    if target == "aten.histc.default":
        assert first is not None
        return (target if _dtype(first.dtype).is_floating_point else HISTC_OF_INTEGERS), args, kwargs
    if target in DROPOUTS:
        return None if not args[2] or args[1] == 0 else (target, args, kwargs)
    if target == "aten.mean.default":
        return target, args, kwargs
    if target == "aten.scaled_dot_product_attention.default" and len(args) > 3 and args[3] is None:
        return target, args[:3] if len(args) == 4 else args, kwargs
    return target, args, kwargs
