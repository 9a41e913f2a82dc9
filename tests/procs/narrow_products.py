"""What one rank does in the tests of products in eight bits."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autopar
from autopar.planner.intra_op.building.parameter_sharding import collectives
from autopar.runtime.ranks import collectives as sending
from autopar.words.precision import Precision, parse_precision

WIDTH, WORDS, LENGTH, ROWS = 64, 32, 16, 8
BLOCKS = ("blocks.*",)
EXACT = {
    name: Precision(
        params="float64", master="float64", moments="float64", reduce="float64", products=name, modules=BLOCKS
    )
    for name in ("fp8", "fp8-row")
}  # fmt: skip
"""Policies under which sums in another order differ by 1e-16, so that hardly a number is rounded otherwise."""
BY_NAME: dict[str, Precision | str] = {
    "exact": EXACT["fp8"], "exact rows": EXACT["fp8-row"], "mixed": "products=fp8,modules=blocks.*",
    "mixed rows": "products=fp8-row,modules=blocks.*", "exact gathers": replace(EXACT["fp8"], narrow_gathers=True),
    "mixed gathers": "products=fp8,modules=blocks.*,narrow_gathers=true",
}  # fmt: skip
COLUMNS = {"*.qkv": {"tensor": "n"}, "*.up": {"tensor": "n"}, "*.out": {"tensor": "k"}, "*.down": {"tensor": "k"}}
"""Megatron's cut."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"mesh": {"data": 2}, "constraints": {"*.up": {"data": "b"}}},
    "zero": {"mesh": {"data": 2}, "constraints": {"*.up": {"data": "b"}}, "params": {"*.weight": "S0 use"}},
    "tensor": {"mesh": {"tensor": 2}, "constraints": COLUMNS},
    "both": {
        "mesh": {"data": 2, "tensor": 2},
        "constraints": {k: {"data": "b", **v} for k, v in COLUMNS.items()},
    },
    "stages": {"mesh": 2, "stages": 2, "microbatches": 2, "schedule": "1f1b", "cuts": ["blocks.1"]},
    "split backward": {"mesh": 2, "stages": 2, "microbatches": 2, "schedule": "zb-h1", "cuts": ["blocks.1"]},
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each.transpose(1, 2)
            for each in self.qkv(self.before(x)).unflatten(-1, (4, 3, -1)).unbind(-2)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), ids[:, 1:].flatten())


def batch(number: int = 0) -> torch.Tensor:
    """Rows in which the next word follows from the one before, but for a tenth of them."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randint(0, WORDS, (ROWS, 1), generator=generator)
    for _ in range(LENGTH - 1):
        follows = (5 * rows[:, -1:] + 3) % WORDS
        other = torch.randint(0, WORDS, (ROWS, 1), generator=generator)
        rows = torch.cat([rows, torch.where(torch.rand(ROWS, 1, generator=generator) < 0.1, other, follows)], 1)
    return rows


# --- the policy written out, in plain torch


def cast(x: torch.Tensor, dtype: torch.dtype, by_row: bool) -> torch.Tensor:
    """What a number in eight bits with a scale stands for, in the dtype of ``x``."""
    most = x.abs().amax(-1, keepdim=True) if by_row else x.abs().amax()
    scale = torch.exp2(torch.ceil(torch.log2(most.double() / torch.finfo(dtype).max)))
    scale = torch.where(most > 0, scale, 1.0)
    return ((x.double() / scale).to(dtype).double() * scale).to(x.dtype)


class Written(torch.autograd.Function):
    """A linear layer of numbers in eight bits: each product is of numbers that were cast, and is itself wide."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, by_row: bool) -> torch.Tensor:
        e4m3 = torch.float8_e4m3fn
        ctx.save_for_backward(x, weight)
        ctx.by_row, wide = by_row, torch.promote_types(x.dtype, torch.float32)
        return (cast(x, e4m3, by_row).to(wide) @ cast(weight, e4m3, by_row).to(wide).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x, weight), by_row = ctx.saved_tensors, ctx.by_row
        e4m3, wide = torch.float8_e4m3fn, torch.promote_types(x.dtype, torch.float32)
        narrow = cast(grad, e4m3 if by_row else torch.float8_e5m2, by_row).to(wide)
        of_x = (narrow @ cast(weight.t(), e4m3, by_row).to(wide).t()).to(x.dtype)
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        if not by_row:
            rows, inputs = narrow.flatten(0, -2), cast(x, e4m3, False).to(wide).flatten(0, -2)
        return of_x, (rows.t() @ inputs).to(x.dtype), None


