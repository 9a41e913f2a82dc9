"""How far a capture has come: whoever waits for it (:mod:`autopar.progress`) hears the module that is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from autopar.progress import is_heard, tell
from autopar.torch_private import ModuleStackTracer


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Around a trace."""
    call_module = ModuleStackTracer.call_module
    if not is_heard():
        yield
        return

    def telling(tracer: Any, m: Any, *rest: Any) -> Any:
        tell(lambda: str(tracer.path_of_module(m)).removeprefix("_export_root").removeprefix("."))
        return call_module(tracer, m, *rest)

    with mock.patch.object(ModuleStackTracer, "call_module", telling):
        yield


__all__ = ["told"]
