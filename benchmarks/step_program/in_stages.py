"""Step programs in the stages of a pipeline, under any schedule, against today's executor.

``python benchmarks/step_program/in_stages.py gpt2 --schedule zb-h1``: two gloo ranks, two stages, four microbatches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import spmd_types as spmd
from measure import local, made
from running import Program

import autopar
from autopar.allocations import Allocations
from autopar.lower.freed_tensors import EMPTIED


class InFlight:
    """The step program of one stage, in the place of what its ``Flight`` runs.

    Attributes:
        flying: by microbatch, what its backward reads; :attr:`halves` what its second half reads.
    """

    def __init__(self, flight: Any) -> None:
        self.flight, self.stage = flight, flight.stage
        self.back = [wire for wire in flight.into if wire.back is not None]
        self.roots = sorted({wire.stage_edge.output for wire in flight.out if wire.back is not None})
        graph = flight.part.graph
        self.loss = graph.loss
        roots = [*self.roots, *([] if self.loss is None else [self.loss])]
        wanting = [wire.name for wire in self.back]
        self.program = Program(self.stage, roots, wanting, split=True, reduce=False)
        self.flying: dict[int, list[Any]] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.halves: dict[int, list[Any]] = {}
        self.today = flight.forward, flight.backward, flight.weights

    def on(self, is_on: bool) -> None:
        """Run the step program from now on, or what ran before."""
        mine = self.forward, self.backward, self.weights
        self.flight.forward, self.flight.backward, self.flight.weights = mine if is_on else self.today

    def forward(
        self, post: Any, microbatch: int, batch: Any, shown: Any, seed: Any, evaluating: bool, reached: Any = None
    ) -> tuple[torch.Tensor | None, tuple[Any, ...]]:
        """Run the forward of a microbatch."""
        flight, stage = self.flight, self.stage
        with spmd.set_current_mesh(stage.device_mesh), torch.no_grad():
            inputs = {wire.name: post.take(wire, False, microbatch).detach() for wire in flight.into}
            for name in flight.part.inputs:
                inputs[name] = stage.local_input(name, batch[name].detach(), shown.get(name, name))
            outputs, saved = self.program.forward(inputs, seed)
            flight.begun = True
            for wire in flight.out:
                post.send(wire, False, microbatch, outputs[wire.stage_edge.output])
        self.flying[microbatch] = saved
        loss = None if self.loss is None else outputs[self.loss]
        if loss is not None:
            self.losses[microbatch] = loss
        return loss, outputs

    def backward(self, post: Any, action: Any) -> None:
        """Run the backward of a microbatch, or its first half."""
        flight, k, functions = self.flight, action.microbatch, self.program.functions
        with spmd.set_current_mesh(self.stage.device_mesh), torch.no_grad():
            sums: dict[int, torch.Tensor] = {}
            for wire in flight.out:
                if wire.back is not None:
                    grad, at = post.take(wire, True, k), wire.stage_edge.output
                    sums[at] = sums[at] + grad if at in sums else grad
            if self.loss is not None:
                sums[self.loss] = torch.full_like(self.losses.pop(k), flight.shares[k])
            values = self.flying.pop(k)
            values.extend(sums[at] for at in functions.roots)
            if action.kind == "B":
                got = dict(zip(functions.slots, functions.backward(values), strict=True))
                self._add(got, action)
            else:
                half = functions.inputs(values)
                n = len(functions.first)
                got = dict(zip(functions.first, half[:n], strict=True))
                self.halves[k] = list(half[n:])
            slots = self.stage.input_slots
            for wire in flight.into:
                if wire.back is not None:
                    post.send(wire, True, k, got[slots[wire.name]])

    def weights(self, action: Any) -> None:
        """Run the second half."""
        functions = self.program.functions
        with torch.no_grad():
            got = functions.weights(self.halves.pop(action.microbatch))
        self._add(dict(zip(functions.second, got, strict=True)), action)

    def _add(self, got: dict[int, Any], action: Any) -> None:
        with self.stage.gradients.reducing(last=action == self.flight.last, by_hand=True):
            for k, held in self.program.param_slots:
                grad = got.get(k)
                if grad is not None:
                    held.leaf.grad = grad if held.leaf.grad is None else held.leaf.grad.add_(grad)


def rank(name: str, schedule: str, steps: int, microbatches: int) -> dict[str, Any]:
    """Compare both ways on this rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, args, kwargs = made(name)
    pm = autopar.parallelize(model, 2, kwargs or args, stages=2, schedule=schedule, microbatches=microbatches)
    run = pm._autopar

    def one() -> tuple[float, float]:
        for p in pm.parameters():
            p.grad = None
        start, wall = time.thread_time(), time.perf_counter()
        loss = pm.train_step(*args, **kwargs)
        return float(loss), time.thread_time() - start, time.perf_counter() - wall

    one()
    began = time.thread_time()
    flights = [InFlight(f) for work in run.works.values() for f in work.flights.values()]
    found: dict[str, Any] = {"model": name, "schedule": schedule, "built_s": time.thread_time() - began}
    (work,) = run.works.values()
    found["row"] = " ".join(map(str, work.row))
    numbers = {}
    for way in (False, True):
        for f in flights:
            f.on(way)
        torch.manual_seed(3)
        loss = one()[0]
        numbers[way] = loss, {k: None if p.grad is None else local(p.grad).clone() for k, p in pm.named_parameters()}
    found["loss_diff"] = abs(numbers[True][0] - numbers[False][0])
    pairs = [(numbers[False][1][k], numbers[True][1][k]) for k in numbers[False][1]]
    found["unequal_none"] = sum((a is None) != (b is None) for a, b in pairs)
    found["grad_diff"] = max(float((a - b).abs().max()) for a, b in pairs if a is not None and a.numel())
    seconds: dict[bool, list[Any]] = {False: [], True: []}
    for i in range(steps + 2):
        for way in (False, True) if i % 2 else (True, False):
            for f in flights:
                f.on(way)
            result = one()[1:]
            if i >= 2:
                seconds[way].append(result)
    for way, called in ((False, "today"), (True, "program")):
        found[f"{called}_ms"] = [round(1e3 * statistics.median(x[k] for x in seconds[way]), 2) for k in range(2)]
        found[f"{called}_min_ms"] = [round(1e3 * min(x[k] for x in seconds[way]), 2) for k in range(2)]
        for f in flights:
            f.on(way)
        for p in pm.parameters():
            p.grad = None
        count = Allocations(EMPTIED)
        with count:
            one()
        found[f"{called}_peak"] = count.peak_bytes
    found["load"] = os.getloadavg()[0]
    return found


def main() -> None:
    """Measure the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    for name in options.models:
        for found in autopar.run_local(rank, 2, name, options.schedule, options.steps, 4, timeout=400):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
