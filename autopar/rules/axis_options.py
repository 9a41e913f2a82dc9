"""The options of an operator on one mesh axis, as they follow from its rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.rules.notation import Rule
from autopar.rules.option_names import GRADIENTS_PENDING, WHOLE
from autopar.rules.terms import Term
from autopar.words.placements import INVARIANT, PENDING, REPLICATED, Placement, shard


@dataclass(frozen=True, slots=True)
class Option:
    """One option of one op on one mesh axis: the factor cut (or ``I``, ``R``, ``P<group>``) and the placements."""

    name: str
    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]


def _place(rule: Rule, term: Term, factor: str, block: int, otherwise: Placement) -> Placement:
    joint = rule.together.get(factor)
    for d, dim in enumerate(term):
        if joint is not None:
            if not joint.isdisjoint(dim):
                return shard(d)
        elif factor in dim:
            return shard(d, block * prod(rule.sizes[f] for f in dim[dim.index(factor) + 1 :]) if block else 1)
    return otherwise


def axis_options(
    rule: Rule, in_grads: Sequence[bool], out_grads: Sequence[bool], blocks: Sequence[tuple[str, int]] = ()
) -> list[Option]:
    """List every option on one axis, ``I`` first. A tensor without gradient is ``R`` where it would be ``I``.

    Args:
        in_grads, out_grads: whether gradients flow through each input and output.
        blocks: the ``(factor, elements of a block)`` that get options beside those of all factors.
    """

    def option(name: str, ins: Sequence[Placement], outs: Sequence[Placement]) -> Option:
        return Option(
            name,
            tuple(REPLICATED if p is INVARIANT and not g else p for p, g in zip(ins, in_grads, strict=True)),
            tuple(REPLICATED if p is INVARIANT and not g else p for p, g in zip(outs, out_grads, strict=True)),
        )

    n_in, n_out = len(rule.inputs), len(rule.outputs)
    options = [option(WHOLE, [INVARIANT] * n_in, [INVARIANT] * n_out)]
    for factor, block in (*((f, 0) for f in rule.cuttable), *blocks):
        outs = [_place(rule, t, factor, block, PENDING) for t in rule.outputs]
        summed = PENDING in outs
        ins = [
            _place(rule, t, factor, block, PENDING if summed and i in rule.additive else REPLICATED)
            for i, t in enumerate(rule.inputs)
        ]
        name = f"{factor}*{block}" if block else factor
        for way in ("", *rule.ways.get(factor, ())) if not block else ("",):
            options.append(option(f"{name}{way}", rule.in_as.get(factor, ins), rule.out_as.get(factor, outs)))
    if any(out_grads) and not rule.whole_gradients:
        options.append(option(GRADIENTS_PENDING, [REPLICATED] * n_in, [REPLICATED] * n_out))
    for number, group in enumerate(rule.linear):
        ins = [PENDING if i in group else REPLICATED for i in range(n_in)]
        options.append(option(f"P{number}", ins, [PENDING] * n_out))
    return options
