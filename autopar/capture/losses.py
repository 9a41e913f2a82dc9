"""A loss that trains nothing is an error, with the place where its gradient ends."""

from __future__ import annotations

import torch

from autopar.errors import CaptureError
from autopar.graph import Graph, Node, Ref


def check_loss(graph: Graph, module: torch.nn.Module, of_loss_fn: bool) -> None:
    """Refuse a model that is to be trained and whose loss has no gradient.

    A model in eval mode without a loss function may give any scalar; so may one in training mode that also gives
    something with a gradient, of which the caller makes a loss.

    Raises:
        CaptureError: there are parameters that require a gradient, and a scalar of floats, but no output that has one.
    """
    if not (of_loss_fn or module.training) or not any(p.requires_grad for p in module.parameters()):
        return
    outs = [out for out in graph.outputs if isinstance(out, Ref)]
    if any(graph.nodes[out.node].needs_grad and graph.spec(out).is_float for out in outs):
        return
    scalars = [out for out in outs if graph.spec(out).shape == () and (of_loss_fn or graph.spec(out).is_float)]
    if not scalars:
        return
    called = getattr(module, "_called", type(module).__name__)
    end = _where_it_ends(graph, scalars[0])
    if end is None:
        why = "it depends on no parameter that requires a gradient"
    elif end.target == "aten.detach.default":
        why = f"its gradient ends in '{end.module or '<model>'}'" + (f" at {end.source}" if end.source else "")
        why += ", by detach(), .data or a region without gradients"
    else:
        why = f"{end.where} has no gradient"
    raise CaptureError(
        f"the loss of {called} does not require a gradient, though the model has parameters that do: {why}\n  compute "
        "the loss from what depends on the parameters, or capture the model in eval mode if it is not to be trained"
    )


def _where_it_ends(graph: Graph, out: Ref) -> Node | None:
    """The last operator on the way to a value that reads something with a gradient."""
    todo = [out.node]
    seen: set[int] = set()
    while todo:
        i = max(todo)
        todo.remove(i)
        node = graph.nodes[i]
        if any(graph.nodes[r.node].needs_grad for r in node.refs):
            return node
        todo.extend({r.node for r in node.refs} - seen)
        seen.update(r.node for r in node.refs)
    return None


__all__ = ["check_loss"]
