"""``autopar diff`` where one of the plans is pipelined."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.common import bound, model_of, open_plan, show_pins
from autopar.cli.pipeline import is_pipeline, opened, what_if
from autopar.cli.stages import asked_for
from autopar.errors import ModelError, PlanError

if TYPE_CHECKING:
    from autopar.planner.inter_op.replan import Replanner


def rows_of(a: Path, b: Path, model: str | None) -> list[tuple[str, Any, Any]]:
    """``(what, in a, in b)``: by decision if both are for one model, else entry by entry."""
    from autopar.report.rows import differences as entries
    from autopar.report.stage_differences import differences

    raw = [_raw(path) for path in (a, b)]
    if raw[0]["fingerprint"] == raw[1]["fingerprint"]:
        try:
            (x, first), (y, second) = _asked(a, model), _asked(b, model)
            return differences(x.graph, x, y, (first, second))
        except (ModelError, PlanError):
            if model is not None:
                raise
    return [row for row in entries(*raw) if "checksum" not in row[0] and "solution.solver" not in row[0]]


def _raw(path: Path) -> dict[str, Any]:
    from autopar.planfile import pipeline as files

    if not is_pipeline(path):
        return dict(open_plan(path).raw)
    raw = files.read(path.read_text(encoding="utf-8"), str(path))
    return {**raw, "stages": {str(k): stage for k, stage in enumerate(raw["stages"])}}


def _asked(path: Path, model: str | None) -> tuple[Replanner, str]:
    """A plan that can be simulated, and what was asked for."""
    from autopar.pins import options_of
    from autopar.planner.inter_op.replan import Replanner
    from autopar.report.stage_differences import as_pipeline

    if is_pipeline(path):
        _, captured, plan = opened(path, model)
        return what_if(path, captured, plan), asked_for(plan.pins)
    document = open_plan(path)
    _, captured = model_of(document, path, model)
    one, cluster = bound(document, captured)
    return Replanner(captured.graph, as_pipeline(captured.graph, one), cluster, options_of(one)), show_pins(one.pins)
