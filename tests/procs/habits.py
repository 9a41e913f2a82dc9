"""What one rank does in the tests of what people do.

Each function trains a small model in a way that scripts do, beside the same model in eager mode, and returns the worst
relative difference, or what was said.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar

CUT = {"constraints": {"*up": {"data": "b"}}}
"""The batch is cut over the ranks."""
PIPED = {"stages": 2, "schedule": "1f1b", "microbatches": 2, "cuts": ["down"]}


class Net(nn.Module):
    """Two layers, dropout where it is asked for, and a loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.drop, self.down = nn.Linear(6, 12), nn.Dropout(dropout), nn.Linear(12, 6)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.drop(self.up(x).relu())) - x).square().mean()


def batches(n: int, rows: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 6, generator=generator, dtype=torch.float64) for _ in range(n)]


def spread(model: nn.Module, piped: bool, x: torch.Tensor, **options: Any) -> Any:
    """The model on two ranks: its batch cut, or in two stages."""
    if piped:
        return autopar.parallelize(model, 2, x[: len(x) // 2], **{**PIPED, **options})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    return autopar.parallelize(model, mesh, x, **{**CUT, **options})


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    if hasattr(model, "train_step"):
        return float(model.train_step(x, optimizer=optimizer))
    loss = model(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def difference(found: Any, wanted: Any) -> float:
    a, b = (torch.as_tensor(v, dtype=torch.float64).detach() for v in (found, wanted))
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


def weights(pm: nn.Module, model: nn.Module) -> float:
    """Worst difference of the parameters that this rank holds."""
    wanted = dict(model.named_parameters())
    return max((difference(whole(p), wanted[name]) for name, p in pm.named_parameters()), default=0.0)


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "named": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


def optimizer_before(kind: str, piped: bool, params: Mapping[str, str] | None = None) -> float:
    """Two steps in eager mode, then parallelize with the optimizer: groups, options, state and scheduler go on."""
    found = []
    model, xs = Net(), batches(5)
    alone = copy.deepcopy(model)
    for moved in (True, False):
        own = model if moved else alone
        groups: Any = [
            {"params": own.up.parameters(), "weight_decay": 0.1}, {"params": own.down.parameters(), "lr": 0.05},
        ]  # fmt: skip
        optimizer = OPTIMIZERS[kind](own.named_parameters() if kind == "named" else groups)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        losses = [step(own, optimizer, x + (dist.get_rank() if moved and i == 1 else 0)) for i, x in enumerate(xs[:2])]
        if moved and dist.get_rank():  # rank 0's weights and state count
            losses = []
        used: Any = spread(model, piped, xs[0], optimizer=optimizer, params=params) if moved else own
        for x in xs[2:]:
            losses.append(step(used, optimizer, x))
            scheduler.step()
        found.append((losses[-3:], used))
    return max(difference(found[0][0], found[1][0]), weights(found[0][1], alone))


def old_optimizer(piped: bool) -> str:
    """An optimizer of the old parameters, without moving it."""
    model, x = Net(), batches(1)[0]
    optimizer = torch.optim.AdamW(model.parameters())
    pm = spread(model, piped, x)
    return said(lambda: pm.train_step(x, optimizer=optimizer))


def several(calls: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Call functions of this module by name, one after the other; a collective after each finds ranks that disagree."""
    found = {}
    for key, (name, *args) in calls.items():
        found[key] = globals()[name](*args)
        dist.barrier()
    return found
