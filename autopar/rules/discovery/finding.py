"""The rule of an operator that has none, found by trying the operator and proved like a written one.

The operator runs on small tensors (:mod:`.small`). Cuts in two that give its outputs (:mod:`.cuts`) say which dims
belong together: each is a factor, of which a tensor that lacks it in the outputs is a pending sum. Then every option
of the rule is proved on numbers, forward and backward, on two ranks and on pieces that are not equal; what fails its
proof is taken out, and the rest proved again. What remains is a rule of the call's own sizes.

Not tried are operators that write to their arguments, draw random numbers, or give tensors whose sizes depend on
values. Each cut is tried on four draws of numbers, so that none is right by chance.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import gcd
from typing import Any

import torch

from autopar.placements import PENDING, Mesh, Placement
from autopar.rules.discovery.cuts import (
    REFUSALS,
    Path,
    ValidCut,
    choices_of,
    halvable,
    valid_cuts,
    value_at,
    with_value,
)  # fmt: skip
from autopar.rules.discovery.small import small_call
from autopar.rules.local import resolve
from autopar.rules.notation import Localize, Rule
from autopar.rules.operator_call import Call
from autopar.rules.proof import Case, RuleIsWrong, invoke, prove, strategies_of
from autopar.rules.registry import Sample, replicated
from autopar.torch_private import OpOverload

SEEDS = (0, 1, 2, 3)
REPEATS = 6
"""How often an operator is called with the same numbers, to see that it draws none."""
MOST_CHOICES = 4000
"""Cuts that are tried one by one; of operators with more, only dims of one size are cut together."""
MOST_INPUTS = 8
TWO: Mesh = (("data", 2),)
UNEVEN: tuple[Mesh, ...] = ((("data", 3),), (("data", 4),))
"""Meshes that divide small sizes into pieces that are not equal, and for some ranks into none."""
BOTH: Mesh = (("data", 2), ("tensor", 2))


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
    """What was found of a small call, and holds for every call like it.

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


def discover(call: Call) -> Discovered:
    """What can be found of an operator by trying it; of one that can't be tried, why."""
    if why := _never_tried(call):
        return Discovered(why_whole=why)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=()):
        warnings.simplefilter("ignore")
        small = small_call(call)
        if isinstance(small, str):
            return Discovered(why_whole=small)
        try:
            return _found(call.target, small.sample)
        except REFUSALS as error:
            return Discovered(why_whole=f"could not be tried: {type(error).__name__}: {str(error)[:200]}")


def rule_from(call: Call, found: Discovered) -> Rule:
    """The rule of a call of which that was found."""
    if found.why_whole:
        return replicated(call)
    outs = tuple(o.shape for o in call.outs if o is not None)
    return _rule(call, [s.shape for s in call.ins], outs, found)


def _never_tried(call: Call) -> str:
    """Why an operator must not be called on numbers that it was not given; empty if it may."""
    fn = resolve(call.target)
    if not isinstance(fn, OpOverload):
        return "is no operator of torch's dispatcher"
    if fn._schema.is_mutable:
        return "writes to its arguments"
    if torch.Tag.dynamic_output_shape in fn.tags and any(s.dtype in ("bool", "uint8") for s in call.ins):
        return "gives tensors whose sizes depend on values"
    if len(call.ins) > MOST_INPUTS:
        return f"has {len(call.ins)} tensor inputs"
    return ""


def _found(target: str, sample: Sample) -> Discovered:
    whole = [Case(target, sample, seed, replicated) for seed in SEEDS]
    if not _same_twice(target, sample):
        return Discovered(why_whole="gives other numbers when it is called again")
    first = whole[0].call
    shapes, outs = [s.shape for s in first.ins], [o.shape for o in first.outs if o is not None]
    equal = len(choices_of(shapes, False, whole[0].grads)) * len(halvable(first)) > MOST_CHOICES
    shape_arg = _shape_arg(first)
    found = Discovered(
        _factors(valid_cuts(whole, equal), outs, shape_arg), shape_arg=shape_arg,
        small_ins=tuple(shapes), small_outs=tuple(outs),
    )  # fmt: skip
    if shape_arg and not any(f.halved and f.halved[0] in shape_arg for f in found.factors):
        found = replace(found, shape_arg=None)
    floats = [i for i, g in enumerate(whole[0].grads) if g]
    groups = [*((i,) for i in floats), *combinations(floats, 2), *([tuple(floats)] if len(floats) > 2 else [])]
    return _proved(target, sample, replace(found, linear=tuple(g for g in groups if _linear(whole, g))))


def _same_twice(target: str, sample: Sample) -> bool:
    """Whether the operator gives the same numbers whenever it is called."""
    first, *more = (Case(target, sample, 0, replicated) for _ in range(REPEATS))
    return all(torch.equal(x, y) for again in more for x, y in zip(first.outs, again.outs, strict=True))


