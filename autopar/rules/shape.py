"""Operators that move, repeat, join or split values without changing them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

from autopar.rules.notation import BATCH_NAMES, Call, Dim, Rule, Term
from autopar.rules.registry import T, prove_with, rule, sample

_FIRST = (frozenset({0}),)


def named(shape: Sequence[int]) -> tuple[dict[str, int], list[Dim]]:
    """One factor per dim, ``b s t u ...``."""
    names = BATCH_NAMES[: len(shape)]
    return dict(zip(names, shape, strict=True)), [(n,) for n in names]


def except_dim(call: Call, dim: int, kind: str = "copy", linear: bool = True, **rest: Any) -> Rule:
    """All dims free but ``dim``, which may change its size."""
    sizes, dims = named(call.ins[0].shape)
    outs = []
    for k, out in enumerate(o for o in call.outs if o is not None):
        changed = f"o{k}"
        sizes[changed] = out.shape[dim]
        outs.append(tuple((changed,) if d == dim else f for d, f in enumerate(dims)))
    whole = frozenset({dims[dim][0], *(f"o{k}" for k in range(len(outs)))})
    return Rule(sizes, (tuple(dims),), tuple(outs), kind, whole, _FIRST if linear else (), **rest)


def _split_factors(a: Sequence[int], b: Sequence[int]) -> tuple[dict[str, int], Term, Term, frozenset[str]]:
    """Factors of a reshape from ``a`` to ``b``.

    Both shapes are walked from the left; where the products so far meet, a factor ends in both. A stretch whose
    boundaries do not divide one another is one whole factor per dim.
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
            for side, dims, start, stop in ((a, left, i, i1), (b, right, j, j1)):
                for k in range(start, stop):
                    name = f"f{len(sizes)}"
                    sizes[name] = side[k]
                    whole.add(name)
                    dims[k] = [name]
        i, j = i1, j1
    return sizes, tuple(map(tuple, left)), tuple(map(tuple, right)), frozenset(whole)


