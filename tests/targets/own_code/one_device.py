"""Trains an exported folder on one device without its trainer, and on gloo ranks with it: both losses are compared."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

STEPS = 3
TOLERANCE = 1e-5  # of a loss in float32: sums over ranks have another order


def script_of(folder: Path):
    """Import train.py of a folder."""
    spec = importlib.util.spec_from_file_location(f"train_{folder.name}", folder / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses_alone(folder: Path, rate: float, decay: float) -> list[float]:
    """Return the losses of steps on the whole batch, on one device, in plain torch."""
    train = script_of(folder)
    torch.manual_seed(0)
    model = train.make_model().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    losses = []
    for step in range(STEPS):
        args, kwargs = train.batch_of(step, 0, train.RUN["batch"], 0, 1)
        loss = train.loss_of(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_here(folder: Path, command: list[str], env: dict[str, str]) -> list[float]:
    """Return the losses that train.py prints on gloo ranks of this machine."""
    case = json.loads((folder / "case.json").read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(case["devices"]), "--master-addr",
        "127.0.0.1", "--master-port", str(port),
    ]  # fmt: skip
    ran = subprocess.run([*launcher, *command, "--steps", str(STEPS)], cwd=folder, capture_output=True, text=True,
                         timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1", **env})  # fmt: skip
    losses = [float(line.split()[-1]) for line in ran.stdout.splitlines() if line.startswith("step ")]
    if ran.returncode or len(losses) != STEPS:
        raise RuntimeError(f"exit code {ran.returncode}: {ran.stdout[-500:]} {ran.stderr[-2500:]}")
    return losses


def compared(
    folder: Path, command: list[str], env: dict[str, str], rate: float, decay: float, *, saved: bool = False
) -> str:
    """Return what the runs showed; raise an error if losses differ. ``saved``: ranks start from a checkpoint."""
    if saved:
        script_of(folder).make_model().save_pretrained(folder / "checkpoint")
    alone, here = losses_alone(folder, rate, decay), losses_here(folder, command, env)
    worst = max(abs(a - b) / abs(a) for a, b in zip(alone, here))
    if not worst < TOLERANCE or not all(map(math.isfinite, here)) or len(set(here)) != STEPS:
        raise RuntimeError(f"losses {here} on ranks, {alone} on one device")
    return f"{STEPS} losses of one device to {worst:.0e}"
