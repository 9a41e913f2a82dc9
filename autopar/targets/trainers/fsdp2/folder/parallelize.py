"""How the model is spread over devices: decisions, then the code that applies them. Edit the tables."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

# --- decisions ---
MESH = {"pipeline": 1, "replicate": 1, "shard": 1, "tensor": 1}
BATCH: dict[str, Any] = {"rows": 8, "sequence": None, "microbatches": 1, "inputs": []}
FULLY_SHARD: dict[str, Any] = {"modules": [], "zero": 0}
CHECKPOINT: list[str] = []
PRECISION: dict[str, Any] = {}
TENSOR: dict[str, Any] = {}
PIPELINE: dict[str, Any] = {}
# --- code ---

Call = Callable[[nn.Module, dict[str, Any]], torch.Tensor]
"""What gives the loss of a model for inputs by name."""


class Trainer:
    """A model on all ranks, ready to train.

    Attributes:
        model: what this rank has of it; its parameters are what an optimizer steps on.
        rank: the number of this process.
        mesh: the mesh of all processes, pipeline outermost and tensor innermost; None on one device.
    """

    def __init__(
        self, model: nn.Module, call: Call, example: dict[str, Any], device: torch.device, mixed: bool = True
    ) -> None:
        """Spread a model.

        Args:
            model: the whole model with the same weights in every process.
            call: gives its loss for inputs by name.
            example: the batch of a step, for its shapes.
            device: of this process.
            mixed: follow PRECISION; else parameters keep their formats.
        """
        self.call, self.device = call, device
        self.mesh: DeviceMesh | None = None
        self.data: DeviceMesh | None = None
        self.schedule: Any = None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        world, wanted = int(os.environ.get("WORLD_SIZE", "1")), functools.reduce(int.__mul__, MESH.values())
        if world == 1:
            self.model = model.to(device)
            checkpoint_modules(self.model)
            return
        if world != wanted:
            raise SystemExit(f"MESH in parallelize.py is for {wanted} processes, torchrun started {world}")
        self.mesh = init_device_mesh(device.type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
        self.data = self.mesh["replicate", "shard"]._flatten("data") if self.data_ranks > 1 else None
        stages = [model]
        if PIPELINE:
            import pipeline

            blocks = [path for path, _ in matching(model, FULLY_SHARD["modules"])]
            dtype = getattr(torch, PRECISION["compute"]) if mixed and "compute" in PRECISION else None
            one = microbatch(example, 0, 0)
            stages = pipeline.stages_of(
                model, call, one, self.mesh["pipeline"], PIPELINE, blocks, BATCH["inputs"], dtype
            )  # fmt: skip
        for stage in stages:
            self._spread(stage, mixed)
        self.model = nn.ModuleList(stages) if PIPELINE else model
        if PIPELINE:
            self.schedule = pipeline.Schedule(stages, self.mesh, device, BATCH["microbatches"], PIPELINE)

    @property
    def data_ranks(self) -> int:
        """The number of ranks over which the rows of a microbatch are cut."""
        return MESH["replicate"] * MESH["shard"]

    def _spread(self, model: nn.Module, mixed: bool) -> None:
        """Apply tensor parallelism, recomputation and sharding to the model or to a stage of it, in this order."""
        assert self.mesh is not None
        inner = getattr(model, "whole", model)  # a stage holds the whole model, the modules of other stages absent
        if self.data is not None:
            batch_norms_over(model, self.data)
        if MESH["tensor"] > 1:
            import tensor_parallel

            tensor_parallel.apply(inner, self.mesh["tensor"], TENSOR)
        checkpoint_modules(inner)
        shard_parameters([*(module for _, module in matching(inner, FULLY_SHARD["modules"])), model], self.mesh, mixed)
        model.to(self.device)  # buffers

    def forward_backward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Run a step's microbatches forward and backward, and return the loss of the whole batch.

        Every microbatch and every rank has equally many rows, so that the mean of their losses, and of their
        gradients, is that of the whole batch.
        """
        count = BATCH["microbatches"]
        part = 0 if self.mesh is None or self.data is None else self.data.get_local_rank()
        parts = [moved(microbatch(batch, k, part), self.device) for k in range(count)]
        total = torch.zeros((), device=self.device)
        scope = loss_scope()
        if self.schedule is not None:
            with scope:
                total = self.schedule.step(parts).to(self.device)
            return self._mean(total)
        for k, inputs in enumerate(parts):
            if isinstance(self.model, FSDPModule):
                last = k == count - 1
                self.model.set_requires_gradient_sync(last or FULLY_SHARD["zero"] == 3)
                self.model.set_reshard_after_backward(last or FULLY_SHARD["zero"] == 3)
            with scope:
                loss = self.call(self.model, inputs) / count
                loss.backward()
            total = total + loss.detach()
        return self._mean(total)

    def _mean(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the mean over data ranks; ranks without the last stage have a loss of zero."""
        if self.mesh is None:
            return loss
        loss = loss.to(torch.float64)
        dist.all_reduce(loss)
        return loss / (self.data_ranks * MESH["tensor"])


def microbatch(batch: dict[str, Any], number: int, part: int) -> dict[str, Any]:
    """Return one microbatch of a step's batch, and of it the rows of one data rank."""
    parts = MESH["replicate"] * MESH["shard"] if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 1
    cut = {}
    for name, value in batch.items():
        if name in BATCH["inputs"]:
            value = value.chunk(BATCH["microbatches"])[number].chunk(parts)[part]
        cut[name] = value
    return cut


def moved(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return inputs on a device."""
    return {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}


def loss_scope() -> Any:
    """Return the context in which losses of logits that are cut by vocabulary are computed."""
    if MESH["tensor"] > 1 and TENSOR.get("loss_parallel") and dist.is_initialized():
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()
    return contextlib.nullcontext()


def matching(model: nn.Module, patterns: list[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules with parameters whose paths match a pattern, part by part: ``layers.*.mlp``."""
    wanted = [pattern.split(".") for pattern in patterns]
    found = []
    for path, module in model.named_modules():
        names = path.split(".")
        fits = any(len(p) == len(names) and all(map(fnmatchcase, names, p)) for p in wanted)
        if fits and any(True for _ in module.parameters()):
            found.append((path, module))
    return found


def checkpoint_modules(model: nn.Module) -> None:
    """Recompute the modules of CHECKPOINT in the backward instead of keeping their activations."""
    for _, module in matching(model, CHECKPOINT):
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def shard_parameters(modules: list[nn.Module], mesh: DeviceMesh, mixed: bool) -> None:
    """Shard parameters, gradients and optimizer state, or replicate them: a group for each block, one for the rest.

    ``modules`` are the blocks, and last the model, or the stage, that holds them.

    With ``"zero": 0`` every rank has all parameters, and gradients are all-reduced over ``replicate``. With 1 they are
    gathered once a step, and gradients reduced once a step. With 3 both happen for every use.
    """
    zero = FULLY_SHARD["zero"]
    policy = MixedPrecisionPolicy()
    if mixed and PRECISION:
        compute, reduce = (getattr(torch, PRECISION[name]) if name in PRECISION else None for name in ("compute", "reduce"))
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    over = mesh["shard"] if MESH["replicate"] == 1 else mesh["replicate", "shard"]
    for module in modules:
        fully_shard(module, mesh=over, reshard_after_forward=zero == 3, mp_policy=policy)


def batch_norms_over(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let batch norms in training take the statistics of all ranks' rows, as one device does."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.forward = functools.partial(batch_norm, module, mesh.get_group())


def batch_norm(norm: Any, group: dist.ProcessGroup, x: torch.Tensor) -> torch.Tensor:
    """Return the batch norm of ``x`` [rows, channels, ...] with the statistics of the rows of all ranks."""
    if not norm.training:
        return type(norm).forward(norm, x)
    from torch.distributed.nn.functional import all_reduce

    dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
    ranks = dist.get_world_size(group)
    mean = all_reduce(x.mean(dims), group=group) / ranks
    centred = x - mean.view(shape)
    variance = all_reduce(centred.square().mean(dims), group=group) / ranks
    if norm.track_running_stats:
        count = x.numel() // x.shape[1] * ranks
        norm.num_batches_tracked += 1
        share = norm.momentum if norm.momentum is not None else 1 / norm.num_batches_tracked.item()
        with torch.no_grad():
            norm.running_mean.lerp_(mean.detach().to(norm.running_mean), share)
            norm.running_var.lerp_(variance.detach().to(norm.running_var) * count / max(count - 1, 1), share)
    y = centred * torch.rsqrt(variance + norm.eps).view(shape)
    return y if norm.weight is None else y * norm.weight.view(shape) + norm.bias.view(shape)
