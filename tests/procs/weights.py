"""What one rank does in the tests of safetensors folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from procs.checkpoints import HOW, Data, Net
from torch.distributed.device_mesh import init_device_mesh

import autopar


def module_of(how: str, meta: bool) -> Any:
    """The model of the checkpoints' tests, with weights of its own, spread in one way."""
    with torch.device("meta" if meta else "cpu"):
        model = Net()
    mesh = 2 if how == "pipeline" else init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    return autopar.parallelize(model, mesh, Data().batch(), **HOW[how])


def train(pm: Any, steps: int) -> None:
    optimizer, data = torch.optim.SGD(pm.parameters(), lr=0.05), Data()
    for _ in range(steps):
        if hasattr(pm, "train_step"):
            pm.train_step(*data.batch())
        else:
            pm(*data.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


def both_ways(
    how: str, folder: str, size: str, theirs: str, meta: bool, broken: dict[str, str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float, dict[str, str]]:
    """A trained module's weights, which are saved; those that are there when a folder was loaded, and the loss in eval
    mode then; and what is said of folders that do not fit, which change nothing."""
    pm = module_of(how, meta)
    train(pm, 2)
    autopar.save_safetensors(pm, folder, max_shard_size=size)
    trained = dict(autopar.full_state_dict(pm, all_ranks=True))
    said = {}
    for what, name in broken.items():
        try:
            autopar.load_safetensors(pm, Path(theirs).parent / name)
        except autopar.RunError as error:
            said[what] = str(error)
    after = autopar.full_state_dict(pm, all_ranks=True)
    assert all(torch.equal(after[name], value) for name, value in trained.items())
    autopar.load_safetensors(pm, theirs)
    state = dict(autopar.full_state_dict(pm, all_ranks=True))
    pm.eval()
    with torch.no_grad():
        loss = float(pm(*Data().batch())) if how != "pipeline" else 0.0
    autopar.load_full_state_dict(pm, {n: v for n, v in trained.items() if n != "head.weight"})  # one name is enough
    again = autopar.full_state_dict(pm, all_ranks=True)
    assert all(torch.equal(again[name], value) for name, value in trained.items())
    return trained, state, loss, said
