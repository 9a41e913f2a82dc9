"""Operators that pick or place values by index: what is indexed is whole, everything else is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from autopar.rules.families.shape import named
from autopar.rules.notation import Rule
from autopar.rules.operator_call import Call, In
from autopar.rules.registry import T, prove_with, replicated, rule, sample
from autopar.rules.terms import BATCH_NAMES, Dim

_FIRST = (frozenset({0}),)


@rule(
    "aten.index.Tensor",
    samples=[
        sample(T((6, 8)), [T((4,), "int64", 6)]), sample(T((6, 8, 4)), [None, T((4, 2), "int64", 8)]),
        sample(T((6, 8, 4)), [T((4, 1), "int64", 6), T((2,), "int64", 8)]),
        sample(T((6, 8, 4)), [T((2, 1), "int64", 6), None, T((4,), "int64", 4)]),
        sample(T((6,)), [T((4, 2), "int64", 6)]),
        sample(T((4, 6, 8)), [None, None, T((), "int64", 8)]), sample(T((4, 6)), [T((4,), "bool", 2)]),
    ],
)  # fmt: skip
def index(call: Call) -> Rule:
    """Make the rule of ``x[i, j]``: the dims of the broadcast indices replace the first indexed dim."""
    x = call.ins[0].shape
    given: Sequence[In | None] = call.args[1]
    at = [d for d, i in enumerate(given) if i is not None]
    specs = [call.ins[i.position] for i in given if i is not None]
    sizes, dims = named(x)
    if any(s.dtype in ("bool", "uint8") for s in specs):
        return _all_whole(call)
    rank = max(len(s.shape) for s in specs)
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0  # indices that are apart give leading dims
    shape = call.out.shape[first : first + rank]
    picked: list[Dim] = [(f"i{k}",) for k in range(rank)]
    sizes.update({f"i{k}": n for k, n in enumerate(shape)})
    terms = [tuple(dims), *(_right_aligned(picked, shape, s.shape) for s in specs)]
    rest = [f for d, f in enumerate(dims) if d not in at]
    out = (*rest[:first], *picked, *rest[first:])
    whole = frozenset(dims[d][0] for d in at)
    return Rule(sizes, tuple(terms), (out,), "copy", whole, _FIRST, saves=tuple(range(1, len(terms))), curve="lookup")


def _right_aligned(dims: Sequence[Dim], shape: Sequence[int], in_shape: Sequence[int]) -> tuple[Dim, ...]:
    """Return the term of a tensor that is broadcast to ``shape``."""
    lead = len(shape) - len(in_shape)
    return tuple(dims[lead + k] if n == shape[lead + k] else () for k, n in enumerate(in_shape))


def _all_whole(call: Call) -> Rule:
    return replace(replicated(call), kind="copy", saves=tuple(range(1, len(call.ins))), saves_out=False)


@rule(
    "aten.index_put.default",
    samples=[
        sample(T((6, 8)), [T((1,), "int64", 6)], T((1, 8))), sample(T((6, 8)), [T((4,), "int64", 6)], T((8,)), True),
        sample(T((4, 6, 8)), [None, T((4,), "int64", 6)], T((4, 4, 8)), True),
        sample(T((4, 6)), [T((4, 6), "bool", 2)], T(())), sample(T((4, 6, 8)), [T((4, 6), "bool", 2)], T((1,))),
        sample(T((4, 6, 8)), [T((2, 1), "int64", 4), None, T((4,), "int64", 8)], T((2, 4, 6)), True),
        sample(T((4, 6), "int64", 9), [T((4, 6), "bool", 2)], T((), "int64", 9)),
    ],
)  # fmt: skip
def index_put(call: Call) -> Rule:
    """Make the rule of ``x[i] = v``: indexed dims are replicated; a mask that writes one value is pointwise.

    Accumulated values may be cut along the indices: each shard then adds to a pending sum.
    """
    given: Sequence[In | None] = call.args[1]
    at = [d for d, i in enumerate(given) if i is not None]
    specs = [call.ins[i.position] for i in given if i is not None]
    sizes, dims = named(call.ins[0].shape)
    value = call.ins[-1].shape
    both = (frozenset({0, len(call.ins) - 1}),) if call.out.is_float else ()
    if len(specs) == 1 and specs[0].dtype == "bool":
        mask = tuple(dims[at[0] : at[0] + len(specs[0].shape)])
        if prod(value) != 1:
            return _all_whole(call)
        return Rule(sizes, (tuple(dims), mask, ((),) * len(value)), (tuple(dims),), "copy", linear=both, saves=(1,))
    if any(s.dtype in ("bool", "uint8") for s in specs):
        return _all_whole(call)
    adds = bool(call.arg(3, "accumulate", False))
    rank = max(len(s.shape) for s in specs)
    shape = [1] * rank
    for s in specs:
        for k, n in enumerate(s.shape, rank - len(s.shape)):
            shape[k] = max(shape[k], n)
    first = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    picked: list[Dim] = [(f"i{k}",) for k in range(rank)]
    sizes.update({f"i{k}": n for k, n in enumerate(shape)})
    rest = [d for d in range(len(dims)) if d not in at]
    places = [*(dims[d] for d in rest[:first]), *picked, *(dims[d] for d in rest[first:])]
    extent = [sizes[f[0]] for f in places]
    terms = [
        tuple(dims),
        *(_right_aligned(picked, shape, s.shape) for s in specs),
        _right_aligned(places, extent, value),
    ]
    whole = {dims[d][0] for d in at} | (set() if adds and call.out.is_float else {f"i{k}" for k in range(rank)})
    return Rule(
        sizes, tuple(terms), (tuple(dims),), "copy", frozenset(whole), both, frozenset({0}),
        saves=tuple(range(1, len(terms) - 1)),
    )  # fmt: skip


def _rows_along(call: Call) -> tuple[dict[str, int], list[Dim], int, tuple[Dim, ...]]:
    """Describe a call that writes rows at given numbers along a dim.

    Returns the sizes of the factors, the dims of the tensor, which of them is written along, and the dims of the
    rows, which have ``i`` there.
    """
    sizes, dims = named(call.ins[0].shape)
    d = call.args[1] % len(dims)
    sizes["i"] = call.ins[1].shape[0]
    return sizes, dims, d, tuple(("i",) if k == d else f for k, f in enumerate(dims))


@rule(
    "aten.index_add.default",
    samples=[
        sample(T((6, 8)), 0, T((4,), "int64", 6), T((4, 8))),
        sample(T((4, 6)), -1, T((2,), "int64", 6), T((4, 2)), alpha=2),
    ],
)  # fmt: skip
def index_add(call: Call) -> Rule:
    """Make the rule of ``index_add``: pieces of the source add to a pending sum."""
    sizes, dims, d, source = _rows_along(call)
    both = (frozenset({0, 2}),) if call.out.is_float else ()
    whole = frozenset({dims[d][0], *(() if both else "i")})
    return Rule(
        sizes, (tuple(dims), (("i",),), source), (tuple(dims),), "copy", whole, both, frozenset({0}), saves=(1,)
    )


@rule(
    "aten.index_copy.default",
    samples=[sample(T((6, 8)), 0, T((1,), "int64", 6), T((1, 8)))],
)
def index_copy(call: Call) -> Rule:
    sizes, dims, d, source = _rows_along(call)
    both = (frozenset({0, 2}),) if call.out.is_float else ()
    return Rule(
        sizes, (tuple(dims), (("i",),), source), (tuple(dims),), "copy", frozenset({dims[d][0], "i"}), both, saves=(1,)
    )


@rule(
    "aten.index_copy_.default",
    samples=[sample(T((6, 8), grad=False), 0, T((1,), "int64", 6), T((1, 8), grad=False))],
)
def index_copy_in_place(call: Call) -> Rule:
    """Make the rule of ``index_copy_``, which is that of ``index_copy``, as those of other writes in place."""
    return replace(index_copy(call), in_place=True, linear=())


@rule("aten.index_put_.default", samples=[
    sample(T((4, 6, 8), grad=False), [None, T((1,), "int64", 6)], T((4, 1, 8), grad=False)),
])  # fmt: skip
def index_put_in_place(call: Call) -> Rule:
    return replace(index_put(call), in_place=True, linear=(), additive=frozenset())


@rule("aten.scatter_.src", samples=[
    sample(T((4, 6), grad=False), 1, T((4, 1), "int64", 6), T((4, 1), grad=False)),
])  # fmt: skip
def scatter_in_place(call: Call) -> Rule:
    return replace(scatter(call), in_place=True, linear=())


@rule("aten.scatter_.value", samples=[sample(T((4, 6), grad=False), 1, T((4, 2), "int64", 6), 1.5)])
def scatter_value_in_place(call: Call) -> Rule:
    return replace(scatter_value(call), in_place=True, linear=())


@rule("aten.index_fill.int_Scalar", samples=[sample(T((4, 6)), 1, T((2,), "int64", 6), 0.0)])
def index_fill(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    name = dims[call.args[1] % len(dims)][0]
    sizes["i"] = call.ins[1].shape[0]
    linear = _FIRST if call.out.is_float and not call.args[3] else ()
    return Rule(sizes, (tuple(dims), (("i",),)), (tuple(dims),), "copy", frozenset({name, "i"}), linear, saves=(1,))


@rule("aten.gather.default", samples=[
    sample(T((4, 6)), 1, T((4, 3), "int64", 6)), sample(T((4, 6)), -1, T((4, 4), "int64", 6)),
    sample(T((4, 6)), 1, T((2, 4), "int64", 6)),
])  # fmt: skip
def gather(call: Call) -> Rule:
    """Make the rule of ``gather``: equal dims are shared, the gathered one and those that the index shortens whole."""
    d = call.args[1] % max(1, len(call.out.shape))
    sizes, dims = named(call.ins[0].shape)
    term: list[Dim] = []
    whole = set()
    for k, n in enumerate(call.ins[1].shape):
        if k == d or n != call.ins[0].shape[k]:
            sizes[f"o{k}"] = n
            term.append((f"o{k}",))
            whole.add(dims[k][0])
            if k != d:
                whole.add(f"o{k}")
        else:
            term.append(dims[k])
    return Rule(
        sizes, (tuple(dims), tuple(term)), (tuple(term),), "copy", frozenset(whole), _FIRST, saves=(1,), curve="lookup"
    )


@rule("aten.index_select.default", samples=[sample(T((4, 6)), 1, T((4,), "int64", 6))])
def index_select(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    d = call.args[1] % len(dims)
    sizes["o"] = call.out.shape[d]
    out = tuple(("o",) if k == d else f for k, f in enumerate(dims))
    return Rule(sizes, (tuple(dims), (("o",),)), (out,), "copy", frozenset(dims[d]), _FIRST, saves=(1,), curve="lookup")


@rule(
    "aten.slice_scatter.default", samples=[sample(T((4, 8)), T((4, 3)), 1, 2, 5), sample(T((4, 8)), T((2, 8)), 0, 1, 3)]
)
def slice_scatter(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    d = call.arg(2, "dim", 0) % len(dims)
    sizes["o"] = call.ins[1].shape[d]
    part = tuple(("o",) if k == d else f for k, f in enumerate(dims))
    linear = (frozenset({0, 1}),) if call.out.is_float else ()
    return Rule(sizes, (tuple(dims), part), (tuple(dims),), "copy", frozenset({dims[d][0], "o"}), linear)


@rule("aten.select_scatter.default", samples=[sample(T((4, 8)), T((4,)), 1, 2), sample(T((4, 8)), T((8,)), 0, 3)])
def select_scatter(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    d = call.args[2] % len(dims)
    part = tuple(f for k, f in enumerate(dims) if k != d)
    linear = (frozenset({0, 1}),) if call.out.is_float else ()
    return Rule(sizes, (tuple(dims), part), (tuple(dims),), "copy", frozenset(dims[d]), linear)


@rule(
    "aten.scatter.src", "aten.scatter_add.default",
    samples=[sample(T((4, 6)), 1, T((4, 1), "int64", 6), T((4, 1)))],
)  # fmt: skip
def scatter(call: Call) -> Rule:
    return _scatter(call, call.ins[2].shape)


@rule("aten.scatter_reduce.two", samples=[
    sample(T((4, 6)), 1, T((4, 2), "int64", 6), T((4, 2)), "sum"),
    sample(T((4, 6)), 0, T((2, 6), "int64", 4), T((2, 6)), "amax", include_self=False),
])  # fmt: skip
def scatter_reduce(call: Call) -> Rule:
    rule = _scatter(call, call.ins[2].shape)
    return rule if call.args[4] == "sum" else replace(rule, saves=(0, 1, 2), saves_out=True)


@rule("aten.scatter.value", samples=[sample(T((4, 6)), 1, T((4, 2), "int64", 6), 1.5)])
def scatter_value(call: Call) -> Rule:
    return _scatter(call, None)


def _scatter(call: Call, src: tuple[int, ...] | None) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    d = call.args[1] % len(dims)
    index: list[Dim] = []
    whole = {dims[d][0]}
    for k, n in enumerate(call.ins[1].shape):
        same = k != d and n == call.ins[0].shape[k] and (src is None or src[k] == n)
        if same:
            index.append(dims[k])
        else:
            sizes[f"i{k}"] = n
            whole |= {f"i{k}", dims[k][0]}
            index.append((f"i{k}",))
    inputs = [tuple(dims), tuple(index)]
    if src is not None:
        term: list[Dim] = []
        for k, n in enumerate(src):
            if index[k] == dims[k] or n == call.ins[1].shape[k]:
                term.append(index[k])
            else:
                sizes[f"v{k}"] = n
                whole.add(f"v{k}")
                term.append((f"v{k}",))
        inputs.append(tuple(term))
    linear, name = (), f"i{d}"
    if call.out.is_float and src is not None and ("scatter_add" in call.target or "sum" in call.args):
        linear = (frozenset({0, 2}),)
        if inputs[2][d] == inputs[1][d] and call.arg(5, "include_self", True):
            whole.discard(name)  # pieces of the source add to a pending sum
    return Rule(sizes, tuple(inputs), (tuple(dims),), "copy", frozenset(whole), linear, frozenset({0}), saves=(1,))


def _along(call: Call, dim: int) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    d = dim % len(dims)
    whole = {dims[d][0]}
    outs = []
    for k, out in enumerate(call.outs):
        assert out is not None
        if out.shape[d] != call.ins[0].shape[d]:
            sizes[f"o{k}"] = out.shape[d]
            whole.add(f"o{k}")
            outs.append(tuple((f"o{k}",) if j == d else f for j, f in enumerate(dims)))
        else:
            outs.append(tuple(dims))
    return Rule(sizes, (tuple(dims),), tuple(outs), "reduce", frozenset(whole), saves_out=True)


@rule("aten.topk.default", samples=[sample(T((4, 6)), 2), sample(T((4, 6)), 2, 0)])
def topk(call: Call) -> Rule:
    return _along(call, call.arg(2, "dim", -1))


@rule("aten.sort.default", "aten.argsort.default", samples=[sample(T((4, 6))), sample(T((4, 6)), 0)])
def sort(call: Call) -> Rule:
    return _along(call, call.arg(1, "dim", -1))


@rule("aten.one_hot.default", samples=[sample(T((4, 6), "int64", 5), 5)])
def one_hot(call: Call) -> Rule:
    n = len(call.ins[0].shape)
    names = BATCH_NAMES[:n]
    sizes = {**dict(zip(names, call.ins[0].shape, strict=True)), "v": call.out.shape[-1]}
    term = tuple((f,) for f in names)
    return Rule(sizes, (term,), ((*term, ("v",)),), "copy", frozenset("v"))


prove_with("aten.argsort.default", sample(T((4, 6))), sample(T((4, 6)), 0))
prove_with("aten.scatter_add.default", sample(T((4, 6)), 1, T((4, 2), "int64", 6), T((4, 2))))
