"""A script whose ranks are started again: under torchrun or autopar.elastic, which runs it by its path."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import MeshError

STEPS, EVERY, AT = 12, 3, 5


class Net(nn.Module):
    """Two layers with dropout, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor((self.layers(x) - y).square().mean())


def fault(how: str, step: int, ranks: int, attempt: int) -> None:
    """What goes wrong on the last rank."""
    if attempt == 1 and step == AT and dist.get_rank() == ranks - 1 and ranks > 1:
        if how == "error":
            raise ValueError("on purpose")
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[how])


def train(folder: Path, how: str, stages: int, batch: str) -> None:
    """Steps from the last checkpoint on; in the first attempt something goes wrong.

    Args:
        how: what; ``refused N``: where more than N ranks are there, there is no plan, and then a rank is killed.
    """
    made = folder / "attempts"
    if os.environ["RANK"] == "0":
        with made.open("a") as log:
            log.write(f"{os.environ['WORLD_SIZE']}\n")
    dist.init_process_group("gloo")
    ranks, attempt = dist.get_world_size(), len(made.read_text().split())
    most = int(how.partition(" ")[2] or ranks)
    if ranks > most:
        raise MeshError(f"no plan for {ranks} ranks")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    rows = torch.utils.data.TensorDataset(torch.randn(36, 8), torch.randn(36, 4))
    cut = {"params": {"*": "S0 use"}} if ranks > 1 else {}  # else nothing of so small a model is
    options: dict[str, Any] = {"stages": min(stages, ranks), "microbatches": 2} if stages > 1 else cut
    example = rows[: 12 // ranks] if batch == "local" else rows[:12]
    pm = autopar.parallelize(Net(), ranks, example, batch=batch, **options)
    optimizer = torch.optim.AdamW(pm.parameters(), 1e-2)
    loader = pm.shard(torch.utils.data.DataLoader(rows, 12, shuffle=True))
    checkpoint = autopar.Checkpoint(folder / "saves", pm, optimizer)
    step, sampler = checkpoint.load() or 0, loader.sampler
    for epoch in range(sampler.epoch, STEPS // 3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            fault(how.split()[0] if not how.startswith("refused") else "killed", step, ranks, attempt)
            loss = float(pm.train_step(x, y, optimizer=optimizer))
            if dist.get_rank() == 0:
                with (folder / "losses").open("a") as log:
                    log.write(json.dumps([step, loss, ranks]) + "\n")
            step += 1
            if step % EVERY == 0:
                checkpoint.save(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
