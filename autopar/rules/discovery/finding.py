"""The rule of an operator that has none, found by trying the operator and proved like a written one.

The operator runs on small tensors (:mod:`.small`). Cuts in two that give its outputs (:mod:`.cuts`) say which dims
belong together: each is a factor, of which a tensor that lacks it in the outputs is a pending sum. Then every option
of the rule is proved on numbers, forward and backward, on two ranks and on pieces that are not equal; what fails its
proof is taken out, and the rest proved again. What remains is a rule of the call's own sizes.

Not tried are operators that write to their arguments, draw random numbers, or give tensors whose sizes depend on
values. Each cut is tried on four draws of numbers, so that none is right by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch

from autopar.errors import RuleError
from autopar.rules.axis_options import Option
from autopar.rules.discovery.cuts import ValidCut, choices_of, halvable, valid_cuts
from autopar.rules.discovery.proposal import Discovered, Factor, rule_from
from autopar.rules.discovery.remembered import keep, key_of, recall
from autopar.rules.discovery.safe_calls import REFUSALS, NotTried, in_a_fork, outputs
from autopar.rules.discovery.small import says_nothing, small_call
from autopar.rules.local_calls import resolve
from autopar.rules.operator_call import Call
from autopar.rules.option_names import GRADIENTS_PENDING, WHOLE
from autopar.rules.proving.proof import Case, RuleIsWrong, prove, strategies_of
from autopar.rules.registry import Sample, replicated
from autopar.torch_private import OpOverload
from autopar.words.meshes import Mesh
from autopar.words.placements import PENDING, Placement

SEEDS = (0, 1, 2, 3)
REPEATS = 6
"""How often an operator is called with the same numbers, to see that it draws none."""
MOST_CHOICES = 4000
"""Cuts that are tried one by one; of operators with more, only dims of one size are cut together."""
MOST_INPUTS = 8
TWO = Mesh.of(data=2)
UNEVEN = Mesh.of(data=3), Mesh.of(data=4)
"""Meshes that divide small sizes into pieces that are not equal, and for some ranks into none."""
BOTH = Mesh.of(data=2, tensor=2)


def discover(call: Call) -> Discovered:
    """Find the rule of an operator by trying it, or the reason why it cannot be tried.

    Nothing in this process is changed (see :func:`~autopar.rules.discovery.safe_calls.in_a_fork`).
    """
    if why := _never_tried(call):
        return Discovered(why_whole=why)
    try:
        return in_a_fork(lambda: tried(call))
    except NotTried as error:
        return Discovered(why_whole=str(error))


def tried(call: Call) -> Discovered:
    """Run :func:`discover` in this process."""
    small = small_call(call)
    if isinstance(small, str):
        return Discovered(why_whole=small)
    key = key_of(call.target, small.sample)
    remembered = recall(key)
    if remembered is not None and _still_holds(call.target, small.sample, remembered):
        discovered = remembered
    else:
        discovered = _found(call.target, small.sample)
        if not discovered.why_whole:
            keep(key, discovered)
    if discovered.why_whole or small.as_it_is is None:
        return discovered
    if not _holds_as_it_is(call.target, small.as_it_is, discovered):
        return Discovered(why_whole="has cuts on small tensors that are wrong on those of this call")
    return discovered


def _holds_as_it_is(target: str, sample: Sample, discovered: Discovered) -> bool:
    """Check that what was found on small tensors is right on the call's: behaviour may depend on sizes."""
    case = Case(target, sample, len(SEEDS), lambda call: rule_from(call, discovered))
    return all(_is_right(case, picked, TWO) for picked in strategies_of(case, TWO))


def _is_right(case: Case, picked: Sequence[Option], mesh: Mesh) -> bool:
    """Check that a strategy passes its proof."""
    try:
        prove(case, picked, mesh, in_turn=True)
    except (RuleIsWrong, *REFUSALS):
        return False
    return True


def _still_holds(target: str, sample: Sample, kept: Discovered) -> bool:
    """Check that what an earlier process found is still right for the operator."""
    try:
        return _first_wrong(target, sample, kept, TWO) is None
    except (RuleIsWrong, RuleError, *REFUSALS):
        return False


