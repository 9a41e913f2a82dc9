"""Seconds of collectives, as torch's profiler saw them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class CollectiveTime:
    """One collective: its name (``all_reduce``), the shapes that went in, and its seconds on this rank."""

    name: str
    shapes: str
    seconds: float


def time_collectives(fn: Callable[[], Any]) -> list[CollectiveTime]:
    """Run ``fn`` and return its collectives in order of their start."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        fn()
    times = []
    for event in sorted(profile.events() or [], key=lambda e: e.time_range.start):
        backend, colon, name = event.name.partition(":")
        if colon and backend in ("gloo", "nccl"):
            shapes = " ".join("x".join(map(str, s)) for s in event.input_shapes if s)
            times.append(CollectiveTime(name, shapes, event.time_range.elapsed_us() / 1e6))
    return times
