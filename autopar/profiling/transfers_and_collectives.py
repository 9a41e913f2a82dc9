"""Costs of a step in addition to ops, measured on a few ranks: transfers, collectives, optimizer, executor."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from math import ceil
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.capture import capture
from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
from autopar.plans.transfer import Side, transfer
from autopar.profiling.clock import Clock
from autopar.runtime.as_module.spreading import pipelined
from autopar.runtime.pipelines.wires import Post, Wire
from autopar.runtime.ranks.groups import channel, groups_for
from autopar.words.graph import Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import whole_state
from cost_models.schedules.actions import Action
from hardware_profiles import Cluster

SIZES = tuple(4**k for k in range(5, 13))  # 1 KiB to 16 MiB
ADDED = tuple(4**k for k in range(5, 14))
OPTIMIZED = (256, 65536, 1048576)
"""Elements of the parameters with which optimizers are measured, several tensors of each."""
OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
}


def accumulate_points(clock: Clock, *, in_place: bool) -> list[list[float]]:
    """Return ``[bytes, seconds]`` of accumulating a gradient in place, or of computing the sum anew."""
    points = []
    for n_bytes in ADDED:
        n = n_bytes // 4
        gradients = [torch.ones(n, device=clock.device) for _ in range(max(2, min(64, 2**26 // n_bytes)))]
        times = []
        for k in range(3 * len(gradients) if len(gradients) < 8 else len(gradients)):
            fresh = torch.ones(n, device=clock.device)
            worked = clock.work()
            at = k % len(gradients)
            gradients[at] = gradients[at].add_(fresh) if in_place else gradients[at] + fresh
            del fresh
            times.append(worked())
        points.append([n_bytes, median(times)])
    return points


def send_points(clock: Clock) -> list[list[float]]:
    """Return ``[bytes, seconds]`` of one message between two ranks, there and back, as a pipeline sends it."""
    rank, repeats = dist.get_rank(), 20
    pairs = [(0, 1), (1, 0)]
    groups = groups_for(clock.device)
    groups.make(channel(*pair) for pair in pairs)
    points = []
    for n_bytes in SIZES:
        spec = Spec((n_bytes // 4,), "float32")
        mesh = Mesh.of(data=1)
        here, there = Side(whole_state(mesh, True), mesh, (0,)), Side(whole_state(mesh, True), mesh, (1,))
        wire = Wire(0, "x", 0, 1, transfer(spec, here, there), transfer(spec, there, here))
        rows = {r: [Action(r, kind, k) for k in range(repeats) for kind in "FB"] for r in (0, 1)}
        times = []
        if rank < 2:
            post = Post.of(rank, clock.device, (wire,), rows, repeats, groups.channels(pairs))
            post.begin()
            value = torch.ones(spec.shape, device=clock.device)
            for k in range(repeats):
                passed = clock.wall()
                if rank == 0:
                    post.send(wire, False, k, value)
                    post.take(wire, True, k)
                else:
                    value = post.take(wire, False, k)
                    post.send(wire, True, k, value)
                times.append(passed() / 2)
            post.end()
        dist.barrier()
        points.append([n_bytes, median(times[2:]) if times else 0.0])
    return points


def collective_points(clock: Clock) -> dict[str, list[list[float]]]:
    """Return ``[bytes, seconds]`` of each collective among all ranks, until the last has it."""
    world = dist.get_world_size()
    points: dict[str, list[list[float]]] = {}
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        rows = []
        for n_bytes in SIZES:
            n = ceil(n_bytes / 4 / world) * world
            whole, part, landing = (torch.ones(size, device=clock.device) for size in (n, n // world, n))
            call: dict[str, Callable[[], object]] = {
                "all_reduce": partial(dist.all_reduce, whole),
                "all_gather": partial(dist.all_gather_into_tensor, whole, part),
                "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
                "all_to_all": partial(dist.all_to_all_single, landing, whole),
            }
            times = []
            for _ in range(12 if n_bytes < 2**21 else 6):
                dist.barrier()
                passed = clock.wall()
                call[kind]()
                took = torch.tensor([passed()], dtype=torch.float64)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times.append(took.item())
            rows.append([n_bytes, median(times)])
        points[kind] = rows
    return points


def optimizer_seconds(clock: Clock) -> dict[str, tuple[float, float]]:
    """Return ``(seconds per tensor, seconds per byte)`` of a step and ``zero_grad`` on stored parameters."""
    meshes = [
        DeviceMesh(clock.device.type, torch.tensor([r]), mesh_dim_names=("data",)) for r in range(dist.get_world_size())
    ]  # fmt: skip
    mesh, costs = meshes[dist.get_rank()], {}

    def sharded(n: int) -> DTensor:  # ones: pages of zeros are not allocated before they are read
        return DTensor.from_local(torch.ones(n, device=clock.device), mesh, [Replicate()], run_check=False)

    for name, make in OPTIMIZERS.items():
        rows = []
        for n in OPTIMIZED:
            params = [torch.nn.Parameter(sharded(n)) for _ in range(max(4, min(24, 2**22 // n)))]
            optimizer, times = make(params), []
            for _ in range(6):
                for p in params:
                    p.grad = sharded(n)
                dist.barrier()
                worked = clock.work()
                optimizer.step()
                optimizer.zero_grad()
                times.append(worked() / len(params))
            rows.append((4.0 * n, median(times[1:])))
        tensor = rows[0][1]
        costs[name] = tensor, max(0.0, (rows[-1][1] - tensor) / rows[-1][0])
    return costs


class _Tiny(torch.nn.Module):
    """Layers of almost no work, with a loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.layers(x).square().mean()


def executor_spans(cluster: Cluster, layers: int, schedule: str, device: torch.device) -> dict[str, float]:
    """Return the host's seconds of the actions of a tiny two-stage pipeline, and of a step in addition to them.

    They are lower quartiles, since other load only adds. The forward is that of the first stage and everything else of
    the last: these wait for nobody's tensors.
    """
    torch.manual_seed(0)
    model, x, count = _Tiny(2 * layers), torch.ones(2, 4), 4
    captured = capture(model, (x,))
    starts = (next(n.name for n in captured.graph.nodes if n.kind == "op" and n.module == f"layers.{layers}"),)
    request = PipelineOptions(count, 2, (schedule,), Mesh.of(data=1), starts, may_recompute=False)
    planned = plan_pipeline(captured.graph, cluster, 2, request)
    module = pipelined(model, captured, planned.plan, device.type)
    batch = x.repeat(count, 1).to(device)
    spans: dict[str, list[float]] = {}
    for _ in range(30):
        events = module.record()
        dist.barrier()
        start = time.perf_counter()
        module.train_step(batch)
        whole = time.perf_counter() - start
        for what, _, begin, end in events:
            spans.setdefault(next(c for c in what if c in "FBIW"), []).append(end - begin)
        spans.setdefault("step", []).append(max(0.0, whole - (events[-1][3] - events[0][2])))
        for p in module.parameters():
            p.grad = None
    return {k: quantiles(v[len(v) // 5 :], n=4)[0] for k, v in spans.items()}
