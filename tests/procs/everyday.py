"""What one rank does in the tests of everyday scripts: saving as one device does, meshes in words,
and what is beside the model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from procs.habits import said
from procs.optimizer_cases import Small, compared, inputs, spread, spread_anew, train
from torch import optim

import autopar


def saved(folder: str) -> float:
    """``autopar.save`` of a script's checkpoint, ``torch.load`` into the plain model and into the parallel one."""
    eager, xs = Small(), inputs(6)
    pm = spread(Small(), "ZeRO-3")
    ours, theirs = (optim.AdamW(list(m.parameters()), lr=0.05) for m in (pm, eager))
    train(pm, ours, xs[:3])
    train(eager, theirs, xs[:3])
    path = Path(folder) / "checkpoint.pt"
    autopar.save({"model": pm.state_dict(), "optimizer": ours.state_dict(), "step": 3, "more": [(pm.scale, "x")]}, path)
    there = torch.load(path)
    with path.with_name("open.pt").open("wb") as file:
        autopar.save(pm.state_dict(), file)
    plain = Small()
    plain.load_state_dict(torch.load(path.with_name("open.pt")))
    alone = optim.AdamW(list(plain.parameters()), lr=0.05)
    alone.load_state_dict(there["optimizer"])
    assert there["step"] == 3 and type(there["more"][0][0]) is torch.Tensor
    far = compared(pm, plain, train(pm, ours, xs[3:4]), train(plain, alone, xs[3:4]))
    there = torch.load(path)  # an optimizer goes on with the very tensors that it is given
    pm.load_state_dict(there["model"])
    again = optim.AdamW(list(pm.parameters()), lr=0.05)
    again.load_state_dict(copy.deepcopy(there["optimizer"]))
    plain.load_state_dict(there["model"])
    alone.load_state_dict(there["optimizer"])
    far = max(far, compared(pm, plain, train(pm, again, xs[3:]), train(plain, alone, xs[3:])))
    return far


def saved_by_one_rank(folder: str) -> str:
    """``if rank == 0: autopar.save(...)``, while the other rank trains on."""
    pm = spread_anew(Small(), "ZeRO-3")
    state: dict[str, Any] = pm.state_dict()
    if dist.get_rank() == 0:
        text = said(lambda: autopar.save(state, Path(folder) / "alone.pt"))
        pm(inputs(1)[0])
        return text
    pm(inputs(1)[0])
    return ""


def in_words(axes: str | dict[str, int], options: dict[str, Any]) -> tuple[float, tuple[str, ...], str]:
    """A mesh in the words of ``autopar plan --mesh``: a step beside one device, axes, and too many ranks."""
    x, eager = inputs(1)[0], Small()
    pm = autopar.parallelize(Small(), axes, x, **options)
    difference = abs(float(pm.train_step(x)) - float(eager(x)))
    many = said(lambda: autopar.parallelize(Small(), "data=2,tensor=2", x))
    return difference, pm.plan.stages[0].mesh.names, many
