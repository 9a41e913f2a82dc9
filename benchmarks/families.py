"""``make zoo``: what autopar makes of each family of models of the zoo, as the table of docs/zoo.md.

    python benchmarks/families.py                       # all families that have no result yet
    python benchmarks/families.py --only mixtral lstm   # these, again
    python benchmarks/families.py --table docs/zoo.md   # the table of the results that are there

A table that is written over another one keeps the rows of families that have no result yet; each row says at which
commit it ran.

Every family runs in a process of its own, forked from one that has imported everything, with a limit of CPU seconds: a
crash or a long search ends that family alone, and what it had shown until then counts. Results are lines of JSON in
``build/zoo/results.jsonl``, one per family and run, the last one of a family counts; a run that is broken off goes on
where it was. What is tried stands in ``tests/family_trial.py``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
RESULTS = ROOT / "build" / "zoo" / "results.jsonl"
SECONDS = 120
"""CPU seconds that a family may take."""
STEPS = ("captured", "same", "planned", "equal", "staged")
COLUMNS = (
    "family", "ops", "captured", "same", "2x2", "two stages", "FLOPs cut", "one rank", "collectives", "seconds",
    "found by trying; kept whole; guarded", "at",
)  # fmt: skip
ENOUGH = 0.95
"""The share of a family's FLOPs that should be cut."""

PASSES = "## Passes by families"
Record = dict[str, Any]


def attempt(
    name: str, make: Callable[[], Any], seconds: int, stages: bool = True, say: Callable[[str], None] = print
) -> Record:
    """Try a family in a process of its own; of one that dies or takes too long, what it showed before."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        os._exit(_in_child(make, seconds, stages, writer))
    os.close(writer)
    with os.fdopen(reader) as lines:
        steps = [json.loads(line) for line in lines]
    _, status = os.waitpid(child, 0)
    ended = ""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        ended = f"more than {seconds} CPU s" if number == signal.SIGXCPU else f"died of {signal.Signals(number).name}"
    elif os.WEXITSTATUS(status):
        ended = f"its process ended with {os.WEXITSTATUS(status)}"
    steps_by_name = {step.pop("step"): step for step in steps}
    record = {"family": name, "steps": steps_by_name, "ended": ended, "at": commit()}
    say(line_of(record))
    return record


@functools.cache
def commit() -> str:
    """That of the tree, in short; empty outside of a checkout."""
    asked = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip()


def _in_child(make: Callable[[], Any], seconds: int, stages: bool, writer: int) -> int:
    from family_trial import trial

    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(writer, "w") as pipe:
        try:
            case = make()
        except Exception as error:
            pipe.write(json.dumps({"step": "built", "ok": False, "why": f"{type(error).__name__}: {error}"[:300]}))
            return 0
        for result in trial(case, stages):
            pipe.write(json.dumps(result) + "\n")
            pipe.flush()
    return 0


def line_of(record: Mapping[str, Any]) -> str:
    """A family in one line, for whoever waits."""
    steps = record["steps"]
    words = [f"{name} {'yes' if step['ok'] else 'NO: ' + step['why']}" for name, step in steps.items()]
    seconds = sum(step.get("seconds", 0.0) for step in steps.values())
    cut = f"{steps['planned']['cut']:.1%} cut, " if steps.get("planned", {}).get("ok") else ""
    return f"{record['family']}: {'; '.join(words)}; {cut}{seconds:.1f} s {record['ended']}".replace("\n", " | ")


def read(path: Path) -> dict[str, Record]:
    """The last result of every family."""
    if not path.exists():
        return {}
    return {record["family"]: record for record in map(json.loads, path.read_text().splitlines())}


def kept_rows(page: str) -> dict[str, Record]:
    """The results that a page shows, by family: what its table says of each."""
    whys: dict[tuple[str, str], str] = {}
    kept: dict[str, Record] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3:
            whys[cells[0], cells[1]] = cells[2]
        if not line.startswith("| ") or len(cells) != len(COLUMNS) or cells[0] == COLUMNS[0]:
            continue
        family, ops, captured, same, equal, staged, cut, rank, calls, seconds, notes, at = cells
        steps: dict[str, Any] = {}
        if cut:
            counts = dict(reversed(call.split(" ", 1)) for call in calls.split(", ") if call)
            steps["planned"] = {"ok": True, "cut": _share(cut), "rank": _share(rank), "not_cut": {},
                                "collectives": {kind: int(n) for kind, n in counts.items()}}  # fmt: skip
        elif (family, "planned") in whys:
            steps["planned"] = {"ok": False, "why": whys[family, "planned"]}
        for name, said in (("captured", captured), ("same", same), ("equal", equal), ("staged", staged)):
            if said:
                steps[name] = {"ok": said == "yes", "why": whys.get((family, name), "")}
        steps.get("captured", {}).update(ops=ops, seconds=float(seconds), notes=notes)
        ordered = {name: steps[name] for name in STEPS if name in steps}
        kept[family] = {"family": family, "steps": ordered, "ended": "", "at": at}
    for line in page.partition(PASSES)[2].partition("\n## ")[0].splitlines():
        if not line.startswith("| "):
            continue
        name, _, which = [cell.strip() for cell in line.strip("|").split("|")]
        for family in kept if which == "all" else which.split(", "):
            if "captured" in kept.get(family, {}).get("steps", {}):
                kept[family]["steps"]["captured"].setdefault("passes", []).append(name)
    return kept


def _share(text: str) -> float:
    return float(text.rstrip("%")) / 100


# --- the table -------------------------------------------------------------------------------------------------------


def table(records: Iterable[Mapping[str, Any]], families: Iterable[str] = ()) -> str:
    """The page docs/zoo.md: a summary, what fails and why, one row per family, and those without a result."""
    rows = sorted(records, key=lambda record: record["family"])
    waiting = sorted({*families} - {row["family"] for row in rows})
    ends = ["", "## Not run yet", "", f"{len(waiting)} families: {', '.join(waiting)}."] if waiting else []
    return "\n".join([_HEAD, *_summary(rows), *_passes(rows), "", *_failures(rows), "", *_rows(rows), *ends, ""])


_HEAD = """# The zoo: what is made of families of models

