"""Aliasing of a call's result with its inputs, by the operator's schema."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from autopar.rules.local_calls import resolve
from autopar.rules.operator_call import Call, In
from autopar.torch_private import OpOverload, has_kernel, pytree
from autopar.words.trees import PyTree

_known: dict[Any, bool] = {}


def may_alias(call: Call) -> bool:
    """Check whether an output of the call may share storage with a tensor input; true if unknown."""
    of_every_call = _by_schema(call.target)
    if of_every_call is not None:
        return of_every_call
    op = resolve(call.target)
    key = call.target, repr(call.args), repr(sorted(call.kwargs.items())), call.ins
    if key not in _known:
        _known[key] = _shares(op, call)
    return _known[key]


@cache
def _by_schema(target: str) -> bool | None:
    """Answer :func:`may_alias` for every call of an operator; None if it depends on the call."""
    try:
        op = resolve(target)
    except Exception:
        return True
    if not isinstance(op, OpOverload):
        return True
    if any(out.alias_info is not None for out in op._schema.returns):
        return True
    return None if has_kernel(op.name(), "CompositeImplicitAutograd") else False  # torch's tests hold kernels to it


def _shares(op: Any, call: Call) -> bool:
    tensors = [torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for s in call.ins]

    def fill(value: PyTree) -> PyTree:
        if isinstance(value, In):
            return tensors[value.position]
        if isinstance(value, (tuple, list)):
            return type(value)(fill(v) for v in value)
        return value

    try:
        with torch.no_grad():
            results = op(*map(fill, call.args), **{name: fill(value) for name, value in call.kwargs.items()})
    except Exception:
        return True
    storages = {t.untyped_storage()._cdata for t in tensors}
    outs = pytree.tree_leaves(results)
    return any(isinstance(t, torch.Tensor) and t.untyped_storage()._cdata in storages for t in outs)
