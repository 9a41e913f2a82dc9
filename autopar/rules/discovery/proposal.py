"""The result of trying an operator, and the rule of a call that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from autopar.rules.discovery.cuts import Path, value_at, with_value
from autopar.rules.notation import Localize, Rule
from autopar.rules.operator_call import Call
from autopar.rules.registry import replicated
from autopar.words.trees import PyTree


@dataclass(frozen=True)
class Factor:
    """Dims that are cut together: one dim or none of every input and output (None: a pending sum in an output).

    ``additive`` inputs are pending sums then, too; ``halved`` is the whole number among the arguments that is divided.
    """

    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    additive: tuple[int, ...] = ()
    halved: Path | None = None


@dataclass(frozen=True)
class Discovered:
    """A result for a small call, which holds for every call like it.

    Attributes:
        factors: dims that may be cut together.
        linear: groups of inputs in which the operator is jointly linear.
        even: numbers of those factors whose pieces must be equal; ``needs_some``: of those that no rank may lack.
        shape_arg: the argument that holds the output's shape.
        whole_gradients: the backward is not linear in the gradient.
        why_whole: why nothing was found; empty if something was.
    """

    factors: tuple[Factor, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    even: tuple[int, ...] = ()
    needs_some: tuple[int, ...] = ()
    shape_arg: tuple[int, str] | None = None
    whole_gradients: bool = False
    why_whole: str = ""
    small_ins: tuple[tuple[int, ...], ...] = field(default=())
    small_outs: tuple[tuple[int, ...], ...] = field(default=())


def rule_from(call: Call, discovered: Discovered) -> Rule:
    """Make the rule of a call from a discovery: a factor ``f<number>`` for each; other dims are replicated."""
    if discovered.why_whole:
        return replicated(call)
    shapes, outs = [s.shape for s in call.ins], [o.shape for o in call.outs if o is not None]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    inputs: list[list[tuple[str, ...]]] = [[() for _ in shape] for shape in shapes]
    outputs: list[list[tuple[str, ...]]] = [[() for _ in shape] for shape in outs]
    kept: dict[int, str] = {}
    for number, factor in enumerate(discovered.factors):
        places = [
            (terms[i], d, shape[i][d])
            for terms, shape, dims in ((inputs, shapes, factor.ins), (outputs, outs, factor.outs))
            for i, d in enumerate(dims) if d is not None
        ]  # fmt: skip
        name, size = f"f{number}", gcd(*(n for _, _, n in places))
        if factor.halved is not None:
            size = gcd(size, value_at(call, factor.halved))
        if size < 2 or not _like_small(factor, shapes, outs, discovered):
            continue
        sizes[name], kept[number] = size, name
        for term, d, n in places:
            if n == size:
                term[d] = (name,)
            else:
                rest = f"r{len(sizes)}"
                sizes[rest] = n // size
                whole.add(rest)
                term[d] = (name, rest)
    for terms, of_tensors in ((inputs, shapes), (outputs, outs)):
        for term, shape in zip(terms, of_tensors, strict=True):
            for d, n in enumerate(shape):
                if not term[d] and n != 1:
                    name = f"w{len(sizes)}"
                    sizes[name] = n
                    whole.add(name)
                    term[d] = (name,)
    additive = frozenset(i for n in kept for i in discovered.factors[n].additive)
    return Rule(
        sizes, tuple(map(tuple, inputs)), tuple(map(tuple, outputs)), whole=frozenset(whole),
        linear=tuple(frozenset(g) for g in discovered.linear), saves=tuple(range(len(shapes))), saves_out=True,
        shape_arg=discovered.shape_arg, localize=_localize(discovered, kept), additive=additive,
        even=frozenset(kept[n] for n in discovered.even if n in kept),
        needs_some=frozenset(kept[n] for n in discovered.needs_some if n in kept),
        whole_gradients=discovered.whole_gradients,
    )  # fmt: skip


def _localize(discovered: Discovered, kept: Mapping[int, str]) -> Localize | None:
    """Return how whole numbers among the arguments are divided; None if none is, or only the shape of the output."""
    halved = {
        name: path for number, name in kept.items()
        if (path := discovered.factors[number].halved)
        and not (discovered.shape_arg and path[0] in discovered.shape_arg)
    }  # fmt: skip
    if not halved:
        return None

    def localize(call: Call, cuts: Mapping[str, int]) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        for name, path in halved.items():
            if name in cuts:
                call = with_value(call, path, value_at(call, path) // cuts[name])
        return call.args, dict(call.kwargs)

    return localize


def _like_small(
    factor: Factor, shapes: Sequence[tuple[int, ...]], outs: Sequence[tuple[int, ...]], discovered: Discovered
) -> bool:
    """Check that dims of equal size in the small call are equal here too; otherwise something else was proved."""
    def sizes(of_ins: Sequence[tuple[int, ...]], of_outs: Sequence[tuple[int, ...]]) -> list[int]:
        return [
            shape[d] for of, dims in ((of_ins, factor.ins), (of_outs, factor.outs))
            for shape, d in zip(of, dims, strict=True) if d is not None
        ]  # fmt: skip

    small, large = sizes(discovered.small_ins, discovered.small_outs), sizes(shapes, outs)
    return all((small[0] == s) == (large[0] == n) for s, n in zip(small, large, strict=True))
