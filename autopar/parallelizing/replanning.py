"""What a parallel module needs when shapes or values have changed: a new plan, and a comparison.

The programs themselves are :mod:`autopar.runtime.variants.program_cache`.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture import Captured
from autopar.comparison import FAILS, compare_with_eager
from autopar.errors import CaptureError, PlanError
from autopar.parallelizing.all_ranks import agreed
from autopar.planner.inter_op.exact.shared_buffers import with_buffers
from autopar.planner.inter_op.replan import Replanner, block_starts, limit_of_stage
from autopar.planner.inter_op.stage_pins import of_stage
from autopar.planner.intra_op.memory.recompute import is_asked, patterns_in
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.planner.intra_op.pins.options import Options
from autopar.planner.planning import Outcome, on_only_mesh, wishes_of
from autopar.plans.pins import Pins
from autopar.plans.plan import DEVICE, HOST, Plan, StagePlan
from autopar.plans.stage_graphs import cut, hot_ops
from autopar.rules.experts.expert_load import with_load
from autopar.rules.notation import Rule
from autopar.rules.option_names import factor_and_block, option_written
from autopar.rules.registry import rules_of
from autopar.rules.strategy import options_of, why_not_cut
from autopar.runtime.batches.module_calls import Batch
from autopar.runtime.pipelines.pipeline_programs import ReplanStages
from autopar.runtime.variants.program_cache import Compare, Replan
from autopar.words.graph import Graph, Node, Ref
from autopar.words.labels import matches, op_labels
from autopar.words.meshes import Mesh
from autopar.words.placements import State, replicated_placement
from cost_models.schedules import live_per_stage, with_microbatches
from hardware_profiles import Cluster


def planner_of(
    plan: Plan, cluster: Callable[[], Cluster], group: Any, prepared: Mapping[str, StagePlan] | None = None
) -> Replan:
    """Return what makes plans on the mesh of ``plan``, with its options; rank 0 plans, all ranks call it.

    Args:
        cluster: gives the hardware that plans are for; called when one is made.
        prepared: on rank 0, plans that were made before, by the fingerprints of their graphs.
    """
    plan_options = wishes_of(plan)

    def replan(new: Captured, stored: Mapping[str, str]) -> StagePlan:
        def decide() -> Outcome:
            if prepared and new.graph.fingerprint in prepared:
                return Outcome(Plan.alone(prepared[new.graph.fingerprint], plan.cluster, plan.pins), new)
            options = for_graph(plan_options, new.graph, stored, plan.mesh)
            graph = with_load(new.graph, plan.pins.expert_load)
            pins = pins_for(plan.pins, graph)
            return Outcome(on_only_mesh(graph, cluster(), plan.mesh, options, plan.cluster, pins), new)

        return agreed(decide, new, group)[1].only()

    return replan


def stage_planner_of(plan: Plan, graph: Graph, cluster: Callable[[], Cluster], group: Any) -> ReplanStages:
    """Return what makes plans in the stages of ``plan``, on the same devices; rank 0 plans, all ranks call it.

    Args:
        graph: the graph that ``plan`` is for.
        cluster: gives the hardware that plans are for; called when one is made.
    """

    def replan(new: Captured, microbatches: int) -> Plan:
        def decide() -> Outcome:
            return Outcome(stages_again(plan, graph, new, microbatches, cluster()), new)

        return agreed(decide, new, group)[1]

    return replan


def stages_again(plan: Plan, graph: Graph, new: Captured, microbatches: int, cluster: Cluster) -> Plan:
    """Return a plan for another graph of a model, in the stages of ``plan``: what they store is stored as it is.

    Args:
        graph: the graph that ``plan`` is for.
        microbatches: their number in a step; the schedule of ``plan`` is built for it.

    Raises:
        InfeasibleError, PlanError: the memory, or the wishes, leave no plan; or stages cannot begin where they did.
    """
    plan_options = wishes_of(plan)
    schedule = with_microbatches(plan.schedule, microbatches)
    parts = cut(with_load(new.graph, plan.pins.expert_load), starts_in(graph, plan, new.graph))
    in_flight = live_per_stage(schedule)
    begins = block_starts(new.graph)
    choices = []
    for part, before in zip(parts, plan.stages, strict=True):
        names = {node.target: node for node in part.graph.nodes if node.kind in ("param", "buffer")}
        of_group = [plan.stages[s] for s in plan.schedule.stages_of_rank[plan.schedule.rank_of_stage[part.number]]]
        stored = {
            name: stored_as(choice.stored, names[name].needs_grad, choice.on_host if plan_options.offload else None)
            for stage in of_group for name, choice in stage.params.items() if name in names
        }  # fmt: skip
        if part.graph.forward_only:
            held = {name: state.text for stage in of_group for name, state in stage.buffers.items()}
            stored |= {name: text for name, text in held.items() if name not in new.constants}
        request = for_graph(of_stage(plan_options, part, before.mesh), part.graph, stored, before.mesh)
        options = replace(
            request, in_flight=in_flight[part.number], microbatches=microbatches,
            memory_limit_bytes=limit_of_stage(plan, part.number, cluster, plan_options.memory_limit_bytes),
            recompute=patterns_in(part.graph, request.recompute),
            may_recompute=request.may_recompute and not is_asked(new.graph, plan_options.recompute),
            blocks=[name for name in begins if name in part.graph.index],
        )  # fmt: skip
        stage = plan_graph(part.graph, cluster, before.mesh, options, devices=before.devices)
        as_before = {
            name: state for neighbour in of_group for name, state in neighbour.buffers.items()
            if name in stage.buffers and name not in new.constants
        }  # fmt: skip
        if any(stage.buffers[name] != state for name, state in as_before.items()):
            stage = with_buffers(part.graph, stage, as_before, cluster)
        choices.append(stage)
    again = replace(
        plan, fingerprint=new.graph.fingerprint, schedule=schedule, stages=tuple(choices), graph=None,
        pins=pins_for(plan.pins, new.graph),
    )  # fmt: skip
    return Replanner(new.graph, again, cluster, plan_options).simulated()[0].validate()


def starts_in(graph: Graph, plan: Plan, new: Graph) -> tuple[str, ...]:
    """Return where the stages of a plan for ``graph`` begin in another graph of the same model."""
    labels, labels_of_new = op_labels(graph), op_labels(new)
    by_label = {label: name for name, label in labels_of_new.items()}
    hot = [new.nodes[i] for i in hot_ops(new)]
    position = {node.name: p for p, node in enumerate(hot)}
    group = plan.schedule.rank_of_stage
    holders: dict[str, set[int]] = {}
    for s, stage in enumerate(plan.stages):
        for name in stage.params:
            holders.setdefault(name, set()).update(t for t in range(len(plan.stages)) if group[t] == group[s])
    first_stage = [_first_stage(new, node, holders) for node in hot]
    begins: list[int] = []
    for number, name in enumerate(plan.starts, 1):
        at = position.get(by_label.get(labels.get(name, ""), ""))
        after = begins[-1] if begins else 0
        needed = next((p for p, s in enumerate(first_stage) if p > after and s >= number), None)
        if at is None or at <= after or (needed is not None and needed < at):
            at = needed
        if at is None:
            raise PlanError(
                f"called so, the model has nothing to do for stage {number}, which begins at '{name}' in the plan, and "
                "every stage takes part in every call of a pipeline: give cuts= with which each stage has some of the "
                "model's parameters, or call it as it was captured"
            )
        begins.append(at)
    return tuple(hot[p].name for p in begins)


def _first_stage(graph: Graph, node: Node, holders: Mapping[str, set[int]]) -> int:
    """Return the first stage that can have an operator: 0, or that which has its parameters."""
    params = [graph.nodes[ref.node].target for ref in node.refs if graph.nodes[ref.node].kind == "param"]
    return max((min(holders[name]) for name in params if name in holders), default=0)


def stored_as(state: State, needs_grad: bool, on_host: bool | None = None) -> str:
    """Return how a parameter is stored, as a pin; replicated frozen ones are spelled differently.

    ``on_host``: whether it is in the memory of the host; None where no plan says so.
    """
    how = ",".join(p if p.is_shard else replicated_placement(needs_grad) for p in state)
    return how if on_host is None else f"{how} {HOST if on_host else DEVICE}"


def for_graph(plan_options: Options, graph: Graph, stored: Mapping[str, str], mesh: Mesh) -> Options:
    """Return the wishes that concern a graph, with every parameter stored as it is.

    What names only operators and parameters that the graph does not have (a branch that is not taken), or factors that
    none of its operators can be cut along (the rows of a batch of one), is left out.

    Args:
        stored: placements, such as ``S0,I``, by the name of the parameter, or of a buffer that is kept where it is.
    """
    labels = op_labels(graph)
    names = [node.target for _, node in graph.of_kind("param")]
    ops = [node for node in graph.nodes if node.kind == "op"]
    rules = {node.name: rule for node, rule in zip(graph.nodes, rules_of(graph), strict=True) if node.kind == "op"}
    constraints: dict[str, Mapping[str, str]] = {}
    for pattern, factors in (plan_options.constraints or {}).items():
        there = [(node, rules[node.name]) for node in ops if matches(pattern, node, labels[node.name])]
        borne = {
            axis: factor
            for axis, factor in factors.items()
            if any(rule is not None and _offers(graph, node, rule, mesh, axis, factor) for node, rule in there)
        }
        if borne:
            constraints[pattern] = borne
    request = {p: how for p, how in (plan_options.params or {}).items() if any(fnmatchcase(name, p) for name in names)}
    kept: dict[str, str] = {}
    for name in names:
        if name in stored:
            lifetimes = [how.split()[1:] for pattern, how in request.items() if fnmatchcase(name, pattern)]
            kept[glob.escape(name)] = " ".join([stored[name], *(lifetimes[-1] if lifetimes else [])])
    buffers = {
        node.target: State.parse(stored[node.target], mesh, f"'{node.target}'")
        for _, node in graph.of_kind("buffer") if node.target in stored
    }  # fmt: skip
    inputs = {node.target for _, node in graph.of_kind("input")}
    recompute = [p for p in plan_options.recompute if any(fnmatchcase(node.module, p) for node in ops)]
    return replace(
        plan_options, constraints=constraints or None, params={**request, **kept} or None,
        inputs={k: v for k, v in (plan_options.inputs or {}).items() if k in inputs} or None,
        outputs={k: v for k, v in (plan_options.outputs or {}).items() if k < len(graph.outputs)} or None,
        recompute=tuple(recompute), buffers=buffers or None,
    )  # fmt: skip


def pins_for(pins: Pins, graph: Graph) -> Pins:
    """Return the pins that name something of a graph; ranks that read its plan refuse others as misspelt."""
    labels = op_labels(graph)
    ops = [node for _, node in graph.of_kind("op")]
    params, inputs = ({node.target for _, node in graph.of_kind(kind)} for kind in ("param", "input"))
    tensors = {number for number, out in enumerate(graph.outputs) if isinstance(out, Ref)}
    return replace(
        pins,
        ops={p: axes for p, axes in pins.ops.items() if any(matches(p, node, labels[node.name]) for node in ops)},
        params={p: how for p, how in pins.params.items() if any(fnmatchcase(name, p) for name in params)},
        inputs={name: state for name, state in pins.inputs.items() if name in inputs},
        outputs={number: state for number, state in pins.outputs.items() if number in tensors},
        recompute=tuple(p for p in pins.recompute if any(fnmatchcase(node.module, p) for node in ops)),
    )


def _offers(graph: Graph, node: Node, rule: Rule, mesh: Mesh, axis: str, factor: str) -> bool:
    """Check whether an operator can be sharded along a factor, or replicated, on an axis of the mesh."""
    name = option_written(factor)
    if name not in options_of(graph, node, rule, rule.blocks_on(mesh)):
        return False
    cut, block = factor_and_block(name)
    return cut not in rule.sizes or not why_not_cut(rule, cut, [(mesh.size_of[axis], block)])


def comparer_of(group: Any) -> Compare:
    """Return what compares new captures with the model on the batch of the call, on rank 0.

    What it makes raises a CaptureError where they differ, or where the model itself fails on the batch. Which way the
    batch takes where the model branches on data is seen in the call itself, with the parameters as they are by then.
    """

    def compare(new: Captured, model: torch.nn.Module, batch: Batch) -> None:
        if dist.get_rank(group) == 0:
            args, kwargs, targets = batch
            note = compare_with_eager(new, model, args, kwargs, targets, other_ways=True).note
            if note.startswith(FAILS):
                raise CaptureError(note)

    return compare
