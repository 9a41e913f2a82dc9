"""The time of an optimizer's step on two gloo ranks: on a parallel module's parameters, on plain tensors of the same
pieces, and through DTensor's dispatch alone, as it would be without ``autopar.runtime.repairs.optimizer_steps``.

All three are in the same processes and take turns step by step, so that what else the machine does hits all of them.
CPU seconds of the rank, medians. ``python benchmarks/optimizer_steps.py [--runs 30] [--width 64] [--layers 24]``
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor

import autopar
from autopar.torch_private import OPTIMIZERS_OF_ELEMENTS

MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD, momentum": lambda params: optim.SGD(params, 1e-3, momentum=0.9),
    "AdamW": lambda params: optim.AdamW(params, 1e-3),
    "AdamW, foreach": lambda params: optim.AdamW(params, 1e-3, foreach=True),
    "AdamW, fused": lambda params: optim.AdamW(params, 1e-3, fused=True),
    "RMSprop": lambda params: optim.RMSprop(params, 1e-4),
}


def seconds(step: Callable[[], Any]) -> float:
    """Of this process's CPU."""
    began = time.process_time()
    step()
    return time.process_time() - began


def measure(width: int, layers: int, runs: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each optimizer on each kind of parameters, and ratios."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    options: dict[str, Any] = {"constraints": {"*linear*": {"data": "b"}}, "params": {"*": "S0 use"}}
    pm = autopar.parallelize(model, mesh, torch.randn(8, width), **options)
    pm(torch.randn(8, width)).square().mean().backward()
    cut = list(pm.parameters())
    table = {}
    for name, make in MAKERS.items():
        plain = [nn.Parameter(p.detach().to_local().clone()) for p in cut]
        for ours, theirs in zip(plain, cut, strict=True):
            assert isinstance(theirs.grad, DTensor)
            ours.grad = theirs.grad.to_local().clone()
        on_pieces, on_plain, on_dtensors = make(cut), make(plain), make(cut)
        steps = [function.get() for function in OPTIMIZERS_OF_ELEMENTS]

        def through_dtensor(step: Any = on_dtensors.step, steps: Any = steps) -> None:
            for function, ours in zip(OPTIMIZERS_OF_ELEMENTS, steps, strict=True):
                function.set(ours.__wrapped__)
            try:
                step()
            finally:
                for function, ours in zip(OPTIMIZERS_OF_ELEMENTS, steps, strict=True):
                    function.set(ours)

        ways = {"plain": on_plain.step, "autopar": on_pieces.step, "dtensor": through_dtensor}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for run in range(runs + 3):
            for way, step in ways.items():
                spent = seconds(step)
                if run >= 3:
                    times[way].append(spent)
        middle = {way: 1e3 * statistics.median(values) for way, values in times.items()}
        table[name] = {**middle, "autopar/plain": middle["autopar"] / middle["plain"],
                       "dtensor/plain": middle["dtensor"] / middle["plain"]}  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    given = parser.parse_args()
    table = autopar.run_local(measure, 2, given.width, given.layers, given.runs)[0]
    json.dump(table, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
