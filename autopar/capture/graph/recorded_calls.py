"""Calls of user functions and hooks in a trace: from what was recorded (:mod:`autopar.capture.trace.recording`) to the
arguments of a node of the graph."""

from __future__ import annotations

from typing import Any

from autopar.capture.trace.recording import HOOK, Recording


def recorded_call(recording: Recording, name: str, args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """The function that was called, and its arguments.

    Args:
        name: of the operator in the trace that stands for the call.
        args: of that operator: tensors (one, for a hook) and the number of the call.
    """
    callee = recording.calls[args[1]]
    tensors = iter([args[0]] if name == HOOK else args[0])
    objects = dict(callee.objects)
    values = recording.leaves[args[1]]
    leaves = [
        f"<{_text(objects[k])}>" if k in objects else next(tensors) if is_tensor else value
        for k, (is_tensor, value) in enumerate(values)
    ]  # fmt: skip
    return callee, [*leaves, *(next(tensors) for _ in callee.reads)]


def _text(value: Any) -> str:
    """What stands for a value that has no text of its own."""
    return getattr(value, "__qualname__", None) or type(value).__qualname__


__all__ = ["recorded_call"]
