"""Operators that move, repeat, join or split values without changing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import gcd, prod
from typing import Any

from autopar.rules.notation import Localize, Rule
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, prove_with, rule, sample
from autopar.rules.terms import BATCH_NAMES, Dim, Term
from autopar.words.trees import PyTree

_FIRST = (frozenset({0}),)


def named(shape: Sequence[int]) -> tuple[dict[str, int], list[Dim]]:
    """Name each dim of a shape as a factor: ``b s t u ...``."""
    names = BATCH_NAMES[: len(shape)]
    return dict(zip(names, shape, strict=True)), [(n,) for n in names]


def except_dim(call: Call, dim: int, kind: str = "copy", linear: bool = True, **rest: Any) -> Rule:
    """Make a rule with all dims free but ``dim``, which may change its size."""
    sizes, dims = named(call.ins[0].shape)
    outs = []
    for k, out in enumerate(o for o in call.outs if o is not None):
        changed = f"o{k}"
        sizes[changed] = out.shape[dim]
        outs.append(tuple((changed,) if d == dim else f for d, f in enumerate(dims)))
    whole = frozenset({dims[dim][0], *(f"o{k}" for k in range(len(outs)))})
    return Rule(sizes, (tuple(dims),), tuple(outs), kind, whole, _FIRST if linear else (), **rest)


def _split_factors(a: Sequence[int], b: Sequence[int]) -> tuple[dict[str, int], Term, Term, frozenset[str]]:
    """Return the factors of a reshape from ``a`` to ``b``.

    Both shapes are walked from the left; where the products so far meet, a factor ends in both. A stretch whose
    boundaries do not divide one another can be cut only by what its first dims have in common; the rest is whole.
    """
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    left: list[list[str]] = [[] for _ in a]
    right: list[list[str]] = [[] for _ in b]
    i = j = 0
    while i < len(a) or j < len(b):
        # one stretch: the shortest runs of dims with equal products
        i1, j1 = min(i + 1, len(a)), min(j + 1, len(b))
        while prod(a[i:i1]) != prod(b[j:j1]) or (i1 == i and j1 == j):
            if (prod(a[i:i1]) < prod(b[j:j1]) and i1 < len(a)) or j1 >= len(b):
                i1 += 1
            else:
                j1 += 1
        ends = [(prod(a[i : k + 1]), left, k) for k in range(i, i1)] + [
            (prod(b[j : k + 1]), right, k) for k in range(j, j1)
        ]
        bounds = sorted({1, *(e for e, _, _ in ends)})
        chain = all(y % x == 0 for x, y in pairwise(bounds))
        if chain:
            names = []
            for x, y in pairwise(bounds):
                name = f"f{len(sizes)}"
                sizes[name] = y // x
                names.append((y, name))
            for side, dims, start in ((a, left, i), (b, right, j)):
                stop = i1 if dims is left else j1
                done = 1
                for k in range(start, stop):
                    end = done * side[k]
                    dims[k] = [n for y, n in names if done < y <= end]
                    done = end
        else:
            shared = f"f{len(sizes)}"
            sizes[shared] = gcd(a[i], b[j])
            for side, dims, start, stop in ((a, left, i, i1), (b, right, j, j1)):
                for k in range(start, stop):
                    name = f"f{len(sizes)}"
                    sizes[name] = side[k] // (sizes[shared] if k == start else 1)
                    whole.add(name)
                    dims[k] = [shared, name] if k == start else [name]
        i, j = i1, j1
    return sizes, tuple(map(tuple, left)), tuple(map(tuple, right)), frozenset(whole)


@rule(
    "aten.reshape.default",
    samples=[
        sample(T((4, 6, 16)), [4, 6, 2, 8]), sample(T((4, 2, 8)), [8, 8]), sample(T((4, 6)), [24]),
        sample(T((24,)), [4, 6]), sample(T((4, 6)), [8, 3]), sample(T((4, 1, 6)), [4, 6]),
        sample(T((4, 6)), [1, 4, 6, 1]), sample(T((6, 4)), [4, 6]), sample(T((1, 4)), [4]),
        sample(T((2, 4, 6)), [8, 2, 3]), sample(T((1, 1)), []), sample(T((12, 4)), [8, 6]),
        sample(T((4, 6, 4)), [4, 4, 6]), sample(T((2, 3, 4, 6)), [6, 24]), sample(T((4, 6), "int64", 9), [24]),
    ],
)  # fmt: skip
def reshape(call: Call) -> Rule:
    a, b = call.ins[0].shape, call.out.shape
    if 0 in a:
        sizes, dims = named(a)
        more = {f"o{k}": n for k, n in enumerate(b)}
        return Rule({**sizes, **more}, (tuple(dims),), (tuple((n,) for n in more),), "none", frozenset((*sizes, *more)))
    sizes, left, right, whole = _split_factors(a, b)
    return Rule(sizes, (left,), (right,), "none", whole, _FIRST, shape_arg=(1, "shape"))


@rule("aten.permute.default", samples=[sample(T((4, 6, 8)), [2, 0, 1]), sample(T((4, 6)), [1, 0])])
def permute(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    return Rule(sizes, (tuple(dims),), (tuple(dims[d] for d in call.args[1]),), "none", linear=_FIRST)


@rule(
    "aten.expand.default",
    samples=[
        sample(T((1, 6, 1)), [4, 6, 8]), sample(T((6, 1)), [4, 6, 8]), sample(T((4,)), [2, 4]), sample(T(()), [4, 6]),
    ],
)  # fmt: skip
def expand(call: Call) -> Rule:
    sizes, dims = named(call.out.shape)
    shape = call.ins[0].shape
    lead = len(dims) - len(shape)
    term = tuple(dims[lead + d] if n == call.out.shape[lead + d] else () for d, n in enumerate(shape))
    return Rule(sizes, (term,), (tuple(dims),), "none", linear=_FIRST, shape_arg=(1, "size"))


@rule("aten.slice.Tensor", samples=[sample(T((4, 8)), 1, 2, 6, 1), sample(T((4, 8, 6)), 0, 1, 4, 2)])
def slice_(call: Call) -> Rule:
    return except_dim(call, call.args[1], "none")


@rule("aten.select.int", samples=[sample(T((4, 8, 6)), 1, 3), sample(T((4, 8)), 0, 0)])
def select(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    d = call.args[1]
    return Rule(sizes, (tuple(dims),), (tuple(dims[:d] + dims[d + 1 :]),), "none", frozenset(dims[d]), _FIRST)


@rule("aten.unbind.int", samples=[sample(T((4, 2, 6)), 1)])
def unbind(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    d = call.args[1]
    return Rule(
        sizes, (tuple(dims),), (tuple(dims[:d] + dims[d + 1 :]),) * len(call.outs), "none", frozenset(dims[d]), _FIRST
    )


@rule("aten.split_with_sizes.default", samples=[sample(T((4, 6)), [2, 4], 1), sample(T((6, 4)), [2, 2, 2], 0)])
def split(call: Call) -> Rule:
    return except_dim(call, call.args[2], "none")


@rule(
    "aten.cat.default", "aten.concatenate.default",
    samples=[
        sample([T((4, 2)), T((4, 6))], 1), sample([T((2, 4)), T((2, 4)), T((4, 4))], 0),
        sample([T((0,)), T((4, 6))], 1),
    ],
)  # fmt: skip
def cat(call: Call) -> Rule:
    d = call.arg(1, "dim", 0) % len(call.out.shape)
    sizes, dims = named(call.out.shape)
    inputs: list[tuple[tuple[str, ...], ...]] = []
    for i, spec in enumerate(call.ins):
        if spec.shape == (0,) and len(dims) > 1:  # torch takes nothing, whatever its dims, for nothing
            sizes[f"c{i}"] = 0
            inputs.append(((f"c{i}",),))
            continue
        sizes[f"c{i}"] = spec.shape[d]
        inputs.append(tuple((f"c{i}",) if k == d else f for k, f in enumerate(dims)))
    whole = frozenset({dims[d][0], *(f"c{i}" for i in range(len(inputs)))})
    return Rule(sizes, tuple(inputs), (tuple(dims),), "copy", whole, (frozenset(range(len(inputs))),))


@rule(
    "aten.meshgrid.indexing", "aten.meshgrid.default",
    samples=[sample([T((4,)), T((6,))], indexing="ij"), sample([T((4,)), T((6,)), T((2,))], indexing="xy")],
)  # fmt: skip
def meshgrid(call: Call) -> Rule:
    sizes, dims = named(call.out.shape)
    terms = [(dims[d],) for d in range(len(call.ins))]
    if call.kwargs.get("indexing") == "xy":
        terms[:2] = terms[1::-1]
    return Rule(sizes, tuple(terms), (tuple(dims),) * len(call.outs), "copy")


@rule("aten.stack.default", samples=[sample([T((4, 6)), T((4, 6))], 1), sample([T((4, 6))] * 4, 0)])
def stack(call: Call) -> Rule:
    d = call.args[1]
    sizes, dims = named(call.out.shape)
    term = tuple(dims[:d] + dims[d + 1 :])
    n = len(call.ins)
    return Rule(sizes, (term,) * n, (tuple(dims),), "copy", frozenset(dims[d]), (frozenset(range(n)),))


def whole_dims(call: Call, dims_whole: Sequence[int]) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    n = len(dims)
    whole = frozenset(dims[d % n][0] for d in dims_whole)
    return Rule(sizes, (tuple(dims),), (tuple(dims),), "copy", whole, _FIRST if call.out.is_float else ())


@rule(
    "aten.roll.default",
    samples=[sample(T((4, 6, 8)), [1, 2], [1, 2]), sample(T((4, 6)), [1], [-1]), sample(T((4, 6)), [3])],
)
def roll(call: Call) -> Rule:
    dims = call.arg(2, "dims", [])
    return whole_dims(call, dims or range(len(call.out.shape)))


@rule("aten.flip.default", samples=[sample(T((4, 6, 8)), [1]), sample(T((4, 6)), [-1, 0])])
def flip(call: Call) -> Rule:
    return whole_dims(call, call.args[1])


@rule("aten.tril.default", "aten.triu.default", samples=[sample(T((4, 6, 6))), sample(T((4, 6, 6)), 1)])
def triangle(call: Call) -> Rule:
    return whole_dims(call, (-2, -1))


@rule(
    "aten.repeat.default", "aten.tile.default",
    samples=[
        sample(T((4, 6)), [1, 2]), sample(T((4, 6)), [3, 1, 1]), sample(T((1, 6)), [4, 1]), sample(T((4, 6)), [2, 3]),
    ],
)  # fmt: skip
def repeat(call: Call) -> Rule:
    """Make the rule of ``repeat``: a repeated dim is replicated unless it had size 1; a new leading dim is free."""
    sizes, dims = named(call.out.shape)
    shape = call.ins[0].shape
    lead = len(dims) - len(shape)
    times = (*(1 for _ in range(len(dims) - len(call.args[1]))), *call.args[1])
    inputs: list[Dim] = []
    whole = set()
    for d, n in enumerate(shape):
        if times[lead + d] == 1:
            inputs.append(dims[lead + d])
        elif n == 1:
            inputs.append(())
        else:
            sizes[f"i{d}"] = n
            inputs.append((f"i{d}",))
            whole |= {f"i{d}", dims[lead + d][0]}
    repeated = frozenset(f for d, (f,) in enumerate(dims) if times[d] > 1)
    return Rule(
        sizes, (tuple(inputs),), (tuple(dims),), "copy", frozenset(whole), _FIRST, even=repeated,
        localize=_fewer_repeats
    )


def _fewer_repeats(call: Call, cuts: Mapping[str, int]) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Return the arguments with fewer repeats, for a cut of a dim that the operator makes."""
    shape = call.ins[0].shape
    dims = named(call.out.shape)[1]
    lead = len(dims) - len(shape)
    times = [*(1 for _ in range(len(dims) - len(call.args[1]))), *call.args[1]]
    for d, (name,) in enumerate(dims):
        if times[d] > 1 and (d < lead or shape[d - lead] == 1):
            times[d] //= cuts.get(name, 1)
    return (call.args[0], times), dict(call.kwargs)


