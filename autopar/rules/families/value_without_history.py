"""One tensor's values with another's history: what a write that autograd does not see leaves behind.

``h.detach().mul_(2)`` and ``with torch.no_grad(): h.mul_(2)`` change the values of ``h``, and its gradient goes on as
if they had not. ``h + (new - h).detach()`` would say the same of finite numbers only.
"""

from __future__ import annotations

import torch

from autopar.rules.families.pointwise import elementwise
from autopar.rules.notation import Rule
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, rule, sample

WITH_VALUE = "autopar.with_value.default"

_library = torch.library.Library("autopar", "FRAGMENT")
_library.define("with_value(Tensor value, Tensor history) -> Tensor")


@torch.library.impl(_library, "with_value", "CompositeImplicitAutograd")  # type: ignore[untyped-decorator]
def with_value(value: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """Return ``value`` with the gradient of ``history``; both have the same shape and dtype."""
    out = history.clone()
    with torch.no_grad():
        out.copy_(value)
    return out


@rule(WITH_VALUE, samples=[sample(T((4, 6), grad=False), T((4, 6))), sample(T((4, 1), grad=False), T((4, 1)))])
def with_value_rule(call: Call) -> Rule:
    sizes, inputs, output = elementwise(call)
    return Rule(sizes, inputs, (output,), linear=(frozenset({0, 1}),))
