"""How the model is spread over devices: decisions, then the code that applies them. Edit the tables."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
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


class ParallelTraining:
    """A model on all ranks, ready to train.

    Attributes:
        model: what this rank has of it; its parameters are what an optimizer steps on.
        rank: the number of this process.
        draws: tells processes apart that draw random numbers of their own; those of ``tensor`` draw the same.
        part: which of the parts into which data ranks cut the rows of a microbatch is this process's.
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
        self.device = device
        self.given_call = call
        self.batch_loss = LossOfBatch()
        self.mesh: DeviceMesh | None = None
        self.schedule: Any = None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.part = self.draws = 0
        world, wanted = int(os.environ.get("WORLD_SIZE", "1")), functools.reduce(int.__mul__, MESH.values())
        if world == 1:
            self.model = model.to(device)
            checkpoint_modules(self.model)
            if mixed and PRECISION.get("compute") != PRECISION.get("parameters"):
                dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # for FSDP2's formats
                blocks = [module for _, module in matching(model, FULLY_SHARD["modules"])]
                shard_parameters(
                    [*blocks, model], init_device_mesh(device.type, (1,), mesh_dim_names=("shard",)), mixed
                )
            return
        if world != wanted:
            raise SystemExit(
                f"MESH in parallelize.py is for {wanted} processes, torchrun started {world}: start {wanted}, or "
                f"export a plan for {world} devices"
            )
        self.mesh = init_device_mesh(device.type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
        self.part = self.mesh.get_local_rank("replicate") * MESH["shard"] + self.mesh.get_local_rank("shard")
        self.draws = self.part + self.data_ranks * self.mesh.get_local_rank("pipeline")
        stages = [model]
        if PIPELINE:
            stages = self._stages(model, example, mixed)
        for stage in stages:
            self._spread(stage, mixed)
        self.model = nn.ModuleList(stages) if PIPELINE else model
        if PIPELINE:
            from pipeline import StageSchedule

            self.schedule = StageSchedule(stages, self.mesh, device, BATCH["microbatches"], PIPELINE)

    def call(self, whole: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the share of one part's loss in that of the batch, times the number of parts."""
        with self.batch_loss:
            loss = self.given_call(whole, inputs)
        return plain(loss) * (self.batch_loss.parts if BATCH.get("sum") else 1)

    @property
    def data_ranks(self) -> int:
        """The number of ranks over which the rows of a microbatch are cut."""
        return MESH["replicate"] * MESH["shard"]

    def _stages(self, model: nn.Module, example: dict[str, Any], mixed: bool) -> list[nn.Module]:
        """Return the stages of this rank: every one of as many as the pipeline has ranks."""
        from pipeline import StageOfModel

        assert self.mesh is not None
        one = microbatch(example, 0, 0)
        rows = next(iter(one[name].shape[0] for name in BATCH["inputs"]))
        if rows != PIPELINE["rows"]:
            raise SystemExit(f"PIPELINE has the shapes of {PIPELINE['rows']} rows, a rank's microbatch has {rows}")
        blocks = [path for path, _ in matching(model, FULLY_SHARD["modules"])]
        floats = next(p.dtype for p in model.parameters())
        if mixed and "compute" in PRECISION:
            floats = getattr(torch, PRECISION["compute"])
        constants = moved({name: value for name, value in one.items() if name not in BATCH["inputs"]}, self.device)
        numbers = range(self.mesh.get_local_rank("pipeline"), len(PIPELINE["starts"]) + 1, MESH["pipeline"])
        return [StageOfModel(model, self.call, number, PIPELINE, blocks, constants, floats) for number in numbers]

    def _spread(self, model: nn.Module, mixed: bool) -> None:
        """Apply tensor parallelism, recomputation and sharding to the model or to a stage of it, in this order."""
        assert self.mesh is not None
        inner = getattr(model, "whole", model)  # a stage holds the whole model, the modules of other stages absent
        if self.data_ranks > 1:
            batch_norms_over(model, self.mesh)
        if MESH["tensor"] > 1:
            import tensor_parallel

            devices = self.mesh
            tensor_parallel.apply(inner, devices["tensor"], TENSOR)
        checkpoint_modules(inner)
        shard_parameters([*(module for _, module in matching(inner, FULLY_SHARD["modules"])), model], self.mesh, mixed)
        model.to(self.device)  # buffers

    def forward_backward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Run a step's microbatches forward and backward, and return the loss of the whole batch.

        Every microbatch and every rank has equally many rows, so that the mean of their losses, and of their
        gradients, is that of the whole batch; for means over labels see :class:`LossOfBatch`.
        """
        count = BATCH["microbatches"]
        self.batch_loss.start(batch, count * (self.data_ranks if self.mesh is not None else 1))
        parts = [moved(microbatch(batch, k, self.part), self.device) for k in range(count)]
        total = torch.zeros((), device=self.device)
        if self.schedule is not None:
            with loss_scope():
                total = self.schedule.step(parts).to(self.device)
            return self._mean(total)
        for k, inputs in enumerate(parts):
            if isinstance(self.model, FSDPModule):
                last = k == count - 1
                self.model.set_requires_gradient_sync(last or FULLY_SHARD["zero"] == 3)
                self.model.set_reshard_after_backward(last or FULLY_SHARD["zero"] == 3)
            with loss_scope():
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


class LossOfBatch(TorchFunctionMode):
    """Cross entropies in this scope divide by the labels that count in the batch, not in one part of it.

    BATCH has, in the order in which the model calls them, ``means``: the input with the ``labels``, how many first
    places of a row to ``skip``, and which label is ``ignored``. With ``sum``, the loss is a sum over rows, no mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts = 1
        self.labels: list[torch.Tensor] = []
        self.called = 0

    def start(self, batch: dict[str, Any], parts: int) -> None:
        """Take the batch of a step, and how many parts it is cut into."""
        if parts > 1 and "means" not in BATCH:
            raise SystemExit(
                f"BATCH in parallelize.py was written for a batch in one part, and {parts} are wanted, whose losses "
                f"may not add up: export the plan again with dp x m = {parts}"
            )
        self.parts, self.labels = parts, []
        for mean in BATCH.get("means", ()) if parts > 1 else ():
            labels = batch[mean["labels"]]
            labels = labels[..., mean["skip"] :] if labels.dim() > 1 else labels
            self.labels.append(labels[labels != mean["ignored"]])

    def __enter__(self) -> Any:
        self.called = 0
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        if kind is None and self.called != len(self.labels):
            raise RuntimeError(
                f"BATCH['means'] has {len(self.labels)} cross entropies, the model called {self.called}; export again"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch; a mean over labels as a sum over the number of them in the batch."""
        kwargs = kwargs or {}
        if not self.labels or func not in (nn.functional.cross_entropy, nn.functional.nll_loss):
            return func(*args, **kwargs)
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["reduction"] != "mean" or given.arguments["target"].is_floating_point():
            return func(*args, **kwargs)
        given.arguments["reduction"] = "sum"
        weight, labels = given.arguments["weight"], self.labels[min(self.called, len(self.labels) - 1)]
        self.called += 1
        total: Any = labels.numel()
        if weight is not None:
            total = weight[labels.to(weight.device)].sum()
        return func(*given.args, **given.kwargs) * self.parts / total


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


def plain(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss that all ranks of ``tensor`` have as a tensor of torch's own kind."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


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


def shard_parameters(modules: list[nn.Module], devices: DeviceMesh, mixed: bool) -> None:
    """Shard parameters, gradients and optimizer state, or replicate them: a group for each block, one for the rest.

    ``modules`` are the blocks, and last the model, or the stage, that holds them.

    With ``"zero": 0`` every rank has all parameters, and gradients are all-reduced over ``replicate``. With 1 they are
    gathered once a step, and gradients reduced once a step. With 3 both happen for every use.
    """
    zero = FULLY_SHARD["zero"]
    policy = MixedPrecisionPolicy()
    if mixed and PRECISION:
        formats = {name: getattr(torch, dtype) for name, dtype in PRECISION.items()}
        policy = MixedPrecisionPolicy(param_dtype=formats.get("compute"), reduce_dtype=formats.get("reduce"))
    hybrid = devices.ndim > 1 and MESH["replicate"] > 1
    over = devices["replicate", "shard"] if hybrid else devices["shard"]
    for module in modules:
        fully_shard(module, mesh=over, reshard_after_forward=zero == 3, mp_policy=policy)


def batch_norms_over(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let batch norms in training take the statistics of all ranks' rows, as one device does."""
    groups = [mesh.get_group(name) for name in ("replicate", "shard") if MESH[name] > 1]
    for module in model.modules():
        norm: Any = module
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            norm.forward = functools.partial(batch_norm, norm, groups)


def batch_norm(norm: Any, groups: list[dist.ProcessGroup], x: torch.Tensor) -> torch.Tensor:
    """Return the batch norm of ``x`` [rows, channels, ...] with the statistics of the rows of all ranks."""
    if not norm.training:
        return type(norm).forward(norm, x)
    dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
    mean = mean_over(x.mean(dims), groups)
    centred = x - mean.view(shape)
    variance = mean_over(centred.square().mean(dims), groups)
    if norm.track_running_stats:
        count = x.numel() // x.shape[1] * MESH["replicate"] * MESH["shard"]
        norm.num_batches_tracked += 1
        share = norm.momentum if norm.momentum is not None else 1 / norm.num_batches_tracked.item()
        with torch.no_grad():
            norm.running_mean.lerp_(mean.detach().to(norm.running_mean), share)
            norm.running_var.lerp_(variance.detach().to(norm.running_var) * count / max(count - 1, 1), share)
    y = centred * torch.rsqrt(variance + norm.eps).view(shape)
    return y if norm.weight is None else y * norm.weight.view(shape) + norm.bias.view(shape)


def mean_over(value: torch.Tensor, groups: list[dist.ProcessGroup]) -> torch.Tensor:
    """Return the mean of a tensor over the ranks of all groups, through which gradients flow."""
    for group in groups:
        value = all_reduce(value, group=group) / dist.get_world_size(group)
    return value
