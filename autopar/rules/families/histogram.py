"""Counts of numbers: histograms and ``bincount``."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.families.shape import named
from autopar.rules.notation import Rule
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, rule, sample

HISTC_OF_INTEGERS = "autopar.histc_of_integers.default"

_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("histc_of_integers(Tensor numbers, int bins=100, Scalar min=0, Scalar max=0) -> Tensor")


def _on_cpu(numbers: torch.Tensor, bins: int = 100, low: Any = 0, high: Any = 0) -> torch.Tensor:
    return torch.histc(numbers.double(), bins, low, high).to(numbers.dtype)


_library.impl("histc_of_integers", _on_cpu, "CPU")
_library.impl("histc_of_integers", torch.histc, "CUDA")
_library.impl("histc_of_integers", lambda numbers, bins=100, *_: numbers.new_empty(bins), "Meta")


@rule("aten.histc.default", samples=[sample(T((24,), high=4.0, grad=False), 4, 0, 4), sample(T((8,), grad=False), 4)])
@rule(HISTC_OF_INTEGERS, samples=[sample(T((24,), "int64", 4), 4, 0, 4), sample(T((8,), "int64", 4), 4)])
def histc(call: Call) -> Rule:
    """Make the rule of ``histc``: counts of shards are pending sums, unless the range is that of the values."""
    sizes, term = named(call.ins[0].shape)
    low, high = call.arg(2, "min", 0), call.arg(3, "max", 0)
    whole = frozenset({"bins", *(sizes if low == high else ())})
    return Rule({**sizes, "bins": call.out.shape[0]}, (tuple(term),), ((("bins",),),), "reduce", whole)
