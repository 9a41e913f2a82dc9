"""A pipelined plan with one thing changed: a stage solved again with another option, or a cut moved.

Groups, meshes, devices and the schedule stay as they are; only the stages that change are solved, and the whole step is
simulated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from autopar.planner.inter_op.blocks import blocks
from autopar.planner.inter_op.exact.shared_buffers import with_agreed_buffers
from autopar.planner.inter_op.simulating.timing import step_of, timing_of
from autopar.planner.inter_op.stage_pins import of_stage
from autopar.planner.intra_op.building.fold import fold
from autopar.planner.intra_op.memory.recompute import is_asked, patterns_in
from autopar.planner.intra_op.mesh_plan import Options, device_limit, plan_graph
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.stage_graphs import StageGraph, cut, hot_ops, stage_edges_of
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from cost_models.schedules import Timeline
from hardware_profiles import Cluster


def limit_of_stage(plan: Plan, number: int, cluster: Cluster, request: float | None) -> float:
    """Return the bytes of a device that a stage of a finished plan may fill: what the other stages of its group leave.

    While a plan is made, stages of a group get shares of this limit by what each is estimated to need (:mod:`.exact`);
    in a finished plan that is what each has. So this is never less than the stage's share was, and whatever one stage
    grows to within it, the group fits. ``request`` is the user's limit; None for what a plan may fill of the device.
    """
    limit = device_limit(cluster, plan.stages[number].devices, request)
    of_group = plan.schedule.stages_of_rank[plan.schedule.rank_of_stage[number]]
    others = [plan.stages[s].price for s in of_group if s != number]
    return max(1.0, limit - sum(p.memory_bytes - p.transient_bytes for p in others))


def block_starts(graph: Graph) -> list[str]:
    """Return the first operators of the blocks, of which stages are made."""
    folding, hot = fold(graph), hot_ops(graph)
    all_blocks = blocks(graph, folding, rules_of(graph, folding.representative))
    return [graph.nodes[hot[b.first]].name for b in all_blocks]


class Replanner:
    """A pipelined plan with its model and its cluster, to answer what changes would do.

    Args:
        options: the options of the whole model, under which stages are solved again.
    """

    def __init__(self, graph: Graph, plan: Plan, cluster: Cluster, options: Options) -> None:
        self.graph, self.plan, self.cluster, self.options = graph, plan, cluster, options
        self.graphs = cut(graph, plan.starts)
        self._group = plan.schedule.rank_of_stage

    def simulated(self, stages: Sequence[StagePlan] | None = None) -> tuple[Plan, Timeline]:
        """Return the plan with `stages`, which begin and end as now, and its step action by action."""
        return self._simulated(self.graphs, tuple(stages or self.plan.stages))

    def _simulated(self, graphs: Sequence[StageGraph], stages: tuple[StagePlan, ...]) -> tuple[Plan, Timeline]:
        stages = tuple(with_agreed_buffers(graphs, stages, self.plan.schedule, self.cluster))
        timeline, seconds = step_of(self.plan.schedule, *timing_of(graphs, stages, self.plan.schedule, self.cluster))
        return replace(self.plan, stages=stages, stage_edges=stage_edges_of(graphs), seconds=seconds), timeline

    def limit_bytes(self, number: int, options: Options | None = None) -> float:
        """Return the memory of a device that a stage may fill; see :func:`limit_of_stage`."""
        return limit_of_stage(self.plan, number, self.cluster, (options or self.options).memory_limit_bytes)

    def solved(self, number: int, options: Options | None = None, stage: StageGraph | None = None) -> StagePlan:
        """Solve a stage again under options of the whole model, by default those of the plan.

        ``stage`` is its graph, if that changes.
        """
        options, stage = options or self.options, stage or self.graphs[number]
        choice = self.plan.stages[number]
        plan_options = of_stage(options, stage, choice.mesh)
        names = {n.target for _, n in stage.graph.of_kind("param")}
        of_group = [s for s in self.plan.schedule.stages_of_rank[self._group[number]] if s != number]
        shared = {
            name: ",".join(how.stored)
            for s in of_group for name, how in self.plan.stages[s].params.items() if name in names
        }  # fmt: skip
        plan_options = replace(
            plan_options, params={**(plan_options.params or {}), **shared} or None, in_flight=choice.in_flight,
            versions=choice.versions,
            microbatches=self.plan.microbatches, memory_limit_bytes=self.limit_bytes(number, options),
            recompute=patterns_in(stage.graph, plan_options.recompute),
            may_recompute=plan_options.may_recompute and not is_asked(self.graph, self.options.recompute),
            blocks=[name for name in self.bounds if name in stage.graph.index],
        )  # fmt: skip
        return plan_graph(stage.graph, self.cluster, choice.mesh, plan_options, devices=choice.devices)

    # -- cuts

    @cached_property
    def bounds(self) -> list[str]:
        """First operators of the blocks, of which stages are made."""
        return block_starts(self.graph)

    def neighbour(self, number: int, by: int) -> str | None:
        """Return where stage ``number`` would begin, ``by`` blocks later (or earlier).

        None if a stage would be empty.
        """
        place = {self.graph.nodes[i].name: p for p, i in enumerate(hot_ops(self.graph))}
        at = [place[c.first] for c in self.plan.stages] + [len(place)]
        begins = sorted(place[name] for name in self.bounds)
        places = [p for p in begins if (p > at[number]) == (by > 0) and p != at[number]]
        places = places if by > 0 else places[::-1]
        if len(places) < abs(by) or not at[number - 1] < places[abs(by) - 1] < at[number + 1]:
            return None
        return next(name for name, p in place.items() if p == places[abs(by) - 1])

    def moved(self, number: int, first: str) -> tuple[Plan, Timeline]:
        """Return the plan with stage ``number`` beginning at another operator; stages that change are solved again."""
        starts = list(self.plan.starts)
        starts[number - 1] = first
        graphs = cut(self.graph, starts)
        stages = tuple(
            choice if choice.fingerprint == stage.graph.fingerprint
            else self.solved(stage.number, stage=stage)
            for choice, stage in zip(self.plan.stages, graphs, strict=True)
        )  # fmt: skip
        return self._simulated(graphs, stages)
