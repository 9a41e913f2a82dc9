"""Experts cut over the ranks of a mesh in this process, compared with one device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import autopar
from autopar.certificate.recount import Report, check
from autopar.comparison.program_vs_eager import verify
from autopar.plans.plan import Plan
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster


def cut_equally(
    model: torch.nn.Module,
    args: Sequence[Any],
    mesh: str,
    constraints: Mapping[str, Mapping[str, str]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    captured: autopar.Captured | None = None,
    random: bool = False,
    certified: bool = False,
    limit: float = 1e-9,
    placements: Mapping[str, str] | None = None,
) -> tuple[Plan, Report | None]:
    """The plan with these cuts, whose numbers are those of one device, and its certificate, if asked for.

    Args:
        random: the model draws random numbers, so that eager mode has others.
        certified: make the certificate, which holds.
    """
    captured = captured or autopar.capture(model, args, example_kwargs=kwargs)
    cluster = load_cluster(f"local-x{math.prod(Mesh.parse(mesh).sizes)}")
    plan = autopar.plan(
        model, cluster, args, example_kwargs=kwargs, captured=captured, mesh=mesh, constraints=constraints,
        placements=placements,
    )  # fmt: skip
    report = check(plan.only(), captured.graph, cluster, types=True) if certified else None
    assert report is None or report.ok, report.failures
    rows = [*verify(captured, model, args, kwargs or {}, plan.only().mesh, cluster, plan=plan)][random:]
    assert rows and all(row.worst < limit for row in rows), rows
    return plan, report
