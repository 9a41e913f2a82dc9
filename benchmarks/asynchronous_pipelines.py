"""A step of an asynchronous pipeline next to 1F1B: wall time on gloo ranks, one stage on each, and what was simulated.

A layer of this model waits for a given time in its forward and for twice that in its backward, as for an accelerator,
so processor cores that are shared by the ranks, or loaded otherwise, do not decide the result: what is measured is who
waits for whom. ``python benchmarks/asynchronous_pipelines.py [--stages 4] [--microbatches 4] [--milliseconds 20]``
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.runtime.ranks.launch import run_local
from cost_models.schedules import build, simulate, times
from cost_models.schedules.asynchronous import steady

WIDTH = 16
SCHEDULES = ("1f1b", "pipedream-2bw", "pipedream")


class Waiting(torch.autograd.Function):
    """The identity, which takes a while."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        if x.device.type == "cpu":
            time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad.clone(), None


class Layer(nn.Module):
    """A product and a wait."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [rows width]
        return Waiting.apply(self.linear(x), self.seconds)


def rank(schedule: str, stages: int, microbatches: int, seconds: float, steps: int) -> list[float]:
    """Return the seconds of each step after those that fill the pipeline, on this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(seconds) for _ in range(stages)))
    x, y = torch.randn(2 * microbatches, WIDTH), torch.randn(2 * microbatches, WIDTH)
    pm = autopar.parallelize(
        model, example_inputs=(x,), loss_fn=nn.functional.mse_loss, targets=(y,), stages=stages, schedule=schedule,
        microbatches=microbatches, cuts=[str(s) for s in range(1, stages)],
    )  # fmt: skip
    pm.compare_every = 0
    optimizer = torch.optim.SGD(pm.parameters(), lr=1e-3)
    spent = []
    for _ in range(steps):
        began = time.perf_counter()
        pm.train_step(x, y, optimizer=optimizer)
        spent.append(time.perf_counter() - began)
    pm.drain()
    dist.barrier()
    return spent[2:]


def predicted(schedule: str, stages: int, microbatches: int, seconds: float) -> float:
    """Return the simulated seconds of a step, of the waits alone."""
    of_stages = times(stages, seconds, seconds, seconds)
    rows = build(schedule, stages, stages, microbatches)
    timeline = simulate(rows, of_stages) if schedule == "1f1b" else steady(rows, of_stages)
    return timeline.makespan_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--milliseconds", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    counts, seconds = (options.stages, options.microbatches), options.milliseconds / 1e3
    measured: dict[str, float] = {}
    for schedule in SCHEDULES:
        of_ranks = run_local(rank, options.stages, schedule, *counts, seconds, options.steps, timeout=300)
        measured[schedule] = max(statistics.median(spent) for spent in of_ranks)
        simulated = predicted(schedule, *counts, seconds)
        ratio, expected = measured[schedule] / measured["1f1b"], simulated / predicted("1f1b", *counts, seconds)
        print(
            f"{schedule}: {1e3 * measured[schedule]:.0f} ms a step (simulated {1e3 * simulated:.0f}), {ratio:.3f} of "
            f"1f1b (simulated {expected:.3f})"
        )


if __name__ == "__main__":
    main()
