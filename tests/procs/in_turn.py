"""Functions of a module, called one after the other on each rank of one group of processes: these start once."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


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
