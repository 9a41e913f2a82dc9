"""The inputs of a model by the names that train.py gives them, and a call with them."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.planner.layouts.pricing import names_with_rows
from autopar.targets.target import Export
from autopar.torch_private import pytree


def named_inputs(export: Export) -> dict[str, Any]:
    """Return the example inputs by the names that train.py gives them: positional ones are ``arg_0``, ``arg_1``."""
    return {**{f"arg_{k}": value for k, value in enumerate(export.loaded.args)}, **export.loaded.kwargs}


def names_in_graph(export: Export, name: str) -> tuple[str, ...]:
    """Return what a graph may call an input of :func:`named_inputs`: as forward does, or by its position."""
    if not name.startswith("arg_"):
        return (name,)
    number = int(name.removeprefix("arg_"))
    positional = [p.name for p in inspect.signature(export.loaded.model.forward).parameters.values()]
    return (f"args_{number}", *positional[number : number + 1])


def inputs_with_rows(export: Export) -> list[str]:
    """Return the names of the inputs that have the rows of the batch, which must be their first dim."""
    with_rows = names_with_rows(export.priced.captured.graph, export.rows // export.microbatches)
    found = []
    for name, value in named_inputs(export).items():
        known = names_in_graph(export, name)
        starts = tuple(f"{n}{end}" for n in known for end in ".[_")
        if not any(n in known or n.startswith(starts) for n in with_rows):
            continue
        if not isinstance(value, torch.Tensor) or value.shape[:1] != (export.rows,):
            raise PlanError(
                f"fsdp2: input '{known[-1]}' has the {export.rows} rows of the batch in another dim than its first; "
                "give the model inputs with rows first"
            )
        found.append(name)
    if not found:
        raise PlanError(f"fsdp2: no input has the {export.rows} rows of the batch; give inputs with rows first")
    return found


def microbatch_of_rank(export: Export) -> dict[str, Any]:
    """Return the shapes of one rank's microbatch, on the meta device."""
    found = {}
    with_rows = inputs_with_rows(export)
    for name, value in named_inputs(export).items():
        if isinstance(value, torch.Tensor):
            value = value.to("meta")
            value = value[: export.rows_of_rank] if name in with_rows else value
        found[name] = value
    return found


def loss_position(export: Export) -> int:
    """Return the position of the loss among the leaves of the model's output."""
    loss = export.priced.captured.graph.loss
    assert loss is not None
    return loss


def caller(position: int) -> Any:
    """Return a function that gives the loss of a model for inputs by name."""

    def call(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        args = [inputs[name] for name in inputs if name.startswith("arg_")]
        output = model(*args, **{name: value for name, value in inputs.items() if not name.startswith("arg_")})
        loss = getattr(output, "loss", output)
        return loss if isinstance(loss, torch.Tensor) else pytree.tree_leaves(output)[position]

    return call
