"""Steps that failures cost on 1,024 to 16,384 devices: checkpoints, elastic restarts, spare machines, spare stages.

``python examples/studies/recovery.py [plot.svg]`` kills and stops ranks of a small job under ``autopar.elastic`` on
this machine and measures what follows; prices the step of Llama-3-405B by autopar; and simulates failures that come at
random. docs/studies/recovery.md has the result, and says which numbers are assumptions.
"""

from __future__ import annotations

import heapq
import math
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import elastic_restart
import plotting
import torch
from torch import nn

import autopar
from autopar.plans.clusters import get_cluster
from cost_models.costs import costs_of

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
ROWS, LENGTH, STAGES, CHUNKS = 2048, 8192, 16, 7
FAILURES, DEVICES = 3000, (1024, 2048, 4096, 8192, 16384)


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


def in_slots(replicas: int) -> float:
    """Return a step in times of a microbatch: with these of each replica in equal rounds, and with the bubble."""
    m = math.ceil(ROWS / replicas)
    while m % (m // STAGES):
        m += 1
    return m + (STAGES - 1) / CHUNKS


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
        priced = of_model.price(cluster, f"tp={MACHINE},pp={STAGES},dp={replicas},vp={CHUNKS},zero=1,sp,recompute=full")
        planned = captured + time.process_time() - began
        slowed = in_slots(replicas - 1) / in_slots(replicas)
        started = small["CPU process"] + GROUPS * n
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


def lost(
    job: Job, how: Strategy, device_hours: float = DEVICE_HOURS, wait: float = WAIT, failures: int = FAILURES
) -> float:
    """Return the part of the devices' time that is lost, spares included, in a simulation of so many failures."""
    draw, mtbf = random.Random(0), 3600 * device_hours / job.devices
    spares = spares_for(mtbf, wait) if how.spares else 0
    save = job.write if how.together else job.copy if how.stages else job.stall
    every = job.step if how.stages else max(interval(save, mtbf), job.step, 0.0 if how.together else job.write)
    now = work = 0.0
    broken: list[float] = []  # when each broken machine is replaced
    fails = draw.expovariate(1 / mtbf)
    for _ in range(failures):
        while True:  # from save to save
            while broken and broken[0] <= now:
                heapq.heappop(broken)
                now += job.restart if how.elastic else 0.0  # which begins at the save
            length = every * (job.slowed if broken and how.elastic else 1.0) + save
            if now + length > fails:
                break
            n = max(1, int((min(fails, broken[0] if broken else fails) - now) / length))
            now, work = now + n * length, work + n * every
        while True:  # until a recovery ends before the next failure
            heapq.heappush(broken, fails + wait)
            now = max(now, fails) + (job.hang if draw.random() < HANGS else job.kill)
            if not how.elastic and len(broken) > spares:
                now = max(now, heapq.heappop(broken))
            now += job.regroup + 2 * job.copy if how.stages else job.restart
            fails += draw.expovariate(1 / mtbf)
            if fails > now:
                break
            now = fails
    return 1 - work * job.devices / (now * (job.devices + MACHINE * spares))


def report(found: Sequence[Job], plot: Path | None, failures: int = FAILURES) -> dict[tuple[int, str], float]:
    """Print the table, draw the plot, and return the lost part of the time by number of devices and strategy."""
    lose = partial(lost, failures=failures)
    table = {(job.devices, how.name): lose(job, how) for job in found for how in STRATEGIES}
    print("| devices | hours between failures | step, s | saves that stop the job, every | spare machines | "
          + " | ".join(how.name for how in STRATEGIES) + " |\n" + "|---" * (5 + len(STRATEGIES)) + "|")  # fmt: skip
    for job in found:
        mtbf = 3600 * DEVICE_HOURS / job.devices
        parts = (table[job.devices, how.name] for how in STRATEGIES)
        cells = (f"{part:.2%}, {part * 86400 / job.step:.0f} steps" for part in parts)
        print(f"| {job.devices:,} | {mtbf / 3600:.1f} | {job.step:.1f} | {interval(job.write, mtbf):.0f} s | "
              f"{spares_for(mtbf, WAIT)} | {' | '.join(cells)} |")  # fmt: skip
    large, what = found[-1], "time lost, %"
    for kind, changed in (("half the restart", replace(large, restart=large.restart / 2, regroup=large.regroup / 2)),
                          ("hangs noticed like kills", replace(large, hang=large.kill))):  # fmt: skip
        cells = (f"{how.name} {lose(changed, how):.2%}" for how in STRATEGIES)
        print(f"{large.devices:,} devices, {kind}: {', '.join(cells)}")
    if plot is None:
        return table
    rates, waits = [DEVICE_HOURS * 2**k for k in range(-4, 3)], [60 * 4.0**k for k in range(6)]

    def lines(points: Callable[[Strategy], list[tuple[float, float]]]) -> list[plotting.Line]:
        return [plotting.Line(how.name, [(x, 100 * y) for x, y in points(how)]) for how in STRATEGIES]

    plotting.write(plot, [
        plotting.Panel("failures as of Llama 3", "devices", what,
                       lines(lambda how: [(job.devices, table[job.devices, how.name]) for job in found]), log_x=True),
        plotting.Panel(f"{large.devices:,} devices", "device-hours for a failure", what,
                       lines(lambda how: [(x, lose(large, how, x)) for x in rates]), log_x=True, log_y=True),
        plotting.Panel(f"{large.devices:,} devices", "minutes until a machine is replaced", what,
                       lines(lambda how: [(x / 60, lose(large, how, wait=x)) for x in waits]), log_x=True, log_y=True),
    ])  # fmt: skip
    return table


def main(plot: Path | None) -> None:
    """Measure, price, simulate."""
    runs = {(2, signal.SIGKILL): {}, (2, signal.SIGSTOP): {}, (4, signal.SIGKILL): {}}
    for ranks, how in runs:
        runs[ranks, how] = elastic_restart.measured(ranks, how)
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in runs[ranks, how].items())
        print(f"{how.name} of one of {ranks} ranks, load {os.getloadavg()[0]:.0f}: {parts} s", flush=True)
    hang = SILENCE + max(0.0, runs[2, signal.SIGSTOP]["noticed"] - elastic_restart.SILENCE)
    found = jobs(DEVICES, runs[2, signal.SIGKILL], hang)
    for job in found:
        print(f"{job.devices:,} devices, seconds: " + ", ".join(f"{k} {v:.3g}" for k, v in list(vars(job).items())[1:]))
    report(found, plot)


if __name__ == "__main__":
    plotting.run(main)
