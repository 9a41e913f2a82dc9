"""How far a capture has come: whoever waits for it hears the module that is traced, ten times a second at most."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from unittest import mock

from autopar.torch_private import ModuleStackTracer

Say = Callable[[str], None]

_SAY: ContextVar[Say | None] = ContextVar("say", default=None)
_SECONDS = 0.1


@contextlib.contextmanager
def heard(say: Say) -> Iterator[None]:
    """Captures in here tell ``say`` the path of the module that they trace."""
    token = _SAY.set(say)
    try:
        yield
    finally:
        _SAY.reset(token)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Around a trace."""
    say, call_module = _SAY.get(), ModuleStackTracer.call_module
    if say is None:
        yield
        return
    last = 0.0

    def telling(tracer: Any, m: Any, *rest: Any) -> Any:
        nonlocal last
        now = time.monotonic()
        if now - last > _SECONDS:
            last = now
            say(str(tracer.path_of_module(m)).removeprefix("_export_root").removeprefix("."))
        return call_module(tracer, m, *rest)

    with mock.patch.object(ModuleStackTracer, "call_module", telling):
        yield


__all__ = ["heard", "told"]
