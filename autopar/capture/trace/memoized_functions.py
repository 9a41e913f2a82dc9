"""Functions that remember their results: what they remember of a trace is no tensor for anybody else.

``functools.lru_cache`` around a table of positions is usual. Called while a trace runs it keeps the trace's tensor, and
gives it to the next trace, or to the model itself in eager mode.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

_MEMO: Any = type(functools.lru_cache(lambda: None))


def _memos(model: torch.nn.Module) -> list[Any]:
    """Return the memoized functions among the methods of the model's modules and in the files of their classes."""
    memos: dict[int, Any] = {}
    seen: set[int] = set()

    def look(value: object) -> None:
        while value is not None and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, _MEMO):
                memos[id(value)] = value
            elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
                look(value.__func__)
            elif isinstance(value, property):
                look(value.fget)
            for cell in getattr(value, "__closure__", None) or () if isinstance(value, types.FunctionType) else ():
                with contextlib.suppress(ValueError):  # not yet given
                    if isinstance(cell.cell_contents, (_MEMO, types.FunctionType)):
                        look(cell.cell_contents)
            value = getattr(value, "__wrapped__", None) if isinstance(value, types.FunctionType) else None

    for kind in {cls for module in model.modules() for cls in type(module).__mro__}:
        if kind.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for value in [*vars(kind).values(), *vars(sys.modules.get(kind.__module__, types)).values()]:
            look(value)
    return list(memos.values())


@contextlib.contextmanager
def memos_forgotten(model: torch.nn.Module) -> Iterator[None]:
    """Let memoized functions that are computed anew inside forget their results."""
    misses_before = [(memo, memo.cache_info().misses) for memo in _memos(model)]
    try:
        yield
    finally:
        for memo, misses in misses_before:
            if memo.cache_info().misses != misses:
                memo.cache_clear()