Written by `make zoo` (`benchmarks/families.py`); do not edit by hand. Small models with random weights, from the
configurations of `transformers` and of plain torch. Each is captured on one batch and compared with eager mode on
another (loss, every gradient, buffers), planned for 2x2 devices, and run for two steps of SGD on four ranks in one
process against one device, in double precision (1e-9); then cut into two stages with two microbatches. Plans are for
devices as slow as the models are small (`benchmarks/clusters/small-models.toml`), so that whatever may be cut pays.

*FLOPs cut* is the share of the forward's FLOPs in operators that some axis of the mesh cuts, *one rank* what one of the
four computes (25% is the least). An operator without a rule counts the FLOPs of its own kind. *Seconds* are of the CPU,
of all steps together; *at* is the commit that a row ran at."""


def _ok(record: Mapping[str, Any], step: str) -> bool:
    return bool(record["steps"].get(step, {}).get("ok"))


def _much(record: Mapping[str, Any]) -> bool:
    return _ok(record, "planned") and record["steps"]["planned"]["cut"] >= ENOUGH


def _summary(rows: list[Mapping[str, Any]]) -> list[str]:
    n = max(len(rows), 1)
    parted = [row for row in rows if "staged" in row["steps"]]
    lines = [
        ("captured", sum(_ok(row, "captured") for row in rows), n),
        ("captured, and equal to eager mode on a second batch", sum(_ok(row, "same") for row in rows), n),
        ("planned on 2x2, and equal to one device", sum(_ok(row, "equal") for row in rows), n),
        (f"at least {ENOUGH:.0%} of the FLOPs cut", sum(map(_much, rows)), n),
        ("in two stages, and equal to one device", sum(_ok(row, "staged") for row in parted), max(len(parted), 1)),
    ]
    return ["", "| | families | share |", "|---|---|---|"] + [
        f"| {what} | {count} of {of} | {count / of:.1%} |" for what, count, of in lines
    ]


def _passes(rows: list[Mapping[str, Any]]) -> list[str]:
    """How many families each pass of capture changed something in, and which."""
    known = [row for row in rows if "passes" in row["steps"].get("captured", {})]
    families: dict[str, list[str]] = {}
    for row in known:
        for name in row["steps"]["captured"]["passes"]:
            families.setdefault(name, []).append(row["family"])
    lines = [
        "", PASSES, "", f"In how many of {len(known)} families a pass of capture (`autopar inspect --passes`) changes "
        "something.", "", "| pass | families | which |", "|---|---|---|",
    ]  # fmt: skip
    every = {", ".join(row["family"] for row in known): "all"}
    for name, which in sorted(families.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {name} | {len(which)} | {every.get(', '.join(which), ', '.join(which))} |")
    return lines if known else []


def _failures(rows: list[Mapping[str, Any]]) -> list[str]:
    lines = ["## What fails", "", "| family | where | why |", "|---|---|---|"]
    for row in rows:
        bad = [(name, step["why"]) for name, step in row["steps"].items() if not step["ok"]]
        if row["ended"]:
            bad.append((next((s for s in STEPS if s not in row["steps"]), "after"), row["ended"]))
        if not bad and not _much(row):
            left = ", ".join(f"{t} {share:.0%}" for t, share in row["steps"]["planned"]["not_cut"].items())
            bad.append(("FLOPs cut", f"not cut: {left}"))
        lines += [f"| {row['family']} | {where} | {_cell(why)} |" for where, why in bad]
    return lines


def _cell(text: str) -> str:
    """Text for a cell: in one line, files without the folders of this machine."""
    return re.sub(r"(?<!\w)(/[\w.-]+)+/(?=\w)", "", " ".join(text.split())).replace("|", "/")


def _rows(rows: list[Mapping[str, Any]]) -> list[str]:
    lines = [
        "## All families", "",
        f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|",
    ]  # fmt: skip
    for row in rows:
        steps = row["steps"]
        first, plan = steps.get("captured", {}), steps.get("planned", {})

        calls = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in plan.get("collectives", {}).items())
        notes = (
            [first["notes"]]
            if "notes" in first
            else [
                ", ".join(_short(t) for t in first.get("discovered", ())),
                ", ".join(f"{_short(t)} ({why})" if why else _short(t) for t, why in first.get("whole", {}).items()),
                f"{len(first['guarded'])} branches" if first.get("guarded") else "",
            ]
        )
        seconds = sum(step.get("seconds", 0.0) for step in steps.values())
        cells = [
            row["family"], str(first.get("ops", "")), _said(row, "captured"), _said(row, "same"), _said(row, "equal"),
            _said(row, "staged"),
            f"{plan['cut']:.1%}" if plan.get("ok") else "", f"{plan['rank']:.1%}" if plan.get("ok") else "", calls,
            f"{seconds:.1f}", _cell("; ".join(note for note in notes if note)), row.get("at", ""),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _said(record: Mapping[str, Any], step: str) -> str:
    return "" if step not in record["steps"] else "yes" if _ok(record, step) else "**no**"


def _short(target: str) -> str:
    return target.removeprefix("aten.").removesuffix(".default")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="FAMILY", help="these, with a result or without")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of the CPU, for a family")
    parser.add_argument("--without-stages", action="store_true", help="only the plans for 2x2")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a file of JSON lines that is added to")
    parser.add_argument("--table", type=Path, help="write all results to this page; run nothing")
    asked = parser.parse_args()
    import torch
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    from zoo_wide import EVERY

    there = read(asked.results)
    if asked.table:
        before = kept_rows(asked.table.read_text()) if asked.table.exists() else {}
        rows = {name: row for name, row in {**before, **there}.items() if name in EVERY}
        asked.table.write_text(table(rows.values(), EVERY))
        return
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    if unknown := {*asked.only} - {*EVERY}:
        sys.exit(f"no such family: {', '.join(sorted(unknown))}")
    names = asked.only or [name for name in EVERY if name not in there]
    began = time.time()
    say = functools.partial(print, flush=True)
    for name in names:
        record = attempt(name, EVERY[name], asked.seconds, not asked.without_stages, say)
        with asked.results.open("a") as lines:
            lines.write(json.dumps(record) + "\n")
    print(f"{len(names)} families in {time.time() - began:.0f} s; {asked.results}")


if __name__ == "__main__":
    main()
