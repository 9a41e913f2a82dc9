"""Which output is the loss; and a loss that trains nothing is an error, with the place where its gradient ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from autopar.errors import CaptureError
from autopar.torch_private import pytree
from autopar.words.graph import Graph, Node, Ref

LOSS = "loss"
"""What a model calls the output that is to be trained, where it gives several scalars."""


def output_names(out_spec: pytree.TreeSpec) -> list[str]:
    """Return the name of each output: keys, fields and positions from the top, joined by dots."""
    names = [""] * out_spec.num_leaves

    def walk(value: object, path: str) -> None:
        parts: Sequence[tuple[Any, Any]]
        if isinstance(value, Mapping):
            parts = list(value.items())
        elif is_dataclass(value) and not isinstance(value, type):
            parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
        elif isinstance(value, (tuple, list)):
            parts = list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
        else:
            if isinstance(value, int):
                names[value] = path
            return
        for key, part in parts:
            walk(part, f"{path}.{key}" if path else str(key))

    walk(pytree.tree_unflatten(range(out_spec.num_leaves), out_spec), "")
    return names


def the_loss(scalars: Sequence[int], out_spec: pytree.TreeSpec) -> int | None:
    """Return the position of the loss among scalar outputs with a gradient: the one of that name, or the first."""
    names = output_names(out_spec) if len(scalars) > 1 else []
    return next((i for i in scalars if names and names[i] == LOSS), scalars[0] if scalars else None)


def other_losses(graph: Graph, out_spec: pytree.TreeSpec) -> list[str]:
    """Return the names of several scalar outputs with a gradient of which none is called the loss; else none."""
    scalars = [
        i for i, out in enumerate(graph.outputs[: out_spec.num_leaves])
        if isinstance(out, Ref) and graph.nodes[out.node].needs_grad and graph.spec(out).shape == ()
    ]  # fmt: skip
    if len(scalars) < 2:
        return []
    names = [output_names(out_spec)[i] for i in scalars]
    return [] if LOSS in names else names


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
    branches = _branches(graph)
    if end is None:
        why = "it depends on no parameter that requires a gradient"
    elif end.target == "aten.detach.default":
        why = f"its gradient ends in '{end.module or '<model>'}'" + (f" at {end.source}" if end.source else "")
        why += ", by detach(), .data or a region without gradients"
    else:
        why = f"{end.where} has no gradient"
    do = (
        "compute the loss from what depends on the parameters, or capture the model in eval mode if it is not to be "
        "trained"
    )
    if branches and (end is None or end.target != "aten.detach.default"):
        why += f" on the way of this batch, which branches on data {branches}"
        do = (
            "give an example that enters what depends on the parameters (tokens for an expert, rows that a mask "
            "selects), or compute both sides and choose with torch.where"
        )
    raise CaptureError(
        f"the loss of {called} does not require a gradient, though the model has parameters that do: {why}\n  {do}"
    )


def _branches(graph: Graph) -> str:
    """Return the places where a model branches on data, and the answers of the example."""
    places = dict.fromkeys(
        f"in '{node.module or '<model>'}'{f' at {node.source}' if node.source else ''}: the condition is "
        f"{node.kwargs['answer']}" for node in graph.ways if not {"fault", "pinned"} & node.kwargs.keys()
    )  # fmt: skip
    return "; ".join([*places][:4]) + ("; ..." if len(places) > 4 else "")


def _where_it_ends(graph: Graph, out: Ref) -> Node | None:
    """Return the last operator on the way to a value that reads something with a gradient."""
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
