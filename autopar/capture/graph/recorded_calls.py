"""Calls of user functions and hooks in a trace, as arguments of nodes (:mod:`autopar.capture.trace.recording`)."""

from __future__ import annotations

from autopar.capture.trace.recording import HOOK, Recording
from autopar.rules.function import Callee
from autopar.words.trees import PyTree


def recorded_call(recording: Recording, name: str, args: tuple[PyTree, ...]) -> tuple[Callee, list[object]]:
    """Return the function that was called, and its arguments.

    Args:
        recording: the recording of the trace.
        name: the name of the operator in the trace that stands for the call.
        args: the arguments of that operator: tensors (one, for a hook) and the number of the call.
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


def _text(value: object) -> str:
    """Return a text for a value that has none of its own."""
    return getattr(value, "__qualname__", None) or type(value).__qualname__
