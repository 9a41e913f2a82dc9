"""Ranks of which one is through with its script, and its process has ended, while the other goes on alone."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from procs.unlaunched import started
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import RunError
from autopar.runtime.ranks import failures, launch

RANKS = 2

kept: list[failures.Failures] = []
"""Those of :func:`watched`: their threads run until the interpreter ends."""


class Net(torch.nn.Module):
    """A layer, and a method beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layer(x).square().mean())

    @torch.no_grad()
    def best(self, x: torch.Tensor) -> torch.Tensor:
        """The class of each row."""
        return torch.as_tensor(self.layer(x).argmax(-1))


def behind_the_end() -> dict[str, str]:
    """What a module and a pipeline say when the process group has been ended."""
    x = torch.ones(8, 8)
    pm = autopar.parallelize(Net(), init_device_mesh("cpu", (RANKS,), mesh_dim_names=("data",)), (x,))
    two = torch.nn.Sequential(torch.nn.Linear(8, 8), Net())
    stages = autopar.parallelize(two, RANKS, (x,), stages=2, microbatches=2, shapes="fixed")
    loss = pm(x)
    dist.destroy_process_group()
    calls = {
        "call": lambda: pm(x), "step": lambda: pm.train_step(x), "backward": loss.backward,
        "save": lambda: autopar.full_state_dict(pm), "stages": lambda: stages.train_step(x),
        "evaluation": lambda: stages.eval()(x),
    }  # fmt: skip
    said = {}
    for what, call in calls.items():
        try:
            said[what] = f"passed: {call()}"
        except Exception as error:
            said[what] = f"{type(error).__name__}: {error}"
    return said


def _rank(pipe: Any, rank: int, env: dict[str, str], in_order: bool) -> None:
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = tempfile.mkdtemp() if rank == 0 else ""
    x = torch.ones(8, 8)
    pm = autopar.parallelize(Net(), init_device_mesh("cpu", (RANKS,), mesh_dim_names=("data",)), (x,))
    folders = [folder]
    dist.broadcast_object_list(folders)
    checkpoint = autopar.Checkpoint(folders[0], model=pm)
    pm(x).backward()
    if rank == 1:
        if in_order:
            dist.destroy_process_group()
            sys.exit()
        raise ValueError("no more batches")
    pipe.recv()  # the other one has ended

    def evaluate() -> None:
        pm.eval()
        pm(x[:4])

    alone = {
        "eval": evaluate, "method": lambda: pm.best(x), "save": lambda: checkpoint.save(1),
        "checkpoint": lambda: autopar.Checkpoint(folder, model=pm),
    }  # fmt: skip
    answers = {}
    for name, does in alone.items():
        try:
            does()
        except RunError as error:
            answers[name] = str(error)
    pipe.send(answers)
    pipe.recv()
    os._exit(0)


def answers(in_order: bool, seconds: float) -> dict[str, str]:
    """What rank 0 is told for each thing that it does alone after rank 1 has ended; empty where it still waits.

    Args:
        in_order: rank 1 destroys its process group and exits; else it ends by an error.
    """
    with started(RANKS, _rank, in_order) as (pipes, processes):
        end = time.monotonic() + seconds
        processes[1].join(seconds)
        pipes[0].send("ended")
        said: dict[str, str] = pipes[0].recv() if pipes[0].poll(max(0.0, end - time.monotonic())) else {}
        return said


def waits(folder: str) -> None:
    """Write down which process this rank is and which has started it, and go on until it is ended."""
    Path(folder, f"rank {dist.get_rank()}").write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(120)


def launches(folder: str) -> None:
    """What a launcher does that is ended before its ranks are."""
    launch.PRELOADED[:] = ["torch.distributed"]
    launch.run_local(waits, 2, folder, timeout=100)


def watched() -> None:
    """A rank whose script ends while threads of its own look into the store all the time."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    failures.QUIET_SECONDS = 0.0
    for _ in range(4):
        kept.append(each := failures.Failures((0, 1), lambda: None, stays_armed=True))
        with each.during("a step"):
            pass
    time.sleep(0.2)
