"""A branch on a random number: both sides are computed, and the number chooses.

``torch.where`` would say the same; an operator of its own is found again in a graph, so that its side can be settled
(``eval()`` of a model that branches in training only).
"""

from __future__ import annotations

import torch

from autopar.rules.notation import Call, Rule
from autopar.rules.pointwise import elementwise
from autopar.rules.registry import T, rule, sample

BRANCH = "autopar.branch.default"
BY_NUMBER = -1
"""The third argument of a branch that its number decides; 0 and 1 stand for one that always goes the same way."""

_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("branch(Tensor condition, Tensor if_true, Tensor if_false, int settled=-1) -> Tensor")


@torch.library.impl(_library, "branch", "CompositeImplicitAutograd")  # type: ignore[untyped-decorator]
def branch(
    condition: torch.Tensor, if_true: torch.Tensor, if_false: torch.Tensor, settled: int = BY_NUMBER
) -> torch.Tensor:
    """``if_true`` or ``if_false``, which have one shape and dtype; the gradient of the other is zero.

    Args:
        condition: a bool without dims.
        settled: 1 or 0 for a branch that is decided whatever the number says.
    """
    if settled != BY_NUMBER:
        condition = torch.full_like(condition, bool(settled))
    return torch.where(condition, if_true, if_false)


@rule(
    BRANCH,
    samples=[
        sample(T((), "bool", 2), T((4, 6)), T((4, 6))),
        sample(T((), "bool", 2), T((4, 1)), T((4, 1)), 1),
        sample(T((), "bool", 2), T((8,)), T((8,)), 0),
    ],
)
def branch_rule(call: Call) -> Rule:
    sizes, inputs, output = elementwise(call)
    linear = (frozenset({1, 2}),) if call.out.is_float else ()
    whole = frozenset(name for name, size in sizes.items() if size == 0)
    return Rule(sizes, inputs, (output,), linear=linear, saves=(0,), whole=whole)


__all__ = ["BRANCH", "BY_NUMBER", "branch"]
