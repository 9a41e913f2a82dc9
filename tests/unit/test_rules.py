"""Every rule is proved on numbers, in all its strategies, and wrong rules are caught."""

from __future__ import annotations

import random
from dataclasses import replace

import autopar.rules  # noqa: F401
import pytest
from autopar.rules.notation import axis_options
from autopar.rules.proof import Case, RuleIsWrong, prove, strategies_of
from autopar.rules.registry import RULES, SAMPLES, T, sample

ONE, TWO = (("data", 2),), (("data", 2), ("tensor", 2))
EVERY = [(target, i) for target in sorted(SAMPLES) for i in range(len(SAMPLES[target]))]


@pytest.mark.parametrize("target, number", EVERY, ids=[f"{t.removeprefix('aten.')}-{i}" for t, i in EVERY])
def test_rule(target: str, number: int) -> None:
    case = Case(target, SAMPLES[target][number])
    for picked in strategies_of(case, ONE):
        prove(case, picked, ONE)
    pairs = [p for p in strategies_of(case, TWO) if all(o.name not in ("I", "R") for o in p)]
    for picked in random.Random(number).sample(pairs, min(3, len(pairs))):
        prove(case, picked, TWO)


@pytest.mark.slow
@pytest.mark.parametrize("target, number", EVERY, ids=[f"{t.removeprefix('aten.')}-{i}" for t, i in EVERY])
def test_rule_in_all_pairs(target: str, number: int) -> None:
    case = Case(target, SAMPLES[target][number])
    for picked in strategies_of(case, TWO):
        prove(case, picked, TWO)


def test_every_rule_has_a_sample() -> None:
    assert not sorted(set(RULES) - set(SAMPLES)), "rules that nothing proves"


def _wrong(target: str, args: tuple, **change: object) -> None:
    case = Case(target, sample(*args))
    case.rule = replace(case.rule, **change)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):  # RuleIsWrong, or ranks that should agree and do not
        for picked in strategies_of(case, ONE):
            prove(case, picked, ONE)


def test_wrong_rules_are_caught() -> None:
    x, w = T((4, 6)), T((8, 6))
    # a sum over the softmax's dim does not commute with it
    _wrong("aten.softmax.int", (T((4, 6)), 1), distributed_factors=frozenset())
    # a bias counted once per rank
    _wrong("aten.linear.default", (x, w, T((8,))), additive=frozenset(), distributed_factors=frozenset())
    # relu, exp and a product are not linear in what they are said to be
    _wrong("aten.relu.default", (x,), linear=(frozenset({0}),))
    _wrong("aten.exp.default", (x,), linear=(frozenset({0}),))
    _wrong("aten.mul.Tensor", (x, T((4, 6))), linear=(frozenset({0, 1}),))
    _wrong("aten.add.Scalar", (x, 2.0), linear=(frozenset({0}),))
    # running sums, sorting and slices along a cut dim
    _wrong("aten.cumsum.default", (x, 1), whole=frozenset())
    _wrong("aten.sort.default", (T((4, 6)), 1), whole=frozenset())
    _wrong("aten.amax.default", (T((4, 6)), [1]), whole=frozenset())
    # a mean over a cut dim without the global count
    _wrong("aten.mean.dim", (T((4, 6)), [1]), distributed_factors=frozenset(), localize=None)
    # causal attention cut along the queries
    causal = Case("aten.scaled_dot_product_attention.default", sample(*[T((2, 2, 4, 8))] * 3, None, 0.0, True))
    causal.rule = replace(causal.rule, whole=frozenset())
    with pytest.raises(RuleIsWrong):
        for picked in strategies_of(causal, ONE):
            prove(causal, picked, ONE)


def test_options_of_a_biased_linear() -> None:
    case = Case("aten.linear.default", sample(T((4, 6)), T((8, 6)), T((8,))))
    options = {o.name: o for o in axis_options(case.rule, [True] * 3, [True])}
    assert options["n"].ins == ("R", "S0", "S0") and options["n"].outs == ("S1",)
    assert options["k"].ins == ("S1", "S1", "P") and options["k"].outs == ("P",)
    assert options["b"].ins == ("S0", "R", "R") and options["b"].outs == ("S0",)
