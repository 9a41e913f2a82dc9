"""Timelines as Chrome trace events for Perfetto (ui.perfetto.dev): predicted and measured in one file.

Each group of devices is a thread of the process ``predicted`` or ``measured``; the transfers between groups have
threads of their own. The format is that of the "Trace Event Format" document of the Chromium project (``X`` events,
times in microseconds).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from autopar.report import Facts
from cost_models.schedules import Timeline
from cost_models.schedules.actions import KINDS, parts
from hardware_profiles.strict import Unreadable, parse_json, read_text

Event = Facts
Span = tuple[str, str, float, float]
"""``(name, category, start seconds, end seconds)``."""


def predicted(timeline: Timeline) -> list[Event]:
    """Return the events of a simulation: compute, transfers and bubbles."""
    events: list[Event] = []
    for rank, row in enumerate(timeline.schedule.rows):
        spans: list[Span] = []
        at = 0.0
        for step, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=False):
            if start > at + 1e-12:
                spans.append(("bubble", "bubble", at, start))
            spans.append((str(step), KINDS[parts(step)[0].kind], start, end))
            at = end
        if timeline.makespan_seconds > at + 1e-12:
            spans.append(("bubble", "bubble", at, timeline.makespan_seconds))
        events += rows("predicted", 1, rank, f"group {rank}", spans)
    for number, (a, b) in enumerate(sorted({(t.source, t.target) for t in timeline.transfers})):
        sent = [
            (f"{t.kind}{t.microbatch}", "transfer", t.start_seconds, t.end_seconds)
            for t in timeline.transfers if (t.source, t.target) == (a, b)
        ]  # fmt: skip
        events += rows("predicted", 1, 1000 + number, f"stage {a} to stage {b}", sent)
    return events


def measured(ranks: Sequence[Sequence[Span]]) -> list[Event]:
    """Return the events of a step that was run, one sequence of spans for each rank, on one clock."""
    start = min((s[2] for row in ranks for s in row), default=0.0)
    events: list[Event] = []
    for rank, row in enumerate(ranks):
        spans = [(name, kind, a - start, b - start) for name, kind, a, b in row]
        events += rows("measured", 2, rank, f"rank {rank}", spans)
    return events


def rows(process: str, pid: int, tid: int, label: str, spans: Iterable[Span]) -> list[Event]:
    """Return one thread's events, with the names of thread and process."""
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": label}},
        {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}},
    ]
    for name, kind, start, end in spans:
        events.append(
            {
                "ph": "X",
                "name": name,
                "cat": kind,
                "pid": pid,
                "tid": tid,
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
            }
        )
    return events


def write(path: str | Path, events: Sequence[Event]) -> None:
    """Write a trace file, or add to the events of an existing one."""
    pids = {e["pid"] for e in events}
    kept = [e for e in known(path) if e["pid"] not in pids]
    Path(path).write_text(json.dumps({"traceEvents": [*kept, *events], "displayTimeUnit": "ms"}), encoding="utf-8")


def known(path: str | Path) -> list[Event]:
    """Return the events of a trace file; none if it does not exist.

    Raises:
        OSError: it cannot be read, or its folder does not exist.
        ValueError: it is no trace.
    """
    path = Path(path)
    if not path.exists():
        if not path.parent.is_dir():
            raise FileNotFoundError(2, f"no folder {path.parent}")
        return []
    try:
        raw = parse_json(read_text(path))
    except Unreadable as error:
        raise ValueError(f"the file is no trace: {error}") from error
    events = raw.get("traceEvents") if isinstance(raw, dict) else None
    if not isinstance(events, list) or not all(isinstance(e, dict) and "pid" in e for e in events):
        raise ValueError("the file is no trace")
    return events
