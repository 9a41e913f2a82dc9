"""Plain tensors and DTensors in one operator: a plain tensor is whole, and the same on every rank.

Parameters of a parallel module are DTensors, and its outputs, like all else in a training script, plain tensors that
every rank has whole. Scripts mix the two: ``pm(x) + decay * sum(p.pow(2).sum() for p in pm.parameters())``, a penalty
``w.T @ w - torch.eye(n)``, a copy of the weights that is averaged, a second model that follows this one. torch refuses
that, because its plain tensors may be anything. On the meshes of parallel modules it works here:

* a number beside a plain tensor (``loss + penalty``) is put together, and the sum is plain;
* else the plain tensor counts as a copy on each rank, and the result is a DTensor, or the plain tensor that is written
  to. Its gradient may then be a DTensor, which optimizers take like any other; the program takes it whole.

All ranks must compute the same, as with every operator of DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.runtime.repairs.dtensor_writes import handle_on_whole, run_on_whole, written_through
from autopar.torch_private import (
    DTENSOR_RESULT,
    DTENSOR_STRATEGY,
    PLAIN_BESIDE_DTENSOR,
    DTensorSpec,
    TensorMeta,
    allow_plain_tensors,
    pytree,
)
from autopar.words.trees import PyTree

_meshes: set[DeviceMesh] = set()
"""The meshes of parallel modules."""
_TURNED = "_autopar_gradient_turned"
_ARITHMETIC = ("add", "sub", "mul", "truediv")
_spec_of_plain: Callable[..., Any] = PLAIN_BESIDE_DTENSOR.get()
_result_of: Callable[..., Any] = DTENSOR_RESULT.get()
_strategy_of: Callable[..., Any] = DTENSOR_STRATEGY.get()


def mix_on(device_mesh: DeviceMesh) -> None:
    """Let operators mix plain tensors with DTensors on this mesh from now on."""
    if not _meshes:
        PLAIN_BESIDE_DTENSOR.set(_replicated)
        DTENSOR_RESULT.set(_result)
        DTENSOR_STRATEGY.set(_strategy)
        handle_on_whole(_meshes)
        for name in _ARITHMETIC:
            for method in (f"__{name}__", f"__r{name}__"):  # Python asks a subclass for these first
                setattr(DTensor, method, _beside_plain(getattr(torch.Tensor, method)))
    _meshes.add(device_mesh)
    _allow()


def mixes_on(device_mesh: DeviceMesh) -> bool:
    """Check whether a plain tensor on this mesh counts as replicated."""
    return device_mesh in _meshes


def _allow(_: Any = None) -> None:
    """Make torch's dispatcher call :func:`_replicated` for plain tensors of any size.

    Each thread has a switch of its own, and autograd's threads begin without.
    """
    allow_plain_tensors(True)


def _copies(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Wrap a plain tensor as a replicated DTensor whose gradient comes back replicated."""
    return DTensor.from_local(tensor, mesh, (Replicate(),) * mesh.ndim, run_check=False)


def _beside_plain(operator: Callable[[Any, Any], Any]) -> Callable[[DTensor, Any], Any]:
    """Make an operator between a scalar DTensor and a plain tensor return a plain tensor."""

    def of(mine: DTensor, value: PyTree) -> PyTree:
        if type(value) is torch.Tensor and (mesh := mine.device_mesh) in _meshes:
            if mine.ndim == 0:
                number = mine.full_tensor()
                if number.requires_grad:
                    number.register_hook(_allow)
                return operator(number, value)
            if value.requires_grad:
                value = _copies(value, mesh)
        return operator(mine, value)

    return of


def _replicated(op: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> DTensorSpec:
    """Return the placement of a plain tensor that meets a DTensor.

    Raises:
        RuntimeError: the DTensor is none of a parallel module's, as without one.
    """
    if mesh in _meshes:
        meta = TensorMeta(shape=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype)
        return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
    allow_plain_tensors(False)
    try:
        spec: DTensorSpec = _spec_of_plain(op, tensor, mesh)
    finally:
        _allow()
    return spec


def _result(
    op: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], mesh: DeviceMesh, sharding: Any, results: Any,
    participating: bool, is_inplace: bool, is_out: bool,
) -> Any:  # fmt: skip
    """Wrap the local results of an operator; torch's own wrapper knows no plain tensor that is written to."""
    written = args[0] if is_inplace and args else None
    if is_inplace and args and mesh in _meshes:
        for tensor in written if isinstance(written, list | tuple) else (written,):
            if tensor._is_view() and isinstance(tensor, DTensor):
                written_through(tensor)
    if not isinstance(written, torch.Tensor) or isinstance(written, DTensor) or mesh not in _meshes:
        return _result_of(op, args, kwargs, mesh, sharding, results, participating, is_inplace, is_out)
    for tensor in pytree.tree_leaves((args, kwargs)) if torch.is_grad_enabled() else ():
        if isinstance(tensor, DTensor) and tensor.requires_grad and not hasattr(tensor, _TURNED):
            setattr(tensor, _TURNED, True)
            tensor.register_hook(_turned(mesh))
    return written


def _strategy(op: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], info: Any, try_cache: bool) -> PyTree:
    """Return how an operator is sharded; for one that torch cannot shard, its result on whole tensors."""
    try:
        return _strategy_of(op, args, kwargs, info, try_cache)
    except (NotImplementedError, RuntimeError):
        mesh = info.compute_mesh
        if mesh not in _meshes:
            raise
        return run_on_whole(op, args, kwargs, mesh)


def _turned(mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a hook for a DTensor whose gradient arrives plain from the tensor that it was written to."""

    def turned(grad: torch.Tensor) -> torch.Tensor:
        _allow()
        return grad if isinstance(grad, DTensor) else _copies(grad, mesh)

    return turned
