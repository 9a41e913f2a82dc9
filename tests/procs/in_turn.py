"""Functions of a module, called one after the other on each rank of one group of processes: these start once."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import pytest
import torch.distributed as dist

LONG = 1500.0  # seconds for the ranks of a slow test, which may run beside much other work


def marked(names: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Values of a test's parameter, those that only the sweeps try marked as slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


def selected(
    request: pytest.FixtureRequest, calls: Mapping[str, tuple[Any, ...]], slow: Collection[str]
) -> dict[str, tuple[Any, ...]]:
    """The calls without the slow ones of which no test was selected; tests name theirs in a parameter."""
    here = (item for item in request.session.items if item.path == request.path)
    asked = {value for item in here if (spec := getattr(item, "callspec", None)) for value in spec.params.values()}
    return {key: call for key, call in calls.items() if key not in slow or key in asked}


def several(module: str, calls: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """What the calls give, by their keys; a collective after each finds ranks that disagree.

    Args:
        module: of this package.
        calls: names of its functions, and what these are called with.
    """
    functions = vars(importlib.import_module(f"procs.{module}"))
    results = {}
    for key, (name, *args) in calls.items():
        results[key] = functions[name](*args)
        dist.barrier()
    return results


def wrong(run: Callable[[], object], refused: str | None = None) -> str:
    """What is wrong with a case: nothing if it ends well, or if it is refused, in these words, as it should be."""
    try:
        run()
    except (Exception, pytest.fail.Exception) as error:
        expected = refused is not None and re.search(refused, f"{type(error).__name__}: {error}")
        return "" if expected else traceback.format_exc()
    return "" if refused is None else "it is not refused"
