"""What one rank does to train on an accelerator that is not there (:mod:`accelerator`), beside the CPU."""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerator import NAME, Accelerator, OnDevice, register
from emulated_nccl import BACKEND
from procs import cases, pipelines
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from zoo import ZOO, Case, loss_of
from zoo_wide import WIDE

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.parallelizing.all_ranks import spread
from autopar.profiling import transfers_and_collectives
from autopar.profiling.document import MOST_BYTES, MOST_OPS, measure_rank
from autopar.profiling.ops import passes_of
from autopar.runtime.as_module.spreading import on_mesh, pipelined
from autopar.runtime.gradients import gradient_reduction
from autopar.runtime.parameters import gathering
from autopar.runtime.parameters.host_memory import is_on_host
from autopar.runtime.ranks.groups import abort_groups
from autopar.runtime.ranks.presence import alive
from autopar.torch_private import default_store, no_dispatch_modes
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

Config = cases.Config | pipelines.Config
ANY: dict[str, Callable[..., Case]] = {**WIDE, **ZOO}
MAY_WAIT = ("expert_all_to_all._on_host", "taking_part.names", "reached.reached")
"""How many rows travel to an expert's rank, the host has to know; and which experts and layers have a gradient."""
NOT_HERE = ("the model's code branches on data", "_thnn_fused_")
"""Errors of a second batch that goes another way; and of fused cells of recurrent layers, of which torch has kernels
for GPUs alone, so that nothing here computes their values."""
LEAST_LOSS = 1e-3
"""Losses are compared relative to themselves, and to no less than this: a critic's first loss may be zero."""
STEPS = 6
"""All are compared between the ranks, but from the fourth call on nobody waits for that."""


def all_trained(configs: Sequence[Config], on_host: str = "") -> list[tuple[float, list[list[str]]]]:
    return [trained(config, on_host) for config in configs]


def faults(configs: Sequence[Config], compared: int) -> dict[str, str]:
    """By model, what is wrong with its steps.

    Args:
        compared: after so many steps nobody waits.
    """
    wrong = {}
    for config in configs:
        try:
            worst, seen = trained(config)
        except CaptureError:
            continue  # of a few families, in test_zoo_wide
        except Exception as error:
            if not any(known in str(error) for known in NOT_HERE):
                wrong[config.name] = traceback.format_exc()
            continue
        waits = [line for step in seen[compared:] for line in step if not any(known in line for known in MAY_WAIT)]
        if worst > 0.05 or waits:  # AdamW and routers make much of the rounding of what is float32 in some of them
            wrong[config.name] = f"{config}: {worst} from the CPU; {waits}"
    return wrong


