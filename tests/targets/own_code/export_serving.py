"""Serving plans of one engine, exported into a folder each: ``python export_serving.py NAME FOLDER``,
with ``tests/`` among the paths of modules.

The plans are random, from seeds (``tests/targets/serving_plans.py``), as many as ``cases.toml`` says; those that the
engine refuses are counted. Each folder has beside the files of the export the plan as ``case.json``.
"""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

from targets.serving_plans import CLUSTER, random_plan

from autopar.errors import PlanError
from autopar.targets.engines import engine_named
from autopar.targets.engines.serving_engine import deployment_of, export_to
from hardware_profiles import load_cluster

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Write the plans of an engine."""
    name, out = sys.argv[1:]
    plans = tomllib.loads((HERE / name / "cases.toml").read_text())["plans"]
    cluster, refused = load_cluster(CLUSTER), 0
    for seed in range(plans):
        plan = random_plan(seed, name)
        try:
            files = export_to(engine_named(name), deployment_of(plan, cluster)).files
        except PlanError:
            refused += 1
            continue
        home = Path(out) / f"plan{seed}"
        home.mkdir(parents=True)
        for path, text in {**files, "case.json": json.dumps(asdict(plan), indent=1)}.items():
            (home / path).write_text(text)
    print(f"{plans - refused} plans are written, {refused} are refused", flush=True)


if __name__ == "__main__":
    main()
