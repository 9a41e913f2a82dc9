"""Calls of a module: the captured call's leaves, however the call is spelled."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar.capture import Captured
from autopar.errors import RunError
from autopar.torch_private import pytree
from autopar.words.trees import PyTree


def flatten_call(
    captured: Captured, signature: inspect.Signature, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> list[Any]:
    """List the leaves of a call, in the order of the captured one.

    Args:
        signature: the signature of the model's forward; by it keywords may stand for positions.

    Raises:
        RunError: the call has another structure.
    """
    leaves = leaves_of(captured, signature, args, kwargs)
    if leaves is not None:
        return leaves
    example_args, example_kwargs = pytree.tree_unflatten(example_leaves(captured)[0], captured.in_spec)
    raise RunError(
        "the call does not have the structure of the example inputs\n"
        f"  captured: {call_text(example_args, example_kwargs)}\n  called:   {call_text(args, kwargs)}\n"
        "  call it as the model was captured, or parallelize again with these inputs"
    )


def leaves_of(
    captured: Captured, signature: inspect.Signature, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> list[Any] | None:
    """List the leaves as :func:`flatten_call` does; None if the call has another structure."""
    spec = captured.in_spec
    leaves, have = pytree.tree_flatten((args, dict(kwargs)))
    if have == spec:
        return leaves
    example_args, example_kwargs = pytree.tree_unflatten(example_leaves(captured)[0], spec)
    try:  # the same call spelled otherwise: keywords for positions, another order of keywords
        bound = signature.bind(*args, **kwargs)
        bound_example = signature.bind(*example_args, **example_kwargs)
    except TypeError:
        bound = bound_example = None  # type: ignore[assignment]
    if bound is not None and bound_example is not None and set(bound.arguments) == set(bound_example.arguments):
        by_name = dict(bound.arguments)
        by_name.update(by_name.pop("kwargs", {}) if isinstance(by_name.get("kwargs"), dict) else {})
        names = list(bound_example.arguments)
        if all(k in by_name for k in example_kwargs) and len(example_args) <= len(names):
            positional = tuple(by_name[n] for n in names[: len(example_args)])
            leaves, have = pytree.tree_flatten((positional, {k: by_name[k] for k in example_kwargs}))
            if have == spec:
                return leaves
    return None


def example_leaves(captured: Captured) -> tuple[list[Any], pytree.TreeSpec]:
    """List example leaves without values: literals, and the spec of each tensor as text."""
    leaves: list[PyTree] = []
    for i, number in enumerate(captured.inputs):
        if i in captured.literals:
            leaves.append(captured.literals[i])
        else:
            leaves.append(None if number is None else Shown(str(captured.graph.nodes[number].out)))
    return leaves, captured.in_spec


class Shown(str):
    """Text that stands for a tensor."""

    def __repr__(self) -> str:
        return str(self)


def leaf_name(path: Sequence[Any]) -> str:
    """Return the name of a leaf of a call, such as ``args[0]``, for messages."""
    kind, *rest = path
    text = pytree.keystr(tuple(rest))
    is_args = getattr(kind, "idx", 0) == 0
    if not is_args and rest:
        return f"'{rest[0].key}'" + pytree.keystr(tuple(rest[1:]))
    return f"args{text}"


def describe(value: PyTree) -> str:
    """Describe a value for messages."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}"


def call_text(args: PyTree, kwargs: Mapping[str, PyTree]) -> str:
    """Describe a call in a few words, such as ``(float32[8 12], labels=int64[8])``."""

    def show(value: PyTree) -> str:
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}[{' '.join(map(str, value.shape))}]"
        if isinstance(value, (tuple, list)):
            return "(" + ", ".join(map(show, value)) + ")"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
        return repr(value)

    return "(" + ", ".join([*map(show, args), *(f"{k}={show(v)}" for k, v in kwargs.items())]) + ")"


@contextlib.contextmanager
def without_inference_mode() -> Iterator[None]:
    """Use no-gradient mode in place of torch's inference mode.

    What outlives a call, such as gathered parameters or a program that is captured for it, is used for training, too.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
