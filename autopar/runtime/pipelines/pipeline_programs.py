"""Programs of a pipeline, by the shapes that it is called with and by the values that its model has.

A program is all that follows from one captured microbatch: graphs and plans of the stages, what crosses between them,
and what a rank does in a step (:class:`~autopar.runtime.pipelines.rank_actions.Work`) for each number of microbatches.
Parameters stay where they are. What the stages of another program send each other may pass between other ranks than
before; then all ranks make the channels that are missing, together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.capture import Captured
from autopar.capture.evaluation import evaluated
from autopar.errors import RunError
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import StageGraph
from autopar.rules.registry import drawing
from autopar.runtime.batches.module_calls import ModuleCall
from autopar.runtime.gradients.reached import ReachedBy, reached_by
from autopar.runtime.pipelines.rank_actions import Unfinished, Work
from autopar.runtime.pipelines.schedule_check import check_rows
from autopar.runtime.pipelines.ties import Tied, groups_between, tied_parameters
from autopar.runtime.pipelines.wires import Wire, wires_of
from autopar.runtime.ranks.groups import Groups
from autopar.runtime.stages.stage import Stage
from autopar.runtime.variants.program_cache import KEPT
from autopar.runtime.variants.program_run import AllWell
from autopar.runtime.variants.run import ParallelRun
from autopar.words.graph import Graph
from cost_models.schedules import with_microbatches

ReplanStages = Callable[[Captured, int], Plan]
"""Makes, for a captured microbatch and the number of them, a plan of the same stages, the same on all ranks."""
Lines = tuple[tuple[Wire, ...], tuple[Tied, ...]]
"""What crosses between stages, and what several groups of ranks hold."""


class PipelinePrograms(ParallelRun):
    """The programs of a pipeline.

    Attributes:
        rank, groups: this rank, and the process groups of all ranks.
        lines: what crosses between the stages, and what several groups hold; ``first_tied``: of the first program.
        works: what this rank does in a step, by its number of microbatches.
        unfinished: a step that broke off.
        drawing: the graphs of training and of eval mode, where these have random operators.
        reached_by: gives what has a gradient in a microbatch; None if all that wants one does.
    """

    PROGRAM = (*ParallelRun.PROGRAM, "drawing", "reached_by", "lines", "works")
    rank: int
    groups: Groups
    lines: Lines
    first_tied: tuple[Tied, ...]
    works: dict[int, Work]
    unfinished: Unfinished
    drawing: tuple[Graph | None, Graph | None]
    reached_by: ReachedBy | None

    def run_program(
        self, captured: Captured, parts: tuple[StageGraph, ...], plan: Plan, stages: dict[int, Stage]
    ) -> None:
        """Run another program from now on, over the ``lines`` that there are."""
        super().run_program(captured, parts, plan, stages)
        self.works, self.drawing = {}, (drawing(captured.graph),) * 2
        self.reached_by = reached_by(captured.graph, self.device)

    def draws(self) -> bool:
        """Return whether the program has random operators."""
        return self.drawing[0] is not None

    def prepare_evaluation(self, sides: Mapping[str, int]) -> None:
        """Make the program of eval mode."""
        super().prepare_evaluation(sides)
        self.drawing = self.drawing[0], drawing(evaluated(self.captured.graph, sides))

    def plan_again(self, planner: ReplanStages, new: Captured, call: ModuleCall) -> Plan:
        """Return a plan for another capture, in the stages and with the parameters stored as they are."""
        return planner(new, call.parts or self.plan.microbatches)

    def check_again(self, new: Captured, parts: tuple[StageGraph, ...], plan: Plan) -> None:
        """Refuse a capture that the stages cannot run, or could not train."""
        check_rows(plan.schedule, parts)
        self._check_ties(new, tied_parameters(parts, plan))

    def connect_again(self, parts: tuple[StageGraph, ...], plan: Plan, all_well: AllWell) -> None:
        """Make the groups and channels that are missing."""
        with all_well():
            self.lines = wires_of(parts, plan), tied_parameters(parts, plan)
            self.groups.make(groups_between(parts, plan, *self.lines))

    def work_of(self, microbatches: int) -> Work:
        """Return what this rank does in a step of `microbatches` of the program that runs now."""
        work = self.works.pop(microbatches, None)
        if work is None:
            plan = self.plan
            if microbatches != plan.microbatches:
                plan = replace(plan, schedule=with_microbatches(plan.schedule, microbatches))
                check_rows(plan.schedule, self.parts)
            work = Work(self.parts, plan, self.rank, self.stages, *self.lines, self.groups, self.unfinished)
        self.works[microbatches] = work
        while len(self.works) > KEPT:
            self.works.pop(next(iter(self.works)))
        return work

    def _check_ties(self, new: Captured, tied: tuple[Tied, ...]) -> None:
        """Refuse to train where a copy of a parameter would get no gradient, and so come apart from the others.

        Raises:
            RunError: with its name.
        """
        if new.graph.loss is None:
            return
        group = self.plan.schedule.rank_of_stage
        used = {node.target for _, node in new.graph.of_kind("param")}
        groups_now = {each.name: {group[s] for s in each.stages} for each in tied}
        for each in self.first_tied:
            before = {group[s] for s in each.stages}
            if each.name in used and groups_now.get(each.name) != before:
                raise RunError(
                    f"called so, the model reads parameter '{each.name}' in fewer stages than it did when it was "
                    "parallelized, and the copies of the other stages would not be trained with it: call it with the "
                    "same arguments in training, or parallelize it with such a call"
                )
