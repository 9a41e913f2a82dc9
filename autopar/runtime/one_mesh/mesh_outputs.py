"""What a call of a program on one mesh gives: the model's outputs, whole, in pieces, or a rank's own rows of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from autopar.runtime.as_module.left_attributes import leave
from autopar.runtime.batches.outputs import IN_SHARDS, unread, with_pending
from autopar.runtime.parameters.state import as_dtensor
from autopar.runtime.variants.module_calls import batch_rows
from autopar.torch_private import pytree


def outputs_of(module: Any, flat: tuple[Any, ...], call: int, of_step: bool) -> Any:
    """Return the structure that the model gives, from the program's flat outputs.

    Args:
        module: the :class:`~autopar.runtime.one_mesh.executor.MeshRun`.
        call: its number.
        of_step: it is a microbatch of a step, of which nothing but the loss is read.
    """
    graph, plan = module.captured.graph, module.stage.plan
    results: list[Any] = []
    local_batch = None if of_step else module.local_batch
    rows = batch_rows(module.captured) if local_batch is not None else 0
    for i, (value, state) in enumerate(zip(flat, plan.outputs, strict=True)):
        if state is None or not isinstance(value, torch.Tensor):
            results.append(value)
            continue
        value = with_pending(value, state, module.device_mesh)
        if local_batch is not None and (shape := graph.spec(graph.outputs[i]).shape) and shape[0] == rows:
            results.append(local_batch.of_output(value, state, shape))
            continue
        if any(not p.is_replicated and n > 1 for p, (_, n) in zip(state, plan.mesh, strict=True)):
            shape = graph.spec(graph.outputs[i]).shape
            if module.meeting is None or i in module.given.pins.outputs:
                value = as_dtensor(value, state, shape, module.device_mesh)
            else:
                meet = partial(module.meeting.meet, "reads", f"output {i} of call {call}", IN_SHARDS)
                value = unread(value, state, shape, module.device_mesh, meet)
        results.append(value)
    n_outputs = module.captured.out_spec.num_leaves
    leave(module, results[n_outputs:], of_step)
    return pytree.tree_unflatten(results[:n_outputs], module.captured.out_spec)