def _never_tried(call: Call) -> str:
    """Say why an operator must not be called on numbers other than those it was given; empty if it may."""
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
    if whole[0].tensors and any(says_nothing([case.outs[i] for case in whole]) for i in range(len(whole[0].outs))):
        return Discovered(why_whole="gives zeros, or the same numbers, for all small inputs that were tried")
    first = whole[0].call
    shapes, outs = [s.shape for s in first.ins], [o.shape for o in first.outs if o is not None]
    equal = len(choices_of(shapes, False, whole[0].grads)) * len(halvable(first)) > MOST_CHOICES
    shape_arg = _shape_arg(first)
    discovered = Discovered(
        _factors(valid_cuts(whole, equal), outs, shape_arg), shape_arg=shape_arg,
        small_ins=tuple(shapes), small_outs=tuple(outs),
    )  # fmt: skip
    if shape_arg and not any(f.halved and f.halved[0] in shape_arg for f in discovered.factors):
        discovered = replace(discovered, shape_arg=None)
    floats = [i for i, g in enumerate(whole[0].grads) if g]
    groups = [*((i,) for i in floats), *combinations(floats, 2), *([tuple(floats)] if len(floats) > 2 else [])]
    return _proved(target, sample, replace(discovered, linear=tuple(g for g in groups if _linear(whole, g))))


def _same_twice(target: str, sample: Sample) -> bool:
    """Check that the operator gives the same numbers whenever it is called."""
    first, *more = (Case(target, sample, 0, replicated) for _ in range(REPEATS))
    return all(torch.equal(x, y) for again in more for x, y in zip(first.outs, again.outs, strict=True))


def _shape_arg(call: Call) -> tuple[int, str] | None:
    """Return the argument that may hold the shape of the output."""
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
    """Return cuts that do not contradict each other: no dim is in two. Those that cut the most tensors come first."""
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
    """Return the dim in which a cut cuts an output, None for a pending sum, ``"none"`` where no rule says that."""
    dims = sorted(p.dim for p in valid if p.dim is not None)
    if dims:
        return dims[0]
    return None if PENDING in valid else "none"


def _linear(cases: Sequence[Case], group: Sequence[int]) -> bool:
    """Check that the operator is jointly linear in a group of inputs: a sum gives the sum."""
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
    return [t for t in outputs(case.call.target, case.call.args, case.call.kwargs, tensors) if torch.is_tensor(t)]


def _proved(target: str, sample: Sample, discovered: Discovered) -> Discovered:
    """Return the part of a discovery that is proved, with its conditions: equal shards, or some on every rank."""
    while True:
        wrong = _first_wrong(target, sample, discovered, TWO)
        if wrong is None:
            break
        discovered = _without(discovered, wrong)
    for number in range(len(discovered.factors)):
        if not _holds(target, sample, discovered, number):
            some = replace(discovered, needs_some=(*discovered.needs_some, number))
            if _holds(target, sample, some, number):
                discovered = some
            else:
                discovered = replace(discovered, even=(*discovered.even, number))
    while len(discovered.factors) + len(discovered.linear) > 1:
        wrong = _first_wrong(target, sample, discovered, BOTH)
        if wrong is None:
            break
        discovered = _without(discovered, wrong)
    if not discovered.factors and not discovered.linear:
        return replace(discovered, why_whole="has no dim that may be cut")
    return discovered


def _first_wrong(target: str, sample: Sample, discovered: Discovered, mesh: Mesh) -> str | None:
    """Return the name of the first option that is not right on a mesh; None if all are."""
    for seed in SEEDS[:2]:
        case = Case(target, sample, seed, lambda call: rule_from(call, discovered))
        for picked in strategies_of(case, mesh):
            names = [option.name for option in picked]
            if len(mesh) > 1 and {WHOLE, GRADIENTS_PENDING} & {*names}:
                continue
            if not _is_right(case, picked, mesh):
                return names[-1]
    return None


def _holds(target: str, sample: Sample, discovered: Discovered, number: int) -> bool:
    """Check that a factor may be cut into unequal shards."""
    case = Case(target, sample, 0, lambda call: rule_from(call, discovered))
    return all(
        _is_right(case, picked, mesh)
        for mesh in UNEVEN for picked in strategies_of(case, mesh) if picked[0].name == f"f{number}"
    )  # fmt: skip


def _without(discovered: Discovered, option: str) -> Discovered:
    """Return the discovery without an option that is wrong."""
    if option.startswith("f"):
        number = int(option[1:].partition("*")[0])
        keep = [n for n in range(len(discovered.factors)) if n != number]
        return replace(
            discovered, factors=tuple(discovered.factors[n] for n in keep),
            even=tuple(keep.index(n) for n in discovered.even if n != number),
            needs_some=tuple(keep.index(n) for n in discovered.needs_some if n != number),
        )  # fmt: skip
    if option.startswith("P"):
        return replace(discovered, linear=tuple(g for n, g in enumerate(discovered.linear) if n != int(option[1:])))
    if option == GRADIENTS_PENDING and not discovered.whole_gradients:
        return replace(discovered, whole_gradients=True)
    return replace(discovered, factors=(), linear=())  # what is whole everywhere is not right: it is not understood
