"""The cases of one trainer, exported into a folder each: ``python export_all.py NAME FOLDER [CASE ...]``."""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.capture import capture
from autopar.frontends.models import load_model
from autopar.planner.layouts.pricing import PricedLayouts
from autopar.plans.clusters import get_cluster
from autopar.targets import target_named
from autopar.targets.model_facts import facts_of
from autopar.targets.space import refusal
from autopar.targets.target import Export
from autopar.words.precision import parse_precision

HERE = Path(__file__).resolve().parent


def export_of(spec: str, case: Mapping[str, Any], software: str, capture_of: dict[object, Any]) -> Export:
    """Price a case's words for its model and cluster; `capture_of` keeps captures among cases."""
    name = f"{case['cluster']} as {software}" if software else str(case["cluster"])
    policy = parse_precision(case.get("precision", "bf16-mixed"))
    key = (case["model"], case["batch"], case["seq"], str(policy))
    if key not in capture_of:
        loaded = load_model(spec, case["batch"], case["seq"])
        captured = capture(loaded.model, loaded.args, loaded.kwargs, precision=policy)
        layouts = PricedLayouts(loaded.model, captured, (loaded.args, loaded.kwargs))
        capture_of[key] = loaded, captured, layouts, facts_of(loaded.model, captured)
    loaded, captured, layouts, facts = capture_of[key]
    priced = layouts.price(name, case["words"])
    optimizer = str(case.get("optimizer", "adamw"))
    rows, seq = int(case["batch"]), int(case["seq"])
    return Export(priced, loaded, captured, facts, get_cluster(name), name, rows, seq, policy, optimizer)


def main() -> None:
    """Write the cases of a trainer."""
    name, out, *only = sys.argv[1:]
    target = target_named(name)
    models = json.loads((HERE / "models.json").read_text())
    cases = tomllib.loads((HERE / name / "cases.toml").read_text())["case"]
    kept: dict[object, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            if only and case["name"] not in only:
                continue
            file = Path(folder) / f"{case['model']}.json"
            file.write_text(json.dumps(models[case["model"]]))
            export = export_of(f"hf:{file}", case, target.software, kept)
            refused = refusal(target, export.layout, export.model)
            if refused:
                raise SystemExit(f"{case['name']}: {refused}")
            written = target.write(export)
            home = Path(out) / case["name"]
            for path, text in written.files.items():
                (home / path).parent.mkdir(parents=True, exist_ok=True)
                (home / path).write_text(text)
            about = {**case, "argv": written.argv, "devices": export.layout.n_devices}
            (home / "case.json").write_text(json.dumps(about, indent=2) + "\n")
            print(f"{case['name']}: {export.layout.text} on {case['cluster']}, {export.priced.plan.microbatches} "
                  f"microbatches", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
