"""What one rank does in the tests of routed experts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from procs.habits import weights
from torch.distributed.device_mesh import init_device_mesh
from zoo_wide import WIDE

import autopar


def trained(name: str, **options: Any) -> float:
    """Largest difference of losses, gradients and weights after two steps to one process, the routing skewed so that
    some experts have no rows."""
    case = WIDE[name]()
    with torch.no_grad():
        for path, param in case.model.named_parameters():
            if "router" in path or path.endswith("gate.weight"):
                param[0] *= 30
                param[1:3] *= 0.01
    alone = copy.deepcopy(case.model)
    devices = 2 if "stages" in options else init_device_mesh(
        "cpu", (dist.get_world_size(),), mesh_dim_names=("expert",)
    )
    pm = autopar.parallelize(case.model, devices, case.args, example_kwargs=case.kwargs, **options)
    steps = [torch.optim.SGD(m.parameters(), 0.1) for m in (pm, alone)]
    worst = 0.0
    for _ in range(2):
        for optimizer in steps:
            optimizer.zero_grad()
        theirs = alone(*case.args, **case.kwargs).loss
        theirs.backward()
        if "stages" in options:
            mine = pm.train_step(*case.args, **case.kwargs)
        else:
            mine = pm(*case.args, **case.kwargs).loss
            mine.backward()
        worst = max(worst, abs(float(mine.detach()) - float(theirs.detach())))
        for optimizer in steps:
            optimizer.step()
    return max(worst, weights(pm, alone))


def all_cuts(name: str, cuts: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {how: trained(name, **options) for how, options in cuts.items()}
