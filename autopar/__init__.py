"""autopar: an automatic parallelization planner and compiler for PyTorch.

>>> pm = autopar.parallelize(model, 2, (x, y))      # in every rank of torchrun --nproc-per-node 2
>>> optimizer = torch.optim.AdamW(pm.parameters())
>>> loss = pm(x, y); loss.backward(); optimizer.step()

The stages, in the order in which a model passes through:

=================== ===================================================================================================
:mod:`.frontends`   where models come from, for the command; a script brings its own
:mod:`.capture`     a module becomes a graph
:mod:`.comparison`  whether that graph does what the model does in eager mode, in parts and padded too; and whether
                    programs have the numbers of one device
:mod:`.rules`       how each operator may be cut: notation and lowerings
:mod:`.planner`     the search: cuts, memory and what runs again (``intra_op``), stages and schedule (``inter_op``)
:mod:`.certificate` what a plan claims, recounted
:mod:`.lower`       graph and plan become a program
:mod:`.runtime`     programs with parameters, on ranks: collectives, gradients, pipelines, checkpoints
=================== ===================================================================================================

What they hand to each other, which knows none of them:

============== ========================================================================================================
:mod:`.words`  graphs, meshes, placements, formats of numbers
:mod:`.plans`  plans, what may be asked of them, clusters
:mod:`.errors` what users can cause
============== ========================================================================================================

What people use, around them:

===================== =================================================================================================
:mod:`.plan_calls`    the calls of a script that need no ranks; :mod:`.api`: the one that does;
                      :mod:`.parallelizing`: what that does, step by step
:mod:`.cli`           the command; :mod:`.mcp_server`: its answers as tools of agents
:mod:`.planfile`      plans as files; :mod:`.report`: as tables and pages; :mod:`.launching`: as jobs on a cluster
:mod:`.targets`       plans as files of other trainers, and their files priced
:mod:`.serving`       plans for serving a model; :mod:`.inference`: models that generate on several ranks
:mod:`.integrations`  training loops of transformers and accelerate
:mod:`.elastic`       ranks that are started again when one dies
:mod:`.profiling`     a machine, and the load of experts, measured
:mod:`.torch_private` private names of torch; :mod:`.allocations`: bytes that live; :mod:`.progress`: what long work
                      tells; :mod:`.garbage_collection`: garbage
===================== =================================================================================================

Beside it: ``cost_models`` (seconds of operators and collectives, schedules and their simulation) and
``hardware_profiles`` (devices and links).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from multiprocessing.util import Finalize, register_after_fork
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
    from autopar.api import parallelize
    from autopar.plan_calls import capture, layouts, plan
    from autopar.plans.plan import Plan
    from autopar.rules.function import function_rule
    from autopar.runtime.as_module.parallel_module import ParallelModule
    from autopar.runtime.checkpoints.full_state_dict import full_state_dict, load_full_state_dict
    from autopar.runtime.checkpoints.optimizer_state_dict import (
        full_optimizer_state_dict,
        load_full_optimizer_state_dict,
    )
    from autopar.runtime.checkpoints.safetensors_folder import load_safetensors, save_safetensors
    from autopar.runtime.checkpoints.saving import save
    from autopar.runtime.checkpoints.sharded_checkpoint import Checkpoint
    from autopar.runtime.one_mesh.cuda_graphs import GraphedStep
    from autopar.runtime.ranks.launch import run_local
    from autopar.runtime.repairs.step_trial import whole_matrix_step
    from autopar.words.precision import Precision

__version__ = "0.2.0"

_WHERE = {
    "parallelize": "autopar.api", "plan": "autopar.plan_calls", "capture": "autopar.plan_calls",
    "layouts": "autopar.plan_calls", "Plan": "autopar.plans.plan",
    "ParallelModule": "autopar.runtime.as_module.parallel_module",
    "full_state_dict": "autopar.runtime.checkpoints.full_state_dict",
    "load_full_state_dict": "autopar.runtime.checkpoints.full_state_dict", "run_local": "autopar.runtime.ranks.launch",
    "function_rule": "autopar.rules.function", "Checkpoint": "autopar.runtime.checkpoints.sharded_checkpoint",
    "GraphedStep": "autopar.runtime.one_mesh.cuda_graphs", "Precision": "autopar.words.precision",
    "save": "autopar.runtime.checkpoints.saving",
    "full_optimizer_state_dict": "autopar.runtime.checkpoints.optimizer_state_dict",
    "load_full_optimizer_state_dict": "autopar.runtime.checkpoints.optimizer_state_dict",
    "load_safetensors": "autopar.runtime.checkpoints.safetensors_folder",
    "save_safetensors": "autopar.runtime.checkpoints.safetensors_folder",
    "whole_matrix_step": "autopar.runtime.repairs.step_trial",
}  # fmt: skip

_MODULES = ("elastic", "errors", "integrations", "planfile")
"""Modules with public names of their own."""


def _load(name: str) -> Any:
    return getattr(importlib.import_module(_WHERE[name]), name)


def _is_rank() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_available() and distributed.is_initialized())


def _say_end() -> None:
    """Report a rank that ends before its ``parallelize``, where the others would wait for it."""
    if _is_rank():
        with contextlib.suppress(Exception):
            importlib.import_module("autopar.runtime.ranks.ended").say_unmet()


def _say_at_exit(_: object = None) -> None:
    """Register the report at exit, except in processes that a rank has forked, such as data loader workers."""
    if not _is_rank():
        Finalize(None, _say_end, exitpriority=0)


def _separate_attempts() -> None:
    """Separate the store entries of each attempt of torchrun, from ``init_process_group`` on."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "RANK" in os.environ:
        importlib.import_module("autopar.runtime.ranks.attempts").separate_attempts()
        importlib.import_module("autopar.runtime.ranks.agent_messages").tell_of_refusal()


_say_at_exit()
register_after_fork(_say_end, _say_at_exit)  # a forked process clears finalizers registered before the fork


class _Package(types.ModuleType):
    """A package that loads its names on first use, so that the command line starts without torch.

    ``capture`` is a function here although a package has this name too: importing that does not change what
    ``autopar.capture`` is.
    """

    capture = property(lambda _: _load("capture"), lambda _, _module: None)

    def __dir__(self) -> list[str]:
        own = (name for name in vars(self) if name.startswith("__"))
        return sorted({*own, *__all__, *_MODULES})

    def __getattr__(self, name: str) -> Any:
        if name in _WHERE:
            return _load(name)
        if name in _MODULES:
            return importlib.import_module(f"autopar.{name}")
        raise AttributeError(f"module 'autopar' has no attribute '{name}'")


if not TYPE_CHECKING:
    sys.modules[__name__].__class__ = _Package

_separate_attempts()

__all__ = [
    "AutoparError", "CaptureError", "Checkpoint", "ClusterError", "GraphedStep", "InfeasibleError", "MeshError",
    "ParallelModule", "Plan", "PlanError", "Precision", "RuleError", "RunError", "capture", "full_optimizer_state_dict",
    "full_state_dict", "function_rule", "layouts", "load_full_optimizer_state_dict", "load_full_state_dict",
    "load_safetensors",
    "parallelize", "plan", "run_local", "save", "save_safetensors", "whole_matrix_step",
]  # fmt: skip
