"""What one rank does where rank 1 alone has another shape: an error on all in seconds, or, of own rows, no error."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from procs.habits import said
from procs.other_shapes import Words, batch
from torch.distributed.device_mesh import init_device_mesh

import autopar

STAGES: dict[str, Any] = {"cuts": ["down"], "schedule": "1f1b", "microbatches": 2}
BUCKETS = [(4, 6), (2, 12)]
WAYS = [
    "mesh global any call rows", "mesh global any step length", "mesh global any step double",
    "mesh global any eval rows", "mesh global fixed call rows", "mesh global fixed step double",
    "mesh global buckets call length", "mesh local any call length", "mesh local any call rows",
    "mesh local any step rows",
    "mesh local any step double", "mesh local fixed call rows", "mesh local buckets call length",
    "stages global any step rows", "stages global any eval length", "stages global fixed step rows",
    "stages global fixed step double", "stages global buckets step length", "both local any step rows",
    "both local any eval rows", "both local any step double", "both local fixed step rows",
]  # fmt: skip
"""Where the model is, whose rows a call has, ``shapes=``, what is called, and in what rank 1 differs."""
ALLOWED = {"mesh local any call rows", "mesh local any step rows", "mesh local any step double"}
"""Rows of one's own need not be equally many."""


def alone(way: str) -> str:
    """What this rank is told, not in one of the first calls, whose values are compared anyway."""
    where, rows, shapes, how, what = way.split()
    options: dict[str, Any] = {"batch": rows, "shapes": shapes, **({"buckets": BUCKETS} if shapes == "buckets" else {})}
    if where == "mesh":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
        pm = autopar.parallelize(Words(), mesh, batch(4, 6), constraints={"*up": {"data": "b"}}, **options)
    elif where == "stages":
        pm = autopar.parallelize(Words(), 2, batch(4, 6), stages=2, **STAGES, **options)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
        pm = autopar.parallelize(Words(), mesh, batch(4, 6), **STAGES, **options)
    pm.compare_every = 0

    def call(rows: int, length: int) -> None:
        if how == "step":
            pm.train_step(*batch(rows, length))
        elif how == "call":
            pm(*batch(rows, length))[0].backward()
        else:
            pm.eval()
            with torch.no_grad():
                pm(*batch(rows, length))

    call(4, 6)
    call(4, 6)
    odd = {"rows": (3, 6), "length": (2, 9) if shapes == "buckets" else (4, 9), "double": (8, 6)}[what]
    return said(lambda: call(*(odd if dist.get_rank() == 1 else (4, 6))))
