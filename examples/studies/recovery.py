"""Steps that failures cost on 1,024 to 16,384 devices: checkpoints, elastic restarts, spare machines, spare stages.

``python examples/studies/recovery.py [plot.svg]`` kills and stops ranks of a small job under ``autopar.elastic`` on
this machine and measures what follows; prices the step of Llama-3-405B by autopar; and simulates failures that come at
random. docs/studies/recovery.md has the result, and says which numbers are assumptions.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import plotting
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from train_elastic import ranks_of  # noqa: E402

import autopar  # noqa: E402
from autopar.plans.clusters import get_cluster  # noqa: E402
from cost_models.costs import costs_of  # noqa: E402

# What is assumed; the page says where the published ones are from.
DEVICE_HOURS = 54 * 24 * 16384 / 419
"""Device-hours for each failure: 419 in 54 days on 16,384 devices (Llama 3)."""
HANGS, SILENCE = 0.3, 60.0
"""Part of the failures that hang, and autopar's default of AUTOPAR_SILENCE_SECONDS, after which they are noticed."""
WAIT = 1800.0
"""Seconds until another machine takes the place of a broken one, where none is kept ready."""
STATE = 14
"""Bytes of a parameter in a checkpoint: bfloat16, its float32 master, two float32 moments."""
STORAGE = 2e12 / 16384
"""Bytes per second of a device to and from storage: 2 TB/s for all of 16,384 (Llama 3)."""
HOST = 25e9
"""Bytes per second of a device to its host's memory."""
GROUPS = 30 / 10_000
"""Seconds to make process groups for each device: 30 s on 10,000 (MegaScale)."""
MACHINE, SPARES_LACK = 8, 0.01
"""Devices of a machine, which is a stage of a replica; probability with which spares may not suffice."""
ROWS, LENGTH, STAGES = 2048, 8192, 16
SMALL, EVERY, LIMIT = 1024, 4, 240


# --- the measured job


def job(folder: Path) -> None:
    """A job that notes when it comes to what; it starts from its last save."""
    def note(what: str) -> None:
        if os.environ["RANK"] == "0":
            with (folder / "notes").open("a") as notes:
                notes.write(json.dumps([what, time.time()]) + "\n")

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


def measured(ranks: int, how: signal.Signals, silence: float = 5.0) -> dict[str, float]:
    """Return the seconds from the loss of a rank to the next step, by part, and those for which saves stop a job."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "autopar.elastic", "--nproc-per-node", str(ranks), __file__, name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                       "AUTOPAR_SILENCE_SECONDS": str(silence)}  # fmt: skip
        agent = subprocess.Popen(command, env=environment)
        limit = time.monotonic() + LIMIT

        def notes(since: float = 0.0) -> dict[str, list[float]]:
            found: dict[str, list[float]] = {}
            for line in (folder / "notes").read_text().splitlines() if (folder / "notes").exists() else []:
                what, at = json.loads(line)
                found.setdefault(what, []).extend([at] if at > since else [])
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
        stops = [b - a for a, b in zip(notes()["saves"], notes()["goes on"])]
    parts = ("noticed", "process", "met", "planned", "loaded", "first step")
    return {**{part: b - a for part, a, b in zip(parts, at, at[1:])}, "save": stops[1], "save while training": stops[0]}


# --- what the steps of a large job take


@dataclass(frozen=True)
class Job:
    """A job on `devices` devices, all times in seconds.

    Attributes:
        step: a step. slowed: a step with one replica less, over a step.
        stall: for which a save stops the job, if it is written while training goes on. write: until it is in storage.
        kill, hang: until the loss of a rank is noticed.
        restart: from there to the next step, new processes and a new plan. regroup: new process groups alone.
        copy: of every device's state to another machine. parameters: their number.
    """

    devices: int
    step: float
    slowed: float
    stall: float
    write: float
    kill: float
    hang: float
    restart: float
    regroup: float
    copy: float


def llama_405b() -> nn.Module:
    """The model of Llama-3-405B's sizes, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def jobs(numbers: Sequence[int], small: dict[str, float], hang: float) -> list[Job]:
    """Return the job on each number of devices; ``small``: what was measured where a rank is killed."""
    model, found = llama_405b(), []
    began = time.process_time()
    with torch.device("meta"):
        ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    of_model = autopar.layouts(model, {"input_ids": ids, "labels": ids})
    captured = time.process_time() - began
    state = STATE * sum(p.numel() for p in model.parameters())
    for n in numbers:
        began, replicas = time.process_time(), n // MACHINE // STAGES
        cluster = get_cluster(f"dgx-h100-x{n // MACHINE}")
        priced = of_model.price(cluster, f"tp={MACHINE},pp={STAGES},dp={replicas},vp=7,zero=1,sp")
        planned = captured + time.process_time() - began
        m = ROWS // replicas
        slowed = (math.ceil(ROWS / (replicas - 1)) + (STAGES - 1) / 7) / (m + (STAGES - 1) / 7)
        started = small["process"] + small["met"] + GROUPS * n
        found.append(Job(
            n, priced.seconds, slowed, state / n / HOST, state / n / STORAGE, small["noticed"], hang,
            started + planned + state / n / STORAGE, GROUPS * n, costs_of(cluster).transfer(0, MACHINE, state / n),
        ))  # fmt: skip
    return found


