"""What every trainer can express of 12 published clusters: exported, read back, priced again, and what it costs.

    python benchmarks/targets.py                            all cases and trainers: a JSON line each
    python benchmarks/targets.py gpt3-64 vit-h-32           these cases
    python benchmarks/targets.py --for megatron gpt3-64     one trainer
    python benchmarks/targets.py --folders out              and keep the exported folders, for make test-targets
    python benchmarks/targets.py --page rows.jsonl          docs/targets.md from the lines

A row has the fastest layout that the trainer can say, its seconds and memory with the trainer's software; what
``autopar price`` makes of the exported files (``again``, which should be the same seconds); and autopar's own best
plan, priced with the same software: what the restriction costs. That plan is searched once a case, for autopar's own
runtime. A trainer that cannot train the model has the reason instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layouts import CASES, model_of

CLUSTERS = (
    "llama-8b-64", "llama-70b-256", "llama-405b-512", "llama-405b-16384", "gpt3-64", "gpt3-1024", "mixtral-8x7b-64",
    "qwen3-30b-a3b-16", "deepseek-v3-1024", "t5-11b-32", "vit-h-32", "whisper-large-8",
)  # fmt: skip
POLICY = "bf16-mixed"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "targets.md"


def spec_of(case: str, folder: Path) -> tuple[str, int, int | None]:
    """Write the config of a case's model; return its spec, the rows of a batch and the sequence length."""
    family, shape, _, rows, seq, _, _ = CASES[case]
    config = model_of(family, shape, seq).config
    model = {"whisper": "WhisperForConditionalGeneration", "vit": "ViTForImageClassification"}.get(family)
    config.architectures = config.architectures or [model or type(model_of(family, shape, seq)).__name__]
    file = folder / f"{case}.json"
    config.to_json_file(file)
    return f"hf:{file}", rows, None if family in ("vit", "whisper") else seq


def measure(case: str, names: list[str], folders: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of one case, in this process."""
    warnings.simplefilter("ignore")
    from autopar.capture import capture
    from autopar.frontends.models import load_model
    from autopar.planner.layouts.pricing import PricedLayouts
    from autopar.targets import targets
    from autopar.words.precision import parse_precision

    with tempfile.TemporaryDirectory() as folder:
        spec, rows, seq = spec_of(case, Path(folder))
        loaded = load_model(spec, rows, seq)
        captured = capture(loaded.model, loaded.args, loaded.kwargs, precision=parse_precision(POLICY))
        layouts = PricedLayouts(loaded.model, captured, (loaded.args, loaded.kwargs))
        start = time.process_time()
        own = _own(case, loaded, captured, layouts, folders, names)
        if own is not None and (not names or "autopar" in names):
            yield {
                "case": case, "target": "autopar", "layout": own.layout, "seconds": own.plan.seconds,
                "GiB": own.plan.memory_bytes / 2**30, "CPU s": round(time.process_time() - start),
            }  # fmt: skip
        for name, target in targets().items():
            if names and name not in names:
                continue
            start = time.process_time()
            row = _row(case, target, loaded, captured, layouts, own, folders)
            yield {"case": case, "target": name, **row, "CPU s": round(time.process_time() - start)}


@dataclass(frozen=True)
class Own:
    """autopar's own best plan, and the graph of a microbatch that it is for."""

    plan: Any
    graph: Any
    layout: str


def _own(case: str, loaded: Any, captured: Any, layouts: Any, folders: Path | None, names: list[str]) -> Own | None:
    """Return autopar's own best plan: that of an earlier run with these folders, or of a search."""
    from autopar.planfile import bind, dumps, open_
    from autopar.planner import planning
    from autopar.plans.pins import Pins
    from autopar.plans.request import PlanRequest
    from hardware_profiles import load_cluster

    cluster = CASES[case][2]
    hardware = load_cluster(cluster)
    file = folders / "autopar" / f"{case}.json" if folders is not None else None
    if file is not None and file.exists():
        document = open_(file)
        graph = layouts.part(document.microbatches).graph
        return Own(bind(document, graph, hardware), graph, document.raw["notes"][-1])
    if names and "autopar" not in names:
        return None
    request = PlanRequest(Pins(precision=captured.graph.precision))
    found = planning.find(
        loaded.model, captured, lambda: (loaded.args, loaded.kwargs), hardware, hardware.n_devices, request, cluster,
        runs=False,
    )  # fmt: skip
    layout = found.tried[0][0] if found.tried else "one group"
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        noted = replace(found.plan, notes=(*found.plan.notes, layout), cluster=cluster)
        file.write_text(dumps(noted, found.captured.graph))
    return Own(found.plan, found.captured.graph, layout)


def _row(
    case: str, target: Any, loaded: Any, captured: Any, layouts: Any, own: Any, folders: Path | None
) -> dict[str, Any]:
    from autopar.errors import AutoparError
    from autopar.targets.exporting import Exporter

    cluster, rows = CASES[case][2:4]
    exporter = Exporter(target, loaded, captured, layouts, cluster, rows)
    try:
        found = exporter.search().find().best
        made, written = exporter.export(found)
    except AutoparError as error:
        return {"refused": str(error)}
    row = {
        "layout": found.layout.text, "seconds": found.seconds, "GiB": found.memory_bytes / 2**30,
        "limit GiB": found.limit_bytes / 2**30,
    }  # fmt: skip
    if own is not None:
        row["own"] = _repriced(own, exporter.where)
    with tempfile.TemporaryDirectory() as there:
        home = Path(there) if folders is None else folders / target.name / case
        for name, text in written.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text)
        about = {"name": case, "argv": written.argv, "devices": made.layout.n_devices, "words": found.layout.text,
                 "batch": rows, "seq": loaded.seq, "cluster": cluster}  # fmt: skip
        (home / "case.json").write_text(json.dumps(about, indent=2) + "\n")
        row["again"] = _again(home, written.files, target, exporter)
    return row


