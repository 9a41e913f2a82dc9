"""Operators that make a tensor from nothing: made sharded where that is wanted, never gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.rules.families.shape import named
from autopar.rules.lowering_helpers.local_shard import Sizes, positions
from autopar.rules.notation import Lowering, Rule
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, prove_with, rule, sample
from autopar.words.trees import PyTree


@rule(
    "aten.full.default",
    samples=[
        sample([4, 6], 1.5, dtype="float64"), sample([4], 2, dtype="int64"), sample([], 0.0), sample([1, 4], True),
    ],
)  # fmt: skip
def full(call: Call) -> Rule:
    sizes, term = named(call.out.shape)
    return Rule(sizes, (), (tuple(term),), "copy", shape_arg=(0, "size"))


def arange_shard(
    start: float, end: float, step: float = 1, *, cut: Mapping[str, Sequence[str]], length: int,
    dtype: torch.dtype | None = None, device: Any = None, sizes: Sizes = None,
) -> torch.Tensor:  # fmt: skip
    """Return one rank's slice of ``arange(start, end, step)``; ``length`` is the number of elements on all ranks."""
    axes = cut["b"]
    device = torch.device(device or "cpu")
    index = positions(length, axes, device)
    exact = isinstance(start, int) and isinstance(step, int)
    if not exact:
        index = index.double()
    return (index * step + start).to(dtype or (torch.int64 if exact else torch.get_default_dtype()))


def _length(call: Call, cuts: Mapping[str, int]) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    return call.args, {**call.kwargs, "length": call.out.shape[0]}


@rule(
    "aten.arange.start_step",
    samples=[
        sample(0, 8, 1, dtype="int64"), sample(3, 19, 2, dtype="int64"), sample(0, 8, 1, dtype="float64"),
        sample(8, 0, -1, dtype="int64"), sample(0.0, 0.8, 0.1, dtype="float64"), sample(0, 8, 1, dtype="float32"),
    ],
)  # fmt: skip
def arange(call: Call) -> Rule:
    return Rule(
        {"b": call.out.shape[0]}, (), ((("b",),),), "copy", localize=_length,
        lowerings=(Lowering(arange_shard, frozenset("b"), uneven=True),),
    )  # fmt: skip


@rule("aten.linspace.default", samples=[sample(0.0, 1.0, 8)])
@rule("aten.eye.default", samples=[sample(4)])
@rule("aten.eye.m", samples=[sample(4, 6)])
@rule("aten.tril_indices.default", "aten.triu_indices.default", samples=[sample(4, 4)])
def made_whole(call: Call) -> Rule:
    """Make the rule of a small tensor whose values depend on their place: each rank makes all of it."""
    sizes, term = named(call.out.shape)
    return Rule(sizes, (), (tuple(term),), "copy", frozenset(sizes))


prove_with("aten.triu_indices.default", sample(4, 4))


@rule(
    "aten.nonzero_static.default",
    samples=[sample(T((4, 6), "bool", 2, grad=False), size=5), sample(T((8,), "int64", 3, grad=False), size=8)],
)
def places_set(call: Call) -> Rule:
    """Return the positions that are set in a small mask that is the same on all ranks."""
    sizes, term = named(call.ins[0].shape)
    rows = {"rows": call.out.shape[0], "dims": call.out.shape[1]}
    return Rule({**sizes, **rows}, (tuple(term),), ((("rows",), ("dims",)),), "copy", frozenset({*sizes, *rows}))
