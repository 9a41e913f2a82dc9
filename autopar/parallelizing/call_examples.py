"""Example inputs of a call, as scripts give them: one tensor, positional arguments, keyword arguments, targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.capture import on_meta
from autopar.capture.dataclass_nodes import know_dataclasses
from autopar.errors import AutoparError
from autopar.runtime.parameters.init import is_meta
from autopar.torch_private import pytree
from autopar.words.trees import PyTree


def split_inputs(
    inputs: Any, example_kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Return example inputs as ``(args, kwargs)``: a tuple of args, a dict of kwargs, or one tensor.

    Args:
        example_kwargs: keyword arguments beside positional ones.
    """
    kwargs = dict(example_kwargs or {})
    know_dataclasses((inputs, kwargs))
    if isinstance(inputs, torch.Tensor):
        return (inputs,), kwargs
    if isinstance(inputs, Mapping):
        if example_kwargs is not None:
            raise AutoparError(
                f"example inputs are a dict of {len(inputs)} keyword arguments, and example_kwargs has {len(kwargs)} "
                "more; give one dict, or positional arguments as a tuple beside example_kwargs"
            )
        if not all(isinstance(key, str) for key in inputs):
            raise AutoparError("example inputs are a dict, but its keys are not all names of arguments")
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), kwargs
    raise AutoparError(
        f"example inputs must be a tensor, a tuple of positional arguments or a dict of keyword arguments, got "
        f"{type(inputs).__name__}"
    )


def split_example(
    inputs: Any, example_kwargs: Mapping[str, Any] | None, targets: Any
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Return ``(args, kwargs, targets)`` of an example."""
    return *split_inputs(inputs, example_kwargs), (targets,) if isinstance(targets, torch.Tensor) else tuple(targets)


def example_of(
    model: torch.nn.Module, inputs: Any, example_kwargs: Mapping[str, Any] | None, targets: Sequence[PyTree]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Return ``(args, kwargs, targets)``, on the meta device if the model is there."""
    args, kwargs = split_inputs(inputs, example_kwargs)
    example = args, kwargs, (targets,) if isinstance(targets, torch.Tensor) else tuple(targets)
    if isinstance(model, torch.nn.Module) and is_meta(model):
        example = pytree.tree_map_only(torch.Tensor, on_meta, example)
    return example
