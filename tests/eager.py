"""The model itself, trained: what plans are compared with."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.capture import Captured
from autopar.comparison.program_vs_eager import SGD, Trained, input_name
from autopar.torch_private import pytree


def train_eager(
    captured: Captured, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], steps: int = 2
) -> Trained:
    """Two steps of SGD of the model itself, on a copy."""
    model = copy.deepcopy(model)
    names = [node.target for _, node in captured.graph.of_kind("param")]
    params = dict(model.named_parameters(remove_duplicate=False))
    trained = [params[n] for n in names if params[n].requires_grad]
    optimizer = torch.optim.SGD(trained or [torch.zeros(())], **SGD)
    losses, first = [], {}
    given, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    given = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in given]
    args, kwargs = pytree.tree_unflatten(given, spec)
    for step in range(steps):
        optimizer.zero_grad()
        out = model(*args, **kwargs)
        loss = pytree.tree_leaves(out)[captured.graph.loss or 0]
        loss.backward()
        losses.append(loss.detach())
        if step == 0:
            first = {n: g.detach().clone() for n in names if (g := params[n].grad) is not None}
            for node, x in zip(captured.inputs, given, strict=True):
                if node is not None and x.grad is not None:
                    first[input_name(captured.graph.nodes[node].target)] = x.grad.detach().clone()
        optimizer.step()
    buffers_now = dict(model.named_buffers(remove_duplicate=False))
    buffers = {n.target: buffers_now[n.target] for _, n in captured.graph.of_kind("buffer") if n.target in buffers_now}
    return Trained(losses, first, {n: params[n].detach() for n in names}, buffers)
