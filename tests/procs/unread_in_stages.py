"""Parameters and buffers that no stage of a pipeline reads: a head for another task, with its alias, and a table."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import autopar

UNREAD = {"old_head.weight", "old_head.bias", "same_head.weight", "same_head.bias", "gains", "table"}


class Refitted(nn.Module):
    """A body with a new head; the head that it was trained with is still there, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.old_head = self.same_head = nn.Linear(8, 3)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.new_head = nn.Linear(8, 2)
        self.gains = nn.Parameter(torch.rand(5), requires_grad=False)
        self.register_buffer("table", torch.rand(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.new_head(self.body(x)).square().mean()


def states(folder: str) -> list[str]:
    """What is wrong with the states of a pipeline, of its copy and of its optimizer, in all directions."""
    torch.manual_seed(0)
    model, plain, x = Refitted().double(), Refitted().double(), torch.rand(8, 8, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    pm = autopar.parallelize(model, 2, (x,), stages=2, schedule="1f1b", microbatches=2)
    optimizers = torch.optim.Adam(pm.parameters(), 0.1), torch.optim.Adam(plain.parameters(), 0.1)
    for _ in range(2):
        pm.train_step(x, optimizer=optimizers[0])
        plain(x).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    wrong = [*unlike(pm, plain.state_dict(), "trained"), *unlike(copy.deepcopy(pm), plain.state_dict(), "copied")]
    state = autopar.full_optimizer_state_dict(pm, optimizers[0], all_ranks=True)
    groups = [state["param_groups"][0]["params"], optimizers[1].state_dict()["param_groups"][0]["params"]]
    if groups[0] != groups[1] or state["state"].keys() != optimizers[1].state_dict()["state"].keys():
        wrong.append(f"the optimizer's parameters are {groups[0]}, not {groups[1]}")
    optimizers[1].load_state_dict(state)
    autopar.load_full_optimizer_state_dict(pm, optimizers[0], optimizers[1].state_dict())
    autopar.Checkpoint(folder, pm, optimizers[0]).save(1)
    doubled = {name: value * 2 for name, value in plain.state_dict().items()}
    autopar.load_full_state_dict(pm, doubled)
    wrong += unlike(pm, doubled, "loaded")
    autopar.Checkpoint(folder, pm, optimizers[0]).load()
    wrong += unlike(pm, plain.state_dict(), "resumed")
    alone = autopar.parallelize(Refitted().double(), 2, (x,))  # another layout
    autopar.Checkpoint(folder, alone, torch.optim.Adam(alone.parameters(), 0.1)).load()
    return wrong + unlike(alone, plain.state_dict(), "resumed on one mesh")


def unlike(pm: Any, wanted: dict[str, torch.Tensor], when: str) -> list[str]:
    """Names that a module's whole state lacks or has too many, and those whose values differ."""
    state = autopar.full_state_dict(pm, all_ranks=True)
    if set(state) != set(wanted):
        return [f"{when}: {sorted(set(state) ^ set(wanted))}"]
    return [f"{when}: {n}" for n, v in wanted.items() if not torch.allclose(state[n], v, rtol=1e-9, atol=1e-12)]


def holders() -> list[set[str]]:
    """What each rank holds of what nothing reads."""
    pm = autopar.parallelize(Refitted(), 2, (torch.rand(8, 8),), stages=2, schedule="1f1b", microbatches=2)
    held: list[Any] = [None] * 2
    named = {**dict(pm.named_parameters(remove_duplicate=False)), **dict(pm.named_buffers())}
    assert all(isinstance(p, DTensor) for p in pm.parameters())
    dist.all_gather_object(held, UNREAD & set(named))
    return held


def all_of_it(folder: str) -> tuple[list[str], list[set[str]]]:
    return states(str(Path(folder) / "saves")), holders()