class WrittenLinear(nn.Linear):
    by_row = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Written.apply(x, self.weight, self.by_row)
        return y if self.bias is None else y + self.bias


def written_out(model: nn.Module, policy: Precision) -> nn.Module:
    """Return the model with its narrow layers written out, in the policy's format."""
    low = copy.deepcopy(model).to(policy.low)
    for name, module in low.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("blocks."):
            module.__class__ = WrittenLinear
            module.by_row = policy.products == "fp8-row"
    return low


def curve_on_one_device(policy: Precision, steps: int, parts: int) -> list[float]:
    """The losses of the policy in plain torch: masters, casts of them, gradients summed in the reductions' format."""
    master = GPT().to(getattr(torch, policy.master))
    low = written_out(master, policy)
    optimizer = torch.optim.AdamW(master.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        with torch.no_grad():
            for p, q in zip(low.parameters(), master.parameters(), strict=True):
                p.copy_(q)
        sums = [torch.zeros_like(p, dtype=policy.reduced_in) for p in master.parameters()]
        total = 0.0
        for ids in batch(step).chunk(parts):
            low.zero_grad()
            loss = low(ids) / parts
            loss.backward()
            total += float(loss.detach())
            for kept, p in zip(sums, low.parameters(), strict=True):
                kept += p.grad
        for p, kept in zip(master.parameters(), sums, strict=True):
            p.grad = kept.to(p.dtype)
        optimizer.step()
        losses.append(total)
    return losses


def curve(name: str, layout: str, steps: int) -> tuple[list[float], list[float]]:
    """The losses of a layout, and those on one device."""
    policy = parse_precision(BY_NAME[name])
    assert policy is not None
    options = dict(LAYOUTS[layout])
    mesh = options.pop("mesh")
    if isinstance(mesh, dict):
        mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    pm = autopar.parallelize(GPT(), mesh, (batch(),), precision=policy, **options)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        losses.append(float(pm.train_step(batch(step), optimizer=optimizer)))
    alone = curve_on_one_device(policy, steps, options.get("microbatches", 1)) if dist.get_rank() == 0 else losses
    return losses, alone


def sent() -> tuple[int, int, tuple[int, int]]:
    """Bytes that a rank gives to gathers in a step without and with narrow gathers, kept for the step; and those of
    narrow weights that the plans count, of whole weights."""
    found, planned = [], []
    for name in ("mixed", "mixed gathers"):
        layout = {"constraints": {"*.up": {"data": "b"}}, "params": {"*.weight": "S0"}}
        pm = autopar.parallelize(
            GPT(), init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), (batch(),),
            precision=BY_NAME[name], **layout,
        )  # fmt: skip
        before, given = sending._all_gather, 0

        def gather(out: torch.Tensor, x: torch.Tensor, **options: Any) -> Any:
            nonlocal given
            given += x.numel() * x.element_size()
            return before(out, x, **options)  # noqa: B023

        sending._all_gather = gather
        try:
            pm(batch()).backward()
        finally:
            sending._all_gather = before
        found.append(given)
        (stage,), graph = pm.plan.stages, autopar.capture(GPT(), (batch(),), precision=BY_NAME[name]).graph
        planned.append(sum(
            n_bytes for _, node in graph.of_kind("param") if node.narrow is not None
            for _, kind, n_bytes, _ in collectives(
                node.out, True, stage.params[node.target], stage.mesh, 1, graph.policy_of(node)
            ) if kind == "all_gather"
        ))  # fmt: skip
    return found[0], found[1], (planned[0], planned[1])


def compiled() -> list[tuple[list[float], list[float]]]:
    """Losses of steps as they run and compiled, on two ranks; with gathers for each use inside of the graph too."""
    found = []
    for name, layout in (("mixed", "data"), ("mixed gathers", "zero"), ("mixed rows", "tensor")):
        curves = []
        for compiles in (False, True):
            options = dict(LAYOUTS[layout])
            mesh = options.pop("mesh")
            device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
            pm = autopar.parallelize(GPT(), device_mesh, (batch(),), precision=BY_NAME[name], **options)
            if compiles:
                pm.compile(backend="aot_eager")
            optimizer = torch.optim.AdamW(pm.parameters(), lr=3e-3)
            curves.append([float(pm.train_step(batch(step), optimizer=optimizer)) for step in range(3)])
        found.append((curves[0], curves[1]))
    return found
