"""Buckets of short and long sequences against the best single plan: priced on 64 devices, and run on real ranks.

    python benchmarks/buckets.py             # on 64 H100, by the plans' prices, on every mesh shape
    python benchmarks/buckets.py --run 4     # steps of a small model on so many processes of this machine
    python benchmarks/buckets.py --run 4 --sizes 16x512 1x16384 --dim 32 --layers 1 --heads 4 --steps 1

The trace alternates the two buckets. A single plan cuts every operator alike in both; of these the best counts. In a
run the two take turns, so that what else the machine does meets both, and every loss is compared with one process's.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.api import capture
from autopar.errors import InfeasibleError, MeshError
from autopar.parallelizing import bucket_plans
from autopar.planner.intra_op.mesh_plan import Options, repriced
from autopar.plans.clusters import get_cluster
from autopar.runtime.ranks.launch import run_local
from autopar.words.meshes import mesh_shapes

TRACES = ([(256, 512), (8, 16384)], [(64, 512), (2, 16384)])
"""Rows and length: four million tokens in each eight steps, and one million."""
SMALL = [(64, 16), (2, 512)]
STEPS = 6


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """A language model with its loss."""

    def __init__(self, dim: int, heads: int, layers: int, words: int, longest: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, dim), nn.Embedding(longest, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, words, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def priced(devices: int) -> None:
    """Seconds of eight steps on every mesh shape: together, over one layout, and by the best single plan."""
    cluster = get_cluster(f"dgx-h100-x{devices}")
    with torch.device("meta"):
        model = Decoder(2048, 16, 4, 32000, 16384).to(torch.bfloat16)
    for sizes in TRACES:
        graphs = {}
        for rows, length in sizes:
            x = torch.zeros(rows, length, dtype=torch.long, device="meta")
            graphs[rows, length] = capture(model, (x, x)).graph
        print(f"buckets {sizes}: ms of a step in the mean; together (changes of layout), one layout, single plan")
        best = [float("inf")] * 3
        for mesh in mesh_shapes(devices, 2):
            began = time.process_time()
            try:
                plans = bucket_plans.plan_buckets(graphs, sizes * 4, cluster, mesh, Options())
            except (InfeasibleError, MeshError) as error:
                print(f"  {mesh.shown()}: {str(error).splitlines()[0]}")
                continue
            seconds = [s / 8 for s in (plans.seconds, plans.fixed_seconds, plans.single_seconds)]
            best = [min(pair) for pair in zip(best, seconds, strict=True)]
            print(
                f"  {mesh.shown():24} {1e3 * seconds[0]:8.2f} ({plans.switches}) {1e3 * seconds[1]:8.2f} "
                f"{1e3 * seconds[2]:8.2f}   planned in {time.process_time() - began:.1f} CPU-s"
            )
        shown = ", ".join(f"{1e3 * seconds:.2f}" for seconds in best)
        print(f"  best: {shown}: {best[0] / best[2]:.3f} of the single plan")


def single(graphs: Any, trace: Any, cluster: Any, mesh: Any, options: Any) -> bucket_plans.BucketPlans:
    """The best single plan in the place of those that are made together."""
    plans = _together(graphs, trace, cluster, mesh, options)
    owner = bucket_plans.plan_graph(graphs[plans.single], cluster, mesh, options)
    of_one = {}
    for size, graph in graphs.items():
        alike = repriced(graph, cluster, mesh, options, [owner])
        assert alike is not None
        of_one[size] = alike[0]
    return replace(plans, plans=of_one, layouts=dict.fromkeys(of_one, 0), seconds=plans.single_seconds)


_together = bucket_plans.plan_buckets


def run(
    sizes: list[tuple[int, int]], dim: int, heads: int, layers: int, steps: int
) -> list[tuple[str, float, float, float, float]]:
    """Of both ways: what it is, predicted and measured seconds of a step, CPU-seconds of all ranks, and how far the
    losses are from those of one process, relatively."""
    torch.set_num_threads(1)
    longest = max(length for _, length in sizes)
    ways: dict[str, Any] = {}
    for name, plan in (("together", _together), ("single", single)):
        torch.manual_seed(0)
        model = Decoder(dim, heads, layers, 512, longest)
        with mock.patch.object(bucket_plans, "plan_buckets", plan):
            pm = autopar.parallelize(
                model, dist.get_world_size(), (torch.zeros(*sizes[0], dtype=torch.long),) * 2, shapes="buckets",
                buckets=sizes * 2, verify_capture=False,
            )  # fmt: skip
        ways[name] = pm, torch.optim.AdamW(pm.parameters()), [0.0, 0.0], [], []
    torch.manual_seed(0)
    alone = Decoder(dim, heads, layers, 512, longest)
    of_alone, wanted = torch.optim.AdamW(alone.parameters()), []
    for step in range(steps + 1):
        for size in sizes:
            x = torch.randint(0, 512, size, generator=torch.Generator().manual_seed(step))
            if dist.get_rank() == 0:
                loss = alone(x, x.roll(-1, 1))
                loss.backward()
                of_alone.step()
                of_alone.zero_grad()
                wanted.append(float(loss.detach()))
            for pm, optimizer, seconds, predicted, losses in ways.values():
                dist.barrier()
                began, cpu = time.perf_counter(), time.process_time()
                loss = pm(x, x.roll(-1, 1))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                used = torch.tensor(time.process_time() - cpu)
                dist.all_reduce(used)
                seconds[0] += (time.perf_counter() - began) * (step > 0)
                seconds[1] += float(used) * (step > 0)
                losses.append(float(loss.detach()))
                if step == 0:
                    predicted.append(pm.plan.seconds)
    n = len(sizes)
    return [
        (
            f"{name}: {pm.plan.mesh.shown()}, moved {pm._autopar.layout} times", sum(predicted) / n, wall / (n * steps),
            cpu / (n * steps), max((abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=False)), default=0.0),
        )
        for name, (pm, _, (wall, cpu), predicted, losses) in ways.items()
    ]  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=int, default=0, metavar="RANKS")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--sizes", nargs="+", default=["x".join(map(str, size)) for size in SMALL])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    if given.run:
        buckets = [(int(rows), int(length)) for rows, length in (size.split("x") for size in given.sizes)]
        both = run_local(run, given.run, buckets, given.dim, given.heads, given.layers, given.steps, timeout=900)[0]
        for what, expected, measured, used, apart in both:
            print(
                f"{what}: {1e3 * expected:.2f} ms a step predicted, {1e3 * measured:.2f} measured, "
                f"{used:.3f} CPU-s; losses within {apart:.1e} of one process"
            )
        wall, cpu = (both[0][i] / both[1][i] for i in (2, 3))
        print(f"together / single: {wall:.3f} of the wall, {cpu:.3f} of the CPU-seconds")
    else:
        priced(given.devices)
