"""A training step of a layer of routed experts on two gloo ranks: autopar's plan against all_to_all_single by hand.

Both live in the same two processes with one thread each and take turns, in an order that rotates. The layer is
Mixtral's; by hand each rank has half of the experts, tokens go to their expert and back, the router is data parallel.
Ratios are of medians, autopar over the other: below 1 is faster. With ``--ways``, other ways to make autopar's exchange
take turns, too, and each ratio is over the first of them.
``python benchmarks/experts_two_ranks.py [--runs 15] [--tokens 2048] [--ways travel travel/2 travel@2]``
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import autopar
from autopar.runtime.ranks.launch import run_local

HIDDEN, FFN, EXPERTS, OF_EACH = 512, 1792, 8, 2


class Layer(nn.Module):
    """Mixtral's experts with a loss."""

    def __init__(self) -> None:
        super().__init__()
        config = MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=EXPERTS, num_experts_per_tok=OF_EACH
        )
        config._experts_implementation = "grouped_mm"
        self.block = MixtralSparseMoeBlock(config)
        for p in self.parameters():
            nn.init.normal_(p, std=0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # [b s h] twice -> []
        out = self.block(x)
        return F.mse_loss(out[0] if isinstance(out, tuple) else out, y)


class ByHand(nn.Module):
    """The same on one of several ranks, which has its part of the experts; takes its part of the tokens."""

    def __init__(self, whole: Layer) -> None:
        super().__init__()
        rank, n = dist.get_rank(), dist.get_world_size()
        experts = whole.block.experts
        mine = slice(rank * EXPERTS // n, (rank + 1) * EXPERTS // n)
        self.gate = nn.Parameter(whole.block.gate.weight.detach().clone())
        self.up = nn.Parameter(experts.gate_up_proj.detach()[mine].clone())
        self.down = nn.Parameter(experts.down_proj.detach()[mine].clone())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        n, of_rank = dist.get_world_size(), len(self.up)
        tokens = x.flatten(0, 1)
        weights, picked = F.softmax(F.linear(tokens, self.gate).float(), -1).topk(OF_EACH)
        weights = weights / weights.sum(-1, keepdim=True)
        order = picked.flatten().argsort(stable=True)
        counts = picked.flatten().bincount(minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sends = counts.view(n, of_rank).sum(1).tolist()
        receives = theirs.view(n, of_rank).sum(1).tolist()
        rows = tokens[order // OF_EACH]
        arrived = all_to_all_single(rows.new_empty(sum(receives), HIDDEN), rows, receives, sends)
        expert = torch.arange(of_rank).repeat(n).repeat_interleave(theirs)
        by_expert = expert.argsort(stable=True)
        parts = arrived[by_expert].split(expert.bincount(minlength=of_rank).tolist())
        done = []
        for part, up, down in zip(parts, self.up, self.down, strict=True):
            gate, features = F.linear(part, up).chunk(2, -1)
            done.append(F.linear(F.silu(gate) * features, down))
        back = torch.cat(done)[by_expert.argsort()]
        made = all_to_all_single(torch.empty_like(rows), back, sends, receives)[order.argsort()]
        out = (made.view(-1, OF_EACH, HIDDEN) * weights.unsqueeze(-1)).sum(1)
        return F.mse_loss(out.view_as(y), y)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss; gradients are those of the mean over all ranks."""
        n = dist.get_world_size()
        loss = self(x.chunk(n)[dist.get_rank()], y.chunk(n)[dist.get_rank()])
        (loss / n).backward()
        dist.all_reduce(self.gate.grad)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total / n


def measured(tokens: int, runs: int, ways: Sequence[str]) -> dict[str, Any]:
    """Seconds of every step on this rank, of autopar by each way to make its exchange and by hand."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = Layer()
    x, y = torch.randn(4, tokens // 4, HIDDEN), torch.randn(4, tokens // 4, HIDDEN)
    hand = ByHand(layer)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("expert",))
    every = {
        way: autopar.parallelize(
            copy.deepcopy(layer), mesh, (x, y), constraints={"block*:expert_block*": {"expert": way}}
        )
        for way in ways
    }
    chosen = autopar.plan(Layer(), "local-x2", (x, y), mesh="expert=2")
    picks = [op for name, op in chosen.stages[0].ops.items() if "expert_block" in name]

    def autopar_step(way: str) -> torch.Tensor:
        loss = every[way](x, y)
        loss.backward()
        return loss.detach()

    optimizers = {name: torch.optim.SGD(m.parameters(), 0.1) for name, m in (*every.items(), ("by hand", hand))}
    steps = {**{way: partial(autopar_step, way) for way in ways}, "by hand": partial(hand.step, x, y)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for run in range(runs + 2):
        for name in sorted(steps, reverse=bool(run % 2)):
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            losses[name].append(float(steps[name]()))
            optimizers[name].step()
            optimizers[name].zero_grad()
            dist.barrier()
            if run > 1:
                seconds[name].append(time.perf_counter() - begin)
                seconds.setdefault(f"{name}, CPU", []).append(time.process_time() - cpu)
    return {"seconds": seconds, "losses": losses, "chosen": [str(pick) for pick in picks]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--ways", nargs="+", default=["travel"])
    given = parser.parse_args()
    ways: list[str] = given.ways
    of_rank = run_local(measured, 2, given.tokens, given.runs, ways)[0]
    medians = {name: statistics.median(all_of) for name, all_of in of_rank["seconds"].items()}
    losses = of_rank["losses"].values()
    worst = max(max(of_step) - min(of_step) for of_step in zip(*losses, strict=True))
    ratio = medians[ways[0]] / medians["by hand"]
    cpu = medians[f"{ways[0]}, CPU"] / medians["by hand, CPU"]
    among = {way: medians[way] / medians[ways[0]] for way in ways[1:]}
    print(json.dumps({"seconds": medians, "ratio": ratio, "CPU ratio": cpu, "losses differ by": worst,
                      "ratios of ways": among, "autopar alone chooses": of_rank["chosen"]}))  # fmt: skip


if __name__ == "__main__":
    main()
