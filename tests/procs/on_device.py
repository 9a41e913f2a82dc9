"""What one rank does to train on an accelerator that is not there (:mod:`accelerator`), beside the CPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerator import NAME, Accelerator, register
from procs import cases, pipelines
from procs.cases import cut
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from zoo import ZOO, loss_of

from autopar.capture import capture
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
        pm.compare_every = 1
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
