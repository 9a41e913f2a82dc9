"""A training step on two gloo ranks: autopar's chosen plan against DDP, FSDP2 and tensor parallelism written by hand.

All live in the same two processes with one thread each, and take turns step by step in an order that rotates, so
that what else the machine does hits all of them. Ratios are of medians, autopar over the other: below 1 is faster.
Those of CPU seconds, which both ranks spend on a step, stand beside them for a machine that has other work.
``--step`` has a fifth one, autopar's plan as an explicit step (``compile(backend="eager")``). ``--local`` gives each
rank of autopar its own rows, as DDP and FSDP2 have them. ``--precision bf16-mixed`` trains under that policy: FSDP2 by
its ``MixedPrecisionPolicy``, DDP and tensor parallelism under ``torch.autocast``.
``python benchmarks/speed_two_ranks.py [--runs 9] [--models gpt resnet18] [--local] [--precision bf16-mixed]``
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from speed_one_device import resnet18
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import autopar

LAYERS, HIDDEN, HEADS, VOCABULARY = 6, 768, 12, 8192


class Layer(nn.Module):
    """Causal attention and an MLP, norms first; separate q, k and v as tensor parallelism by hand wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b s h] -> [b s h]
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns the loss."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Parameter(torch.zeros(tokens, HIDDEN))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Loss(nn.Module):
    """The loss of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixel_values, labels=labels).loss


def gpt(batch: int, tokens: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    ids = torch.randint(0, VOCABULARY, (batch, tokens))
    return GPT(tokens), (ids, ids.roll(-1, 1))


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "gpt": lambda: gpt(8, 128),  # enough tokens that cutting the batch pays
    "gpt_small_batch": lambda: gpt(2, 128),  # few tokens: gradients cost more than activations
    "resnet18": lambda: (Loss(resnet18()[0]), (torch.randn(16, 3, 64, 64), torch.randint(0, 100, (16,)))),
}


def ddp(model: nn.Module, batch: tuple[torch.Tensor, ...], low: bool) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return DistributedDataParallel(model, gradient_as_bucket_view=True), half(batch)


def fsdp2(model: nn.Module, batch: tuple[torch.Tensor, ...], low: bool) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    mesh = dist.init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    blocks = model.layers if isinstance(model, GPT) else model.model.resnet.encoder.stages
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, half(batch)


def by_hand(model: nn.Module, batch: tuple[torch.Tensor, ...], low: bool) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """What an expert writes: Megatron's columns and rows, between them the sequence cut (norms, residuals, positions),
    and embedding, head and loss cut along the vocabulary. Between the layers values are DTensors; attention and the MLP
    run on local tensors, gathered once for q, k and v."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    gathered = PrepareModuleOutput(
        output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
    )  # fmt: skip
    for layer in model.layers:
        parallelize_module(layer, mesh, {"norm1": SequenceParallel(), "norm2": SequenceParallel()})
        parallelize_module(layer, mesh, {
            "norm1": gathered, "norm2": gathered, "q": columns, "k": columns, "v": columns, "up": columns, "out": rows,
            "down": rows,
        })  # fmt: skip
    parallelize_module(model, mesh, {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    })  # fmt: skip
    model.positions = nn.Parameter(distribute_tensor(model.positions.detach(), mesh, [Shard(0)]))
    return model, batch


def chosen(model: nn.Module, batch: tuple[torch.Tensor, ...], low: bool) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return autopar.parallelize(model, 2, batch, precision="bf16-mixed" if low else None), batch


