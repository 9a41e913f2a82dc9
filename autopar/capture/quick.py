"""What makes a trace cheaper and changes nothing in it.

A trace looks at thousands of tensors, and each look at a shape passes through every function mode that is on, ours
among them, though none has anything to say where ``torch.export`` itself looks. It writes Python code for every graph
on its way, which nobody runs. And the collector of garbage walks through all objects of torch again and again, while
hardly any of those that a trace makes are garbage.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.export._trace
import torch.fx.experimental.proxy_tensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module

_ITS_OWN = (
    (torch.fx.experimental.proxy_tensor, "track_tensor_tree"),
    (torch.export._trace, "_fakify_params_buffers"),
    (torch.export._trace, "_produce_aten_artifact"),
)
"""Functions of torch's tracing that run no code of the model."""


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Around a call of ``torch.export``."""
    with contextlib.ExitStack() as stack:
        for where, name in _ITS_OWN:
            stack.enter_context(mock.patch.object(where, name, _without_modes(getattr(where, name))))
        stack.enter_context(_use_lazy_graph_module(True))
        yield


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No search for garbage inside."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


__all__ = ["quickly", "uncollected"]
