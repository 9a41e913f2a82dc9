"""Ranks of which one dies, or leaves, within ``parallelize``, before it, in a step or between steps, and no launcher
that ends the others."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.gradients.step_gradients import Gradients
from autopar.runtime.ranks import presence, pulse
from autopar.runtime.stages.registering import Placing
from autopar.runtime.stages.stage import Stage

CULPRIT = 1


def die() -> None:
    """As the system does where memory is out."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    """As Ctrl-C does, on one rank alone; the process stays."""
    raise KeyboardInterrupt("on this rank alone")


def run_out() -> None:
    """What torch raises where a GPU's memory is out."""
    raise torch.OutOfMemoryError("out of memory, on purpose")


def stop() -> None:
    """As Ctrl-Z, or a machine that hangs: the process stays, and says nothing."""
    os.kill(os.getpid(), signal.SIGSTOP)


HOW: dict[str, Callable[[], None]] = {
    "killed": die, "exits": lambda: os._exit(3), "leaves": leave, "memory": run_out, "stopped": stop,
}  # fmt: skip
WHERE = ("tracing", "loading", "first value")
IN_STEPS = ("forward", "backward", "between steps", "reading", "clipping")


class Net(torch.nn.Module):
    """Two layers; what ``does`` says happens while it is traced."""

    def __init__(self, does: Callable[[], None] | None, mean: bool = True) -> None:
        super().__init__()
        self.mean = mean
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.does = does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.does is not None:
            self.does()
        y = self.second(torch.relu(self.first(x)))
        return y.square().mean() if self.mean else y


def within(how: str, where: str, stages: int | None) -> tuple[float, str]:
    """Seconds until this rank has an error within ``parallelize``, and the error."""
    pulse.SILENCE_SECONDS, pulse.BEAT_SECONDS, presence.BEAT_SECONDS = 3.0, 0.3, 0.3
    culprit = dist.get_rank() == CULPRIT
    does = HOW[how] if culprit else None
    model = Net(does if where == "tracing" else None)
    options: dict[str, Any] = {} if stages is None else {"stages": stages, "schedule": "1f1b", "microbatches": 2}

    def does_instead(*args: Any, **kwargs: Any) -> Any:
        assert does is not None
        does()

    name = {"loading": "parameters", "first value": "__init__"}.get(where, "")
    start = time.monotonic()
    try:
        with mock.patch.object(Placing, name, does_instead) if name and culprit else mock.MagicMock():
            autopar.parallelize(model, dist.get_world_size(), (torch.ones(4, 8),), **options)
    except (Exception, KeyboardInterrupt) as error:
        return time.monotonic() - start, f"{type(error).__name__}: {error}"
    return time.monotonic() - start, ""


def before(how: str) -> tuple[float, str]:
    """Seconds until this rank hears that another one ends before it comes to ``parallelize``, and what it hears."""
    if dist.get_rank() == CULPRIT:
        sys.exit() if how == "exits" else HOW[how]()
    return _heard(lambda: autopar.parallelize(Net(None), dist.get_world_size(), (torch.ones(4, 8),)))


def in_step(how: str, where: str, stages: int | None) -> tuple[float, str]:
    """Seconds until this rank has an error where another one has ended in its second step, and the error."""
    pulse.SILENCE_SECONDS, pulse.BEAT_SECONDS = 3.0, 0.3
    culprit = dist.get_rank() == CULPRIT
    model, x = Net(None, mean=where != "reading"), torch.ones(12, 8)
    if stages is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
        pm = autopar.parallelize(model, mesh, (x,), constraints={"*": {"data": "b"}})
    else:
        pm = autopar.parallelize(model, dist.get_world_size(), (x,), stages=stages, schedule="1f1b", microbatches=2)

    def step() -> None:
        if where == "reading":
            y = pm(x)
            if culprit and calls:
                HOW[how]()
            float(y.sum())
        else:
            pm.train_step(x) if stages is not None else pm(x).backward()
            if where == "clipping":
                if culprit and calls:
                    HOW[how]()
                clip = torch.nn.utils.clip_grad_norm_
                float(clip(pm.parameters(), 1.0) if stages is None else pm.clip_grad_norm_(1.0))

    def fail(*args: Any, **kwargs: Any) -> Any:
        HOW[how]()

    calls: list[int] = []
    step()
    calls.append(1)
    if culprit and where == "between steps":
        HOW[how]()
    name = {"forward": (Stage, "run"), "backward": (Gradients, "reducing")}.get(where)
    with mock.patch.object(*name, fail) if culprit and name else contextlib.nullcontext():
        return _heard(lambda: [step() for _ in range(20)])


def alone(what: str, stages: int | None, folder: str) -> tuple[float, str]:
    """Seconds until this rank has an error where rank 0 alone calls what all ranks are to call, and the error."""
    os.environ["AUTOPAR_SILENCE_SECONDS"] = "30"
    x = torch.ones(12, 8)
    options: dict[str, Any] = {"params": {"*": "S0 use"}} if stages is None else {"stages": stages, "microbatches": 2}
    pm = autopar.parallelize(Net(None), dist.get_world_size(), (x,), **options)
    optimizer = torch.optim.SGD(pm.parameters(), 0.1, momentum=0.9)
    checkpoint = autopar.Checkpoint(folder, pm, optimizer)
    called, _, then = what.partition(", then ")
    calls: dict[str, Callable[[], object]] = {
        "full_state_dict": lambda: autopar.full_state_dict(pm),
        "load_full_state_dict": lambda: autopar.load_full_state_dict(pm, {}),
        "full_optimizer_state_dict": lambda: autopar.full_optimizer_state_dict(pm, optimizer),
        "save_safetensors": lambda: autopar.save_safetensors(pm, folder),
        "Checkpoint.save": lambda: checkpoint.save(2), "Checkpoint.load": checkpoint.load,
    }

    def rest() -> None:
        if dist.get_rank() == 0:
            calls[called]()
        if then == "a barrier":
            dist.barrier()
        for _ in range(3):
            pm.train_step(x, optimizer=optimizer)

    for _ in range(2):
        pm.train_step(x, optimizer=optimizer)
    return _heard(rest)


def _heard(does: Callable[[], object]) -> tuple[float, str]:
    start = time.monotonic()
    try:
        does()
    except Exception as error:
        return time.monotonic() - start, f"{type(error).__name__}: {error}"
    return time.monotonic() - start, ""
