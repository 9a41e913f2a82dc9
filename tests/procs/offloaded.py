"""What one rank does in the tests of offload: train a GPT whose activations wait at the host, and count its memory."""

from __future__ import annotations

import copy

import stand_in
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.allocations import Allocations
from autopar.lower.freed_tensors import EMPTIED

WIDTH, LENGTH, ROWS, WORDS = 32, 32, 16, 64


class Block(nn.Module):
    """A block of a GPT without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """A GPT that returns its loss."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def trained(
    how: str, share: float, rate: float, microbatches: int = 1, as_a_step: bool = False
) -> dict[str, object]:
    """Train by a plan that has a share of the fastest plan's memory; return what was found of it.

    Args:
        how: ``data``, ``tensor``, or ``stages``.
        rate: of the link, in bytes per second; copies are made by threads.
        as_a_step: the program runs as an explicit step.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = GPT(6).double()
    tokens = torch.randint(WORDS, (ROWS, LENGTH))
    cluster = stand_in.stand_in(n)
    layout = {"stages": n, "schedule": "1f1b"} if how == "stages" else {"mesh": f"{how}={n}"}
    options = {**layout, "microbatches": microbatches, "offload": "activations", "recompute": "none"}
    free = autopar.plan(model, cluster, (tokens,), **options)  # type: ignore[arg-type]
    most = max(stage.price.memory_bytes for stage in free.stages)
    limit = int(share * most)
    plan = autopar.plan(model, cluster, (tokens,), **options, memory_limit=limit)  # type: ignore[arg-type]
    alone = copy.deepcopy(model)
    optimizer_alone = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    pm = autopar.parallelize(model, cluster=cluster, example_inputs=(tokens,), plan=plan)
    if as_a_step:
        pm.compile(backend="eager")
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2, foreach=False)
    losses, peaks, worst = [], [], 0.0
    with stand_in.slow_link(rate) as (out, back, trace):
        for _ in range(3):
            optimizer_alone.zero_grad()
            loss_alone = alone(tokens)
            loss_alone.backward()
            optimizer_alone.step()
            count = Allocations(EMPTIED)
            count.ignore(tokens)
            for x in (*pm.parameters(), *(x for state in optimizer.state.values() for x in state.values())):
                if isinstance(x, torch.Tensor):
                    count.note(x)
            with count:
                loss = pm.train_step(tokens, optimizer=optimizer)
            peaks.append(count.peak_bytes)
            losses.append(float(loss))
            worst = max(worst, abs(losses[-1] - float(loss_alone)))
    mine = next(stage for stage in plan.stages if rank in stage.devices)
    return {
        "worst": worst, "losses": losses, "peak": peaks[-1], "planned": mine.price.memory_bytes, "limit": limit,
        "free": most, "moved": [len(stage.memory.get("offload", ())) for stage in plan.stages], "copies": len(trace),
        "waited": out.waited + back.waited, "own": len(mine.memory.get("offload", ())),
    }  # fmt: skip
