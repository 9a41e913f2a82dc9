"""The features between the products of routed experts, along which tensor parallelism cuts their matrices.

The last product of a block sums over them (``k`` of the down projection); what makes them is found backward from there:
operators whose rules cut that dim on its own, products by their columns, and splits of a dim into equal parts (gate and
up projection in one matrix). A rank that has a piece of every such dim computes a term of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.rules.experts.experts import EXPERTS
from autopar.rules.local_calls import resolve
from autopar.rules.operator_call import Call, In
from autopar.rules.registry import rule_for
from autopar.words.graph import Spec
from autopar.words.trees import PyTree

SPLIT, LOOKUP, ADD = "aten.split_with_sizes.default", "aten.embedding.default", "aten.add.Tensor"
Dim = tuple[int, int, int]
"""A value of a block by its number, which of its outputs, and a dim."""


@dataclass(frozen=True)
class Features:
    """The dims and factors of a block that carry its features.

    Attributes:
        size: the size of the smallest dim; others hold several parts of that size, one behind the other.
        dims: for each of the block's tensors, which dim holds the features.
        additive: the block's tensors that are added to the sum, such as the bias of the down projection.
        splits: ``(size of the dim, bytes of an element)`` of every split of such a dim into parts.
    """

    size: int
    dims: Mapping[int, int]
    additive: frozenset[int]
    splits: tuple[tuple[int, int], ...]


def features_of(steps: Sequence[Any], ins: Sequence[Spec]) -> Features | None:
    """Return the features of a block; None if its matrices cannot be cut by features.

    Args:
        steps: the steps of the block's program (:class:`~autopar.rules.experts.expert_block.Body`).
        ins: its tensors, the expert of each row last.
    """
    products = [k for k, (target, _, _) in enumerate(steps) if target == EXPERTS]
    if len(products) < 2:
        return None
    try:
        block = _Block(steps, ins)
    except RuleError:
        return None
    last = products[-1]
    rows, weight = steps[last][1][:2]
    cut: set[Dim] = {(rows.number, rows.out, 1), (weight.number, weight.out, 1)}
    while True:
        before = len(cut)
        for k in range(len(steps)):
            if k != last and not block.spread(k, cut):
                return None
        if len(cut) == before:
            break
    additive = block.added_behind(last)
    if additive is None or any(number == len(ins) + last for number, _, _ in cut):
        return None
    dims: dict[int, int] = {}
    for number, _, dim in cut:
        if number < len(ins):
            if number in dims or number in additive:
                return None
            dims[number] = dim
    sizes = [block.specs[number][out].shape[dim] for number, out, dim in cut]
    least = min(sizes)
    if any(size % least for size in sizes):
        return None
    return Features(least, dims, additive, tuple(block.splits(cut)))


class _Block:
    """The steps of a block with the shapes of all values and the rule of each step.

    Args:
        steps, ins: as for :func:`features_of`.

    Raises:
        RuleError: a step has no rule.
    """

    def __init__(self, steps: Sequence[Any], ins: Sequence[Spec]) -> None:
        self.steps, self.n_ins = steps, len(ins)
        self.specs: list[tuple[Spec, ...]] = [(spec,) for spec in ins]
        self.reads: list[list[Any]] = []
        self.rules: list[Any] = []
        for target, args, kwargs in steps:
            reads: list[Any] = []
            placed = _with_places((args, kwargs), reads)
            made = resolve(target)(*self._tensors(args), **self._tensors(kwargs))
            outs = made if isinstance(made, (tuple, list)) else [made]
            specs = tuple(Spec(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in outs)
            call = Call(target, placed[0], placed[1], tuple(self.specs[v.number][v.out] for v in reads), specs)
            self.rules.append(rule_for(call))
            self.reads.append(reads)
            self.specs.append(specs)

    def _tensors(self, value: PyTree) -> PyTree:
        if _is_value(value):
            spec = self.specs[value.number][value.out]
            return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._tensors, value))
        return {k: self._tensors(x) for k, x in value.items()} if isinstance(value, dict) else value

    def _dims(self, k: int) -> list[tuple[Dim, tuple[str, ...]]]:
        """List every dim that a step reads or makes, with its factors."""
        rule = self.rules[k]
        dims = [
            ((v.number, v.out, d), factors)
            for v, term in zip(self.reads[k], rule.inputs, strict=True) for d, factors in enumerate(term)
        ]  # fmt: skip
        number = self.n_ins + k
        return dims + [
            ((number, out, d), factors) for out, term in enumerate(rule.outputs) for d, factors in enumerate(term)
        ]

    def spread(self, k: int, cut: set[Dim]) -> bool:
        """Add the dims that must be cut with those already cut in a step; return whether the step allows it."""
        target, args, _ = self.steps[k]
        number = self.n_ins + k
        if target == SPLIT and self._splits(k, cut):
            source, lengths, d = args[0], args[1], args[2] % len(self.specs[number][0].shape)
            cut |= {(source.number, source.out, d), *((number, out, d) for out in range(len(lengths)))}
            return len(set(lengths)) == 1
        every = self._dims(k)
        mine = [factors for dim, factors in every if dim in cut]
        if not mine:
            return True
        rule, factors = self.rules[k], set(mine)
        if len(factors) != 1 or len(mine[0]) != 1:
            return False
        [factor] = mine[0]
        if factor not in rule.cuttable or any(factor in lowering.factors for lowering in rule.lowerings):
            return False
        if factor in {*rule.in_as, *rule.out_as} or any(factor in f and len(f) > 1 for _, f in every):
            return False
        cut |= {dim for dim, f in every if f == (factor,)}
        return all(any(factor in f for f in term) for term in rule.outputs)  # else the result is a sum already

    def _splits(self, k: int, cut: set[Dim]) -> bool:
        """Check whether a step splits a dim that is cut."""
        number, source = self.n_ins + k, self.steps[k][1][0]
        parts = self.specs[number]
        d = self.steps[k][1][2] % len(parts[0].shape)
        return (source.number, source.out, d) in cut or any((number, out, d) in cut for out in range(len(parts)))

    def splits(self, cut: set[Dim]) -> list[tuple[int, int]]:
        """See :class:`Features`."""
        found = []
        for k, (target, args, _) in enumerate(self.steps):
            if target == SPLIT and self._splits(k, cut):
                found.append((sum(args[1]), self.specs[self.n_ins + k][0].item_bytes))
        return found

    def added_behind(self, last: int) -> frozenset[int] | None:
        """Return the tensors that are added by expert to the last product; None if anything else is done to it."""
        total, additive = self.n_ins + last, set()
        for k in range(last + 1, len(self.steps)):
            target, args, kwargs = self.steps[k]
            if target == LOOKUP and len(args) == 2 and args[0].number < self.n_ins:
                continue  # what it is for shows where it is read
            if target != ADD or kwargs or len(args) != 2 or not all(map(_is_value, args)):
                return None
            others = [v.number for v in args if v.number != total]
            if len(others) != 1 or others[0] < self.n_ins or self.steps[others[0] - self.n_ins][0] != LOOKUP:
                return None
            additive.add(self.steps[others[0] - self.n_ins][1][0].number)
            total = self.n_ins + k
        if total != self.n_ins + len(self.steps) - 1:
            return None
        behind = [v.number for k in range(last + 1, len(self.steps)) for v in self.reads[k]]
        uses = [v.number for reads in self.reads for v in reads]
        return frozenset(additive) if all(uses.count(n) == 1 and n in behind for n in additive) else None


def _is_value(x: torch.Tensor) -> bool:
    return hasattr(x, "number") and hasattr(x, "out")


def _with_places(value: PyTree, reads: list[Any]) -> PyTree:
    """Arguments with a place for each value, which is noted."""
    if _is_value(value):
        reads.append(value)
        return In(len(reads) - 1)
    if isinstance(value, (tuple, list)):
        return type(value)(_with_places(x, reads) for x in value)
    return {k: _with_places(x, reads) for k, x in value.items()} if isinstance(value, dict) else value
