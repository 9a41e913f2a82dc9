"""What follows the loss of a rank, measured: a small job under ``autopar.elastic`` on this machine, gloo.

The study of :mod:`recovery` calls :func:`measured`; the agent starts this file for each rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import autopar

sys.path.insert(0, str(Path(__file__).parents[1]))
from train_elastic import ranks_of

SMALL, EVERY, LIMIT, SILENCE = 1024, 4, 240, 5.0
"""Features, steps between saves, most seconds of a wait, and silence after which a rank is taken for dead."""


def job(folder: Path) -> None:
    """A job that notes when it comes to what; it starts from its last save."""
    def note(what: str) -> None:
        if os.environ["RANK"] == "0":
            with (folder / "notes").open("a") as notes:
                notes.write(json.dumps([what, time.time(), time.process_time()]) + "\n")

    note("started")
    dist.init_process_group("gloo")
    note("met")
    torch.manual_seed(0)
    x, model = torch.randn(8, SMALL), nn.Sequential(*(nn.Linear(SMALL, SMALL) for _ in range(8)))
    cut = {"params": {"*": "S0 use"}} if dist.get_world_size() > 1 else {}
    pm = autopar.parallelize(model, example_inputs=x, loss_fn=lambda y: y.square().mean(), **cut)
    note("planned")
    optimizer = torch.optim.AdamW(pm.parameters())
    checkpoint = autopar.Checkpoint(folder / "saves", pm, optimizer)
    step = checkpoint.load() or 0
    note("loaded")
    while step < 3 * EVERY:
        pm.train_step(x, optimizer=optimizer)
        step += 1
        note("step")
        if step % EVERY == 0:
            note("saves")
            checkpoint.save(step, wait=step != EVERY)  # the first one is written while training goes on
            note("goes on")
            time.sleep(1.0)
    dist.destroy_process_group()


def measured(ranks: int, how: signal.Signals, silence: float = SILENCE) -> dict[str, float]:
    """Return the seconds from the loss of a rank to the next step, by part, and those for which saves stop a job.

    Parts named ``CPU`` are seconds of rank 0's processor: what a rank takes on a machine that is not shared.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "autopar.elastic", "--nproc-per-node", str(ranks), __file__, name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                       "AUTOPAR_SILENCE_SECONDS": str(silence)}  # fmt: skip
        agent = subprocess.Popen(command, env=environment)
        limit = time.monotonic() + LIMIT

        def notes(since: float = 0.0, kind: int = 0) -> dict[str, list[float]]:
            """Of the clock (0) or of rank 0's processor (1), after `since`."""
            found: dict[str, list[float]] = {}
            for line in (folder / "notes").read_text().splitlines() if (folder / "notes").exists() else []:
                what, *at = json.loads(line)
                found.setdefault(what, []).extend([at[kind]] if at[0] > since else [])
            return found

        def until(reached: Callable[[], bool]) -> float:
            while not reached():
                if agent.poll() is not None or time.monotonic() > limit:
                    raise RuntimeError(f"the measured job of {ranks} ranks ended with {agent.poll()}, or hangs")
                time.sleep(0.02)
            return time.time()

        try:
            until(lambda: len(notes().get("goes on", ())) == 2)
            old = ranks_of(agent.pid)
            lost = time.time()
            os.kill(old[-1], how)
            ended = until(lambda: not set(old) & set(ranks_of(agent.pid)))
            until(lambda: bool(notes(ended).get("step")))
        finally:
            left = ranks_of(agent.pid) if agent.poll() is None else []
            for end, pid in [(signal.SIGTERM, agent.pid), *((signal.SIGKILL, pid) for pid in left)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, end)
            agent.wait(LIMIT)
        at = [lost, ended, *(notes(ended)[what][0] for what in ("started", "met", "planned", "loaded", "step"))]
        cpu = [0.0, *(notes(ended, 1)[what][0] for what in ("met", "planned", "loaded"))]
        stops = [b - a for a, b in zip(notes()["saves"], notes()["goes on"])]
    parts = ("noticed", "process", "met", "planned", "loaded", "first step")
    on_cpu = {f"CPU {part}": b - a for part, a, b in zip(("process", "planned", "loaded"), cpu, cpu[1:])}
    of_clock = {part: b - a for part, a, b in zip(parts, at, at[1:])}
    return {**of_clock, "save": stops[1], "save while training": stops[0], **on_cpu}


if __name__ == "__main__":
    job(Path(sys.argv[1]))