def _again(home: Path, files: Any, target: Any, exporter: Any) -> Any:
    """Return the seconds of the file that the trainer reads, or why there are none."""
    from autopar.errors import AutoparError
    from autopar.targets.pricing import as_priced, layout_words, read_config
    from autopar.targets.target import Source

    mine = [n for n, text in files.items() if target.reads is not None and target.reads(Source(Path(n), text))]
    if not mine:
        return None
    try:
        _, said = read_config(home / mine[0], target.name)
        words = layout_words(said, exporter.hardware.n_devices, exporter.rows, mine[0])
        where = exporter.where.replace(target.software, as_priced(said, target).software)
        return exporter.layouts.price(where, words).seconds
    except AutoparError as error:
        return str(error)


def _repriced(own: Any, where: str) -> float | None:
    """Return the seconds of autopar's own plan with a trainer's software; None where it cannot be priced so."""
    from autopar.errors import AutoparError
    from autopar.planfile import bind, dumps, parse
    from autopar.plans.clusters import get_cluster

    document = json.loads(dumps(own.plan, own.graph))
    document["cluster"] = where
    try:
        return bind(parse(json.dumps(document)), own.graph, get_cluster(where)).seconds
    except AutoparError as error:
        print(f"# own plan with {where}: {error}", file=sys.stderr)
        return None


def page(rows: list[dict[str, Any]]) -> str:
    """Return docs/targets.md."""
    own = {row["case"]: row for row in rows if row["target"] == "autopar"}
    lines = [
        "# What other trainers can express",
        "",
        "The fastest layout that each trainer can say of 12 published clusters, priced with the trainer's software",
        f"(`autopar plan --for TRAINER`, in {POLICY}); *again* is what `autopar price` makes of the exported files;",
        "*restriction* is what the layout takes more than autopar's own plan (searched for its own runtime, priced",
        "with the trainer's software; negative where the trainer's layout is faster than that plan with it). Made by",
        "`python benchmarks/targets.py`, nothing measured. The models are those of `benchmarks/layouts.py`.",
        "",
        "| case | trainer | layout | s a step | GiB | again | restriction |",
        "|---|---|---|---|---|---|---|",
    ]
    order = {case: number for number, case in enumerate(CLUSTERS)}
    for row in sorted(rows, key=lambda row: (order[row["case"]], row["target"] != "autopar")):
        if row["target"] == "autopar":
            lines.append(_cells(row["case"], "autopar", row["layout"], f"{row['seconds']:.4g}", f"{row['GiB']:.1f}"))
            continue
        if "refused" in row:
            lines.append(_cells(row["case"], row["target"], f"*{_short(row['refused'])}*"))
            continue
        again = row.get("again")
        same = f"{again / row['seconds'] - 1:+.2%}" if isinstance(again, float) else _short(str(again or "no file"))
        mine = row.get("own")
        cost = f"{row['seconds'] / mine - 1:+.1%}" if mine and own.get(row["case"]) else ""
        numbers = f"{row['seconds']:.4g}", f"{row['GiB']:.1f}"
        lines.append(_cells(row["case"], row["target"], f"`{row['layout']}`", *numbers, same, cost))
    if missing := [case for case in CLUSTERS if case not in {row["case"] for row in rows}]:
        lines += ["", f"Not run: {', '.join(missing)}; and the trainers that a case does not list."]
    return "\n".join(lines) + "\n"


def _cells(*cells: str) -> str:
    return "| " + " | ".join([*cells, *[""] * (7 - len(cells))]) + " |"


def _short(text: str) -> str:
    return text.splitlines()[0].replace("|", "/")[:160]


def main() -> None:
    """Print a line for every case and trainer, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CLUSTERS], default=[])
    parser.add_argument("--for", dest="names", action="append", default=[], help="a trainer; repeatable")
    parser.add_argument("--folders", type=Path, help="where to keep the exported folders")
    parser.add_argument("--page", type=Path, help="lines of earlier runs, from which docs/targets.md is written")
    asked = parser.parse_args()
    if asked.page is not None:
        PAGE.write_text(page([json.loads(line) for line in asked.page.read_text().splitlines()]))
        return
    if len(asked.cases) == 1:
        for row in measure(asked.cases[0], asked.names, asked.folders):
            print(json.dumps(row), flush=True)
        return
    options = [f"--for={name}" for name in asked.names] + ([f"--folders={asked.folders}"] if asked.folders else [])
    for case in asked.cases or CLUSTERS:
        subprocess.run([sys.executable, __file__, case, *options], check=False)


if __name__ == "__main__":
    main()
