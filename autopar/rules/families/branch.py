"""A branch on a random number: both sides are computed, and the number chooses.

``torch.where`` would say the same; an operator of its own is found again in a graph, so that its side can be settled
(``eval()`` of a model that branches in training only).
"""

from __future__ import annotations

import torch

from autopar.rules.families.pointwise import elementwise
from autopar.rules.notation import Rule
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, rule, sample
from autopar.torch_private import FakeTensor, LocalTensor

BRANCH = "autopar.branch.default"
BY_NUMBER = -1
"""The third argument of a branch that its number decides; 0 and 1 stand for one that always goes the same way."""
_READ = "_autopar_branch_taken"

_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("branch(Tensor condition, Tensor if_true, Tensor if_false, int settled=-1) -> Tensor")


@torch.library.impl(_library, "branch", "CompositeImplicitAutograd")  # type: ignore[untyped-decorator]
@torch.compiler.disable  # a compiled program is broken up here
def branch(
    condition: torch.Tensor, if_true: torch.Tensor, if_false: torch.Tensor, settled: int = BY_NUMBER
) -> torch.Tensor:
    """Copy ``if_true`` or ``if_false``, which have the same shape and dtype.

    The other is not in autograd's graph behind the branch, as in eager mode: no backward runs there, and parameters
    that are read there alone have no gradient, which is something else than zeros for an optimizer with weight decay
    or momentum. Where values are not known (while shapes or types are worked out) it is in the graph, and its gradient
    is zero.

    Args:
        condition: a bool without dims, the same on all ranks.
        settled: 1 or 0 for a branch that is decided whatever the number says.
    """
    taken = bool(settled) if settled != BY_NUMBER else _value(condition)
    if taken is None:
        return torch.where(condition, if_true, if_false)
    return (if_true if taken else if_false).clone()


def _value(condition: torch.Tensor) -> bool | None:
    """Return the value of a condition, read once however many branches it decides; None if it has no value."""
    if condition.is_meta or isinstance(condition, FakeTensor):
        return None
    answer: bool | None = getattr(condition, _READ, None)
    if answer is None:
        whole = next(iter(condition._local_tensors.values())) if isinstance(condition, LocalTensor) else condition
        answer = bool(whole)
        setattr(condition, _READ, answer)
    return answer


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
    return Rule(sizes, inputs, (output,), linear=linear, saves=(), whole=whole)