def of_own_rows(
    model: nn.Module, batch: tuple[torch.Tensor, ...], low: bool
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    precision = "bf16-mixed" if low else None
    return autopar.parallelize(model, 2, half(batch), batch="local", precision=precision), half(batch)


def half(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.chunk(2)[dist.get_rank()].contiguous() for x in batch)


def as_a_step(model: nn.Module, batch: tuple[torch.Tensor, ...], low: bool) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return autopar's module as an explicit step."""
    model, batch = chosen(model, batch, low)
    model.compile(backend="eager")
    return model, batch


UNDER_AUTOCAST = ("ddp", "by_hand")
WAYS = {"autopar": chosen, "autopar_local": of_own_rows, "ddp": ddp, "fsdp2": fsdp2, "by_hand": by_hand,
        "step": as_a_step}  # fmt: skip


def rank(name: str, ways: list[str], runs: int, low: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    steps: dict[str, Callable[[], None]] = {}
    parts: dict[str, list[list[float]]] = {}
    losses: dict[str, list[float]] = {}
    for way in ways:
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        model, batch = WAYS[way](copy.deepcopy(model).train(), batch, low)
        if way.startswith("autopar"):
            kinds = {(c.stored, c.used, c.lifetime) for c in model.plan.params.values()}
            found["plan"] = {"mesh": model.plan.mesh, "parameters": sorted(map(str, kinds)),
                             "predicted_seconds": model.plan.price.seconds}  # fmt: skip
        kinds_of: dict[type, list[Any]] = {}  # foreach does not mix plain tensors and DTensors
        for parameter in model.parameters():
            kinds_of.setdefault(type(parameter), []).append(parameter)
        optimizer = torch.optim.AdamW([{"params": p} for p in kinds_of.values()], lr=1e-4, foreach=True)

        def step(model: Any = model, batch: Any = batch, optimizer: Any = optimizer, way: str = way) -> None:
            times = [time.perf_counter()]
            with loss_parallel() if way == "by_hand" else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=low and way in UNDER_AUTOCAST):
                    loss = model(*batch)
                times.append(time.perf_counter())
                loss.backward()
            times.append(time.perf_counter())
            whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
            losses.setdefault(way, []).append(float(whole.detach()))
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
            parts.setdefault(way, []).append([b - a for a, b in itertools.pairwise(times)])

        steps[way] = step
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    of_cpu: dict[str, list[float]] = {way: [] for way in ways}
    for run in range(-2, runs):
        for i in range(len(ways)):
            way = ways[(i + run) % len(ways)]
            dist.barrier()
            start, spent = time.perf_counter(), time.process_time()
            steps[way]()
            spent = time.process_time() - spent
            if run >= 0:
                seconds[way].append(time.perf_counter() - start)
            on_both = torch.tensor(spent)
            dist.all_reduce(on_both)
            if run >= 0:
                of_cpu[way].append(float(on_both))
    mine = ways[0]
    for way in {"autopar", "autopar_local", "by_hand"} & losses.keys():  # losses of the whole batch, of the same model
        worst = max(abs(a - b) for a, b in zip(losses[way], losses[mine]))
        assert worst < (5e-2 if low else 1e-3), f"{way} trains another model: its losses differ by {worst:.2e}"
    found["cpu_seconds"] = {way: statistics.median(s) for way, s in of_cpu.items()}
    found["seconds"] = {way: statistics.median(s) for way, s in seconds.items()}
    found["minima"] = {way: min(s) for way, s in seconds.items()}
    found["parts"] = {
        way: dict(zip(("forward", "backward", "optimizer"), map(statistics.median, zip(*p[2:]))))
        for way, p in parts.items()
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--local", action="store_true", help="autopar's ranks have their own rows")
    parser.add_argument("--precision", choices=["bf16-mixed"], help="a policy; by default all is float32")
    parser.add_argument("--step", action="store_true", help="autopar's module as an explicit step, too")
    options = parser.parse_args()
    mine, left_out = ("autopar_local", "autopar") if options.local else ("autopar", "autopar_local")
    for name in options.models:
        ways = [way for way in WAYS if way != left_out and (way != "by_hand" or name.startswith("gpt"))]
        if not options.step:
            ways.remove("step")
        if options.precision is not None and name == "resnet18":
            ways.remove("fsdp2")  # its cast parameters meet float32 statistics, which torch's batch norm refuses here
        found = autopar.run_local(rank, 2, name, ways, options.runs, options.precision is not None, timeout=1200)[0]
        own = found["seconds"][mine]
        found["ratios"] = {way: own / s for way, s in found["seconds"].items() if way != mine}
        of_cpu = {way: found["cpu_seconds"][mine] / s for way, s in found["cpu_seconds"].items()}
        found["ratio_to_best"] = max(found["ratios"].values())
        if options.json:
            print(json.dumps({"model": name, **found}), flush=True)
            continue
        print(f"{name}: {found['plan']}")
        for way in ways:
            parts = "  ".join(f"{k} {v * 1e3:6.0f}" for k, v in found["parts"][way].items())
            ratio = f"{mine}/{way} {found['ratios'][way]:.3f}, of CPU seconds {of_cpu[way]:.3f}" if way != mine else ""
            print(
                f"  {way:13} {found['seconds'][way] * 1e3:7.0f} ms "
                f"(least {found['minima'][way] * 1e3:5.0f})  {parts}  {ratio}"
            )
        print(f"  autopar over the best of the others: {found['ratio_to_best']:.3f}", flush=True)


if __name__ == "__main__":
    main()
