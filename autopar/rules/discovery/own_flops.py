"""Floating point operations of an operator without a written rule."""

from __future__ import annotations

from math import prod

import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.rules.discovery.safe_calls import REFUSALS, moved
from autopar.rules.local_calls import resolve
from autopar.rules.notation import Rule
from autopar.rules.operator_call import Call
from autopar.rules.proving.proof import invoke


def flops_of(call: Call, rule: Rule) -> float:
    """Return forward floating-point operations per element of the product of all factors, as a rule has them.

    As torch counts them on tensors without values; one for every element of the largest tensor where it counts none.
    """
    elements = max((spec.n_elements for spec in (*call.ins, *(o for o in call.outs if o is not None))), default=0)
    return max(_counted(call), float(elements)) / max(prod(rule.sizes.values()), 1)


def _counted(call: Call) -> float:
    tensors = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in call.ins]
    kwargs = {name: moved(value) for name, value in call.kwargs.items()}
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            invoke(resolve(call.target), moved(call.args), kwargs, tensors)
    except REFUSALS:
        return 0.0
    return float(counter.get_total_flops())
