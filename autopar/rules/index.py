"""Operators that pick or place values by index: what is indexed is whole, everything else is free."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.rules.notation import BATCH_NAMES, Call, Dim, In, Rule
from autopar.rules.registry import T, prove_with, rule, sample
from autopar.rules.shape import named

_FIRST = (frozenset({0}),)


@rule(
    "aten.index.Tensor",
    samples=[
        sample(T((6, 8)), [T((4,), "int64", 6)]), sample(T((6, 8, 4)), [None, T((4, 2), "int64", 8)]),
        sample(T((6, 8, 4)), [T((4, 1), "int64", 6), T((2,), "int64", 8)]),
    ],
)  # fmt: skip
def index(call: Call) -> Rule:
    """``x[i, j]``: the dims of the broadcast indices stand where the first indexed dim stood."""
    x = call.ins[0].shape
    given: Sequence[In | None] = call.args[1]
    at = [d for d, i in enumerate(given) if i is not None]
    specs = [call.ins[i.position] for i in given if i is not None]
    sizes, dims = named(x)
    simple = at == list(range(at[0], at[0] + len(at))) and all(s.dtype != "bool" for s in specs)
    if not simple:
        more = {f"o{k}": n for k, n in enumerate(call.out.shape)}
        terms = [tuple(dims)]
        for j, s in enumerate(specs):
            own = {f"i{j}_{k}": n for k, n in enumerate(s.shape)}
            more.update(own)
            terms.append(tuple((n,) for n in own))
        out = tuple((f"o{k}",) for k in range(len(call.out.shape)))
        return Rule({**sizes, **more}, tuple(terms), (out,), "copy", frozenset((*sizes, *more)), saves=(1,))
    rank = max(len(s.shape) for s in specs)
    shape = call.out.shape[at[0] : at[0] + rank]
    picked: list[Dim] = [(f"i{k}",) for k in range(rank)]
    sizes.update({f"i{k}": n for k, n in enumerate(shape)})
    terms = [tuple(dims)]
    for s in specs:
        lead = rank - len(s.shape)
        terms.append(tuple(picked[lead + k] if n == shape[lead + k] else () for k, n in enumerate(s.shape)))
    out = (*dims[: at[0]], *picked, *dims[at[0] + len(at) :])
    whole = frozenset(dims[d][0] for d in at)
    return Rule(sizes, tuple(terms), (out,), "copy", whole, _FIRST, saves=tuple(range(1, len(terms))))


@rule("aten.gather.default", samples=[sample(T((4, 6)), 1, T((4, 3), "int64", 6))])
def gather(call: Call) -> Rule:
    """Dims of equal size are shared by input and index; the gathered dim, and dims that the index shortens, are whole."""
    d = call.args[1] % max(1, len(call.out.shape))
    sizes, dims = named(call.ins[0].shape)
    own: list[Dim] = []
    whole = set()
    for k, n in enumerate(call.ins[1].shape):
        if k == d or n != call.ins[0].shape[k]:
            sizes[f"o{k}"] = n
            own.append((f"o{k}",))
            whole.add(dims[k][0])
            if k != d:
                whole.add(f"o{k}")
        else:
            own.append(dims[k])
    return Rule(sizes, (tuple(dims), tuple(own)), (tuple(own),), "copy", frozenset(whole), _FIRST, saves=(1,))


@rule("aten.index_select.default", samples=[sample(T((4, 6)), 1, T((4,), "int64", 6))])
def index_select(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    d = call.args[1] % len(dims)
    sizes["o"] = call.out.shape[d]
    out = tuple(("o",) if k == d else f for k, f in enumerate(dims))
    return Rule(sizes, (tuple(dims), (("o",),)), (out,), "copy", frozenset(dims[d]), _FIRST, saves=(1,))


@rule("aten.slice_scatter.default", samples=[sample(T((4, 8)), T((4, 3)), 1, 2, 5), sample(T((4, 8)), T((2, 8)), 0, 1, 3)])
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
    return Rule(sizes, tuple(inputs), (tuple(dims),), "copy", frozenset(whole), saves=(1,))


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
