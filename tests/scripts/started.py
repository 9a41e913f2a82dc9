"""Runs somebody's script as ``__main__`` and writes down numbers: ``started.py NUMBERS READS CUT SCRIPT ...``.

``NUMBERS`` is the file of this rank, one number a line. With ``READS`` of ``item`` they come in the order in which the
script (or a file beside it) calls ``item()`` of a floating point tensor: losses and what it prints of them; with
``any`` of any tensor: actions that were drawn, too. With ``backward`` they are the losses that ``backward`` is called
on, of scripts that read few of them. With ``log`` they are what a Trainer of transformers logs, without
times: losses of training and validation, metrics, norms of gradients. ``CUT`` is an option that
``autopar.parallelize`` is told to take wherever an operator has it, such as ``b``; ``-`` leaves the choice to the plan.
In float64 (``run.py --float64``) what differs by rounding alone differs by nothing that one sees.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import autopar.api

WIDE = "AUTOPAR_SCRIPTS_IN_FLOAT64"
"""Set by ``run.py --float64``."""


def of_script(frame: Any, folder: Path) -> bool:
    """Whether it is code of the script that runs there, or of a file beside it."""
    return Path(frame.f_globals.get("__file__") or "").resolve().is_relative_to(folder)


def record(numbers: Path, folder: Path, kinds: tuple[type, ...]) -> None:
    """Write what code in the folder reads of tensors."""
    read = torch.Tensor.item
    file = numbers.open("w", encoding="utf-8", buffering=1)

    def item(self: torch.Tensor) -> Any:
        value = read(self)
        if isinstance(value, kinds) and of_script(sys._getframe(1), folder):
            file.write(f"{value!r}\n")
        return value

    torch.Tensor.item = item  # type: ignore[method-assign]


def record_losses(numbers: Path, folder: Path) -> None:
    """Write what ``backward`` is called on."""
    backward = torch.Tensor.backward
    file = numbers.open("w", encoding="utf-8", buffering=1)

    def recorded(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if of_script(sys._getframe(1), folder):
            file.write(f"{float(self.detach().sum())!r}\n")
        backward(self, *args, **kwargs)

    torch.Tensor.backward = recorded  # type: ignore[method-assign]


def record_log(numbers: Path) -> None:
    """Write what Trainers log."""
    import transformers

    logged = transformers.Trainer.log
    file = numbers.open("w", encoding="utf-8", buffering=1)

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        for name in sorted(logs):
            if name in ("loss", "grad_norm", "train_loss") or (name.startswith("eval_") and "per_second" not in name):
                if name != "eval_runtime":
                    file.write(f"{float(logs[name])!r}\n")
        return logged(self, logs, *args, **kwargs)

    transformers.Trainer.log = log


def force(cut: str) -> None:
    """Have every plan cut what can be cut so; the script says nothing of it."""
    chosen = autopar.api.parallelize

    def parallelize(model: Any, mesh: Any, *args: Any, **kwargs: Any) -> Any:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
        pm = chosen(model, mesh, *args, constraints={"*": {"ranks": cut}}, **kwargs)
        if dist.get_world_size() > 1:
            local = sum(p.to_local().numel() for p in pm.parameters())
            print(
                f"cut {cut}: {local} of {sum(p.numel() for p in pm.parameters())} parameters on this rank", flush=True
            )
        return pm

    autopar.api.parallelize = parallelize


if __name__ == "__main__":
    numbers, reads, cut, script, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    if os.environ.get(WIDE):
        torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)  # a script that seeds nothing itself has other numbers at each start
    random.seed(0)
    np.random.seed(0)
    folder = Path(script).resolve().parent
    mine = Path(f"{numbers}.{os.environ.get('RANK', '0')}")
    if reads == "log":
        record_log(mine)
    elif reads == "backward":
        record_losses(mine, Path.cwd())
    else:
        record(mine, Path.cwd(), (float, int) if reads == "any" else (float,))
    if cut != "-":
        force(cut)
    sys.argv = [script, *rest]
    sys.path[0] = str(folder)
    runpy.run_path(script, run_name="__main__")