def _shape_arg(call: Call) -> tuple[int, str] | None:
    """The argument that may hold the shape of the output."""
    if not call.outs or call.outs[0] is None:
        return None
    shape = call.out.shape
    names = [argument.name for argument in resolve(call.target)._schema.arguments]  # type: ignore[attr-defined]
    for position, name in enumerate(names):
        value = call.arg(position, name)
        if isinstance(value, (list, tuple)) and len(value) == len(shape) and len(shape) > 0:
            if all(isinstance(v, int) and v in (n, -1) for v, n in zip(value, shape, strict=True)):
                return position, name
    return None


def _factors(
    cuts: Sequence[ValidCut], outs: Sequence[tuple[int, ...]], shape_arg: tuple[int, str] | None
) -> tuple[Factor, ...]:
    """Cuts that do not contradict each other: no dim is in two. Those that cut the most tensors come first."""
    candidates = []
    for cut in cuts:
        dims = tuple(_dim(valid) for valid in cut.outs)
        additive = tuple(i for i, p in enumerate(cut.ins) if p.is_pending)
        if "none" in dims or (additive and any(d is not None for d in dims)):
            continue
        factor = Factor(tuple(p.dim for p in cut.ins), dims, additive, cut.halved)  # type: ignore[arg-type]
        if cut.halved and shape_arg and cut.halved[0] in shape_arg and dims[0] != cut.halved[1]:
            continue
        candidates.append(factor)
    candidates.sort(
        key=lambda f: (-sum(d is not None for d in (*f.outs, *f.outs, *f.ins)), len(f.additive), f.halved is not None)
    )
    chosen: list[Factor] = []
    for candidate in candidates:
        taken = {(i, d) for factor in chosen for i, d in enumerate(factor.ins)}
        taken_out = {(i, d) for factor in chosen for i, d in enumerate(factor.outs)}
        free = all(d is None or (i, d) not in taken for i, d in enumerate(candidate.ins))
        free_out = all(d is None or (i, d) not in taken_out for i, d in enumerate(candidate.outs))
        if free and free_out:
            chosen.append(candidate)
    return tuple(chosen)


def _dim(valid: frozenset[Placement]) -> int | str | None:
    """The dim in which a cut cuts an output, None for a pending sum, ``"none"`` where no rule says that."""
    dims = sorted(p.dim for p in valid if p.dim is not None)
    if dims:
        return dims[0]
    return None if PENDING in valid else "none"


def _linear(cases: Sequence[Case], group: Sequence[int]) -> bool:
    """Whether the operator is jointly linear in a group of inputs: of a sum it gives the sum."""
    if not all(t.is_floating_point() for t in cases[0].outs):
        return False
    for case in cases[:2]:
        parts = [torch.randn(t.shape, dtype=torch.float64).to(t.dtype) for t in case.tensors]
        terms = []
        for sign in (1, -1):
            inputs = [
                (0.5 * t + sign * part) if i in group else t
                for i, (t, part) in enumerate(zip(case.tensors, parts, strict=True))
            ]
            terms.append(_outputs(case, inputs))
        if any(
            not torch.allclose(a + b, whole, rtol=1e-6, atol=1e-6)
            for a, b, whole in zip(*terms, case.outs, strict=True)
        ):
            return False
    return True


