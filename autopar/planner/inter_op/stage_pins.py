"""Options of a user for a whole model, divided over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from autopar.errors import InfeasibleError, MeshError, PlanError, closest
from autopar.planner.inter_op.simulating.order import SEARCHED, START
from autopar.planner.intra_op.pins.options import Options
from autopar.planner.intra_op.pins.pinned_choices import PinnedChoices
from autopar.plans.stage_graphs import StageGraph, hot_ops
from autopar.rules.option_names import option_written
from autopar.rules.registry import rules_of
from autopar.rules.strategy import options_of
from autopar.words.graph import Graph
from autopar.words.labels import matches, op_labels
from autopar.words.meshes import AXIS_NAMES, Mesh
from autopar.words.placements import REPLICATE, State
from cost_models.schedules import parse_kind


def starts_of(graph: Graph, cuts: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the first operators of all stages but the first.

    A cut is the path of the module that a stage begins with, or an operator as ``module:op``.
    """
    labels = op_labels(graph)
    hot = [graph.nodes[i] for i in hot_ops(graph)]
    positions: list[int] = []
    for word in cuts:
        at = [
            p for p, n in enumerate(hot)
            if word in (n.name, labels[n.name], n.module) or n.module.startswith(f"{word}.")
        ]  # fmt: skip
        if not at:
            names = [*dict.fromkeys(n.module for n in hot if n.module), *(labels[n.name] for n in hot)]
            raise PlanError(f"cut '{word}': no module or operator that depends on a parameter; {closest(word, names)}")
        if at[0] == 0:
            raise PlanError(f"cut '{word}' is where the model begins, so stage 0 would be empty; leave it out")
        if positions and at[0] <= positions[-1]:
            raise PlanError(
                f"cut '{word}' is operator {at[0]} in execution order, '{cuts[len(positions) - 1]}' before it operator "
                f"{positions[-1]}; name each once, in execution order"
            )
        positions.append(at[0])
    return tuple(hot[p].name for p in positions)


def check(graph: Graph, options: Options, mesh: Mesh | None) -> None:
    """Refuse options that no stage can honour.

    ``mesh``: of every group; None if it is still to be chosen, then only patterns and factors are checked.
    """
    if mesh is None:
        named = {axis: None for axes in (options.constraints or {}).values() for axis in axes}
        mesh = Mesh((axis, 1) for axis in named) or Mesh.of(data=1)
        params = dict.fromkeys(options.params or {}, REPLICATE)
        options = replace(options, params=params, inputs=None, outputs=None)
    PinnedChoices(graph, rules_of(graph), mesh, options)


def allows(mesh: Mesh, options: Options) -> bool:
    """Return whether a mesh can honour the options: it has the axes, and as many as the placements."""
    axes = set(mesh.names)
    states: list[Sequence[str]] = [*(options.inputs or {}).values(), *(options.outputs or {}).values()]
    states += [how.split(",") for how in (options.params or {}).values() if how.split()[0] != REPLICATE]
    return options.named_axes <= axes and all(len(state) == len(mesh) for state in states)


def of_stage(options: Options, stage: StageGraph, mesh: Mesh) -> Options:
    """Return the options that concern a stage, in its own names."""
    parts: dict[str, Any] = {
        _FIELDS[name]: part_of(getattr(options, _FIELDS[name]) or {}, stage) or None for name, part_of in PARTS.items()
    }
    plan_options = replace(options, **parts)
    if not allows(mesh, plan_options):
        raise InfeasibleError(
            f"stage {stage.number} on mesh {mesh.shown(', ')}: what is asked of its operators "
            "and parameters names other axes; give the mesh of a group with mesh="
        )
    return plan_options


def _ops(constraints: Mapping[str, Mapping[str, str]], stage: StageGraph) -> dict[str, dict[str, str]]:
    """Return the pins of operators that a stage has, with the factors that one of them has."""
    pins: dict[str, dict[str, str]] = {}
    if not constraints:
        return pins
    graph = stage.graph
    labels, rules = op_labels(graph), rules_of(graph)
    for pattern, wanted in constraints.items():
        factors = {
            option.name
            for node, rule in zip(graph.nodes, rules, strict=True)
            if node.kind == "op" and rule is not None and matches(pattern, node, labels[node.name])
            for option in options_of(graph, node, rule).values()
        }
        kept = {axis: f for axis, f in wanted.items() if option_written(f) in factors}
        if kept:
            pins[pattern] = kept
    return pins


def _params(params: Mapping[str, str], stage: StageGraph) -> dict[str, str]:
    names = [node.target for _, node in stage.graph.of_kind("param")]
    return {pattern: how for pattern, how in params.items() if any(fnmatchcase(name, pattern) for name in names)}


def _inputs(inputs: Mapping[str, State], stage: StageGraph) -> dict[str, State]:
    return {name: state for name, state in inputs.items() if name in stage.inputs}


def _outputs(outputs: Mapping[int, State], stage: StageGraph) -> dict[int, State]:
    """Return placements by position in the stage, whose first outputs are tensors for later stages."""
    return {
        len(stage.gives) + stage.outputs.index(k): state for k, state in outputs.items() if k in stage.outputs
    }  # fmt: skip


PARTS: dict[str, Callable[[Any, StageGraph], Any]] = {
    "ops": _ops, "params": _params, "inputs": _inputs, "outputs": _outputs,
}  # fmt: skip
"""A stage's part of each pin of which stages get a part (:mod:`autopar.plans.plan_options`)."""
_FIELDS = {"ops": "constraints", "params": "params", "inputs": "inputs", "outputs": "outputs"}
"""Where options have them."""


def check_counts(
    groups: int | None, cuts: Sequence[str], n: int, schedules: Sequence[str], mesh: Mesh | None, options: Options,
    sizes: Sequence[Mesh],
) -> None:  # fmt: skip
    """Refuse counts of stages, cuts, schedules or meshes that do not go together.

    ``schedules``: names to choose from; ``sizes``: the meshes that a group may have.
    """
    if mesh is None and not any(allows(m, options) for m in sizes):
        shown = "; ".join(m.text for m in sizes[:6])
        raise MeshError(
            f"what is asked of operators and parameters fits none of the meshes that a group can have ({shown}), whose "
            f"axes have names among {', '.join(AXIS_NAMES)}; name these, or give the mesh that you mean, and a number "
            "of stages"
        )
    if not cuts:
        return
    if groups is not None and n % groups:
        raise PlanError(
            f"{len(cuts)} cut{'s' if len(cuts) > 1 else ''} and {groups} stages on {n} devices: with cuts, groups "
            f"have equally many devices; use a number of stages that divides {n}, or leave the cuts to the planner"
        )
    stages = len(cuts) + 1
    counts = [groups] if groups is not None else [g for g in range(1, n + 1) if n % g == 0]
    kinds = {name: parse_kind(START if name == SEARCHED else name) for name in schedules}
    for g in counts:
        for kind, degree in kinds.values():
            if g > 1 and stages % g == 0 and kind.allows_degree(stages // g) and degree in (None, stages // g):
                return
    if stages == 1 and 1 in counts:
        return
    request = f"{groups} group{'s' if groups > 1 else ''}" if groups is not None else f"equal groups of {n} devices"
    each = "; ".join(
        f"{name}: {degree or kind.fewest}{' or more' if kind.most is None and degree is None else ''} a group"
        for name, (kind, degree) in kinds.items()
    )
    raise PlanError(
        f"{len(cuts)} cut{'s make' if len(cuts) > 1 else ' makes'} {stages} stages, which {request} cannot hold "
        f"({each}); give one cut less than stages"
    )
