"""What one rank does in the tests of calls that are padded to buckets."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from procs.habits import difference, said
from procs.other_shapes import Words, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import bucket_plans
from autopar.planner.intra_op.mesh_plan import plan_graph

CUTS: dict[str, dict[str, Any]] = {
    "batch": {"constraints": {"*up": {"data": "b"}}},
    "zero": {"constraints": {"*up": {"data": "b"}}, "params": {"*.weight": "S0 use", "*.bias": "S0 step"}},
    "tensor": {"constraints": {"*up": {"data": "n"}, "*down": {"data": "k"}}},
}
BUCKETS = [(4, 6), (2, 12)]
SIZES = [(4, 6), (3, 5), (1, 9), (2, 12), (1, 1), (4, 5)]


def spread(model: nn.Module, example: Any, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    return autopar.parallelize(model, mesh, example, shapes="buckets", buckets=BUCKETS, **options)


def worst_gradient(pm: Any, alone: nn.Module) -> float:
    return max(difference(p.grad.full_tensor(), alone.get_parameter(n).grad) for n, p in pm.named_parameters())


def _step(pm: Any, alone: nn.Module, call: Any, whole: Any, optimizers: Any) -> float:
    """Losses, logits and weights of one step, on ranks and on one device."""
    (loss, out), (wanted, wanted_out) = pm(*call), alone(*whole)
    worst = max(difference(loss.detach(), wanted.detach()), difference(out.detach(), wanted_out.detach()))
    loss.backward()
    wanted.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return max(worst, *(difference(p.full_tensor(), alone.get_parameter(n)) for n, p in pm.named_parameters()))


def trained(cut: str) -> tuple[float, int]:
    model = Words()
    alone = copy.deepcopy(model)
    pm = spread(model, batch(4, 6), **CUTS[cut])
    optimizers = torch.optim.AdamW(pm.parameters(), lr=1e-2), torch.optim.AdamW(alone.parameters(), lr=1e-2)
    worst = max(_step(pm, alone, call, call, optimizers) for call in (batch(*size, 1) for size in SIZES))
    return worst, pm._programs.captures


def _two_layouts(graphs: Any, trace: Any, cluster: Any, mesh: Any, options: Any) -> bucket_plans.BucketPlans:
    """What the planner gives where it pays to move parameters between the buckets; here it is forced."""
    pins = [{"*.weight": "S0 use"}, {"*.weight": "S1 step", "norm.weight": "replicate", "*.bias": "S0"}]
    plans = {
        size: plan_graph(graph, cluster, mesh, replace(options, params=pins[i]))
        for i, (size, graph) in enumerate(graphs.items())
    }
    return bucket_plans.BucketPlans(plans, {size: i for i, size in enumerate(plans)}, 1.0, 0.0, 1, 1.0, trace[0], 1.0)


def between_layouts(optimizer: str) -> tuple[float, list[str], str]:
    """Parameters and optimizer state move between two buckets' layouts; how a weight is stored in each step."""
    model = Words()
    alone = copy.deepcopy(model)
    with mock.patch.object(bucket_plans, "plan_buckets", _two_layouts):
        pm = spread(model, batch(4, 6))
    optimizers = [getattr(torch.optim, optimizer)(m.parameters(), lr=1e-2) for m in (pm, alone)]
    worst, stored = 0.0, []
    for size in SIZES:
        call = batch(*size, 1)
        worst = max(worst, _step(pm, alone, call, call, optimizers))
        stored.append(str(pm.get_parameter("up.weight").placements[0]))
        for param, state in optimizers[0].state.items():
            assert all(v.placements == param.placements for v in state.values() if v.shape == param.shape)
    first = pm(*batch(4, 6))[0]
    pm(*batch(2, 12))
    return worst, stored, said(first.backward)


def uneven_own_rows(cut: str) -> float:
    """Ranks have rows of their own, not equally many and not equally long: the mean over all labels."""
    model = Words()
    alone, worst, ranks = copy.deepcopy(model), 0.0, dist.get_world_size()
    pm = spread(model, batch(4, 6, dist.get_rank()), batch="local", **CUTS[cut])
    for number in range(3):
        calls = [batch(4 - rank if number else 3, 6 - rank * number, 10 * number + rank) for rank in range(ranks)]
        loss, out = pm(*calls[dist.get_rank()])
        x, y = (
            torch.cat([nn.functional.pad(part, (0, 6 - part.shape[1])) for part in parts])
            for parts in zip(*calls, strict=True)
        )
        wanted, wanted_out = alone(x, y)  # labels of zero are ignored
        mine = sum(call[0].shape[0] for call in calls[: dist.get_rank()])
        rows, length = calls[dist.get_rank()][0].shape
        worst = max(worst, difference(loss.detach(), wanted.detach()))
        worst = max(worst, difference(out.detach(), wanted_out.detach()[mine : mine + rows, :length]))
        loss.backward()
        wanted.backward()
    return max(worst, worst_gradient(pm, alone))


def in_stages() -> float:
    model = Words()
    alone, worst = copy.deepcopy(model), 0.0
    pm = autopar.parallelize(
        model, dist.get_world_size(), batch(4, 6), stages=2, cuts=["down"], schedule="1f1b", microbatches=2,
        shapes="buckets", buckets=BUCKETS,
    )  # fmt: skip
    for size in SIZES:
        call = batch(*size, 1)
        loss, wanted = pm.train_step(*call), alone(*call)[0]
        wanted.backward()
        worst = max(worst, difference(loss, wanted.detach()))
    worst = max(worst, worst_gradient(pm, alone))
    pm.eval()
    alone.eval()
    with torch.no_grad():
        return max(worst, difference(pm(call[0]), alone(call[0])))


def other_bucket_on_one_rank(way: str) -> str:
    """Rank 1 alone has a call of another bucket."""
    options: dict[str, Any] = {"batch": "local"} if way == "local" else {}
    if way == "stages":
        pm = autopar.parallelize(
            Words(), dist.get_world_size(), batch(4, 6), stages=2, cuts=["down"], schedule="1f1b", microbatches=2,
            shapes="buckets", buckets=BUCKETS,
        )  # fmt: skip
        step = pm.train_step
    else:
        pm = spread(Words(), batch(4, 6), **CUTS["batch"], **options)
        step = pm
    step(*batch(4, 6))
    try:
        step(*batch(*(1, 9) if dist.get_rank() else (4, 6)))
    except autopar.RunError as error:
        return str(error)
    return "no error"