@rule(
    "aten.repeat_interleave.self_int",
    samples=[
        sample(T((4, 6)), 3, 1), sample(T((4, 6)), 2, 0), sample(T((4, 6)), 2, -1), sample(T((4, 6)), 2),
        sample(T((4, 1)), 4, 1), sample(T((4, 1, 2)), 4, 1, output_size=4),
    ],
)  # fmt: skip
def repeat_interleave(call: Call) -> Rule:
    dim = call.arg(2, "dim")
    if dim is None:
        return _flat(call)
    sizes, dims = named(call.ins[0].shape)
    d = dim % len(dims)
    out = [*dims[:d], (*dims[d], "repeats"), *dims[d + 1 :]]
    return Rule(
        {**sizes, "repeats": call.args[1]}, (tuple(dims),), (tuple(out),), "copy", linear=_FIRST,
        localize=_repeated_here(d), even=frozenset((*dims[d], "repeats")),
    )


def _repeated_here(dim: int) -> Localize:
    """Return the repeats, and the argument ``output_size``, at local sizes: a dim of size 1 is cut by fewer repeats."""

    def localize(call: Call, cuts: Mapping[str, int]) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        name = named(call.ins[0].shape)[1][dim][0]
        x, repeats, *others = call.args
        fewer, kwargs = cuts.get("repeats", 1), dict(call.kwargs)
        if kwargs.get("output_size") is not None:
            kwargs["output_size"] = call.out.shape[dim] // (cuts.get(name, 1) * fewer)
        return (x, repeats // fewer, *others), kwargs

    return localize


def _flat(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    return Rule({**sizes, "o": call.out.shape[0]}, (tuple(dims),), ((("o",),),), "copy", frozenset((*sizes, "o")))


@rule("aten.diff.default", samples=[sample(T((4, 6))), sample(T((4, 6)), 1, 0)])
def diff(call: Call) -> Rule:
    if len(call.ins) > 1:
        d = call.arg(2, "dim", -1) % len(call.out.shape)
        sizes, dims = named(call.out.shape)
        inputs = []
        for i, s in enumerate(call.ins):
            sizes[f"c{i}"] = s.shape[d]
            inputs.append(tuple((f"c{i}",) if k == d else f for k, f in enumerate(dims)))
        whole = frozenset({dims[d][0], *(f"c{i}" for i in range(len(inputs)))})
        return Rule(sizes, tuple(inputs), (tuple(dims),), "copy", whole)
    return except_dim(call, call.arg(2, "dim", -1) % len(call.out.shape), linear=call.out.is_float)


@rule("aten.unfold.default", samples=[sample(T((4, 8)), 1, 4, 2)])
def unfold(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    d = call.args[1] % len(dims)
    sizes.update(o=call.out.shape[d], w=call.out.shape[-1])
    out = [*(("o",) if k == d else f for k, f in enumerate(dims)), ("w",)]
    return Rule(sizes, (tuple(dims),), (tuple(out),), "none", frozenset({dims[d][0], "o", "w"}), _FIRST)


@rule("aten.diagonal.default", samples=[sample(T((4, 6, 6)), 0, 1, 2), sample(T((4, 6)))])
def diagonal(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    taken = [call.arg(k + 2, f"dim{k + 1}", k) % len(dims) for k in range(2)]
    out = [f for d, f in enumerate(dims) if d not in taken]
    whole = frozenset({dims[d][0] for d in taken} | {"o"})
    return Rule({**sizes, "o": call.out.shape[-1]}, (tuple(dims),), ((*out, ("o",)),), "none", whole, _FIRST)


prove_with("aten.concatenate.default", sample([T((4, 2)), T((4, 6))], -1), sample([T((2, 4)), T((2, 4))]))
prove_with("aten.meshgrid.default", sample([T((4,)), T((6,))]))
prove_with("aten.tile.default", sample(T((4, 6)), [2]), sample(T((6,)), [4, 1]))
prove_with("aten.triu.default", sample(T((4, 6, 6)), 1))
