"""What one rank does in the tests of mixed precision."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autopar

CUTS: dict[str, dict[str, Any]] = {
    "data": {"constraints": {"*up": {"data": "b"}}},
    "zero": {"constraints": {"*up": {"data": "b"}}, "params": {"*.weight": "S0 use"}},
    "tensor": {"constraints": {"*up": {"data": "n"}, "*down": {"data": "k"}}},
}


class Net(nn.Module):
    """A tied weight, so that its cast is used twice, and a norm, which stays in float32."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(16, 12)
        self.up, self.norm, self.down = nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 12)
        self.head = nn.Linear(12, 16, bias=False)
        self.head.weight = self.words.weight
        self.inside = inside

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.inside or torch.is_autocast_enabled("cpu")):
            x = self.words(ids)
            with torch.autocast("cpu", enabled=False):
                x = x + x.float().square().to(x.dtype)
            return self.head(self.down(self.norm(self.up(x)).relu()))


def batch(number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 16, (8, 6), generator=generator)
    return ids, ids.roll(1, 1)


def spread(model: nn.Module, example: Any, mesh: tuple[int, ...], **options: Any) -> Any:
    names = ("data", "tensor")[: len(mesh)]
    return autopar.parallelize(model, init_device_mesh("cpu", mesh, mesh_dim_names=names), example, **options)


def apart(pm: Any, alone: nn.Module) -> float:
    """By how much gradients differ: the norm of the difference by that of the gradient, the worst of all parameters."""
    worst = 0.0
    for name, param in pm.named_parameters():
        theirs = alone.get_parameter(name).grad
        assert theirs is not None
        mine = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
        worst = max(worst, float((mine - theirs).norm() / theirs.norm()))
    return worst


def trained(cut: str, inside: bool, mesh: tuple[int, ...] = (2,)) -> tuple[float, float, int]:
    """Three steps beside one device: the worst difference under autocast, and without it, and how many captures.

    Where autocast is around the call, the second step is without: another program over the same parameters.
    """
    pm = spread(Net(inside), batch()[:1], mesh, **CUTS[cut])
    alone = Net(inside)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pm, alone)]
    low = full = 0.0
    for step in range(4):
        ids, labels = batch(step)
        on = not inside and step % 2 == 1
        for model in (pm, alone):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                out = model(ids)
                assert out.dtype == (torch.bfloat16 if inside or on else torch.float32)
            F.cross_entropy(out.flatten(0, 1).float(), labels.flatten()).backward()
        if inside or on:
            low = max(low, apart(pm, alone))
        else:
            full = max(full, apart(pm, alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        autopar.load_full_state_dict(pm, alone.state_dict())
    return low, full, pm._programs.captures


def scaled(cut: str, infinite_on: int | None) -> tuple[float, float, bool]:
    """A step with a gradient scaler and clipping beside one device: the worst difference of a parameter, the scale
    afterwards, and whether the step was skipped.

    Args:
        infinite_on: the rank on whose piece of a gradient there is an infinity.
    """
    pm, alone = spread(Net(True), batch()[:1], (2,), **CUTS[cut]), Net(True)
    before = {name: value.clone() for name, value in alone.state_dict().items()}
    scale = 0.0
    for model in (pm, alone):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        ids, labels = batch()
        loss = F.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten())
        scaler.scale(loss).backward()
        grad = model.up.weight.grad
        if infinite_on is not None and model is pm:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local[0, 0] = torch.inf if dist.get_rank() == infinite_on else local[0, 0]
        elif infinite_on is not None:
            grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        assert scale in (0.0, scaler.get_scale())
        scale = scaler.get_scale()
    whole = autopar.full_state_dict(pm, all_ranks=True)
    worst = max(float((whole[name] - value).abs().max()) for name, value in alone.state_dict().items())
    return worst, scale, all(torch.equal(value, before[name]) for name, value in whole.items())


def low(cut: str, mesh: tuple[int, ...] = (2,)) -> float:
    """Steps of a model in bfloat16 beside one device; the worst difference of gradients."""
    pm = spread(Net(False).bfloat16(), batch()[:1], mesh, **CUTS[cut])
    alone = Net(False).bfloat16()
    worst = 0.0
    for step in range(3):
        ids, labels = batch(step)
        for model in (pm, alone):
            F.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten()).backward()
        worst = max(worst, apart(pm, alone))
        for model in (pm, alone):
            assert all(p.dtype == p.grad.dtype == torch.bfloat16 for p in model.parameters() if p.grad is not None)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        autopar.load_full_state_dict(pm, alone.state_dict())
    return worst