def begin_world(backend: str) -> None:
    """Have the ranks begin anew, with a process group of that backend."""
    register()
    if dist.get_backend_config() != backend:
        rank, size, store = dist.get_rank(), dist.get_world_size(), default_store()
        all_arrived(store, size)  # a rank that is still connecting would lose its peer
        dist.destroy_process_group()
        store = dist.PrefixStore(backend, store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def all_arrived(store: Any, size: int) -> None:
    """Wait for all ranks of the world: a barrier needs tensors, which a world of the accelerator alone has only while
    it is emulated."""
    number = store.add("arrived", 1)
    wanted = -(-number // size) * size
    while store.add("arrived", 0) < wanted:
        time.sleep(0.01)


def planned(config: Config) -> tuple[Any, Any, Any]:
    """A model of the zoo, what is captured of it, and its plan."""
    torch.manual_seed(0)
    case = ANY[config.name](**config.zoo)
    captured = pipelines.part_of(case, config.microbatches)
    if isinstance(config, pipelines.Config):
        return case, captured, pipelines.make_plan(captured, config)
    return case, captured, cases.make_plan(captured, config)


def trained(config: Config, on_host: str = "") -> tuple[float, list[list[str]]]:
    """How far losses on the accelerator are from those on the CPU, and what each step on it did that it should not.

    Args:
        on_host: how long copies live of parameters that are stored in the memory of the host; empty if none are.
    """
    begin_world(f"cpu:gloo,{NAME}:{BACKEND}")
    case, captured, plan = planned(config)
    if on_host:
        plan = replace(plan, stages=tuple(
            replace(stage, params={
                name: replace(choice, on_host=True, lifetime=on_host) for name, choice in stage.params.items()
            }) for stage in plan.stages
        ))  # fmt: skip

    def made(device: str) -> Any:
        model = copy.deepcopy(case.model)
        if isinstance(config, pipelines.Config):
            return pipelined(model, captured, plan, device)
        names = tuple(name for name, _ in config.mesh)
        mesh = init_device_mesh(device, tuple(n for _, n in config.mesh), mesh_dim_names=names)
        return on_mesh(model, captured, plan, mesh)

    def step(pm: Any, batch: Any) -> torch.Tensor:
        torch.manual_seed(3)  # both devices draw alike
        args, kwargs = batch
        if isinstance(config, pipelines.Config) or config.microbatches > 1:
            loss = pm.train_step(*args, **kwargs)
        else:
            loss = loss_of(pm(*args, **kwargs))
            loss.backward()
        if config.clip:
            if pm._autopar.leads is not None:
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
        for param in pm.parameters() if on_host else ():
            local = param.to_local() if isinstance(param, DTensor) else param
            assert is_on_host(param) and local.device.type == "cpu" and not isinstance(local, OnDevice)
        losses, seen = [], []
        for number in range(STEPS):
            with accelerator.watching() as waits:
                loss = step(pm, batches[number % 2])
            optimizer.step()  # AdamW counts its steps on the CPU
            optimizer.zero_grad()
            losses.append(loss.item())
            seen.append(list(dict.fromkeys(waits)))
        collectives = accelerator.collectives
        assert collectives.count and not collectives.forgotten, collectives.forgotten
    worst = max(abs(a - b) / max(abs(b), LEAST_LOSS) for a, b in zip(losses, wanted, strict=True))
    return worst, seen


class _PartlyRead(torch.nn.Module):
    """Of its parameters the one in the middle is of no use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unread, self.last = (torch.nn.Parameter(torch.randn(8, 8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first @ self.last).square().mean()


def gathers_in_a_step() -> tuple[int, list[str]]:
    """Of a module whose parameters are gathered for each use, one of them for none: how many gathers a step has begun,
    and those that nobody has waited for."""
    begin_world(f"cpu:gloo,{NAME}:{BACKEND}")
    torch.manual_seed(0)
    model, x = _PartlyRead(), torch.randn(8, 8)
    mesh = init_device_mesh(NAME, (2,), mesh_dim_names=("data",))
    options: dict[str, Any] = {"constraints": {"*": {"data": "b"}}, "params": {"*": "S0 use"}}
    with mock.patch.object(gathering, "UNIT_BYTES", 1):  # each by itself
        with no_dispatch_modes():
            on_cpus = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
            pm = autopar.parallelize(copy.deepcopy(model), on_cpus, (x,), **options)
            captured, plan = pm._autopar.captured, pm.plan
        with Accelerator() as accelerator:
            there: Any = on_mesh(model, captured, plan, mesh)
            there.compare_every = 0
            batch = x.to(NAME)
            there.train_step(batch)
            count = accelerator.collectives.count
            before = sum(n for name, n in count.items() if "allgather" in name)
            there.train_step(batch)
            gathers = sum(n for name, n in count.items() if "allgather" in name) - before
            forgotten = accelerator.collectives.forgotten
    begin_world("cpu:gloo")
    return gathers, forgotten


def profiled(graph: Any, cluster: str) -> dict[str, Any]:
    """What a profile is made of, measured on the accelerator by this rank."""
    begin_world(f"cpu:gloo,{NAME}:{BACKEND}")
    hardware = load_cluster(cluster)
    passes = passes_of(graph, hardware, (Mesh.of(data=2),), MOST_OPS, MOST_BYTES)

    def captured(*example: Any) -> Any:
        with no_dispatch_modes():  # a trace is without the accelerator
            return capture(*example)

    with Accelerator() as accelerator, mock.patch.object(transfers_and_collectives, "capture", captured):
        measured = measure_rank(passes, 0.5, hardware, NAME)
        assert accelerator.collectives.count and not accelerator.collectives.forgotten
    begin_world("cpu:gloo")
    return measured


def used(configs: Sequence[Config], backend: str, folder: str) -> list[str]:
    wrong = [each for number, config in enumerate(configs) for each in _used(config, backend, f"{folder}/{number}")]
    begin_world("cpu:gloo")  # whoever has started this rank ends the world without an accelerator
    return wrong


def _used(config: Config, backend: str, folder: str) -> list[str]:
    """What goes wrong beside the steps of a model on the accelerator, in a world of that backend: where its values are
    spread, sent, gathered, saved, loaded and compared, on the way of ``parallelize`` and of a user."""
    begin_world(backend)
    case, captured, plan = planned(config)
    wrong: list[str] = []

    def same(what: str, have: Any, wanted: Any) -> None:
        if set(have) != set(wanted) or any(not torch.equal(have[n].to("cpu"), wanted[n].to("cpu")) for n in wanted):
            wrong.append(f"{config.name}, {type(pm).__name__}: {what}")

    with Accelerator() as accelerator:
        model, mesh = case.model, None
        values = {name: value.clone() for name, value in model.state_dict().items()}
        if isinstance(config, pipelines.Config):
            model = model.to(NAME)
        else:
            names = tuple(name for name, _ in config.mesh)
            mesh = init_device_mesh(NAME, tuple(n for _, n in config.mesh), mesh_dim_names=names)
        if dist.get_rank():
            with torch.no_grad():
                for x in model.parameters():
                    x.add_(1)  # a rank of another seed: rank 0's values count
        with alive(dist.group.WORLD, abort=abort_groups):
            pm = spread(model, captured, plan, dist.group.WORLD, device_mesh=mesh)
        first = dist.get_rank() == 0
        same("the values of rank 0", autopar.full_state_dict(pm), values if first else {})
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x.to(NAME), case.batch)
        optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2, foreach=True)
        checkpoint = autopar.Checkpoint(folder, model=pm, optimizer=optimizer)

        def step() -> torch.Tensor:
            loss = pm.train_step(*args, **kwargs)
            if pm._autopar.leads is not None:
                pm.clip_grad_norm_(1.0)
            else:
                torch.nn.utils.clip_grad_norm_(pm.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.to("cpu")

        step()
        saved = autopar.full_state_dict(pm, all_ranks=True)
        checkpoint.save(1)
        second = step()
        if mesh is not None:  # its model is on the CPU: a capture knows nothing of the accelerator
            with no_dispatch_modes():
                pm.eval()
            with torch.no_grad():
                pm(*args, **kwargs)
            pm.train()
        else:
            pm.evaluate(*args, **kwargs)
        autopar.load_full_state_dict(pm, saved if first else None)  # sent from rank 0
        same("what rank 0 has loaded", autopar.full_state_dict(pm, all_ranks=True), saved)
        step()
        autopar.load_full_state_dict(pm, saved)
        same("what all have loaded", autopar.full_state_dict(pm, all_ranks=True), saved)
        step()
        if checkpoint.load() != 1:
            wrong.append("no checkpoint")
        same("the checkpoint", autopar.full_state_dict(pm, all_ranks=True), saved)
        if not torch.equal(again := step(), second):
            wrong.append(f"{config.name}: a step after the checkpoint gives {again}, it gave {second}")
        wrong += accelerator.collectives.forgotten
    return wrong


def reduced_in(dtype: torch.dtype | None) -> tuple[set[torch.dtype], float, set[torch.dtype]]:
    """Of a bfloat16 model on three ranks: the dtypes of its gradients' collectives, the worst relative difference of a
    gradient to the sum of the ranks' own, rounded once, and the dtypes of the gradients."""
    on_the_way: set[torch.dtype] = set()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).bfloat16()
    eager = copy.deepcopy(model)
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
        eager.zero_grad()
        eager(part).float().sum().backward()
        parts += [p.grad.clone() for p in eager.parameters() if p.grad is not None]
    exact = torch.stack(parts).double().sum(0)
    gradients = [pipelines.whole(p.grad) for p in pm.parameters()]
    worst = max(float(((g.double() - exact).abs() / exact.abs().max()).max()) for g in gradients)
    return on_the_way, worst, {g.dtype for g in gradients}


def notices() -> dict[str, str]:
    """What the emulated backend has to say of what NCCL would not forgive."""
    begin_world(f"cpu:gloo,{NAME}:{BACKEND}")
    group, said = dist.new_group(backend=BACKEND), {}

    def expect(what: str, does: Callable[[], object]) -> None:
        try:
            does()
            said[what] = "nothing"
        except AssertionError as error:
            said[what] = type(error).__name__

    with Accelerator() as accelerator:
        x, out = torch.ones(4, device=NAME), torch.empty(4, device=NAME)
        expect("on the CPU", lambda: dist.all_reduce(torch.ones(4), group=group))
        expect("by the CPU's backend", lambda: dist.all_reduce(torch.ones(4)))
        work = dist.all_reduce(x, group=group, async_op=True)
        said["read early"] = str((x + 1).sum().item())
        work.wait()
        said["read late"] = str((x + 1).sum().item())
        work = dist.all_gather_into_tensor(out, x, group=group, async_op=True)
        x.mul_(2)
        expect("input written", work.wait)
        work = dist.all_gather_into_tensor(out, x, group=group, async_op=True)
        out.zero_()
        expect("output written", work.wait)
        work = dist.all_gather_into_tensor(out, x, group=group, async_op=True)
        out.untyped_storage().resize_(0)
        expect("freed", work.wait)
        said["forgotten before"] = str(len(accelerator.collectives.forgotten))
        dist.all_reduce(x, group=group, async_op=True)
        said["forgotten"] = str(len(accelerator.collectives.forgotten))
    return said


def _noting(dtypes: set[torch.dtype], real: Any) -> Any:
    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_floating_point():
            dtypes.add(tensor.dtype)
        return real(tensor, *args, **kwargs)

    return all_reduce
