"""The first hour on GPUs: checks, a small training, and times beside eager torch, DDP and FSDP2, as one table.

    python benchmarks/first_hour.py [--device cuda|cpu] [--ranks N] [--quick]

Nothing here needs the network. Every row runs in processes of its own, with a limit, so that what hangs is a row that
says so and not the end. ``--device cpu`` runs the same over gloo. What is printed at the end, and ``first_hour.json``,
are to be sent back.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.cli.common import UsageError, where_to_run
from autopar.errors import AutoparError
from autopar.plans.detection import cluster_of_ranks, record_here
from autopar.rules.attention.attention import attention_with_dropout
from autopar.rules.families.sharded_random import bits, dropout
from autopar.runtime.ranks.groups import channel, groups_for
from autopar.runtime.ranks.launch import backend_of, run_local

FREE_CALLS = 3
"""Calls in which the ranks compare their batches at once, so that the host waits."""
LIMIT_SECONDS = 180.0


@dataclass(frozen=True)
class Size:
    """A GPT, its batch, and how often a step is measured."""

    layers: int
    hidden: int
    heads: int
    words: int
    batch: int
    tokens: int
    steps: int
    dropout: float = 0.0


SMALL = Size(2, 64, 4, 128, 8, 16, 6)
ON_GPUS = Size(12, 1024, 16, 32000, 8, 1024, 20)
ON_CPUS = Size(4, 128, 4, 256, 16, 64, 12)


class Layer(nn.Module):
    """Causal attention and an MLP, norms first."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        h = size.hidden
        self.heads, self.dropout = size.heads, nn.Dropout(size.dropout)
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b s h] -> [b s h]
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(b, s, h)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Words in, the loss of the next word out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.words, size.hidden)
        self.positions = nn.Parameter(0.02 * torch.randn(size.tokens, size.hidden))
        self.layers = nn.Sequential(*(Layer(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, size.words, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # [b s], [b s] -> []
        scores = self.head(self.norm(self.layers(self.embed(ids) + self.positions)))
        return F.cross_entropy(scores.flatten(0, 1).float() if scores.dtype is torch.bfloat16 else scores.flatten(0, 1),
                               labels.flatten())  # fmt: skip


def case(size: Size, device: str, dtype: torch.dtype = torch.float32) -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    """The model and a batch, the same on every rank."""
    torch.manual_seed(0)
    model = GPT(size)
    words = torch.randint(0, size.words, (size.batch, size.tokens + 1))
    return model.to(device, dtype), (words[:, :-1].contiguous().to(device), words[:, 1:].contiguous().to(device))


def wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


# --- checks: each runs on every rank, and gives what is to be said ----------------------------------------------------


def collectives(device: str) -> str:
    """Sums over all, and messages both ways between neighbours on channels of their own, forty under way."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((1 << 20,), float(rank), device=device)
    dist.all_reduce(x)
    assert x.eq(n * (n - 1) / 2).all(), "a sum over all ranks is wrong"
    if n == 1:
        return "one rank: nothing to send"
    groups = groups_for(torch.device(device))
    pairs = [(a, (a + 1) % n) for a in range(n)] + [((a + 1) % n, a) for a in range(n)]
    pairs = list(dict.fromkeys(pairs))
    groups.make([channel(*pair) for pair in pairs])
    channels = groups.channels(pairs)
    works, arrived = [], []
    for k in range(10):
        for source, target in pairs:
            if rank == source:
                sent = torch.full((1 << 16,), float(100 * source + k), device=device)
                works.append((dist.isend(sent, dst=target, group=channels[source, target]), sent))
            elif rank == target:
                there = torch.empty(1 << 16, device=device)
                works.append((dist.irecv(there, src=source, group=channels[source, target]), there))
                arrived.append((there, 100 * source + k))
    for work, _ in works:
        work.wait()  # type: ignore[union-attr]
    assert all(there.eq(value).all() for there, value in arrived), "a message is wrong"
    return f"{len(pairs)} channels, {len(arrived)} messages to each rank"


def attention_like_the_cpus(device: str, dtype: torch.dtype, limit: float) -> None:
    """Attention with dropout has the numbers of the CPU's: on GPUs it is fused kernels, but for float64."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 1100, 16, dtype=dtype)  # long enough to go in blocks
    drawn = {"cut": {}, "site": 3, "shape": tuple(q.shape), "shards": ((),) * 4}
    of_devices = []
    for d in ("cpu", device):
        inputs = [x.to(d).requires_grad_() for x in (q, k, v)]
        y = attention_with_dropout(*inputs, None, 0.1, True, seed=torch.full((), 11, device=d), **drawn)
        of_devices.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    for on_cpu, on_device in zip(*of_devices, strict=True):
        worst = float((on_device.detach().cpu().double() - on_cpu.detach().double()).abs().max())
        highest = float(on_cpu.detach().abs().max())
        assert worst <= limit * highest, f"attention with dropout in {dtype} differs by {worst} of {highest}"


def random_bits(device: str) -> str:
    """Masks of dropout are the same bits on this device as on the CPU."""
    for shape in ((7,), (64, 33), (4, 5, 6, 129)):
        cut = tuple(() for _ in shape)
        here, there = (bits(torch.full((), 11, device=d), 3, shape, cut, torch.device(d)) for d in ("cpu", device))
        assert torch.equal(here, there.cpu()), f"other random bits than on the CPU for shape {shape}"
        x, drawn = torch.ones(shape), {"cut": {}, "site": 3, "shape": shape, "shards": cut}
        here, there = (dropout(x.to(d), 0.1, seed=torch.full((), 11, device=d), **drawn) for d in ("cpu", device))
        assert torch.equal(here != 0, there.cpu() != 0), f"dropout drops others than on the CPU for shape {shape}"
    for dtype, limit in ((torch.float64, 1e-9), (torch.float32, 1e-3), (torch.bfloat16, 5e-2)):
        attention_like_the_cpus(device, dtype, limit)
    return "equal to the CPU's, in dropout and in attention with it"


def same_numbers(device: str, options: dict[str, Any]) -> str:
    """Losses of four steps of AdamW in double precision beside eager torch on one device."""
    losses: list[list[float]] = []
    for parallel in (False, True):
        model, batch = case(SMALL, device, torch.float64)
        step_model: Any = model
        if parallel:
            step_model = autopar.parallelize(model, dist.get_world_size(), batch, **options)
        optimizer = torch.optim.AdamW(step_model.parameters(), lr=1e-2)
        taken = []
        for _ in range(4):
            loss = step_model.train_step(*batch) if parallel else model(*batch)
            if not parallel:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(loss.item())
        losses.append(taken)
    worst = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    assert worst < 1e-9, f"{worst:.1e} from one device: {losses}"
    return f"{worst:.0e} from one device"


def no_waiting(device: str, options: dict[str, Any]) -> str:
    """After the first calls no step makes the host wait; torch raises where one does."""
    model, batch = case(Size(**{**asdict(SMALL), "dropout": 0.1}), device)
    pm: Any = autopar.parallelize(model, dist.get_world_size(), batch, **options)
    pm.compare_every = 1
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3, **({"capturable": True} if device != "cpu" else {}))
    for step in range(FREE_CALLS + 4):
        if step >= FREE_CALLS and device != "cpu":
            torch.cuda.set_sync_debug_mode("error")
        try:
            pm.train_step(*batch, optimizer=optimizer)
        finally:
            if device != "cpu":
                torch.cuda.set_sync_debug_mode("default")
    return "no step waits" if device != "cpu" else "steps run; whether the host waits shows on GPUs only"


def compiled(device: str) -> str:
    """Losses of the program as one compiled graph, beside those of the program as it is."""
    model, batch = case(Size(**{**asdict(SMALL), "dropout": 0.1}), device)
    pms: list[Any] = [autopar.parallelize(copy.deepcopy(model), dist.get_world_size(), batch) for _ in range(2)]
    pms[1].set_extra_state(pms[0].get_extra_state())
    pms[1].compile(fullgraph=True)
    return beside_each_other([pm.train_step for pm in pms], pms, batch)


def cuda_graph(device: str) -> str:
    """Losses of a recorded step beside those of the step as it is."""
    if device == "cpu":
        return "steps are recorded on GPUs only"
    model, batch = case(Size(**{**asdict(SMALL), "dropout": 0.1}), device)
    pms: list[Any] = [autopar.parallelize(copy.deepcopy(model), dist.get_world_size(), batch) for _ in range(2)]
    pms[1].set_extra_state(pms[0].get_extra_state())
    step = autopar.GraphedStep(pms[1], *batch)
    return beside_each_other([pms[0].train_step, step], pms, batch)


def beside_each_other(steps: list[Any], modules: list[Any], batch: Any) -> str:
    """The worst relative difference of the losses of five steps of AdamW."""
    losses: list[list[torch.Tensor]] = []
    for step, module in zip(steps, modules, strict=True):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        losses.append([])
        for k in range(5):
            losses[-1].append(step(*(x.roll(k, 0) for x in batch)))
            optimizer.step()
            optimizer.zero_grad()
    worst = max(abs(a.item() - b.item()) / abs(a.item()) for a, b in zip(*losses, strict=True))
    assert worst < 1e-3, f"{worst:.1e} from the step as it is: {losses}"
    return f"{worst:.0e} from the step as it is"


def memory(device: str, options: dict[str, Any]) -> str:
    """The most memory of a step beside what the plan says."""
    model, batch = case(ON_GPUS if device != "cpu" else SMALL, device)
    pm: Any = autopar.parallelize(model, dist.get_world_size(), batch, **options)
    del model
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    for _ in range(2):
        pm.train_step(*batch, optimizer=optimizer)
    planned = pm.plan.memory_bytes / 2**20
    if device == "cpu":
        return f"planned {planned:.1f} MiB; the CPU's is not measured"
    torch.cuda.reset_peak_memory_stats()
    pm.train_step(*batch, optimizer=optimizer)
    real = torch.cuda.max_memory_allocated() / 2**20
    return f"{real:.0f} MiB, planned {planned:.0f} MiB ({real / planned - 1:+.1%})"


def training(device: str) -> str:
    """Twenty steps on one batch under the best plan, with dropout: the loss falls."""
    model, batch = case(Size(**{**asdict(SMALL), "dropout": 0.1}), device)
    pm: Any = autopar.parallelize(model, dist.get_world_size(), batch)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=3e-3)
    losses = [pm.train_step(*batch, optimizer=optimizer).item() for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0], f"the loss does not fall: {losses}"
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"


def speed(device: str, size: Size, way: str) -> dict[str, float]:
    """Median seconds of a step of the whole batch on all ranks, or of eager torch on one device; plan's seconds."""
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    model, batch = case(size, device, dtype)
    n, rank = dist.get_world_size(), dist.get_rank()
    predicted = float("nan")
    run: Any = model
    mine = batch
    if way == "autopar":
        run = autopar.parallelize(model, n, batch)
        predicted = run.plan.seconds
    elif way in ("DDP", "FSDP2"):
        mine = tuple(x.chunk(n)[rank] for x in batch)  # type: ignore[assignment]
        if way == "DDP":
            run = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()] if device != "cpu" else None)
        else:
            for layer in model.layers:
                fully_shard(layer)
            run = fully_shard(model)
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-4, foreach=True)
    seconds = []
    for step in range(size.steps + FREE_CALLS + 1):
        if way == "eager" and rank:
            break
        if way != "eager":
            dist.barrier()
        wait(device)
        start = time.perf_counter()
        if way == "autopar":
            run.train_step(*mine, optimizer=optimizer)
        else:
            run(*mine).backward()
            optimizer.step()
            optimizer.zero_grad()
        wait(device)
        if step > FREE_CALLS:
            seconds.append(time.perf_counter() - start)
    return {"seconds": median(seconds) if seconds else float("nan"), "predicted": predicted}


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A line of the table: ``ok`` is None of what cannot fail."""

    name: str
    said: str
    ok: bool | None = None


def check(name: str, n: int, device: str, fn: Callable[..., str], *args: Any) -> Row:
    """A row that says what the first rank says, or what is wrong."""
    began = time.perf_counter()
    try:
        said, ok = run_local(fn, n, device, *args, timeout=LIMIT_SECONDS, backend=backend_of(device))[0], True
    except AutoparError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        said, ok = lines[-1] if lines else "failed", False
    row = Row(name, f"{said} ({time.perf_counter() - began:.0f} s)", ok)
    print(f"  {'ok    ' if ok else 'FAILED'} {name}: {row.said}", flush=True)
    return row


def machine(n: int, device: str, said: str) -> list[Row]:
    """What this is."""
    rows = [
        Row("date", datetime.date.today().isoformat()),
        Row("torch", f"{torch.__version__}, Python {sys.version.split()[0]}"),
        Row("runs on", f"{said}, {platform.machine()}"),
    ]
    if device == "cuda":
        version = ".".join(map(str, torch.cuda.nccl.version()))
        driver = f"CUDA {torch.version.cuda}, NCCL {version}, cuDNN {torch.backends.cudnn.version()}"
        rows.append(Row("libraries", driver))
        record = record_here()
        rows.append(Row("GPU", f"{record.product}, {record.memory_bytes / 2**30:.1f} GiB"))
        try:
            rows.append(Row("taken for", cluster_of_ranks([record] * n)))
        except AutoparError as error:
            rows.append(Row("taken for", str(error), False))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=0, help="processes; default: one for each GPU, 2 on the CPU")
    parser.add_argument("--quick", action="store_true", help="one check of each kind, and no times")
    parser.add_argument("--output", type=Path, default=Path("first_hour.json"))
    asked = parser.parse_args()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked.device == "cuda" and not gpus:
        print("torch finds no GPU here, so there is nothing to check; --device cpu runs the same on processors")
        return 0
    n = asked.ranks or (gpus if asked.device == "cuda" else 2)
    try:
        device, said = where_to_run(asked.device, n)
    except UsageError as error:
        print(error)
        return 2
    rows = machine(n, device, said)
    for row in rows:
        print(f"  {row.name}: {row.said}")
    rows.append(check("collectives and channels", n, device, collectives))
    rows.append(check("random bits", n, device, random_bits))
    half = {"stages": 2, "schedule": "1f1b", "microbatches": 4}
    layouts: dict[str, dict[str, Any]] = {"best plan": {}}
    if n > 1 and n % 2 == 0 and not asked.quick:
        layouts |= {"1f1b": half, "zb-h1": {**half, "schedule": "zb-h1"}}
    for name, options in layouts.items():
        rows.append(check(f"numbers, {name}", n, device, same_numbers, options))
    rows.append(check("no waiting, best plan", n, device, no_waiting, {}))
    if "1f1b" in layouts:
        rows.append(check("no waiting, 1f1b", n, device, no_waiting, half))
    if not asked.quick:
        rows.append(check("one compiled graph", n, device, compiled))
        rows.append(check("a step as a CUDA graph", n, device, cuda_graph))
    rows.append(check("memory, best plan", n, device, memory, {}))
    rows.append(check("a small training", n, device, training))
    if not asked.quick:
        rows += times(n, device)
    show(rows)
    document = {"rows": [asdict(row) for row in rows]}
    asked.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"written to {asked.output}; send it back, or the table above")
    return 0 if all(row.ok is not False for row in rows) else 1


def times(n: int, device: str) -> list[Row]:
    """Seconds of a step, and ratios to what autopar takes."""
    size = ON_GPUS if device != "cpu" else ON_CPUS
    rows, seconds, predicted = [], {}, float("nan")
    for way in ("eager", "DDP", "FSDP2", "autopar"):
        try:
            ranks = run_local(speed, n, device, size, way, timeout=LIMIT_SECONDS, backend=backend_of(device))
        except AutoparError as error:
            rows.append(Row(f"a step, {way}", str(error).splitlines()[-1], False))
            continue
        seconds[way] = ranks[0]["seconds"]
        predicted = ranks[0]["predicted"] if way == "autopar" else predicted
        print(f"  a step, {way}: {1e3 * seconds[way]:.1f} ms", flush=True)
    mine = seconds.get("autopar")
    for way, value in seconds.items():
        ratio = "" if mine is None or way == "autopar" else f", {value / mine:.2f} x autopar's"
        where = "one device" if way == "eager" else f"{n} ranks"
        said = f", predicted {1e3 * predicted:.1f} ms" if way == "autopar" else ""
        rows.append(Row(f"a step, {way}", f"{1e3 * value:.1f} ms on {where}{ratio}{said}"))
    return rows


def show(rows: list[Row]) -> None:
    """The table, to be copied as it is."""
    width = max(len(row.name) for row in rows)
    print("\n| | " + "what".ljust(width) + " | result |\n|---|---|---|")
    for row in rows:
        verdict = "" if row.ok is None else "ok" if row.ok else "FAILED"
        print(f"| {verdict} | {row.name.ljust(width)} | {row.said} |")


if __name__ == "__main__":
    sys.exit(main())
