"""autopar: an automatic parallelization planner and compiler for PyTorch.

>>> pm = autopar.parallelize(model, 2, (x, y))      # in every rank of torchrun --nproc-per-node 2
>>> optimizer = torch.optim.AdamW(pm.parameters())
>>> loss = pm(x, y); loss.backward(); optimizer.step()
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from autopar.errors import (
    AutoparError,
    CaptureError,
    ClusterError,
    InfeasibleError,
    MeshError,
    PlanError,
    RuleError,
    RunError,
)

if TYPE_CHECKING:
    from autopar.api import capture, parallelize, plan
    from autopar.plan import Plan
    from autopar.rules.function import function_rule
    from autopar.runtime.checkpoint import full_state_dict, load_full_state_dict
    from autopar.runtime.executor import ParallelModule
    from autopar.runtime.launch import run_local

_WHERE = {
    "parallelize": "autopar.api", "plan": "autopar.api", "capture": "autopar.api", "Plan": "autopar.plan",
    "ParallelModule": "autopar.runtime.executor", "full_state_dict": "autopar.runtime.checkpoint",
    "load_full_state_dict": "autopar.runtime.checkpoint", "run_local": "autopar.runtime.launch",
    "function_rule": "autopar.rules.function",
}  # fmt: skip


def _load(name: str) -> Any:
    return getattr(importlib.import_module(_WHERE[name]), name)


class _Package(types.ModuleType):
    """Loads names when they are first asked for: the command line starts without torch.

    ``plan`` and ``capture`` are functions here although modules have these names too: importing those modules does not
    change what ``autopar.plan`` is.
    """

    plan = property(lambda self: _load("plan"), lambda self, module: None)
    capture = property(lambda self: _load("capture"), lambda self, module: None)

    def __getattr__(self, name: str) -> Any:
        if name in _WHERE:
            return _load(name)
        raise AttributeError(f"module 'autopar' has no attribute '{name}'")


if not TYPE_CHECKING:
    sys.modules[__name__].__class__ = _Package

__all__ = [
    "AutoparError", "CaptureError", "ClusterError", "InfeasibleError", "MeshError", "ParallelModule", "Plan",
    "PlanError", "RuleError", "RunError", "capture", "full_state_dict", "function_rule", "load_full_state_dict",
    "parallelize", "plan", "run_local",
]  # fmt: skip