def _outputs(case: Case, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    got = invoke(resolve(case.call.target), case.call.args, case.call.kwargs, tensors)
    return [t for t in (got if isinstance(got, (tuple, list)) else [got]) if isinstance(t, torch.Tensor)]


def _proved(target: str, sample: Sample, found: Discovered) -> Discovered:
    """What of it is proved, with what it needs: pieces that are equal, or on every rank."""
    while True:
        wrong = _first_wrong(target, sample, found, TWO)
        if wrong is None:
            break
        found = _without(found, wrong)
    for number in range(len(found.factors)):
        if not _holds(target, sample, found, number):
            some = replace(found, needs_some=(*found.needs_some, number))
            if _holds(target, sample, some, number):
                found = some
            else:
                found = replace(found, even=(*found.even, number))
    while len(found.factors) + len(found.linear) > 1:
        wrong = _first_wrong(target, sample, found, BOTH)
        if wrong is None:
            break
        found = _without(found, wrong)
    if not found.factors and not found.linear:
        return replace(found, why_whole="has no dim that may be cut")
    return found


def _first_wrong(target: str, sample: Sample, found: Discovered, mesh: Mesh) -> str | None:
    """The name of an option that is not right on a mesh; None if all are."""
    for seed in SEEDS[:2]:
        case = Case(target, sample, seed, lambda call: _small_rule(call, found))
        for picked in strategies_of(case, mesh):
            names = [option.name for option in picked]
            if len(mesh) > 1 and any(name in ("I", "R") for name in names):
                continue
            try:
                prove(case, picked, mesh, in_turn=True)
            except (RuleIsWrong, *REFUSALS):
                return names[-1]
    return None


def _holds(target: str, sample: Sample, found: Discovered, number: int) -> bool:
    """Whether a factor may be cut into pieces that are not equal."""
    case = Case(target, sample, 0, lambda call: _small_rule(call, found))
    for mesh in UNEVEN:
        for picked in strategies_of(case, mesh):
            if picked[0].name == f"f{number}":
                try:
                    prove(case, picked, mesh, in_turn=True)
                except (RuleIsWrong, *REFUSALS):
                    return False
    return True


def _without(found: Discovered, option: str) -> Discovered:
    """Without an option that is wrong."""
    if option.startswith("f"):
        number = int(option[1:].partition("*")[0])
        keep = [n for n in range(len(found.factors)) if n != number]
        return replace(
            found, factors=tuple(found.factors[n] for n in keep),
            even=tuple(keep.index(n) for n in found.even if n != number),
            needs_some=tuple(keep.index(n) for n in found.needs_some if n != number),
        )  # fmt: skip
    if option.startswith("P"):
        return replace(found, linear=tuple(g for n, g in enumerate(found.linear) if n != int(option[1:])))
    if option == "R" and not found.whole_gradients:
        return replace(found, whole_gradients=True)
    return replace(found, factors=(), linear=())  # what is whole everywhere is not right: it is not understood


def _small_rule(call: Call, found: Discovered) -> Rule:
    return _rule(call, found.small_ins, found.small_outs, found)


def _rule(
    call: Call, shapes: Sequence[tuple[int, ...]], outs: Sequence[tuple[int, ...]], found: Discovered
) -> Rule:
    """A rule with a factor ``f<number>`` for each that was found, and factors that are whole for all other dims."""
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    inputs: list[list[tuple[str, ...]]] = [[() for _ in shape] for shape in shapes]
    outputs: list[list[tuple[str, ...]]] = [[() for _ in shape] for shape in outs]
    kept: dict[int, str] = {}
    for number, factor in enumerate(found.factors):
        places = [
            (terms[i], d, shape[i][d])
            for terms, shape, dims in ((inputs, shapes, factor.ins), (outputs, outs, factor.outs))
            for i, d in enumerate(dims) if d is not None
        ]  # fmt: skip
        name, size = f"f{number}", gcd(*(n for _, _, n in places))
        if factor.halved is not None:
            size = gcd(size, value_at(call, factor.halved))
        if size < 2 or not _like_small(factor, shapes, outs, found):
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
    additive = frozenset(i for n in kept for i in found.factors[n].additive)
    return Rule(
        sizes, tuple(map(tuple, inputs)), tuple(map(tuple, outputs)), whole=frozenset(whole),
        linear=tuple(frozenset(g) for g in found.linear), saves=tuple(range(len(shapes))), saves_out=True,
        shape_arg=found.shape_arg, localize=_localize(found, kept), additive=additive,
        even=frozenset(kept[n] for n in found.even if n in kept),
        needs_some=frozenset(kept[n] for n in found.needs_some if n in kept), whole_gradients=found.whole_gradients,
    )  # fmt: skip


def _localize(found: Discovered, kept: Mapping[int, str]) -> Localize | None:
    """How whole numbers among the arguments are divided; None where none is, or only the shape of the output."""
    halved = {
        name: path for number, name in kept.items()
        if (path := found.factors[number].halved) and not (found.shape_arg and path[0] in found.shape_arg)
    }  # fmt: skip
    if not halved:
        return None

    def localize(call: Call, cuts: Mapping[str, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for name, path in halved.items():
            if name in cuts:
                call = with_value(call, path, value_at(call, path) // cuts[name])
        return call.args, dict(call.kwargs)

    return localize


def _like_small(
    factor: Factor, shapes: Sequence[tuple[int, ...]], outs: Sequence[tuple[int, ...]], found: Discovered
) -> bool:
    """Whether dims that have one size in the small call have one here too: else another thing was proved."""
    def sizes(of_ins: Sequence[tuple[int, ...]], of_outs: Sequence[tuple[int, ...]]) -> list[int]:
        return [
            shape[d] for of, dims in ((of_ins, factor.ins), (of_outs, factor.outs))
            for shape, d in zip(of, dims, strict=True) if d is not None
        ]  # fmt: skip

    small, large = sizes(found.small_ins, found.small_outs), sizes(shapes, outs)
    return all((small[0] == s) == (large[0] == n) for s, n in zip(small, large, strict=True))


__all__ = ["Discovered", "Factor", "discover", "rule_from"]
