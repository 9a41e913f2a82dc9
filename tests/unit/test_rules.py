"""Every rule is proved on numbers, in all its strategies, and wrong rules are caught."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles.valid_cuts import unoffered

import autopar.rules  # noqa: F401
from autopar.rules.axis_options import axis_options
from autopar.rules.lowering_helpers.local_shard import piece
from autopar.rules.notation import Lowering
from autopar.rules.proving.proof import Case, RuleIsWrong, prove, strategies_of
from autopar.rules.registry import RULES, SAMPLES, T, sample
from autopar.words.meshes import Mesh
from autopar.words.placements import State

ONE, TWO = Mesh.of(data=2), Mesh.of(data=2, tensor=2)
EVERY = [(target, i) for target in sorted(SAMPLES) for i in range(len(SAMPLES[target]))]


@pytest.mark.parametrize("target, number", EVERY, ids=[f"{t.removeprefix('aten.')}-{i}" for t, i in EVERY])
def test_rule(target: str, number: int) -> None:
    case = Case(target, SAMPLES[target][number])
    for picked in strategies_of(case, ONE):
        prove(case, picked, ONE)
    pairs = [p for p in strategies_of(case, TWO) if all(o.name not in ("I", "R") for o in p)]
    for picked in random.Random(number).sample(pairs, min(1, len(pairs))):  # the others below
        prove(case, picked, TWO)


@pytest.mark.slow
@pytest.mark.parametrize("target, number", EVERY, ids=[f"{t.removeprefix('aten.')}-{i}" for t, i in EVERY])
def test_rule_in_all_pairs(target: str, number: int) -> None:
    case = Case(target, SAMPLES[target][number])
    for picked in strategies_of(case, TWO):
        prove(case, picked, TWO)


def test_every_rule_has_a_sample() -> None:
    assert not sorted(set(RULES) - set(SAMPLES)), "rules that nothing proves"


UNOFFERED = {
    "aten.all.default": "by chance: all of many random values is false in every half",
    "aten.any.default": "by chance: any of many random values is true in every half",
    "aten.avg_pool1d.default": "windows that do not overlap; spatial dims are whole",
    "aten.avg_pool2d.default": "windows that do not overlap; spatial dims are whole",
    "aten.max_pool2d.default": "windows that do not overlap; spatial dims are whole",
    "aten.cat.default": "an input without elements beside one that is cut",
    "autopar.branch.default": "only one of the ways is taken, so the other one's tensor may be cut in any way",
    "autopar.expert_block.default": "features inside of experts: a cut that is not offered yet",
    "aten.avg_pool3d.default": "windows that do not overlap; spatial dims are whole",
    "aten.max_pool1d.default": "windows that do not overlap; spatial dims are whole",
    "aten.max_pool3d.default": "windows that do not overlap; spatial dims are whole",
    "aten.conv3d.default": "windows that do not overlap; spatial dims are whole",
    "aten.conv_transpose3d.input": "windows that do not overlap; spatial dims are whole",
    "aten.upsample_nearest3d.vec": "nearest neighbours by a whole factor; spatial dims are whole",
    "aten.embedding.default": "the gradient is scaled by counts over the batch: only the forward can be cut",
    "aten.index.Tensor": "by chance: a mask that keeps as many in both halves; sizes depend on data",
    "aten.repeat_interleave.self_int": "flat repeats of a whole tensor",
    "aten.scaled_dot_product_attention.default": "the values' head dim: every rank would repeat all scores",
    "aten.slice.Tensor": "by chance: two steps of two, one in each half",
}
"""Operators with valid cuts that no rule offers, and why."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_other_cut_is_valid() -> None:
    found = {
        target: [f"sample {i}: {cut}" for i, s in enumerate(samples) for cut in unoffered(target, s)]
        for target, samples in sorted(SAMPLES.items())
    }
    assert not {t: cuts for t, cuts in found.items() if cuts and t not in UNOFFERED}, (
        "valid cuts that a rule leaves out"
    )
    assert not [t for t in UNOFFERED if not found[t]], "nothing is left out any more: take these from the list"


