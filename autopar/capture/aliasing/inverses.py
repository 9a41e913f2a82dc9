"""A view turned round: the base's new value from its old one and the view's new value.

Views in their one spelling have an inverse of their own: that of a reshape is another reshape, that of a slice is
``slice_scatter``. All others are picks of elements by strides, and are written by index into the flat base; so is
``as_strided`` read. No layout of memory is needed for that but the traced one, which a sharded program need not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from autopar.words.graph import Ref, Spec
from autopar.words.trees import PyTree

Form = tuple[str, tuple[Any, ...]]
Emit = Callable[[str, tuple[Any, ...], dict[str, Any], tuple[Spec | None, ...], str], list[Ref]]
"""``emit(target, args, kwargs, outs, name)`` makes an operator and gives its outputs."""

_OWN_INVERSE = {
    "aten.view_as_real.default": "aten.view_as_complex.default", "aten.conj.default": "aten.conj.default",
    "aten.view_as_complex.default": "aten.view_as_real.default", "aten._conj.default": "aten._conj.default",
    "aten._neg_view.default": "aten._neg_view.default",
}  # fmt: skip


def written(emit: Emit, target: str, args: tuple[PyTree, ...], number: int, new: Ref, spec: Spec) -> Ref | None:
    """Return the base's value after output ``number`` of the view ``target(*args)`` became ``new``.

    It is None for a view that has no inverse but by strides. The first of ``args`` is the base's value until now, and
    ``spec`` is that of the base.
    """

    def one(target: str, *args: object) -> Ref:
        return emit(target, args, {}, (spec,), "")[0]

    base = args[0]
    if target == "aten.reshape.default" or (target == "aten.expand.default" and prod(args[1]) == spec.n_elements):
        return one("aten.reshape.default", new, list(spec.shape))
    if target == "aten.permute.default":
        order = args[1]
        return one(target, new, sorted(range(len(order)), key=lambda d: order[d]))
    if target == "aten.slice.Tensor":
        return _scattered(emit, "aten.slice_scatter.default", base, new, spec, *args[1:])
    if target == "aten.select.int":
        return _scattered(emit, "aten.select_scatter.default", base, new, spec, *args[1:])
    if target == "aten.split_with_sizes.default":
        start = sum(args[1][:number])
        where = args[2], start, start + args[1][number], 1
        return _scattered(emit, "aten.slice_scatter.default", base, new, spec, *where)
    if target == "aten.unbind.int":
        return _scattered(emit, "aten.select_scatter.default", base, new, spec, args[1], number)
    if target == "aten.diagonal.default":
        return one("aten.diagonal_scatter.default", base, new, *args[1:])
    if target in _OWN_INVERSE:
        return one(_OWN_INVERSE[target], new)
    if target == "aten.view.dtype":
        return one(target, new, getattr(torch, spec.dtype))
    if target in ("aten.real.default", "aten.imag.default") and spec.dtype.startswith("complex"):
        parts = Spec((*spec.shape, 2), "float64" if spec.dtype == "complex128" else "float32")
        (pairs,) = emit("aten.view_as_real.default", (base,), {}, (parts,), "")
        which = int(target == "aten.imag.default")
        (pairs,) = emit("aten.select_scatter.default", (pairs, new, len(spec.shape), which), {}, (parts,), "")
        return one("aten.view_as_complex.default", pairs)
    return None


def _scattered(emit: Emit, target: str, base: Ref, new: Ref, spec: Spec, dim: int = 0, *where: Any) -> Ref:
    """Return ``target(base, new, dim, *where)``, a scatter of a slice or of one place of a dim.

    Of complex tensors torch has no gradient of it: theirs is that of pairs of numbers.
    """
    if not spec.dtype.startswith("complex"):
        return emit(target, (base, new, dim, *where), {}, (spec,), "")[0]
    dim %= len(spec.shape)
    shape = list(spec.shape)
    if target == "aten.select_scatter.default":
        del shape[dim]
    else:
        shape[dim] = len(range(shape[dim])[slice(*where)])  # a start, an end and a step, or the first of them
    real = "float64" if spec.dtype == "complex128" else "float32"
    pairs = Spec((*spec.shape, 2), real)
    (old,) = emit("aten.view_as_real.default", (base,), {}, (pairs,), "")
    (put,) = emit("aten.view_as_real.default", (new,), {}, (Spec((*shape, 2), real),), "")
    (scattered,) = emit(target, (old, put, dim, *where), {}, (pairs,), "")
    return emit("aten.view_as_complex.default", (scattered,), {}, (spec,), "")[0]


def _order(size: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """Return the dims of a dense tensor in memory order, outermost first; None if it has gaps or overlaps."""
    order = sorted(range(len(size)), key=lambda d: (-stride[d] if size[d] > 1 else 0, d))
    order = [d for d in order if size[d] > 1] + [d for d in order if size[d] <= 1]
    step = 1
    for d in reversed(order):
        if size[d] > 1:
            if stride[d] != step:
                return None
            step *= size[d]
    return order


def flattened(emit: Emit, x: Ref, size: Sequence[int], stride: Sequence[int], spec: Spec) -> Ref | None:
    """Return the elements of a dense tensor in the order of the traced memory, in one dim."""
    order = _order(size, stride)
    if order is None:
        return None
    if order != list(range(len(order))):
        (x,) = emit("aten.permute.default", (x, order), {}, (Spec(tuple(size[d] for d in order), spec.dtype),), "")
    if len(size) == 1:
        return x
    return emit("aten.reshape.default", (x, [spec.n_elements]), {}, (Spec((spec.n_elements,), spec.dtype),), "")[0]


def put_back(emit: Emit, flat: Ref, size: Sequence[int], stride: Sequence[int], spec: Spec) -> Ref:
    """Invert :func:`flattened`."""
    order = _order(size, stride)
    assert order is not None
    shape = tuple(size[d] for d in order)
    if len(size) != 1:
        (flat,) = emit("aten.reshape.default", (flat, list(shape)), {}, (Spec(shape, spec.dtype),), "")
    if order == list(range(len(order))):
        return flat
    back = sorted(range(len(order)), key=lambda d: order[d])
    return emit("aten.permute.default", (flat, back), {}, (spec,), "")[0]


def _places(emit: Emit, size: Sequence[int], stride: Sequence[int], offset: int) -> Ref:
    """Return the indices of a strided view into flat memory, int64 of shape ``size``."""
    size = tuple(size)
    rank = len(size)
    where: Ref | None = None
    shape: tuple[int, ...] = ()
    for d, (n, step) in enumerate(zip(size, stride, strict=True)):
        if n == 1 or step == 0:
            continue
        start = offset if where is None else 0
        kwargs = {"dtype": torch.int64}
        (line,) = emit("aten.arange.start_step", (start, start + n * step, step), kwargs, (Spec((n,), "int64"),), "")
        line_shape = (n, *(1 for _ in range(rank - d - 1)))
        if len(line_shape) > 1:
            (line,) = emit("aten.reshape.default", (line, list(line_shape)), {}, (Spec(line_shape, "int64"),), "")
        if where is None:
            where, shape = line, line_shape
        else:
            shape = tuple(torch.broadcast_shapes(shape, line_shape))
            (where,) = emit("aten.add.Tensor", (where, line), {}, (Spec(shape, "int64"),), "")
    if where is None:
        return emit("aten.full.default", (list(size), offset), {"dtype": torch.int64}, (Spec(size, "int64"),), "")[0]
    if shape != size:
        (where,) = emit("aten.expand.default", (where, list(size)), {}, (Spec(size, "int64"),), "")
    return where


def picked(emit: Emit, flat: Ref, size: Sequence[int], stride: Sequence[int], offset: int, spec: Spec) -> Ref:
    """Return ``as_strided`` of flat memory."""
    return emit("aten.index.Tensor", (flat, [_places(emit, size, stride, offset)]), {}, (spec,), "")[0]


def placed(emit: Emit, flat: Ref, size: Sequence[int], stride: Sequence[int], offset: int, new: Ref, spec: Spec) -> Ref:
    """Return ``as_strided_scatter`` into flat memory with the elements of ``spec``."""
    where = _places(emit, size, stride, offset)
    whole = Spec((spec.n_elements,), spec.dtype)
    return emit("aten.index_put.default", (flat, [where], new), {}, (whole,), "")[0]
