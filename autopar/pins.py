"""What users ask of a plan, as words and as options of the planner; a plan remembers it."""

from __future__ import annotations

import re
from dataclasses import replace

from autopar.errors import PlanError
from autopar.graph import Graph
from autopar.pipeline import PipelinePlan
from autopar.placements import Mesh, format_state, parse_state
from autopar.plan import LIFETIMES, Pins, Plan
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from hardware_profiles import Cluster


def parse_kept(text: str, mesh: Mesh | None, where: str) -> str:
    """How a parameter is to be kept: ``replicate``, ``S0,I`` or with a lifetime ``S0,I use``; spelled as here.

    Args:
        mesh: None if it is still to be chosen; then the number of placements is not checked.
        where: whose words they are, for messages.

    Raises:
        PlanError: there is no such lifetime, or too many words.
        MeshError: one of the placements is none, or there are more or fewer than axes.
    """
    words = re.sub(r"\s*,\s*", ",", text.strip()).split()
    if words == ["replicate"]:
        return words[0]
    if len(words) not in (1, 2):
        raise PlanError(f"{where}: '{text}' has {len(words)} words; write 'replicate', or like 'S0,I' or 'S0,I use'")
    if len(words) == 2 and words[1] not in LIFETIMES:
        raise PlanError(
            f"{where}: '{words[1]}' is no lifetime; write '{words[0]} step' (gathered once a step), '{words[0]} use' "
            f"(gathered again for the backward), or '{words[0]}' for whichever is cheaper"
        )
    axes = mesh if mesh is not None else (("", 1),) * (words[0].count(",") + 1)
    return " ".join([format_state(parse_state(words[0], axes, where)), *words[1:]])


def plan_pinned(graph: Graph, cluster: Cluster, mesh: Mesh, options: Options, name: str) -> Plan:
    """:func:`~autopar.planner.intra_op.mesh_plan.plan_graph`, whose plan remembers what was asked."""
    return replace(plan_graph(graph, cluster, mesh, options, cluster_name=name), pins=pins_of(options))


def pins_of(options: Options) -> Pins:
    """What of the options is a wish about the plan."""
    limit = options.memory_limit_bytes
    return Pins(
        {pattern: dict(axes) for pattern, axes in (options.constraints or {}).items()}, dict(options.params or {}),
        dict(options.inputs or {}), dict(options.outputs or {}), None if limit is None else int(limit),
        tuple(options.recompute),
    )  # fmt: skip


def options_of(plan: Plan) -> Options:
    """Options under which a plan is solved again as its user wanted it."""
    p = plan.pins
    return Options(
        constraints=p.ops or None, params=p.params or None, inputs=p.inputs or None, outputs=p.outputs or None,
        memory_limit_bytes=p.memory_limit_bytes, optimizer=plan.optimizer, microbatches=plan.microbatches,
        recompute=p.recompute,
    )  # fmt: skip


def pipeline_options(plan: PipelinePlan) -> Options:
    """The same for a pipelined plan: wishes for the whole model, of which stages get their part."""
    p = plan.pins.plan
    return Options(
        constraints=p.ops or None, params=p.params or None, inputs=p.inputs or None, outputs=p.outputs or None,
        memory_limit_bytes=p.memory_limit_bytes, optimizer=plan.optimizer, microbatches=plan.microbatches,
        recompute=p.recompute,
    )  # fmt: skip


def pin_lines(pins: Pins) -> list[str]:
    """One line of text for each pin but the memory limit."""
    return [
        *(f"{p}: " + " ".join(f"{axis}={factor}" for axis, factor in axes.items()) for p, axes in pins.ops.items()),
        *(f"{pattern}: {how}" for pattern, how in pins.params.items()),
        *(f"input {name}: {format_state(state)}" for name, state in sorted(pins.inputs.items())),
        *(f"output {number}: {format_state(state)}" for number, state in sorted(pins.outputs.items())),
        *(f"{pattern}: recompute" for pattern in pins.recompute),
    ]


__all__ = ["options_of", "parse_kept", "pin_lines", "pins_of", "pipeline_options", "plan_pinned"]
