"""What one rank does to train on an accelerator that is not there (:mod:`accelerator`), beside the CPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerator import NAME, Accelerator, register
from procs import cases, pipelines
from procs.cases import cut
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from zoo import ZOO, loss_of

import autopar
from autopar.capture import capture
from autopar.runtime import gradient_reduction
from autopar.runtime.executor import ParallelModule
from autopar.runtime.pipeline import PipelineModule
from autopar.torch_private import default_store

Config = cases.Config | pipelines.Config
STEPS = 6
"""All are compared between the ranks, but from the fourth call on nobody waits for that."""


def all_trained(configs: Sequence[Config]) -> list[tuple[float, list[list[str]]]]:
    return [trained(config) for config in configs]


def trained(config: Config) -> tuple[float, list[list[str]]]:
    """How far losses on the accelerator are from those on the CPU, and what each step on it did that it should not."""
    register()
    if NAME not in dist.get_backend_config():
        rank, size, store = dist.get_rank(), dist.get_world_size(), default_store()
        dist.destroy_process_group()
        store = dist.PrefixStore(NAME, store)
        dist.init_process_group(f"cpu:gloo,{NAME}:gloo", store=store, rank=rank, world_size=size)
    torch.manual_seed(0)
    case = ZOO[config.name](**config.zoo)
    captured = capture(case.model, *cut(case.batch, config.microbatches, 0))
    if isinstance(config, pipelines.Config):
        plan = pipelines.make_plan(captured, config)
    else:
        plan = cases.make_plan(captured, config)

    def made(device: str) -> Any:
        model = copy.deepcopy(case.model)
        if isinstance(config, pipelines.Config):
            return PipelineModule(model, captured, plan, device, seed=3)
        names = tuple(name for name, _ in config.mesh)
        mesh = init_device_mesh(device, tuple(n for _, n in config.mesh), mesh_dim_names=names)
        return ParallelModule(model, captured, plan, mesh, seed=3)

    def step(pm: Any, batch: Any) -> torch.Tensor:
        args, kwargs = batch
        if isinstance(config, pipelines.Config) or config.microbatches > 1:
            loss = pm.train_step(*args, **kwargs)
        else:
            loss = loss_of(pm(*args, **kwargs))
            loss.backward()
        if config.clip:
            if isinstance(pm, PipelineModule):
                pm.clip_grad_norm_(config.clip)
            else:
                torch.nn.utils.clip_grad_norm_(pm.parameters(), config.clip)
        return loss.detach()

    wanted = []
    pm = made("cpu")
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    for number in range(STEPS):
        wanted.append(step(pm, (case.batch, case.batch2)[number % 2]).item())
        optimizer.step()
        optimizer.zero_grad()
    del pm, optimizer
    with Accelerator() as accelerator:
        batches = [pytree.tree_map_only(torch.Tensor, lambda x: x.to(NAME), b) for b in (case.batch, case.batch2)]
        pm = made(NAME)
        pm.compare_every = config.microbatches if isinstance(config, cases.Config) else 1  # once a step
        optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2, foreach=True)
        losses, seen = [], []
        for number in range(STEPS):
            with accelerator.watching() as waits:
                loss = step(pm, batches[number % 2])
            optimizer.step()  # AdamW counts its steps on the CPU
            optimizer.zero_grad()
            losses.append(loss.item())
            seen.append(list(dict.fromkeys(waits)))
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
    return worst, seen


def reduced_in(dtype: torch.dtype | None) -> tuple[set[torch.dtype], float, set[torch.dtype]]:
    """Of a bfloat16 model on three ranks: the dtypes of its gradients' collectives, the worst relative difference of a
    gradient to the sum of the ranks' own, rounded once, and the dtypes of the gradients."""
    on_the_way: set[torch.dtype] = set()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).bfloat16()
    rows = torch.randn(24, 64).bfloat16() * torch.logspace(-3, 3, 24).unsqueeze(1).bfloat16()
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("data",))
    pm = autopar.parallelize(
        model, mesh, (rows,), loss_fn=lambda y: y.float().sum(), constraints={"0": {"data": "b"}}, params={"*": "I"},
        gradient_dtype=dtype,
    )  # fmt: skip
    with mock.patch.object(gradient_reduction.dist, "all_reduce", side_effect=_noting(on_the_way, dist.all_reduce)):
        pm(rows).backward()
    parts = []
    for part in rows.chunk(3):
        model.zero_grad()
        model(part).float().sum().backward()
        parts += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    exact = torch.stack(parts).double().sum(0)
    gradients = [pipelines.whole(p.grad) for p in pm.parameters()]
    worst = max(float(((g.double() - exact).abs() / exact.abs().max()).max()) for g in gradients)
    return on_the_way, worst, {g.dtype for g in gradients}


def _noting(dtypes: set[torch.dtype], real: Any) -> Any:
    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point():
            dtypes.add(tensor.dtype)
        return real(tensor, *args, **kwargs)

    return all_reduce
