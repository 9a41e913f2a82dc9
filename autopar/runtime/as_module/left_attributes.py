"""What a forward leaves in attributes (:mod:`~autopar.capture.python.attribute_outputs`), put into a parallel module
and its parts.

It stands there as the model would have it: from one call to the next one that sets it. A pipeline has no outputs of a
training step, and a padded batch has other numbers in the middle of the model than the batch, so there, and where an
attribute holds more than numbers, to read it is an error.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autopar.capture import Captured
from autopar.capture.python.attribute_outputs import Left
from autopar.errors import RunError
from autopar.torch_private import pytree

_NOTHING = object()


def leave(module: Any, values: Sequence[Any], of_step: bool) -> None:
    """Set the attributes after a call.

    Args:
        module: the parallel module.
        values: the program's outputs behind the model's own, whole.
        of_step: it is a microbatch of a step, whose backward is done by the step.
    """
    if not module._autopar_captured.left:
        return
    parts, start = dict(module.named_modules()), 0
    for left in module._autopar_captured.left:
        attributes = parts[left.path].__dict__ if left.path in parts else {}
        if left.plain:
            attributes[left.name] = left.plain[0]
        elif left.spec is None or module._autopar_buckets is not None:
            attributes.pop(left.name, None)
        else:
            leaves = values[start : start + left.spec.num_leaves]
            start += left.spec.num_leaves
            new = pytree.tree_unflatten([x.detach() if of_step else x for x in leaves], left.spec)
            if left.into is None:
                attributes[left.name] = new
            else:
                _fill(_held(attributes, left), left, new)


def _held(attributes: dict[str, Any], left: Left) -> Any:
    """The list or dict that a program fills: the model's own stays as it was."""
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


def is_left(captured: Captured, path: str, name: str) -> bool:
    """Whether forward sets or fills an attribute."""
    return any((left.path, left.name) == (path, name) for left in captured.left)


def filled_by_calls(pm: Any, part: Any, path: str, name: str) -> Any:
    """A list or dict that calls fill, before the first one; None where it is none, or calls do not fill it.

    Args:
        part: at that path.
    """
    for left in pm._autopar_captured.left if pm._autopar_leads is None and pm._autopar_buckets is None else ():
        if (left.path, left.name) == (path, name) and left.into is not None and left.spec is not None:
            return _held(part.__dict__, left)
    return None


def refuse_left(captured: Captured, path: str, name: str) -> None:
    """Refuse to read an attribute that the model's forward sets and the program does not.

    Args:
        path: of the part that is asked for it.

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


def refuse_unseen(pm: Any, method: Any) -> None:
    """Refuse a method that reads what forward sets and the program does not.

    Raises:
        RunError: it names such an attribute.
    """
    code = getattr(inspect.unwrap(method), "__code__", None)
    parts = dict(pm.named_modules())
    for left in pm._autopar_captured.left:
        if code is None or left.name not in code.co_names or left.path not in parts:
            continue
        part = parts[left.path]
        if left.name not in vars(part) and filled_by_calls(pm, part, left.path, left.name) is None:
            refuse_left(pm._autopar_captured, left.path, left.name)


@contextlib.contextmanager
def as_calls_left_it(pm: Any, model: torch.nn.Module) -> Iterator[None]:
    """In here the model's attributes hold what calls of the parallel module have left in them, and not what the model's
    own have; what is put there is the parallel module's.

    Raises:
        RunError: a method, or one that it calls, reads what forward sets and the program does not.
    """
    parts, owners = dict(pm.named_modules()), dict(model.named_modules())
    swapped: list[tuple[Left, Any, Any]] = []
    for left in pm._autopar_captured.left:
        if left.path not in parts or left.path not in owners:
            continue
        attributes = owners[left.path].__dict__
        given = vars(parts[left.path]).get(left.name, _NOTHING)
        before = attributes.get(left.name, _NOTHING)
        if given is not _NOTHING or _is_unread(left):
            swapped.append((left, given, before))
            _put(attributes, left.name, given)
    try:
        yield
    except AttributeError as error:
        for left, given, _ in swapped:
            if given is _NOTHING and left.name == error.name and owners[left.path] is error.obj:
                refuse_left(pm._autopar_captured, left.path, left.name)
        raise
    finally:
        for left, given, before in swapped:
            attributes = owners[left.path].__dict__
            now = attributes.get(left.name, _NOTHING)
            if now is not given and now is not _NOTHING:
                parts[left.path].__dict__[left.name] = now
            _put(attributes, left.name, before)


def _is_unread(left: Left) -> bool:
    """Whether a program leaves nothing in an attribute that forward sets."""
    return left.spec is None and not left.plain


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    attributes.pop(name, None)
    if value is not _NOTHING:
        attributes[name] = value


__all__ = ["as_calls_left_it", "filled_by_calls", "is_left", "leave", "refuse_left", "refuse_unseen"]
