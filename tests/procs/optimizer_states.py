"""What one rank does in the tests of optimizer states that go both ways."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from procs.checkpoints import HOW, Data, Net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


class Other(Net):
    """The checkpoints' model without dropout and batch norm, its last module first, as the order of a pipeline's stages
    is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(16).double(), nn.Identity()
        down = self._modules.pop("down")
        self._modules = {"down": down, **self._modules}


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices alone, as scripts have it."""
    params = list({id(p): p for p in model.parameters()}.values())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]


MAKES: dict[str, Any] = {
    "adamw, in groups": lambda m: torch.optim.AdamW(grouped(m), lr=0.05, amsgrad=True),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05),
}
Script = tuple[Any, torch.optim.Optimizer, Any, Data]


def script(model: Any, make: str) -> Script:
    optimizer = MAKES[make](model)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), Data()


def trained(run: Script, steps: int) -> list[float]:
    model, optimizer, scheduler, data = run
    losses = []
    for _ in range(steps):
        if hasattr(model, "train_step"):
            loss = model.train_step(*data.batch())
        else:
            loss = model(*data.batch())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def state_of(run: Script) -> dict[str, Any]:
    """What one process saves."""
    model, optimizer, scheduler, data = run
    return copy.deepcopy({
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        "data": data.position,
    })  # fmt: skip


Found = tuple[list[float], list[float], list[float], list[str]]


def both_ways(how: str, folder: str) -> dict[str, Found]:
    """What becomes of every optimizer on one kind of plan."""
    mesh = 2 if how == "pipeline" else init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    pm = autopar.parallelize(Other(), mesh, Data().batch(), **HOW[how])
    begin = dict(autopar.full_state_dict(pm, all_ranks=True))
    return {make: _both_ways(pm, begin, make, f"{folder}/{how}-{make}.pt") for make in MAKES}


def _both_ways(pm: Any, begin: dict[str, torch.Tensor], make: str, file: str) -> Found:
    """Losses after three steps of one process, of it resumed as the parallel module, and of the module resumed in one
    process; and what is said of states that do not fit."""
    alone = script(Other(), make)
    trained(alone, 3)
    saved = state_of(alone)
    wanted = trained(alone, 3)
    autopar.load_full_state_dict(pm, begin)
    spread = script(pm, make)
    trained(spread, 3)
    state = {
        "model": autopar.full_state_dict(pm), "optimizer": autopar.full_optimizer_state_dict(pm, spread[1]),
        "scheduler": spread[2].state_dict(), "data": spread[3].position,
    }  # fmt: skip
    autopar.save(state, file)
    loaded = torch.load(file, weights_only=True)
    back = script(Other(), make)
    back[0].load_state_dict(loaded["model"])
    back[1].load_state_dict(loaded["optimizer"])
    back[2].load_state_dict(loaded["scheduler"])
    back[3].position = loaded["data"]
    returned = trained(back, 3)
    again = script(pm, make)
    first = dist.get_rank() == 0
    autopar.load_full_state_dict(pm, saved["model"] if first else None)
    autopar.load_full_optimizer_state_dict(pm, again[1], saved["optimizer"] if first else None)
    again[2].load_state_dict(saved["scheduler"])
    again[3].position = saved["data"]
    went_on = trained(again, 3)
    said = []
    for wrong in ({"state": {}}, {"state": {}, "param_groups": [{"params": [0, 1]}]}, None):
        try:
            autopar.load_full_optimizer_state_dict(pm, again[1], wrong)
        except autopar.RunError as error:
            said.append(str(error))
    if hasattr(type(pm), "train_step"):
        backwards = torch.optim.SGD(list(pm.parameters())[::-1], 0.1)
        try:
            autopar.full_optimizer_state_dict(pm, backwards)
        except autopar.RunError as error:
            said.append(str(error))
    return wanted, went_on, returned, said
