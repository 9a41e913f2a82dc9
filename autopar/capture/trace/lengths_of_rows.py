"""``len(rows)`` while a model is traced, of rows whose number depends on data.

``if len(rows) == 0: continue`` asks for what ``rows.numel() == 0`` asks for, but Python's ``len`` must know the number.
While a model is traced the files that its modules come from see another ``len``, which gives ``rows.shape[0]``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sized
from typing import Any

import torch

_LIBRARIES = ("torch", "transformers", "builtins")


@contextlib.contextmanager
def lengths_of_rows(module: torch.nn.Module) -> Iterator[None]:
    """The files of the module's parts ask for lengths so; those that have a ``len`` of their own keep it."""
    files = {cls.__module__ for part in module.modules() for cls in type(part).__mro__}
    users = [vars(sys.modules[f]) for f in files if f.partition(".")[0] not in _LIBRARIES and f in sys.modules]
    changed = [names for names in users if "len" not in names]
    for names in changed:
        names["len"] = _length
    try:
        yield
    finally:
        for names in changed:
            names.pop("len", None)


def _length(x: Sized) -> Any:
    if isinstance(x, torch.Tensor) and x.dim() and isinstance(x.shape[0], torch.SymInt):
        return x.shape[0]
    return len(x)


__all__ = ["lengths_of_rows"]