def test_the_sweep_finds_what_a_rule_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_inside = sample(T((4, 6)), T((8, 6)))
    assert not unoffered("aten.linear.default", whole_inside)
    own = RULES["aten.linear.default"]
    monkeypatch.setitem(RULES, "aten.linear.default", lambda call: replace(own(call), whole=frozenset("k")))
    assert [str(cut) for cut in unoffered("aten.linear.default", whole_inside)] == ["S1, S1 -> P"]


def _wrong(target: str, args: tuple, **change: object) -> None:
    case = Case(target, sample(*args))
    for picked in strategies_of(case, ONE):
        prove(case, picked, ONE)  # the rule itself is right
    case.rule = replace(case.rule, **change)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):  # RuleIsWrong, or ranks that should agree and do not
        for picked in strategies_of(case, ONE):
            prove(case, picked, ONE)


def test_wrong_rules_are_caught() -> None:
    x, w = T((4, 6)), T((8, 6))
    # a sum over the softmax's dim does not commute with it
    _wrong("aten.softmax.int", (T((4, 6)), 1), lowerings=())
    # a bias counted once per rank
    _wrong("aten.linear.default", (x, w, T((8,))), additive=frozenset(), lowerings=())
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
    _wrong("aten.mean.dim", (T((4, 6)), [1]), lowerings=(), localize=None)
    # causal attention cut along the queries
    causal = Case("aten.scaled_dot_product_attention.default", sample(*[T((2, 2, 4, 8))] * 3, None, 0.0, True))
    causal.rule = replace(causal.rule, whole=frozenset())
    with pytest.raises(RuleIsWrong):
        for picked in strategies_of(causal, ONE):
            prove(causal, picked, ONE)

    # a whole input whose gradient is pending, said to be whole and alike
    _wrong("aten.linear.default", (x, w), in_as={"n": State.of("I", "S0")})
    # added values counted once per rank; a product linear in both; zero is not 1.5
    _wrong("aten.index_add.default", (T((6, 8)), 0, T((4,), "int64", 6), T((4, 8))), additive=frozenset())
    _wrong("aten.addcmul.default", (x, T((4, 6)), T((4, 6))), linear=(frozenset({0, 1, 2}),))
    _wrong("aten.masked_fill.Scalar", (x, T((4, 6), "bool", 2), 1.5), linear=(frozenset({0}),))
    # a range that follows the values
    _wrong("aten.histc.default", (T((8,), grad=False), 4), whole=frozenset({"bins"}))


def _by_rank(x: torch.Tensor, cut: Mapping[str, Sequence[str]]) -> torch.Tensor:
    return torch.relu(x) + piece(cut["b"], x.device)


def test_copies_that_differ_are_caught() -> None:
    """The first rank alone has the right numbers."""
    case = Case("aten.relu.default", sample(T((4, 6))))
    whole = {"b": State.of("R")}
    case.rule = replace(case.rule, lowerings=(Lowering(_by_rank, frozenset("b")),), out_as=whole, in_as=whole)
    picked = [o for o in case.options() if o.name == "b"]
    with pytest.raises(RuleIsWrong, match="copies on axis 'data' differ"):
        prove(case, picked, ONE)


def test_wrong_gradients_of_random_operators_are_caught() -> None:
    case = Case("aten.dropout.default", sample(T((4, 6)), 0.5, True))
    assert case.gradients[0] is not None and set(case.gradients[0].ne(0).flatten().tolist()) == {True, False}
    right = case.rule.lowerings[0].function

    def doubled(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return right(2 * x - x.detach(), *args, **kwargs)

    for picked in strategies_of(case, ONE):
        prove(case, picked, ONE)
    case.rule = replace(case.rule, lowerings=(Lowering(doubled),))
    with pytest.raises(RuleIsWrong, match="gradient 0: differs"):
        prove(case, [case.options()[0]], ONE)


def test_options_of_a_biased_linear() -> None:
    case = Case("aten.linear.default", sample(T((4, 6)), T((8, 6)), T((8,))))
    options = {o.name: o for o in axis_options(case.rule, [True] * 3, [True])}
    assert options["n"].ins == State.of("R", "S0", "S0") and options["n"].outs == State.of("S1")
    assert options["k"].ins == State.of("S1", "S1", "P") and options["k"].outs == State.of("P")
    assert options["b"].ins == State.of("S0", "R", "R") and options["b"].outs == State.of("S0")
