"""What one rank does to train with the optimizer's state, and its step, on the host, in memory that is counted."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from counted_device import CountedDevice
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.gradients import gradient_reduction
from autopar.runtime.parameters import gathering
from autopar.runtime.parameters.host_memory import is_on_host
from autopar.words.meshes import Mesh

BESIDE_A_HOST = Path(__file__).parents[1] / "data" / "beside-a-host.toml"
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: optim.AdamW(params, lr=1e-3),
    "sgd_momentum": lambda params: optim.SGD(params, lr=1e-2, momentum=0.9),
}
STEPS = 3
SMALL = 1 << 14
"""Bytes of units and of buckets: as small beside this model as they are beside a large one."""
ROWS, LENGTH, WIDTH, VOCABULARY, BLOCKS = 8, 16, 64, 128, 10


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, s, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


class Gpt(nn.Module):
    """A small GPT that returns its loss."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.to(dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Trained(NamedTuple):
    """What a rank gives back.

    Attributes:
        worst: relative difference of losses and weights from one device's.
        counted: peak bytes of the device that were counted in the last step; ``said`` by the plan.
        on_host: parameters of this rank on the host, of all.
        mixed: operators that read from both memories.
        free_bytes: peak of the plan without a limit.
    """

    worst: float
    counted: int
    said: int
    on_host: int
    all: int
    mixed: tuple[str, ...]
    free_bytes: int
    limit: int


def batches(count: int = STEPS) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (ROWS, LENGTH), generator=drawn) for _ in range(count)]


def one_device(
    model: nn.Module, kind: str, parts: int, clip: float | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer, losses = OPTIMIZERS[kind](model.parameters()), []
    for ids in batches():
        total = 0.0
        for part in ids.chunk(parts):
            loss = model(part) / parts
            loss.backward()
            total += loss.item()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def trained(
    kind: str, offload: Any, share: float | None = None, clip: float | None = None, **options: Any
) -> Trained:
    """Train on all ranks beside one device.

    Args:
        share: the memory limit, of what the fastest plan takes.
        options: of ``parallelize``.
    """
    gathering.UNIT_BYTES = gradient_reduction.ALONE_BYTES = gradient_reduction.BUCKET_BYTES = SMALL
    parts = options.get("microbatches", 1)
    losses, weights = one_device(Gpt(), kind, parts, clip)
    ids, model = batches()[0], Gpt()
    options = {"cluster": BESIDE_A_HOST, "optimizer": kind, "verify_capture": False, **options}
    free = 0
    if share is not None:
        asked = {k: v for k, v in options.items() if k not in ("cluster", "verify_capture")}
        cluster = BESIDE_A_HOST if dist.get_world_size() == 4 else f"{BESIDE_A_HOST}@0-{dist.get_world_size() - 1}"
        cluster = cluster.replace("@0-0", "@0") if isinstance(cluster, str) else cluster
        free = autopar.plan(copy.deepcopy(model), cluster, ids, **asked).memory_bytes
        options["memory_limit"] = int(share * free)
    mesh = Mesh.parse(options.pop("mesh")) if "mesh" in options else None
    ranks = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names) if mesh is not None else None
    pm = autopar.parallelize(model, ranks, ids, offload=offload, **options)
    optimizer = OPTIMIZERS[kind](pm.parameters())
    count, seen = CountedDevice(), []
    for number, ids in enumerate(batches()):
        if number == STEPS - 1:
            for x in (*pm.parameters(), *(x for s in optimizer.state.values() for x in s.values())):
                (count.note if not is_on_host(x) and x.ndim and not _of_host(x, optimizer) else count.note_on_host)(x)
            for held in _copied(pm):
                (count.follow if held.per_use else count.note)(held.leaf)
            count.ignore(ids)
            with count:
                seen.append(step(pm, optimizer, ids, clip, parts))
        else:
            seen.append(step(pm, optimizer, ids, clip, parts))
    worst = max(abs(a - b) / abs(b) for a, b in zip(seen, losses, strict=True))
    full = pm.full_state_dict(all_ranks=True)
    for name, value in weights.items():
        worst = max(worst, ((full[name] - value).abs().max() / value.abs().max().clamp(min=1e-3)).item())
    mine = [stage for stage in pm.plan.stages if dist.get_rank() in stage.devices]
    here = list(pm.parameters())
    return Trained(
        worst, count.most_bytes, max(stage.price.memory_bytes for stage in mine),
        sum(is_on_host(p) for p in here), len(here), tuple(sorted(set(count.mixed))), free,
        options.get("memory_limit", 0),
    )


def _of_host(x: torch.Tensor, optimizer: optim.Optimizer) -> bool:
    return any(is_on_host(p) and any(x is y for y in s.values()) for p, s in optimizer.state.items())


def _copied(pm: Any) -> list[Any]:
    """Parameters of which the device has copies."""
    run = vars(pm)["_autopar"]
    stages = run.stages.values() if hasattr(run, "stages") else [run.stage]
    held = [h for stage in stages for h in stage.held_params.values()]
    return [h for h in held if not h.alias]


def step(pm: Any, optimizer: optim.Optimizer, ids: torch.Tensor, clip: float | None, parts: int) -> float:
    if parts > 1 or len(pm.plan.stages) > 1:
        return float(pm.train_step(ids, optimizer=optimizer, clip_grad_norm=clip).item()) if clip else float(
            pm.train_step(ids, optimizer=optimizer).item()
        )
    loss = pm(ids)
    loss.backward()
    if clip is not None:
        pm.clip_grad_norm_(clip)
    value = loss.item()
    del loss
    optimizer.step()
    optimizer.zero_grad()
    return value


def with_options(kind: str, offload: Any, share: float | None, options: dict[str, Any]) -> Trained:
    """Call :func:`trained` with options of ``parallelize``."""
    return trained(kind, offload, share, recompute="none", **options)
