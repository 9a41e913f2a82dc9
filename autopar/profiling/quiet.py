"""Load of the machine during a measurement: seconds of other processes, from the kernel's counters."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

QUIET = 0.1
"""CPUs that others may keep busy on average on a quiet machine."""

LOOK = 0.15
"""Seconds over which the load of others is averaged."""

Row = TypeVar("Row")


def busy_seconds() -> float | None:
    """Return the seconds that all CPUs have worked (or were taken away); None without a counter."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _, _, irq, soft, stolen = map(int, fields)
    return (user + nice + system + irq + soft + stolen) / os.sysconf("SC_CLK_TCK")


class CpuWatch:
    """Counter of other processes' work since its start; every rank makes and asks one at the same points."""

    def __init__(self) -> None:
        self.began, self.own, self.busy = time.perf_counter(), time.process_time(), busy_seconds()

    def others(self) -> tuple[float, float]:
        """Return ``(processors, seconds)`` that others kept busy on average, and since the start; same on all ranks."""
        values = torch.tensor([time.process_time() - self.own, 0.0], dtype=torch.float64)
        spent = time.perf_counter() - self.began
        now = busy_seconds()
        if dist.is_initialized():
            dist.all_reduce(values)
            shared = torch.tensor([spent, (now or 0.0) - (self.busy or 0.0)], dtype=torch.float64)
            dist.all_reduce(shared, dist.ReduceOp.MAX)
            spent, busy = shared.tolist()
        else:
            busy = (now or 0.0) - (self.busy or 0.0)
        return max(0.0, busy - float(values[0])) / max(spent, 1e-9), spent


def until_quiet(most_seconds: float) -> float:
    """Wait until the machine is quiet, at most so long, on all ranks; return the seconds waited."""
    began = time.perf_counter()
    while True:
        watch = CpuWatch()
        time.sleep(LOOK)
        others, _ = watch.others()
        waited = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(waited, dist.ReduceOp.MAX)
        if others <= QUIET or float(waited) > most_seconds:
            return float(waited)


def quietest(rows: Sequence[Row], others: Callable[[Row], float], least: int) -> list[Row]:
    """Return the rows measured while the machine was quiet; the ``least`` quietest where there are fewer."""
    ordered = sorted(rows, key=others)
    return [row for i, row in enumerate(ordered) if i < least or others(row) <= QUIET]
