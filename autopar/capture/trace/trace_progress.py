"""The progress of a capture: whoever waits (:mod:`autopar.progress`) is notified of the module that is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from autopar.progress import is_heard, tell
from autopar.torch_private import ModuleStackTracer


@contextlib.contextmanager
def progress_reported() -> Iterator[None]:
    """Tell the path of each module that is called, around a trace.

    Whether somebody listens, and how long ago something was reported, changes nothing of the trace.
    """
    call_module = ModuleStackTracer.call_module
    if not is_heard():
        yield
        return

    def telling(tracer: Any, m: Any, *rest: Any) -> Any:
        tell(lambda: _path(tracer, m))
        return call_module(tracer, m, *rest)

    with mock.patch.object(ModuleStackTracer, "call_module", telling):
        yield


def _path(tracer: Any, module: Any) -> str:
    """Return the path of a module, or the name of its class if it is no submodule of what is traced.

    The paths are looked up in the tracer's tables: its ``path_of_module`` raises an error for a module that is no
    submodule, which torch takes for one of the module around it.
    """
    path = tracer.proxy_paths.get(module)
    path = tracer.submodule_paths.get(module, type(module).__name__) if path is None else path
    return str(path).removeprefix("_export_root").removeprefix(".")
