"""Functions of torch that take the parameters of one rank for all of the model's, which they are not on a pipeline.

``torch.nn.utils.clip_grad_norm_`` is refused. A rank holds the gradients of its own stages, so the norm that torch
computes from them would be that of these stages, another one on every group of ranks: gradients would be scaled apart
without a word. The sum over all stages needs every rank, and torch's function does nothing on a rank whose stages have
no gradients; ``ParallelModule.clip_grad_norm_`` does it. All of torch's functions get their norm from one, so that is
what is wrapped, however they were imported. Only gradients on the mesh of a stage, or none at all, are looked for; all
others go to torch as they came.

``torch.distributed.checkpoint`` writes the options of an optimizer's groups, and the names in them, once for all ranks,
unless they are flat, by name of parameter. Of a pipeline they are always flat: else only one rank could load them.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.torch_private import STATE_DICT_OPTIONS, TOTAL_NORM
from autopar.words.trees import PyTree

NOTHING = (
    "torch's norm of gradients, as of clip_grad_norm_, was called for parameters none of which has a gradient, so "
    "nothing is clipped: if they are those of a model that was parallelized, pass the parallel module's parameters()"
)
_said: set[str] = set()
_meshes: dict[int, weakref.ref[DeviceMesh]] = {}


def refuse_norms_on(mesh: DeviceMesh) -> None:
    """Make torch's norm of gradients on ``mesh``, one of several of a pipeline, raise from now on."""
    key = id(mesh)
    _meshes[key] = weakref.ref(mesh, lambda _: _meshes.pop(key, None))
    _wrap()


def watch_norms() -> None:
    """Warn once, from now on, when torch's norm gets no gradients at all.

    A model that was parallelized has none (``clip_grad_norm_(model.parameters(), 1.0)``), so nothing would be
    clipped.
    """
    _wrap()


def flat_optimizer_states() -> None:
    """Make torch's state dicts of optimizers of pipelines flat from now on."""
    real: Any = STATE_DICT_OPTIONS.get()
    if hasattr(real, "_flat_for"):
        return

    @functools.wraps(real)
    def verify(model: torch.nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        bound = inspect.signature(real).bind(model, *args, **kwargs)
        if getattr(model.__dict__.get("_autopar"), "leads", None) is not None:
            options = bound.arguments.get("options") or dsd.StateDictOptions()
            bound.arguments["options"] = replace(options, flatten_optimizer_state_dict=True)
        return real(*bound.args, **bound.kwargs)

    verify._flat_for = True  # type: ignore[attr-defined]
    STATE_DICT_OPTIONS.set(verify)


def of_a_stage(tensor: Any) -> bool:
    """Check whether a tensor is a DTensor on the mesh of one of several stages."""
    if not isinstance(tensor, DTensor):
        return False
    stage_mesh = _meshes.get(id(tensor.device_mesh))
    return stage_mesh is not None and stage_mesh() is tensor.device_mesh


def _wrap() -> None:
    """Put the refusal into torch's function itself, of which scripts may hold references from before."""
    total_norm: Any = TOTAL_NORM.get()
    if hasattr(total_norm, "_refuses_stages"):
        return
    inner = dict(zip(total_norm.__code__.co_freevars, total_norm.__closure__ or (), strict=True)).get("func")
    if inner is not None:
        inner.cell_contents = _refusing(inner.cell_contents)
        total_norm._refuses_stages = True
    else:
        torch.nn.utils.get_total_norm = _refusing(total_norm)
        TOTAL_NORM.set(torch.nn.utils.get_total_norm)


def _refusing(real: Any) -> Any:
    @functools.wraps(real)
    def total_norm(tensors: Iterable[torch.Tensor] | torch.Tensor, *args: PyTree, **kwargs: PyTree) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not tensors and NOTHING not in _said and not _meshes:
            _said.add(NOTHING)
            warnings.warn(NOTHING, stacklevel=4)
        if any(map(of_a_stage, tensors)):
            raise RunError(
                "torch's norm of the gradients of a pipeline would be that of this rank's stages alone, another one on "
                "every rank; call pm.clip_grad_norm_(max_norm) on all ranks, which counts all stages"
            )
        return real(tensors, *args, **kwargs)

    total_norm._refuses_stages = True  # type: ignore[attr-defined]
    return total_norm
