"""Activation checkpointing inside a model: its regions are marked in the trace, and plans run them again.

``torch.utils.checkpoint`` keeps nothing of what is computed in a region but its inputs. A program does the same for a
segment of its operators, so all that has to be known is which operators a region has: a mark stands before the first
and one after the last. Of regions inside each other the outermost counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from autopar.capture.trace.recording import here, now
from autopar.torch_private import CHECKPOINT, TorchDispatchMode
from autopar.words.trees import PyTree


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Mark the operators inside as a region."""
    recording = now()
    if recording is None or not torch.is_grad_enabled():  # without a backward nothing runs again
        yield
        return
    recording.depth += 1
    outermost = recording.depth == 1
    number = recording.regions
    if outermost:
        recording.regions += 1
        torch.ops.autopar.begin(number)
    try:
        yield
    finally:
        recording.depth -= 1
    if outermost:
        torch.ops.autopar.end(number)


@contextlib.contextmanager
def marked_regions() -> Iterator[None]:
    """Let checkpointing of either kind mark its regions."""
    plain = CHECKPOINT.get()

    def generator(
        fn: object, preserve: object = True, context_fn: Any = None, *rest: Any, **kwargs: PyTree
    ) -> Iterator[None]:  # fmt: skip
        if now() is None:
            yield from plain(fn, preserve, context_fn, *rest, **kwargs)
            return
        forward = contextlib.nullcontext() if context_fn is None else context_fn()[0]
        if isinstance(forward, TorchDispatchMode):  # a choice of what to keep: a program keeps nothing
            forward = contextlib.nullcontext()
        with marked(), forward:
            yield

    with CHECKPOINT.replaced(generator):
        yield


def reentrant(function: Any, preserve: Any, *args: PyTree) -> PyTree:
    """Compute ``checkpoint(use_reentrant=True)``: no gradient flows where no tensor argument has one."""
    flows = any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
    with marked():
        outs = function(*args)
    if flows or not torch.is_grad_enabled():
        return outs
    recording = now()
    assert recording is not None
    recording.notes[
        f"torch.utils.checkpoint with use_reentrant=True {here()}: none of its arguments has a gradient, so the "
        "parameters inside get none either, as in eager mode; use use_reentrant=False"
    ] = None
    if isinstance(outs, torch.Tensor):
        return outs.detach()
    return tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in outs) if isinstance(outs, tuple) else outs