@rule(
    "aten.reshape.default",
    samples=[
        sample(T((4, 6, 16)), [4, 6, 2, 8]), sample(T((4, 2, 8)), [8, 8]), sample(T((4, 6)), [24]),
        sample(T((24,)), [4, 6]), sample(T((4, 6)), [8, 3]), sample(T((4, 1, 6)), [4, 6]),
        sample(T((4, 6)), [1, 4, 6, 1]),
        sample(T((6, 4)), [4, 6]), sample(T((1, 4)), [4]), sample(T((2, 4, 6)), [8, 2, 3]), sample(T((1, 1)), []),
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
    own = call.ins[0].shape
    lead = len(dims) - len(own)
    term = tuple(dims[lead + d] if n == call.out.shape[lead + d] else () for d, n in enumerate(own))
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


@rule("aten.cat.default", samples=[sample([T((4, 2)), T((4, 6))], 1), sample([T((2, 4)), T((2, 4)), T((4, 4))], 0)])
def cat(call: Call) -> Rule:
    d = call.args[1]
    sizes, dims = named(call.out.shape)
    inputs = []
    for i, spec in enumerate(call.ins):
        sizes[f"c{i}"] = spec.shape[d]
        inputs.append(tuple((f"c{i}",) if k == d else f for k, f in enumerate(dims)))
    whole = frozenset({dims[d][0], *(f"c{i}" for i in range(len(inputs)))})
    return Rule(sizes, tuple(inputs), (tuple(dims),), "copy", whole, (frozenset(range(len(inputs))),))


@rule("aten.stack.default", samples=[sample([T((4, 6)), T((4, 6))], 1), sample([T((4, 6))] * 4, 0)])
def stack(call: Call) -> Rule:
    d = call.args[1]
    sizes, dims = named(call.out.shape)
    term = tuple(dims[:d] + dims[d + 1 :])
    n = len(call.ins)
    return Rule(sizes, (term,) * n, (tuple(dims),), "copy", frozenset(dims[d]), (frozenset(range(n)),))


@rule("aten.pad.default", samples=[sample(T((4, 6, 8)), [1, 2], "constant", 0.0), sample(T((4, 6, 8)), [0, 0, 1, 0])])
def pad(call: Call) -> Rule:
    amounts = call.args[1]
    n = len(call.out.shape)
    sizes, dims = named(call.ins[0].shape)
    outs, whole = list(dims), set()
    for k in range(len(amounts) // 2):
        d = n - 1 - k
        if amounts[2 * k] or amounts[2 * k + 1]:
            sizes[f"o{d}"] = call.out.shape[d]
            outs[d] = (f"o{d}",)
            whole |= {f"o{d}", dims[d][0]}
    value = call.arg(3, "value", None)
    constant = call.arg(2, "mode", "constant") == "constant"
    linear = _FIRST if call.out.is_float and (not constant or not value) else ()
    return Rule(sizes, (tuple(dims),), (tuple(outs),), "copy", frozenset(whole), linear)


def _whole_dims(call: Call, dims_whole: Sequence[int], kind: str = "copy", linear: bool = True) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    n = len(dims)
    whole = frozenset(dims[d % n][0] for d in dims_whole)
    return Rule(sizes, (tuple(dims),), (tuple(dims),), kind, whole, _FIRST if linear and call.out.is_float else ())


@rule("aten.roll.default", samples=[sample(T((4, 6, 8)), [1, 2], [1, 2])])
def roll(call: Call) -> Rule:
    dims = call.arg(2, "dims", [])
    return _whole_dims(call, dims or range(len(call.out.shape)))


@rule("aten.flip.default", samples=[sample(T((4, 6, 8)), [1])])
def flip(call: Call) -> Rule:
    return _whole_dims(call, call.args[1])


@rule("aten.tril.default", "aten.triu.default", samples=[sample(T((4, 6, 6))), sample(T((4, 6, 6)), 1)])
def triangle(call: Call) -> Rule:
    return _whole_dims(call, (-2, -1))


@rule("aten.repeat.default", samples=[sample(T((4, 6)), [1, 2]), sample(T((4, 6)), [3, 1, 1])])
def repeat(call: Call) -> Rule:
    times = call.args[1]
    sizes, dims = named(call.out.shape)
    own = call.ins[0].shape
    lead = len(dims) - len(own)
    inputs, whole = [], set()
    for d, n in enumerate(own):
        if times[lead + d] == 1:
            inputs.append(dims[lead + d])
        else:
            sizes[f"i{d}"] = n
            inputs.append((f"i{d}",))
            whole |= {f"i{d}", dims[lead + d][0]}
    whole |= {dims[d][0] for d in range(lead)}
    return Rule(sizes, (tuple(inputs),), (tuple(dims),), "copy", frozenset(whole), _FIRST)


@rule("aten.repeat_interleave.self_int", samples=[sample(T((4, 6)), 3, 1), sample(T((4, 6)), 2, 0)])
def repeat_interleave(call: Call) -> Rule:
    dim = call.arg(2, "dim")
    if dim is None:
        return _flat(call)
    return except_dim(call, dim % len(call.out.shape))


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


@rule(
    "aten.upsample_nearest2d.vec", "aten.upsample_bilinear2d.vec", "aten.upsample_bicubic2d.vec",
    "aten.upsample_nearest1d.vec", "aten.upsample_linear1d.vec", "aten.upsample_trilinear3d.vec",
    samples=[sample(T((4, 2, 3, 3)), None, [2.0, 2.0])],
)  # fmt: skip
def upsample(call: Call) -> Rule:
    sizes, dims = named(call.ins[0].shape)
    outs = dims[:2]
    for d in range(2, len(dims)):
        sizes[f"o{d}"] = call.out.shape[d]
        outs = [*outs, (f"o{d}",)]
    whole = frozenset(n for d in (*dims[2:], *outs[2:]) for n in d)
    return Rule(sizes, (tuple(dims),), (tuple(outs),), "copy", whole, _FIRST)


prove_with("aten.triu.default", sample(T((4, 6, 6)), 1))
for _target in ("upsample_bilinear2d.vec", "upsample_bicubic2d.vec"):
    prove_with(f"aten.{_target}", sample(T((4, 2, 3, 3)), None, False, [2.0, 2.0]))
prove_with("aten.upsample_nearest1d.vec", sample(T((4, 2, 3)), None, [2.0]))
prove_with("aten.upsample_linear1d.vec", sample(T((4, 2, 3)), None, False, [2.0]))
prove_with("aten.upsample_trilinear3d.vec", sample(T((4, 2, 2, 2, 2)), None, False, [2.0, 2.0, 2.0]))
