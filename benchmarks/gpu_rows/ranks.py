"""Checks on all ranks, each with a process group; and seconds of a step beside DDP and FSDP2."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.rules.attention.attention import attention_with_dropout
from autopar.rules.families.sharded_random import bits, dropout
from autopar.runtime.ranks.groups import channel, groups_for
from autopar.runtime.ranks.launch import backend_of, run_local
from gpu_rows.table import Result

FREE_CALLS = 3
"""Calls in which the ranks compare their batches at once, so that the host waits."""


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
    pms[1].compile(fullgraph=True)
    return beside_each_other([pm.train_step for pm in pms], pms, batch)


def cuda_graph(device: str) -> str:
    """Losses of a recorded step beside those of the step as it is."""
    if device == "cpu":
        return "steps are recorded on GPUs only"
    model, batch = case(Size(**{**asdict(SMALL), "dropout": 0.1}), device)
    pms: list[Any] = [autopar.parallelize(copy.deepcopy(model), dist.get_world_size(), batch) for _ in range(2)]
    step = autopar.GraphedStep(pms[1], *batch)
    return beside_each_other([pms[0].train_step, step], pms, batch)


def beside_each_other(steps: list[Any], modules: list[Any], batch: Any) -> str:
    """The worst relative difference of the losses of five steps of AdamW."""
    losses: list[list[torch.Tensor]] = []
    for step, module in zip(steps, modules, strict=True):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        losses.append([])
        for k in range(5):
            torch.manual_seed(k)
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


@contextlib.contextmanager
def alone(device: str) -> Iterator[None]:
    """A process group of this process alone, ended afterwards."""
    if device != "cpu":
        torch.cuda.set_device(0)
    dist.init_process_group(backend_of(device), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_ranks(n: int, device: str, limit: float, check: str, *args: Any) -> Result:
    """One of the checks above by its name, on ``n`` ranks: in this process where it is one, else in processes."""
    fn: Callable[..., str] = globals()[check]
    if n == 1:
        with alone(device):
            return Result(fn(device, *args), True)
    return Result(run_local(fn, n, device, *args, timeout=limit, backend=backend_of(device))[0], True)


def beside_others(n: int, device: str, limit: float) -> Result:
    """Seconds of a step of a GPT on all ranks: eager mode on one, DDP, FSDP2, autopar."""
    size = ON_GPUS if device != "cpu" else ON_CPUS
    seconds, predicted = {}, float("nan")
    for way in ("eager", "DDP", "FSDP2", "autopar"):
        numbers = run_local(speed, n, device, size, way, timeout=limit / 4, backend=backend_of(device))[0]
        seconds[way] = numbers["seconds"]
        predicted = numbers["predicted"]
    said = ", ".join(f"{way} {1e3 * s:.1f} ms" for way, s in seconds.items())
    return Result(f"{said}, predicted {1e3 * predicted:.1f} ms", None, {"seconds": seconds, "predicted": predicted})


__all__ = ["FREE_CALLS", "alone", "beside_others", "on_ranks"]
