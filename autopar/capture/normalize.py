"""One spelling for each thing: the table of rewrites that :mod:`autopar.capture` applies to every operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.rules.families.histogram import HISTC_OF_INTEGERS
from autopar.words.graph import Ref, Spec
from autopar.words.trees import PyTree

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


@dataclass(frozen=True)
class _Call:
    """A call of an operator: its arguments, and the specs of its first input and of its results."""

    target: str
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    first: Spec
    outs: tuple[Spec | None, ...]

    @property
    def out(self) -> Spec:
        """The first result."""
        out = self.outs[0]
        assert out is not None
        return out

    @property
    def rank(self) -> int:
        """The number of dims of the first input."""
        return len(self.first.shape)

    def dim(self, position: int, name: str) -> int:
        """Return an argument that is a dim, counted from the front."""
        value: int = self.args[position] if len(self.args) > position else self.kwargs.get(name, 0)
        return value + self.rank if value < 0 else value

    def permuted(self, order: Sequence[int]) -> Form | None:
        """Return the permutation of the first input."""
        if list(order) == list(range(self.rank)):
            return None
        return "aten.permute.default", (self.args[0], list(order)), {}


def normalize(
    target: str, args: tuple[object, ...], kwargs: Mapping[str, object], outs: tuple[Spec | None, ...],
    spec_of: Callable[[Ref], Spec],
) -> Form | None:  # fmt: skip
    """Return the one spelling of an operator, or None if its result is its first argument.

    Placement of factories (device, layout, pinned memory) is dropped: lowering adds the device.
    """
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory", "memory_format")}
    spell = _SPELLINGS.get(target)
    if spell is None:
        return target, args, kwargs
    return spell(_Call(target, args, kwargs, spec_of(args[0]) if args and isinstance(args[0], Ref) else _NONE, outs))


_NONE = Spec((), "")
"""The spec of a first argument that is no tensor."""


def _dtype(spec: Spec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def _shaped(call: _Call) -> Form | None:
    name = "aten.reshape.default" if call.target in _VIEWS else "aten.expand.default"
    return None if call.out.shape == call.first.shape else (name, (call.args[0], list(call.out.shape)), {})


def _cast(call: _Call) -> Form | None:
    return None if call.out.dtype == call.first.dtype else ("aten.to.dtype", (call.args[0], _dtype(call.out)), {})


def _full(call: _Call) -> Form:
    value = _FULLS[call.target]
    if value is None:
        position = {"aten.new_full.default": 2, "aten.scalar_tensor.default": 0}.get(call.target, 1)
        value = call.args[position] if len(call.args) > position else call.kwargs["fill_value"]
    return "aten.full.default", (list(call.out.shape), value), {"dtype": _dtype(call.out)}


def _arange(call: _Call) -> Form:
    args = call.args
    start, end, step = {1: (0, args[0], 1), 2: (*args[:2], 1), 3: args}[len(args)]  # type: ignore[misc]
    return "aten.arange.start_step", (start, end, step), {"dtype": _dtype(call.out)}


def _transposed(call: _Call) -> Form | None:
    order = list(range(call.rank))
    if call.target == "aten.numpy_T.default":
        order.reverse()
    elif call.rank >= 2:
        named = call.target in ("aten.transpose.int", "aten.swapaxes.default")
        a, b = (call.dim(1, "dim0"), call.dim(2, "dim1")) if named else (call.rank - 2, call.rank - 1)
        order[a], order[b] = order[b], order[a]
    return call.permuted(order)


def _moved(call: _Call) -> Form:
    sources, places = ([d % call.rank for d in ([x] if isinstance(x, int) else x)] for x in call.args[1:3])
    rest = iter(d for d in range(call.rank) if d not in sources)
    order = [sources[places.index(d)] if d in places else next(rest) for d in range(call.rank)]
    return "aten.permute.default", (call.args[0], order), {}


def _sliced(call: _Call) -> Form | None:
    d, given = call.dim(1, "dim"), [*call.args[2:], None, None, None]
    if call.target == "aten.narrow.default":
        given = [given[0], given[0] + given[1], 1]
    start, end, step = slice(given[0], given[1], given[2] or 1).indices(call.first.shape[d])
    end = max(end, start)
    if (start, end, step) == (0, call.first.shape[d], 1):
        return None
    return "aten.slice.Tensor", (call.args[0], d, start, end, step), {}


def _split(call: _Call) -> Form:
    d = call.dim(2, "dim")
    sizes = [out.shape[d] for out in call.outs if out is not None]
    return "aten.split_with_sizes.default", (call.args[0], sizes, d), {}


def _selected(call: _Call) -> Form:
    d = call.dim(1, "dim")
    index = (call.args[2] % call.first.shape[d],) if call.target == "aten.select.int" else ()
    return call.target, (call.args[0], d, *index), {}


def _joined(call: _Call) -> Form:
    d = (call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)) % len(call.out.shape)
    return call.target.replace("concat", "cat"), (list(call.args[0]), d), {}


_SPELLINGS: dict[str, Callable[[_Call], Form | None]] = {
    **dict.fromkeys((*_VIEWS, *_EXPANDS), _shaped), **dict.fromkeys(_CASTS, _cast), **dict.fromkeys(_FULLS, _full),
    **dict.fromkeys(("aten.arange.default", "aten.arange.start", "aten.arange.start_step"), _arange),
    **dict.fromkeys(("aten.transpose.int", "aten.t.default", "aten.numpy_T.default", "aten.swapaxes.default",
                     "aten.mT.default"), _transposed),
    "aten.permute.default": lambda call: call.permuted([d % call.rank for d in call.args[1]]),
    **dict.fromkeys(("aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int"), _moved),
    **dict.fromkeys(("aten.slice.Tensor", "aten.narrow.default"), _sliced),
    **dict.fromkeys(("aten.chunk.default", "aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default"),
                    _split),
    **dict.fromkeys(("aten.select.int", "aten.unbind.int"), _selected),
    **dict.fromkeys(("aten.cat.default", "aten.concat.default", "aten.stack.default"), _joined),
    "aten.histc.default": lambda call: (
        call.target if _dtype(call.first).is_floating_point else HISTC_OF_INTEGERS, call.args, call.kwargs),
    **dict.fromkeys(DROPOUTS, lambda call: (
        None if not call.args[2] or call.args[1] == 0 else (call.target, call.args, call.kwargs))),
    "aten.scaled_dot_product_attention.default": lambda call: (
        call.target, call.args[:3] if len(call.args) == 4 and call.args[3] is None else call.args, call.kwargs),
}  # fmt: skip
"""The one spelling of each operator that has several."""
