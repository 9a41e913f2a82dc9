"""A training step in microbatches on one mesh: gradients add up, and are reduced in the last one.

Each loss counts by its part of what the loss of the batch is the mean of (:mod:`.loss_counts`): of its rows, which are
as many in every microbatch, or of the labels that count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.autocasting import without_autocast
from autopar.runtime.batch_statistics import tell_of_statistics
from autopar.runtime.direct import stand_ins
from autopar.runtime.loss_counts import Count, Shares, shares_by_count
from autopar.runtime.own_rows import Call
from autopar.runtime.state import as_dtensor
from autopar.torch_private import pytree


def backwards(pm: Any, calls: Sequence[Call], shares: Shares, number: int) -> torch.Tensor:
    """Forward and backward of every microbatch; the parameters have their gradients then.

    A microbatch in which nothing counts has a loss that is no number, and no gradient: it only runs forward, for
    whatever a forward changes.

    Args:
        pm: the module; it runs the program of these calls.
        calls: of the microbatches.
        shares: of their losses in that of the batch.
        number: of the loss among the model's outputs.

    Returns:
        The loss of the batch, a tensor of shape [] and of the loss's dtype.
    """
    stage = pm.stage
    if not pm.told_of_statistics:
        pm.told_of_statistics = tell_of_statistics([stage.graph], len(calls), stacklevel=4)
    gradients = stage.gradients
    stage.bind()
    counting = [i for i in range(len(calls)) if isinstance(shares, torch.Tensor) or shares[i] != 0.0]
    total: torch.Tensor | None = None
    try:
        with stand_ins(stage.param_slots, stage.template) if stage.direct else contextlib.nullcontext():
            for i, (positional, by_name) in enumerate(calls):
                gradients.defer, gradients.accumulating = i < counting[-1], counting[0] < i <= counting[-1]
                loss = pytree.tree_leaves(pm.run_call(positional, by_name, of_step=True))[number]
                if i not in counting:
                    continue
                if len(calls) > 1:
                    share = shares[i]
                    loss = loss * (share.to(loss.dtype) if isinstance(share, torch.Tensor) else share)
                with without_autocast():
                    loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
    except BaseException:
        gradients.drop()
        raise
    finally:
        gradients.defer = gradients.accumulating = False
    assert total is not None
    return total


def shares_of_calls(pm: Any, calls: Sequence[Call]) -> Shares:
    """By what part each microbatch counts in the loss of the batch."""
    of_rows = [1 / len(calls)] * len(calls)
    count: Count | None = pm.count if len(calls) > 1 else None
    if count is None:
        return of_rows
    counts = torch.stack([count(_whole_inputs(pm, count, *call)) for call in calls])
    shares = shares_by_count([count], counts, torch.full_like(counts, of_rows[0]))
    if shares is None:
        return of_rows
    return shares.tolist() if shares.device.type == "cpu" else shares


def _whole_inputs(pm: Any, count: Count, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs from which the count of a microbatch follows, whole: ranks may be called with their pieces."""
    tensors = pm.batch_of(args, kwargs)
    whole = {}
    for name, shape in count.inputs.items():
        leaf = tensors[name].detach()
        if not isinstance(leaf, DTensor) and tuple(leaf.shape) != shape:
            leaf = as_dtensor(leaf, pm.stage.inputs[name].state, shape, pm.device_mesh)
        whole[name] = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    return whole


__all__ = ["backwards", "shares_of_calls"]
