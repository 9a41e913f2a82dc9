"""A step as an explicit program (``compile(backend="eager")``) beside the same program under autograd, and eager mode.

``python benchmarks/explicit_steps.py gpt2 llama`` on one device; ``--ranks 2`` on two gloo ranks; ``--stages`` in a
pipeline of as many stages. All ways run in one process and take turns; seconds are CPU seconds of the calling thread,
which other work on the machine touches less, and ratios those of neighbouring steps. ``KB`` is the most memory that
lives at once. One line of a table for each model.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import autopar
from autopar.allocations import Allocations
from autopar.lower.freed_tensors import EMPTIED
from autopar.torch_private import pytree

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
SINGLE = ("mixtral",)
"""Models that do not run in double precision."""


class Cube(torch.autograd.Function):
    """x^3 with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3.0 * x * x * grad


class WithFunction(nn.Module):
    """Layers around a custom Function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + Cube.apply(torch.tanh(layer(x)))
        return nn.functional.cross_entropy(self.head(x), labels)


class Lstm(nn.Module):
    """An LSTM of two layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(64, 64), nn.LSTM(64, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(self.embed(ids))
        return nn.functional.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


def lstm() -> Made:
    """Return the LSTM with a batch."""
    ids = torch.randint(0, 64, (8, 16))
    return Lstm(), (ids, ids.clone()), {}


def resnet50() -> Made:
    """Return ResNet-50 for small images."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(num_labels=10)
    batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 10, (4,))}
    return ResNetForImageClassification(config), (), batch


def of_zoo(name: str, **options: Any) -> Callable[[], Made]:
    """Return a maker of a model of the tests."""

    def make() -> Made:
        from zoo import ZOO
        from zoo_wide import WIDE

        case = ZOO[name](**options) if name in ZOO else WIDE[name]()
        return case.model, case.args, case.kwargs

    return make


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": of_zoo("gpt2"), "llama": of_zoo("llama"), "resnet50": resnet50, "t5": of_zoo("t5"),
    "mixtral": of_zoo("mixtral"), "unet": of_zoo("unet"), "lstm": lstm,
    "function": lambda: (WithFunction(), (torch.randn(8, 64), torch.randint(0, 8, (8,))), {}),
    "layerdrop": of_zoo("opt", layerdrop=0.3),
}  # fmt: skip


def made(name: str) -> Made:
    """Return a model with a batch, in double precision where it can be."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    if name in SINGLE:
        return model, args, kwargs
    floats = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, (args, kwargs))
    return model.double(), *floats


def local(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return this rank's part of a gradient."""
    return getattr(x, "_local_tensor", x)


def rank(name: str, steps: int, options: dict[str, Any], ranks: int, backend: str) -> dict[str, Any]:
    """Compare the ways on this rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, args, kwargs = made(name)
    ways: dict[str, nn.Module] = {}
    if ranks == 1:
        ways["eager"] = copy.deepcopy(model)
    for way in ("autograd", "step"):
        copied = copy.deepcopy(model)
        ways[way] = autopar.parallelize(copied, ranks, args, example_kwargs=kwargs, **options)
    ways["step"].compile(backend=backend)

    def one(way: str) -> tuple[torch.Tensor, float]:
        called = ways[way]
        for p in called.parameters():
            p.grad = None
        torch.manual_seed(1)
        began = time.thread_time()
        if way == "eager":
            loss = next(x for x in pytree.tree_leaves(called(*args, **kwargs)) if x.dim() == 0)
            loss.backward()
        else:
            loss = called.train_step(*args, **kwargs)  # type: ignore[operator]
        return loss.detach(), time.thread_time() - began

    one("autograd")
    began = time.thread_time()
    first = one("step")[1]
    built = time.thread_time() - began
    losses = [one(way)[0] for way in ("autograd", "step")]
    pairs = [
        (local(a.grad), local(b.grad))
        for a, b in zip(ways["autograd"].parameters(), ways["step"].parameters(), strict=True)
    ]
    apart = [float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None and a.numel()]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for i in range(steps):
        for way in list(ways)[:: 1 if i % 2 else -1]:
            seconds[way].append(one(way)[1])
    ratios = [b / a for a, b in zip(seconds["autograd"], seconds["step"], strict=True)]
    peaks = {}
    for way in ("autograd", "step"):
        for p in ways[way].parameters():
            p.grad = None
        with (count := Allocations(EMPTIED)):
            one(way)
        peaks[way] = count.peak_bytes / 1024
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "name": name, "loss": float((losses[0] - losses[1]).abs()), "gradients": max(apart),
        "missing": sum((a is None) != (b is None) for a, b in pairs),
        "ms": {way: 1e3 * statistics.median(times) for way, times in seconds.items()},
        "ratio": statistics.median(ratios), "quartiles": (quartiles[0], quartiles[2]), "peaks": peaks,
        "built": built, "first": first, "load": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stages", action="store_true", help="a pipeline with a stage for each rank")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--zero", action="store_true", help="gather all parameters for each use")
    parser.add_argument("--precision")
    parser.add_argument("--backend", default="eager", help="of compile()")
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    options: dict[str, Any] = {}
    if asked.stages:
        options |= {"stages": asked.ranks, "schedule": asked.schedule, "microbatches": 4}
    if asked.zero:
        options["params"] = {"*": "S0 use"}
    if asked.precision:
        options["precision"] = asked.precision
    print("| model | apart: loss, gradients | CPU ms: eager, autograd, step | step / autograd (quartiles) | "
          "peak KB: autograd, step | building, s | load |\n|---|---|---|---|---|---|---|", flush=True)  # fmt: skip
    for name in asked.models:
        args = name, asked.steps, options, asked.ranks, asked.backend
        ranks = [rank(*args)] if asked.ranks == 1 else autopar.run_local(rank, asked.ranks, *args, timeout=900)
        for row in ranks[: len(ranks) if asked.stages else 1]:
            ms = ", ".join(f"{value:.1f}" for value in row["ms"].values())
            low, high = row["quartiles"]
            print(
                f"| {name} | {row['loss']:.1e}, {row['gradients']:.1e} | {ms} | {row['ratio']:.2f} ({low:.2f} to "
                f"{high:.2f}) | {row['peaks']['autograd']:,.0f}, {row['peaks']['step']:,.0f} | {row['built']:.2f} | "
                f"{row['load']:.0f} |", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
