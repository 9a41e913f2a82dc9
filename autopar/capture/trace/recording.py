"""The record of the trace under way, and operators for what torch's cannot express.

Calls of a user's own code, hooks and the ends of a checkpointed region are operators of autopar's in the traced program
(``autopar::function`` and so on) with a number; what the number stands for is in the :class:`Recording` of the trace.
They are operators like others to ``torch.export``, so nothing between tracing and
:mod:`autopar.capture.graph.building` needs to know of them.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import PythonKeyTracer, get_proxy_mode

from autopar.capture.trace.decisions import Attempt
from autopar.errors import CaptureError
from autopar.rules.function import Callee

FUNCTION, HOOK, DATA, ASSIGN, BEGIN, END = (
    f"autopar.{n}.default" for n in ("function", "hook", "data", "assign", "begin", "end")
)

Answer = Callable[[int, str], bool]
"""The answer to the question of a number, asked at a site, whether a random number is true."""


@dataclass
class Recording:
    """One trace: what it is given, and what it met.

    Attributes:
        module: the module that is traced.
        attempt: the attempt with the decisions that the trace follows.
        answer: what questions about random numbers are answered.
        asked: number of such questions so far.
        questions: number of questions about data so far, by site.
        in_forward: the model's own code runs right now.
        contexts: the contexts that handlers need around the trace.
        outputs_checked: are given what the forward returned, and refuse what no program can return.
        calls: the code of ``autopar::function`` and ``autopar::hook``, by number.
        made: shape, strides and dtype of what each call gives.
        leaves: the leaves of each call's arguments: ``(True, None)`` for a tensor, or ``(False, value)``.
        regions: how many regions the model runs under activation checkpointing.
        depth: the depth of nested regions that the trace is in.
        notes: warnings to give after the trace, each once.
        kept: parameters that were used without their name, by way of a list or a global.
        asked_rows: names of numbers of rows (``u0``) for which a branch asked whether they are none, and the names of
            the nodes that the trace had made last when it was first asked, the last one first.
    """

    module: torch.nn.Module
    attempt: Attempt
    answer: Answer = lambda _number, _site: False
    asked: int = 0
    questions: Counter[str] = field(default_factory=Counter)
    in_forward: bool = False
    contexts: list[contextlib.AbstractContextManager[None]] = field(default_factory=list)
    outputs_checked: list[Callable[[Any], None]] = field(default_factory=list)
    calls: list[Callee] = field(default_factory=list)
    made: list[list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]] = field(default_factory=list)
    leaves: list[list[tuple[bool, Any]]] = field(default_factory=list)
    regions: int = 0
    depth: int = 0
    notes: dict[str, None] = field(default_factory=dict)
    kept: list[torch.nn.Parameter] = field(default_factory=list)
    asked_rows: dict[str, list[str]] = field(default_factory=dict)

    def call(self, callee: Callee, leaves: Sequence[object], results: Sequence[torch.Tensor]) -> int:
        """Return a number for a call."""
        self.calls.append(callee)
        self.made.append([(tuple(x.shape), x.stride(), x.dtype) for x in results])
        tensors = [isinstance(x, torch.Tensor) for x in leaves]
        self.leaves.append([(t, None if t else x) for t, x in zip(tensors, leaves, strict=True)])
        return len(self.calls) - 1

    def would_answer(self, answers: Sequence[tuple[str, bool]]) -> bool:
        """Check that random questions at the sites in `answers`, asked now in order, would be answered so."""
        return all(self.answer(self.asked + i, site) == answer for i, (site, answer) in enumerate(answers))

    def tell(self) -> None:
        """Warn of what was noted."""
        for note in self.notes:
            warnings.warn(note, stacklevel=4)


_NOW: ContextVar[Recording | None] = ContextVar("recording", default=None)


def under_way() -> Recording | None:
    """Return the recording of the trace under way; None outside a trace."""
    return _NOW.get()


def now() -> Recording | None:
    """Return the same, but None in code of the trace that is not recorded, too."""
    return _NOW.get() if get_proxy_mode() is not None else None


@contextlib.contextmanager
def recording(record: Recording) -> Iterator[None]:
    """Make a recording that of the trace under way."""
    token = _NOW.set(record)
    try:
        yield
    finally:
        _NOW.reset(token)


@contextlib.contextmanager
def parameters_noted(record: Recording) -> Iterator[None]:
    """Note the parameters that a trace takes for constants, which torch then forgets: those in a list or a global."""
    create_arg = PythonKeyTracer.create_arg

    def noting(tracer: Any, a: Any) -> Any:
        if isinstance(a, torch.nn.Parameter):
            record.kept.append(a)
        return create_arg(tracer, a)

    with mock.patch.object(PythonKeyTracer, "create_arg", noting):
        yield


def here() -> str:
    """Return the place of the trace for messages: ``in 'layers.0' at file.py:12``."""
    frame: FrameType | None = sys._getframe(1)
    source = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and "/autopar/" not in file and not file.startswith("<"):
            source = f" at {file.rsplit('/', 1)[-1]}:{frame.f_lineno}"
            break
        frame = frame.f_back
    mode = get_proxy_mode()
    stack = getattr(mode.tracer, "module_stack", None) if mode is not None else None
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    for root in ("L['self']", "_export_root"):
        path = path.replace(f"{root}.", "").replace(root, "")
    return f"in '{path or '<model>'}'{source}"


def refuse(what: str, do: str) -> CaptureError:
    """Return the error for what a program cannot do, with its place."""
    return CaptureError(f"cannot capture {what} {here()}\n  {do}")


# --- the operators ---------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("autopar", "DEF")
_LIBRARY.define("function(Tensor[] xs, int number) -> Tensor[]")
_LIBRARY.define("hook(Tensor x, int number) -> Tensor")
_LIBRARY.define("data(Tensor(a) x) -> Tensor(a)")
_LIBRARY.define("assign(Tensor(a!) x, Tensor value) -> ()")
_LIBRARY.define("begin(int number) -> ()")
_LIBRARY.define("end(int number) -> ()")


def _function(xs: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    recording = under_way()
    assert recording is not None
    return [
        torch.empty_strided(shape, stride, dtype=dtype, device=xs[0].device)
        for shape, stride, dtype in recording.made[number]
    ]


torch.library.register_fake("autopar::function", _function, lib=_LIBRARY)
torch.library.register_fake("autopar::hook", lambda x, _number: torch.empty_like(x), lib=_LIBRARY)
torch.library.impl("autopar::data", "CompositeImplicitAutograd", lambda x: x.detach(), lib=_LIBRARY)
torch.library.register_fake("autopar::assign", lambda *_: None, lib=_LIBRARY)
torch.fx.node.has_side_effect(torch.ops.autopar.assign.default)
for _name in ("begin", "end"):
    torch.library.register_fake(f"autopar::{_name}", lambda *_: None, lib=_LIBRARY)
    torch.fx.node.has_side_effect(getattr(torch.ops.autopar, _name).default)
# outputs require grad where inputs do, as the model's code may ask; nobody runs this backward
torch.library.register_autograd("autopar::function", lambda _ctx, *_grads: (None, None), lib=_LIBRARY)
torch.library.register_autograd("autopar::hook", lambda _ctx, grad: (grad, None), lib=_LIBRARY)
