"""A step of a model on one GPU by the generated program: as Python, compiled by inductor, recorded as a CUDA graph.

``python benchmarks/step_program/on_gpu.py [--device cuda|cpu] [--quick] [--output FILE] Llama-1B GPT-2``

Each way is one line: median seconds of forward and backward, of the host until all is launched, peak memory, and the
largest difference of a gradient from the executor's, over its largest value. ``--device cpu --quick`` runs small models
without CUDA graphs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from generating import _needed, _read_of
from gpu_rows.models import make
from passes import overlapped
from running import Program, Runs

import autopar

Ran = tuple[torch.Tensor, list[torch.Tensor]]


def parts(program: Program) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule, int]:
    """Return forward and backward of a program as graphs of their own, and the number of results of the first."""
    step = program.step
    ends = [*step.grads.values(), *(x for x in step.results if isinstance(x, torch.fx.Node))]
    needed = _needed(ends)
    nodes = [n for n in step.graph.nodes if n.op == "call_function"]
    early = overlapped([n for n in nodes if not n.meta["late"] and n in needed])
    late = overlapped([n for n in nodes if n.meta["late"] and n in needed])
    saved = _read_of(late, step.grads.values(), {*early, *step.placeholders})

    def graph_of(
        given: Sequence[torch.fx.Node], inside: Sequence[torch.fx.Node], results: Sequence[Any]
    ) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        new: dict[torch.fx.Node, torch.fx.Node] = {}
        for x in given:
            new[x] = graph.placeholder(f"given_{len(new)}")
            new[x].meta["val"] = x.meta["val"]
        for n in inside:
            new[n] = graph.node_copy(n, lambda x: new[x])
        graph.output(tuple(new[x] if isinstance(x, torch.fx.Node) else x for x in results))
        return torch.fx.GraphModule(torch.nn.Module(), graph)

    forward = graph_of(step.placeholders, early, [*step.results, *saved])
    backward = graph_of([*saved, *step.roots.values()], late, list(step.grads.values()))
    return forward, backward, len(step.results)


class Ways:
    """The ways to run one program on one batch."""

    def __init__(self, pm: Any, batch: dict[str, torch.Tensor]) -> None:
        self.pm, self.batch = pm, batch
        self.run = pm._autopar
        self.today = self.run.call_program
        self.runs = Runs(pm)
        began = time.perf_counter()
        self.program = self.runs.program([])
        self.built = time.perf_counter() - began
        stage = self.run.stage
        self.inputs = {
            n: stage.local_input(n, x, self.run.batch.shown[n], n in self.run.batch.pieces)
            for n, x in self.run.batch.tensors((), batch).items()
        }

    def called(self, model: Any) -> Callable[[], Ran]:
        """Return a step of a module, forward and backward."""

        def step() -> Ran:
            for p in model.parameters():
                p.grad = None
            loss = model(**self.batch).loss
            loss.backward()
            return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]

        return step

    def executor(self) -> Callable[[], Ran]:
        """Return a step by what autopar runs today."""
        self.run.call_program = self.today
        return self.called(self.pm)

    def generated(self) -> Callable[[], Ran]:
        """Return a step by the generated functions, without autograd around them."""
        functions = self.program.functions

        @torch.no_grad()
        def step() -> Ran:
            flat = functions.forward(list(self.program.values(self.inputs, None)))
            n = functions.n_results
            loss = flat[functions.roots[0]]
            saved = list(flat[n:])
            del flat
            saved.append(torch.ones_like(loss))
            return loss, [g for g in functions.backward(saved) if g is not None]

        return step

    def behind_autograd(self) -> Callable[[], Ran]:
        """Return a step of the module with the program as one node of the caller's autograd."""
        self.run.call_program = self.runs.call_program
        return self.called(self.pm)

    @torch.no_grad()
    def compiled(self) -> Callable[[], Ran]:
        """Return a step by what inductor makes of the two graphs."""
        forward, backward, n = parts(self.program)
        values = list(self.program.values(self.inputs, None))
        f = torch.compile(forward, dynamic=False, fullgraph=True)
        b = torch.compile(backward, dynamic=False, fullgraph=True)
        root = self.program.functions.roots[0]

        @torch.no_grad()
        def step() -> Ran:
            flat = f(*values)
            loss, saved = flat[root], list(flat[n:])
            del flat
            return loss, [g for g in b(*saved, torch.ones_like(loss)) if g is not None]

        return step

    def recorded(self, step: Callable[[], Ran]) -> Callable[[], Ran]:
        """Return a step as a CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ran = step()

        def replay() -> Ran:
            graph.replay()
            return ran

        return replay


def timed(step: Callable[[], Ran], on_gpu: bool, n: int) -> dict[str, float]:
    """Return median seconds of a step, of the host, and the peak of memory."""
    for _ in range(3):
        step()
    whole, host = [], []
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(n):
        began = time.perf_counter()
        step()
        launched = time.perf_counter()
        if on_gpu:
            torch.cuda.synchronize()
        whole.append(time.perf_counter() - began)
        host.append(launched - began)
    found = {"ms": 1e3 * statistics.median(whole), "host_ms": 1e3 * statistics.median(host)}
    if on_gpu:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def apart(a: Ran, b: Ran) -> float:
    """Return the largest difference of loss and gradients, over the largest value of each."""
    pairs = zip((a[0], *a[1]), (b[0], *b[1]), strict=True)
    return max(float((x - y).abs().max().float() / y.abs().max().float().clamp_min(1e-30)) for x, y in pairs)


def model(name: str, device: str, quick: bool) -> dict[str, Any]:
    """Return the numbers of all ways for one model."""
    on_gpu = device != "cpu"
    made, batch = make(name, device, quick, torch.float32 if quick else torch.bfloat16)
    found: dict[str, Any] = {"model": name}
    # eager mode: the user's model before it is parallelized in place
    pm_step: dict[str, Callable[[], Ran]] = {}

    def eager() -> Ran:
        for p in made.parameters():
            p.grad = None
        loss = made(**batch).loss
        loss.backward()
        return loss.detach(), []

    found["eager"] = timed(eager, on_gpu, 8)
    for p in made.parameters():
        p.grad = None
    ways = Ways(autopar.parallelize(made, 1, batch), batch)
    functions = ways.program.functions
    found |= {
        "built_s": ways.built, "nodes": (functions.n_forward, functions.n_backward), "saved": len(functions.saved),
        "distinct": ways.program.step.distinct, "calls": len(ways.program.step.calls),
    }  # fmt: skip
    order = [n for n, _ in ways.program.params]
    names = [ways.program.step.slots[functions.slots[n]].name for n in order]
    reference = ways.executor()()
    by_name = {n: p.grad for n, p in ways.pm.named_parameters()}
    expected = reference[0].clone(), [by_name[n].clone() for n in names if n in by_name]
    found["first_in_order"] = len(expected[1]) == len(names)
    makers: dict[str, Callable[[], Callable[[], Ran]]] = {
        "today": ways.executor, "program in autograd": ways.behind_autograd, "program": ways.generated,
        "program compiled": ways.compiled,
    }  # fmt: skip
    if on_gpu:
        makers["program recorded"] = lambda: ways.recorded(ways.generated())
        makers["compiled recorded"] = lambda: ways.recorded(ways.compiled())
    for way, maker in makers.items():
        try:
            began = time.perf_counter()
            pm_step[way] = step = maker()
            ran = step()
            if on_gpu:
                torch.cuda.synchronize()
            row: dict[str, Any] = {"ready_s": time.perf_counter() - began}
            if way.startswith(("program c", "program r", "compiled")) or way == "program":
                row["apart"] = apart(ran, expected)
            del ran
            row |= timed(step, on_gpu, 8)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        pm_step.clear()
        found[way] = row
        print(json.dumps({"model": name, way: row}), flush=True)
        for p in ways.pm.parameters():
            p.grad = None
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    return found


def main() -> None:
    """Run the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["Llama-1B", "GPT-2"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("step_program.json"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in options.models:
        try:
            rows.append(model(name, options.device, options.quick))
        except Exception as error:
            rows.append({"model": name, "error": f"{type(error).__name__}: {str(error)[:400]}"})
            print(rows[-1], flush=True)
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