# --- failures


@dataclass(frozen=True)
class Strategy:
    """What a job does against failures.

    Attributes:
        together: a save stops the job until it is in storage. Else it is copied, and written while the job goes on.
        elastic: goes on without the replica whose machine is broken. Else it waits for another machine.
        spares: whether machines are kept ready for that.
        stages: a spare takes over a stage from a copy in another machine's memory, and no process is started.
    """

    name: str
    together: bool = False
    elastic: bool = False
    spares: bool = False
    stages: bool = False


STRATEGIES = (
    Strategy("checkpoints that stop the job", together=True), Strategy("checkpoints written meanwhile"),
    Strategy("elastic restarts", elastic=True), Strategy("spare machines", spares=True),
    Strategy("spare stages", spares=True, stages=True),
)  # fmt: skip


def interval(save: float, mtbf: float) -> float:
    """Return Daly's interval between saves, in seconds of work: of Young's form, with terms of higher order."""
    if save >= 2 * mtbf:
        return mtbf
    x = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - save


def spares_for(mtbf: float, wait: float) -> int:
    """Return how many machines are broken at once at most, but for a probability of ``SPARES_LACK``."""
    k, mean, term, total = 0, wait / mtbf, math.exp(-wait / mtbf), 0.0
    while (total := total + term) < 1 - SPARES_LACK:
        k += 1
        term *= mean / k
    return k


def lost(job: Job, how: Strategy, device_hours: float = DEVICE_HOURS, wait: float = WAIT, failures: int = 3000) -> float:
    """Return the part of the devices' time that is lost, spares included, in a simulation of so many failures."""
    draw = random.Random(0)
    mtbf = 3600 * device_hours / job.devices
    spares = spares_for(mtbf, wait) if how.spares else 0
    save = job.write if how.together else job.copy if how.stages else job.stall
    every = job.step if how.stages else max(interval(save, mtbf), job.step, 0.0 if how.together else job.write)
    back = job.restart + 0.0
    now = work = 0.0
    broken: list[float] = []
    fails = draw.expovariate(1 / mtbf)
    for _ in range(failures):
        while True:  # one interval between saves after the other
            while broken and broken[0] <= now:
                heapq.heappop(broken)
                now += back if how.elastic else 0.0  # a save has just been written
            speed = job.slowed ** -len(broken) if how.elastic else 1.0
            if (end := now + every / speed + save) > fails:
                break
            now, work = end, work + every
        heapq.heappush(broken, fails + wait)
        while True:  # until no failure meets the recovery
            now = max(now, fails) + (job.hang if draw.random() < HANGS else job.kill)
            if not how.elastic and len(broken) > spares:
                now = max(now, heapq.heappop(broken))
            now += job.regroup + 2 * job.copy if how.stages else job.restart
            fails += draw.expovariate(1 / mtbf)
            if fails > now:
                break
            heapq.heappush(broken, fails + wait)
            now = fails
    return 1 - work * job.devices / (now * (job.devices + MACHINE * spares))


if __name__ == "__main__":
    if "RANK" in os.environ:
        job(Path(sys.argv[1]))
