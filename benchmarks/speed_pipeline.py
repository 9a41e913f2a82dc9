"""A training step in two pipeline stages on two gloo ranks: autopar's executor against torch.distributed.pipelining.

The same GPT, cut at the same layer, the same 1F1B schedule, one thread a rank; both live in the same two processes and
take turns step by step. Prints the ratio of medians (below 1: autopar is faster) and what the simulator predicted.
``python benchmarks/speed_pipeline.py [--runs 9] [--microbatches 8]``
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from speed_two_ranks import HIDDEN, LAYERS, VOCABULARY, Layer
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import autopar
from autopar.parallelizing.all_ranks import spread
from autopar.planner.planning import in_stages
from autopar.plans.request import request_of
from hardware_profiles import load_cluster

TOKENS = 128


class Gpt(nn.Module):
    """Token ids to scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [b s] -> [b s v]
        return self.head(self.layers(self.embed(ids)))


def loss_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def rank(microbatches: int, size: int, runs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Gpt()
    ids = torch.randint(0, VOCABULARY, (microbatches * size, TOKENS))
    labels = torch.randint(0, VOCABULARY, (microbatches * size, TOKENS))
    here = dist.get_rank()

    captured = autopar.capture(model, ids[:size], loss_fn=loss_of, targets=labels[:size])
    ops = [n for n in captured.graph.nodes if n.kind == "op" and n.hot]
    half = next(n.name for n in ops if n.module.startswith(f"layers.{LAYERS // 2}"))
    asked = request_of(
        {"stages": 2, "schedule": "1f1b", "microbatches": microbatches, "mesh": "data=1", "cuts": [half]}
    )
    found = in_stages({microbatches: captured.graph}, load_cluster("local-x2"), 2, asked, "local-x2")
    ours = spread(copy.deepcopy(model), captured, found.plan, dist.group.WORLD)

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = copy.deepcopy(model)
            layers = list(whole.layers)
            self.before = whole.embed if here == 0 else nn.Identity()
            self.layers = nn.Sequential(*(layers[: LAYERS // 2] if here == 0 else layers[LAYERS // 2 :]))
            self.after = nn.Identity() if here == 0 else whole.head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.layers(self.before(x)))

    part = Part()
    stage = PipelineStage(part, here, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4, foreach=True) for m in (ours, part)]
    losses: dict[str, float] = {}

    def autopar_step() -> None:
        losses["autopar"] = float(ours.train_step(ids, labels))
        optimizers[0].step()
        optimizers[0].zero_grad()

    def torch_step() -> None:
        if here == 0:
            schedule.step(ids)
        else:
            own: list[torch.Tensor] = []
            schedule.step(target=labels, losses=own)
            losses["torch"] = float(torch.stack(own).mean())
        optimizers[1].step()
        optimizers[1].zero_grad()

    steps: dict[str, Callable[[], None]] = {"autopar": autopar_step, "torch": torch_step}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for run in range(-2, runs):
        for name in list(steps) if run % 2 else list(steps)[::-1]:
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            dist.barrier()
            if run >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {"seconds": seconds, "losses": losses, "predicted": found.plan.seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--size", type=int, default=2, help="sequences in a microbatch")
    options = parser.parse_args()
    ranks = autopar.run_local(rank, 2, options.microbatches, options.size, options.runs, timeout=1200)
    losses = ranks[1]["losses"]
    assert abs(losses["autopar"] - losses["torch"]) < 1e-3 * losses["torch"], f"not the same training: {losses}"
    own, other = (ranks[0]["seconds"][name] for name in ("autopar", "torch"))
    print(
        f"autopar {statistics.median(own) * 1e3:.0f} ms (least {min(own) * 1e3:.0f}), torch.distributed.pipelining "
        f"{statistics.median(other) * 1e3:.0f} ms (least {min(other) * 1e3:.0f}): ratio "
        f"{statistics.median(own) / statistics.median(other):.3f}, of the minima {min(own) / min(other):.3f}\n"
        f"simulated {ranks[0]['predicted'] * 1e3:.0f} ms without the optimizer step; loss {losses['autopar']:.4f}"
    )


if __name__ == "__main__":
    main()
