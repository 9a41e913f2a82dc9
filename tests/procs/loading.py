"""How much memory one rank needs while a model's values come to it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import autopar
from autopar.parallelizing import all_ranks

WIDTH, LAYERS = 2048, 12
WHOLE = LAYERS * WIDTH * WIDTH * 4
"""Bytes of the model."""
ONE = WIDTH * WIDTH * 4
"""Bytes of its largest parameter."""


class Stack(torch.nn.Module):
    """Layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def _memory(which: str) -> int:
    """``VmRSS``: bytes of this process that are in memory; ``VmHWM``: the most since :func:`_forget`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(which)).split()[1])


def _forget() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak(meta: bool, options: dict[str, Any]) -> tuple[int, int, float]:
    """Bytes that this rank needed at most beside what it had while the values came, bytes of its own parameters
    afterwards, and the sum of all of them on all ranks, in float64."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = Stack()
    real, most = all_ranks.spread, list[int]()

    def spread(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        before = _memory("VmRSS")
        _forget()
        module = real(*args, **kwargs)
        most.append(_memory("VmHWM") - before)
        return module

    with mock.patch.object(all_ranks, "spread", spread):
        pm = autopar.parallelize(model, dist.get_world_size(), (torch.ones(8, WIDTH),), **options)
    pieces = [p.to_local() if hasattr(p, "to_local") else p for p in pm.parameters()]
    state = autopar.full_state_dict(pm, all_ranks=True)
    total = sum(float(x.double().abs().sum()) for x in state.values())
    return most[0], sum(x.numel() * x.element_size() for x in pieces), total
