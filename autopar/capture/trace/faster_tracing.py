"""Shortcuts that make a trace cheaper and change nothing in it.

A trace looks at thousands of tensors, and each look at a shape passes through every function mode that is on, ours
among them, though none has anything to say where ``torch.export`` itself looks. It writes Python code for every graph
on its way, which nobody runs. Of every node it describes all of some hundred calls that led to it, to keep those
outside of torch. And the collector of garbage walks through all objects of torch again and again, while hardly any of
those that a trace makes are garbage.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from types import CodeType
from typing import Any
from unittest import mock

import torch
import torch.fx.experimental.proxy_tensor

from autopar.capture.trace.patches import Function
from autopar.capture.untraceable_modules import check_operators
from autopar.torch_private import EXPORT_INSIDE, TRACEBACK_OF_NODES, DisableTorchFunction, lazy_graph_modules
from autopar.words.trees import PyTree


def _without_modes(function: Function) -> Function:
    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        with DisableTorchFunction():
            return function(*args, **kwargs)

    return run


def _without_lines(function: Function) -> Function:
    """Skip reading the stack above a model's call for each parameter: no line of the user's makes an input."""

    def run(tracer: object, *args: PyTree, **kwargs: PyTree) -> PyTree:
        with unstacked(tracer):
            return function(tracer, *args, **kwargs)

    return run


@contextlib.contextmanager
def unstacked(tracer: Any) -> Iterator[None]:
    """Let a tracer make nodes that do not say which line made them."""
    before = tracer.record_stack_traces
    tracer.record_stack_traces = False
    try:
        yield
    finally:
        tracer.record_stack_traces = before


class _CapturedCalls:
    """A ``CapturedTraceback`` that describes a line once, not for each node."""

    def __init__(self) -> None:
        self._described: dict[tuple[int, int], tuple[CodeType, traceback.FrameSummary]] = {}
        self._nodes = 0

    def extract(self) -> _CapturedCalls:
        """Return the calls that are open when :meth:`summary` is called."""
        return self

    def summary(self) -> traceback.StackSummary:
        """Return the open calls, the outermost first."""
        self._nodes += 1
        check_operators(self._nodes)  # a loop that is traced turn by turn may have no end
        calls = []
        frame = sys._getframe(1)
        while frame is not None:
            code, line = frame.f_code, frame.f_lineno
            described = self._described.get((id(code), line))
            if described is None:  # the code is kept: as long as it lives, no other has its id
                described = code, traceback.FrameSummary(code.co_filename, line, code.co_name)
                self._described[id(code), line] = described
            calls.append(described[1])
            frame = frame.f_back  # type: ignore[assignment]
        return traceback.StackSummary(reversed(calls))


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Leave out work of ``torch.export`` inside."""
    with contextlib.ExitStack() as stack:
        for inside in EXPORT_INSIDE:
            stack.enter_context(inside.replaced(_without_modes(inside.get())))
        inputs = torch.fx.Tracer.create_args_for_root
        stack.enter_context(mock.patch.object(torch.fx.Tracer, "create_args_for_root", _without_lines(inputs)))
        stack.enter_context(TRACEBACK_OF_NODES.replaced(_CapturedCalls()))
        stack.enter_context(lazy_graph_modules(True))
        yield
