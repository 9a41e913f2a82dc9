"""The kernels of a plan's operators as far as memory depends on them: those of a GPU, and fused ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from autopar.torch_private import HAS_FUSED_RMS_NORM
from autopar.words.trees import Context, PyTree
from hardware_profiles import Cluster, Device, is_gpu


class Kernels(NamedTuple):
    """The kernels that run a plan's operators.

    Attributes:
        gpu: torch's kernels for GPUs; else those for CPUs.
        fused: pointwise operators and norms that follow each other are one kernel
            (:attr:`hardware_profiles.software.Software.fused`).
        norms_only: only those chains that have a norm or a softmax.
        loss_in_place: a cross-entropy keeps one float32 number for each class and needs nothing beside
            (:attr:`hardware_profiles.software.Software.loss_in_place`).
        keeps_gradients: gradients of parameters are there all the time
            (:attr:`hardware_profiles.software.Software.keeps_gradients`).
        buckets_gradients: buckets hold them once more
            (:attr:`hardware_profiles.software.Software.buckets_gradients`).
    """

    gpu: bool = False
    fused: bool = False
    norms_only: bool = False
    loss_in_place: bool = False
    keeps_gradients: bool = False
    buckets_gradients: bool = False


CPU = Kernels()
"""Torch's kernels for CPUs, one operator after the other."""


def kernels_of(cluster: Cluster, device: Device) -> Kernels:
    """Return the kernels of a cluster's devices under the cluster's software.

    Fused ones save what a GPU's save. A profile measured torch as it runs, so nothing is fused there.
    """
    fused = cluster.software.fused and cluster.measured is None and not cluster.abstract
    norms_only = fused and not cluster.software.fuses_pointwise
    keeps = cluster.software.keeps_gradients and not cluster.abstract
    in_place = fused and cluster.software.loss_in_place
    buckets = keeps and cluster.software.buckets_gradients
    return Kernels(fused or is_gpu(device), fused, norms_only, in_place, keeps, buckets)


class _RmsNormOfGpu(torch.autograd.Function):
    """``aten.rms_norm`` as torch's GPU kernel, which saves its input and each row's inverse RMS in float32.

    See ``_fused_rms_norm`` in ATen/native/layer_norm.cpp and cuda/layer_norm_kernel.cu.
    """

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, weight: torch.Tensor | None, n_dims: int) -> torch.Tensor:
        rows = x.new_empty((*x.shape[: x.dim() - n_dims], *[1] * n_dims), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        of_weight = torch.empty_like(weight) if weight is not None and ctx.needs_input_grad[1] else None
        return torch.empty_like(x) if ctx.needs_input_grad[0] else None, of_weight, None


def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    if (weight is not None and weight.dtype != x.dtype) or not prod(x.shape):
        return torch.ops.aten.rms_norm.default(x, shape, weight, eps)  # which torch computes in parts on GPUs, too
    return _RmsNormOfGpu.apply(x, weight, len(shape))


class _LayerNormOfGpu(torch.autograd.Function):
    """``aten.layer_norm`` as torch's GPU kernel, which saves each row's mean and inverse deviation in float32.

    On the CPU they have the format of the input.
    """

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, n_dims: int
    ) -> torch.Tensor:
        rows = (*x.shape[: x.dim() - n_dims], *[1] * n_dims)
        statistics = [x.new_empty(rows, dtype=torch.float32) for _ in range(2)]
        ctx.save_for_backward(x, weight, bias, *statistics)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Context, *gradients: Any) -> Any:
        needed = zip(ctx.saved_tensors[:3], ctx.needs_input_grad, strict=False)
        return *(torch.empty_like(given) if given is not None and grad else None for given, grad in needed), None


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Any:  # fmt: skip
    if x.dtype.itemsize >= torch.float32.itemsize or not prod(x.shape):  # which the CPU keeps alike
        return torch.ops.aten.layer_norm.default(x, shape, weight, bias, eps, cudnn_enable)
    return _LayerNormOfGpu.apply(x, weight, bias, len(shape))


OF_GPU: Mapping[str, Callable[..., Any]] = {
    "aten.layer_norm.default": _layer_norm,
    **({"aten.rms_norm.default": _rms_norm} if HAS_FUSED_RMS_NORM else {}),
}
"""Stand-ins for operators whose kernel for GPUs keeps something else than the CPU's. They give tensors without values.
Older versions of torch compute an RMS norm in parts everywhere."""


class as_on_gpu(TorchFunctionMode):
    """Make operators on tensors without values save in this scope what GPU kernels save."""

    def __torch_function__(self, func: Any, types: Any, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        return OF_GPU.get(str(func), func)(*args, **(kwargs or {}))
