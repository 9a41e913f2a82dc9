"""Plans for serving where commands take a plan file: which kind a file is, and what it says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.common import out, print_lines
from hardware_profiles.strict import Unreadable, parse_json, read_text

if TYPE_CHECKING:
    from autopar.serving.records import ServingPlan


def serving_plan_in(path: Path) -> ServingPlan | None:
    """Return the serving plan of a file; None for a file of another kind, or one that cannot be read.

    Raises:
        PlanError: it is a serving plan with mistakes.
    """
    try:
        text = read_text(path)
        raw = parse_json(text, [])
    except Unreadable:  # the reader of plans for training says what is wrong with it
        return None
    from autopar.planfile.parsing import is_serving
    from autopar.serving.plan_file import loads

    return loads(text, where=str(path)) if is_serving(raw) else None


def show_serving(plan: ServingPlan, as_json: bool) -> None:
    """Print a serving plan: load, workers, predicted times and memory."""
    if as_json:
        from autopar.serving.plan_file import dumps

        sys.stdout.write(dumps(plan))  # a plan file, which has a version of its own
        return
    from autopar.targets.engines.scripts import head

    lines = head(plan, plan.engine)
    out().print(lines[0], markup=False)
    print_lines(*lines[1:])
    print_lines(*(f"{name}: {cut}" for name, cut in plan.cuts.items()), *(f"note: {note}" for note in plan.notes))
