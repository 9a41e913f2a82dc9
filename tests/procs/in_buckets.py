"""What one rank does in the tests of calls that are padded to buckets."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from procs.habits import difference, said
from procs.other_shapes import Words, batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.parallelizing import bucket_plans
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
    return worst, pm._autopar.programs.captures


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


class Decoder(nn.Module):
    """A language model of one layer with its loss."""

    def __init__(self, dim: int = 64, heads: int = 4, words: int = 64, longest: int = 512) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(words, dim), nn.Embedding(longest, dim)
        self.norm, self.norm_2, self.norm_3 = (nn.LayerNorm(dim) for _ in range(3))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down, self.head = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.Linear(dim, words, False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(self.norm(h)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(attended.transpose(1, 2).flatten(2))
        h = h + self.down(nn.functional.gelu(self.up(self.norm_2(h))))
        return nn.functional.cross_entropy(self.head(self.norm_3(h)).flatten(0, 1), y.flatten())


SHORT, LONG = (64, 8), (1, 512)
RUNS = ([SHORT] * 10 + [LONG] * 10) * 3
"""Steps in runs of ten: long enough for a change of layout to pay on :data:`SLOW_PAIR`."""
SLOW_PAIR = Path(__file__).parents[1] / "data" / "slow-pair.toml"


def a_change_that_pays() -> tuple[float, int, list[bool]]:
    """The planner stores parameters in other pieces for long sequences, by itself; they move and train on. How far
    losses and weights are from one device's, how often parameters moved, and whether ``out`` is cut in each step."""
    torch.manual_seed(0)
    model = Decoder()
    alone = copy.deepcopy(model)
    example = torch.zeros(*SHORT, dtype=torch.long)
    pm = autopar.parallelize(
        model, dist.get_world_size(), (example, example), shapes="buckets", buckets=RUNS, cluster=SLOW_PAIR
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (pm, alone)]
    worst, cut = 0.0, []
    for number, size in enumerate((SHORT, SHORT, LONG, LONG, SHORT)):
        x = torch.randint(0, 64, size, generator=torch.Generator().manual_seed(number))
        mine, theirs = pm(x, x.roll(-1, 1)), alone(x, x.roll(-1, 1))
        worst = max(worst, difference(mine.detach(), theirs.detach()))
        cut.append(pm.get_parameter("out.weight").placements[0].is_shard())
        for loss, optimizer in zip((mine, theirs), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = (difference(p.full_tensor(), alone.get_parameter(n)) for n, p in pm.named_parameters())
    return max(worst, *weights), pm._autopar.layout, cut


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
