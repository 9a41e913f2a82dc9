"""The program that a module runs now, and how another takes its place.

A run has the stages of its rank: one on one mesh, in a pipeline maybe several. A program is all that follows from one
captured call, or microbatch: graphs and plans of the stages, and what they read. Parameters stay where they are:
another graph is cut where the first one was, and planned with every parameter stored as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.capture import Captured
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import StageGraph, cut
from autopar.runtime.batches.batch import Batch, Shape
from autopar.runtime.batches.module_calls import ModuleCall
from autopar.runtime.batches.totals_ahead import TotalsAhead, totals_ahead
from autopar.runtime.parameters.state import Buffers
from autopar.runtime.repairs import dtensor_fixes, optimizer_steps
from autopar.runtime.stages.home import Home
from autopar.runtime.stages.registering import Placing
from autopar.runtime.stages.stage import Stage
from autopar.runtime.variants.module_modes import Modes, Training
from autopar.runtime.variants.recaptured import (
    buffers_for,
    check_stored,
    differs,
    move_to_layout_of,
    placed_buffers,
    planner_for,
    with_buffers_of,
)

Fields = dict[str, Any]
"""Attributes of a run that make up one program of it."""
AllWell = Callable[[], contextlib.AbstractContextManager[None]]
"""Gives contexts (:func:`~autopar.runtime.ranks.agree.everywhere`): what fails in one on any rank is raised on all."""


class ProgramRun(Home):
    """A module's program on this rank.

    Attributes:
        captured: what the program that runs now was captured as; ``planned``: what was planned first.
        plan: the plan that it follows.
        parts, stages: its stages: all of them as graphs, and those of this rank by number.
        batch: its calls.
        trained: the modules that train in it.
    """

    PROGRAM: tuple[str, ...] = ("captured", "plan", "parts", "stages", "batch", "trained", "totals_kept")
    """Attributes that are others with another program."""
    plan: Plan
    parts: tuple[StageGraph, ...]
    stages: dict[int, Stage]
    batch: Batch
    totals_kept: tuple[TotalsAhead | None] | None

    def __init__(self, model: torch.nn.Module, captured: Captured, plan: Plan) -> None:
        super().__init__(model)
        dtensor_fixes.correct()
        optimizer_steps.correct()
        self.captured = self.planned = captured
        self.plan = plan
        self.captured_training = model.training
        self.modes = Modes(model)
        self.trained: Training = self.modes.at_first

    def _place(self, placings: Mapping[int, Placing]) -> None:
        """Register what this rank stores, and begin with the program that was planned; ``parts`` are there."""
        for placing in placings.values():
            placing.parameters()
        buffers = {s: placing.registered_buffers() for s, placing in placings.items()}
        self.user.store()
        with self.user.restored_on_error():
            stages = {
                s: Stage(self.parts[s].graph, self.plan.stages[s], placing.device_mesh, self, buffers[s])
                for s, placing in placings.items()
            }
            self.run_program(self.captured, self.parts, self.plan, stages)

    def run_program(
        self, captured: Captured, parts: tuple[StageGraph, ...], plan: Plan, stages: dict[int, Stage]
    ) -> None:
        """Run another program from now on.

        Args:
            captured: what it was captured as.
            parts: its stages; ``stages``: those of this rank, by number.
        """
        self.captured, self.parts, self.plan, self.stages = captured, parts, plan, stages
        self.totals_kept = None
        self.written |= {*captured.graph.written}
        self.batch = Batch(captured, self.signature, self.device, self.shards_of())

    def shards_of(self) -> dict[str, Shape]:
        """Return the shapes of this rank's pieces of the inputs that it may be called with in pieces."""
        return {}

    @property
    def totals(self) -> TotalsAhead | None:
        """What gives the inputs of the program that are computed ahead of a step; None if it has none."""
        if self.totals_kept is None:
            self.totals_kept = (totals_ahead(self.captured, self.device),)
        return self.totals_kept[0]

    def kept_program(self) -> Fields:
        """Return what makes up the program that runs now."""
        return {name: self.__dict__[name] for name in self.PROGRAM}

    def resume_program(self, fields: Fields) -> None:
        """Run a program again that was kept, with the current buffers."""
        now = self._buffers_now()
        for name, value in fields.items():
            setattr(self, name, value)
        for stage in self.stages.values():
            move_to_layout_of(self, stage.plan)
            with_buffers_of(self, self.captured.graph.tied, stage, now)

    def _buffers_now(self) -> Buffers:
        """Return this rank's buffers, and the constants of its stages, as the program that ran last has them."""
        return {name: entry for stage in self.stages.values() for name, entry in stage.buffers.items()}

    def take_program(
        self, new: Captured, call: ModuleCall, replan: Callable[..., Any] | None, all_well: AllWell
    ) -> None:
        """Run another capture, made for a call: under the present plan, if it differs in literals alone, or a new one.

        Raises:
            RunError: parameters would have to be elsewhere; on all ranks.
        """
        reason = differs(self.captured, new)
        if not reason:
            with all_well():
                cuts = cut(new.graph, self.plan.starts)  # crossings stay those that the wires know
                parts = tuple(replace(part, graph=c.graph) for part, c in zip(self.parts, cuts, strict=True))
                plan = self.plan.of_graphs(new.graph.fingerprint, [part.graph.fingerprint for part in parts])
                stages = {s: stage.with_other_literals(parts[s].graph) for s, stage in self.stages.items()}
                self.run_program(new, parts, plan, stages)
            return
        with all_well():
            planner = planner_for(reason, replan, "state_dict()" if self.leads is None else "full_state_dict()")
        with all_well():  # rank 0's error is raised on all ranks
            plan = self.plan_again(planner, new, call)
        with all_well():
            parts = cut(new.graph, plan.starts)
            for s in self.stages:
                move_to_layout_of(self, plan.stages[s])
                check_stored(self, plan.stages[s])
            self.check_again(new, parts, plan)
        self.connect_again(parts, plan, all_well)
        with all_well():
            now, stages = self._buffers_now(), {}
            for s, before in self.stages.items():
                graph, stage_plan, mesh = parts[s].graph, plan.stages[s], before.device_mesh
                unread = {node.target for _, node in graph.of_kind("buffer")} - now.keys()
                there = {**now, **placed_buffers(self, unread, stage_plan.mesh)}
                buffers = buffers_for(self, self.captured.graph.tied, new, graph, stage_plan, mesh, there)
                stages[s] = Stage(graph, stage_plan, mesh, self, buffers, before.compile_args)
            self.run_program(new, parts, plan, stages)

    def plan_again(self, planner: Callable[..., Any], new: Captured, call: ModuleCall) -> Plan:
        """Return a plan for another capture, in the stages and with the parameters stored as they are."""
        raise NotImplementedError

    def check_again(self, new: Captured, parts: tuple[StageGraph, ...], plan: Plan) -> None:
        """Refuse a capture that cannot be run in the stages."""

    def connect_again(self, parts: tuple[StageGraph, ...], plan: Plan, all_well: AllWell) -> None:
        """Make what other stages need to send each other."""

    @property
    def evaluates(self) -> bool:
        """Whether the program that runs now has one of eval mode next to it."""
        return all(stage.evaluation is not None for stage in self.stages.values())

    def prepare_evaluation(self, sides: Mapping[str, int]) -> None:
        """Make it, of what the program that runs now was captured from.

        Args:
            sides: the sides of random branches (:func:`~autopar.capture.evaluation.evaluated`).
        """
        for stage in self.stages.values():
            stage.prepare_evaluation(sides)
