"""What a forward leaves in attributes of its modules, left by calls of the program.

Captures find it (:mod:`~autopar.capture.python.attribute_outputs`). An attribute holds it from one call to the next one
that sets it. A pipeline has no outputs of a training step, and a padded batch has other numbers in the middle of the
model than the batch, so there, and where an attribute holds more than numbers, to read it is an error.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autopar.capture import Captured
from autopar.capture.python.attribute_outputs import Left
from autopar.errors import RunError
from autopar.runtime.variants.run import ParallelRun
from autopar.torch_private import pytree
from autopar.words.trees import PyTree


def leave(run: ParallelRun, values: Sequence[PyTree], of_step: bool) -> None:
    """Set the attributes after a call.

    Args:
        run: has run the call.
        values: the program's outputs behind the model's own, whole.
        of_step: it is a microbatch of a step, whose backward is done by the step.
    """
    if not run.captured.left:
        return
    parts, start = dict(run.module.named_modules()), 0
    for left in run.captured.left:
        attributes = parts[left.path].__dict__ if left.path in parts else {}
        if left.plain:
            attributes[left.name] = left.plain[0]
        elif left.spec is None or run.buckets is not None:
            attributes.pop(left.name, None)
        else:
            leaves = values[start : start + left.spec.num_leaves]
            start += left.spec.num_leaves
            new = pytree.tree_unflatten([x.detach() if of_step else x for x in leaves], left.spec)
            if left.into is None:
                attributes[left.name] = new
            else:
                _fill(_held(attributes, left), left, new)


def begin(run: ParallelRun) -> None:
    """Clear attributes from before ``parallelize`` that calls of the program would have set."""
    parts = dict(run.module.named_modules())
    for left in run.captured.left:
        if left.path not in parts or left.plain:
            continue
        attributes = parts[left.path].__dict__
        if left.name in attributes:
            run.user.hidden[left.path, left.name] = attributes.pop(left.name)
        if left.into is not None and left.spec is not None and run.leads is None and run.buckets is None:
            _held(attributes, left)


def _held(attributes: dict[str, Any], left: Left) -> Any:
    """Return the list or dict that a program fills: one of before ``parallelize`` stays as it was."""
    if type(attributes.get(left.name)) is not type(left.into):
        tensors = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(left.into))
        attributes[left.name] = type(left.into)() if tensors else copy.copy(left.into)  # type: ignore[misc]
    return attributes[left.name]


def _fill(container: Any, left: Left, new: Any) -> None:
    if left.appends:
        container.extend(new)
    elif isinstance(container, list):
        container[:] = new
    else:
        container.clear()
        container.update(new)


def refuse_left(captured: Captured, path: str, name: str) -> None:
    """Refuse to read an attribute that the model's forward sets and the program does not.

    Args:
        captured: has what forward sets.
        path: the path of the module that is asked for it.
        name: the name of the attribute.

    Raises:
        RunError: it is one.
    """
    for left in captured.left:
        if (left.path, left.name) == (path, name) and not left.plain:
            raise RunError(
                f"forward sets the attribute {left.label} of the model, and the program of a parallel module does not: "
                "it would be that of a call before parallelize\n  return it from forward, or compute it from what "
                "forward returns. Tensors of no dims, such as a loss, can be read after a call of a module on one mesh "
                "without buckets"
            )


@contextlib.contextmanager
def refusing_what_is_left(run: ParallelRun) -> Iterator[None]:
    """Refuse a method of the model that reads what forward sets and the program does not.

    Raises:
        RunError: it names such an attribute.
    """
    try:
        yield
    except AttributeError as error:
        for each in run.user.modules:
            if each.module is error.obj and error.name is not None:
                refuse_left(run.captured, each.path, error.name)
        raise
