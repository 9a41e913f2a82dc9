"""A graph on a mesh with a user's options: the source of its integer programs, and of plans from their solutions."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from autopar.errors import PlanError
from autopar.planner.intra_op.building.build import Builder
from autopar.planner.intra_op.building.decoder import Decided, Decoder
from autopar.planner.intra_op.building.fold import fold, unfolded
from autopar.planner.intra_op.building.integer_program import Problem
from autopar.planner.intra_op.building.parameter_sharding import ParamInStep, cost
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.kept_state import kept_buffers, stored_states, with_hot_state
from autopar.planner.intra_op.memory.recomputable import Recomputable
from autopar.planner.intra_op.memory.recompute import segments_of
from autopar.planner.intra_op.pins.host_storage import what_can_move
from autopar.planner.intra_op.pins.options import Options
from autopar.planner.intra_op.pins.pinned_choices import PinnedChoices
from autopar.planner.intra_op.plan_completion import complete
from autopar.plans.clusters import check_mesh
from autopar.plans.memory_decisions import RECOMPUTE, RECOMPUTE_RESULT
from autopar.plans.offload_options import paths_of
from autopar.plans.plan import StagePlan
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from cost_models.host_link import no_host
from hardware_profiles import Cluster


class MeshProblem:
    """A graph on a mesh with a user's options: the source of its programs, and of plans from their solutions."""

    def __init__(
        self, graph: Graph, cluster: Cluster, mesh: Mesh, options: Options, devices: Sequence[int] | None
    ) -> None:
        check_mesh(mesh, cluster)
        options = what_can_move(options)
        self.stored_states = stored_states(graph, options.buffers)
        self.stored = kept_buffers(graph, self.stored_states)
        self.given, graph = graph, with_hot_state(graph, self.stored)
        self.graph, self.cluster, self.mesh, self.options = graph, cluster, mesh, options
        self.priced = pricer(cluster, mesh, devices)
        folding = fold(graph) if options.fold else unfolded(graph)
        self.rules = rules_of(graph, folding.representative)
        self.pins = PinnedChoices(graph, self.rules, mesh, options)
        self.segments = segments_of(graph, self.rules, options.recompute)
        self.asked = self._asked()
        # blocks that are pinned differently are different blocks
        alike = self.pins.uniform(folding) and all((r in self.asked) == (i in self.asked)
                                                   for i, r in enumerate(folding.representative))  # fmt: skip
        self.folding = folding if alike else unfolded(graph)
        self.recomputable: Recomputable | None = None

    def _asked(self) -> frozenset[int]:
        """Return the operators whose results the user asked to be moved to the memory of the host.

        Raises:
            PlanError: anything may be moved there, results or parameters, and the devices have none.
        """
        offload = self.options.offload
        if self.priced.host is None and (offload or self.pins.host.is_asked):
            raise PlanError(f"offload: {no_host(self.priced.device)}")
        return frozenset(
            i for i, node in self.graph.of_kind("op")
            if node.hot and any(fnmatchcase(path, p) for path in paths_of(node.module) for p in offload.patterns)
        )  # fmt: skip

    def problem(self, keep_memory: bool, choices: bool = False) -> tuple[Problem, Decoder]:
        """Return the integer program and its decoder.

        With ``keep_memory`` there are strategies that only help where memory is short; with ``choices`` gathered copies
        may be regathered in the backward, and operators recomputed unless the user decided that.
        """
        pins, options = self.pins, self.options
        choose_recompute = choices and options.may_recompute and not self.segments
        problem, decoder = Builder(
            self.graph, self.rules, self.folding, self.priced, options.optimizer, options.microbatches,
            pins.op if pins.ops or pins.uncut else None, pins.param if pins.params else None,
            dict(options.outputs or {}), dict(options.inputs or {}), keep_memory, bool(self.cluster.abstract),
            options.in_flight, self.segments, choose_recompute, choices, options.blocks, self.stored,
            self.stored_states, offloads=options.offload.chooses_activations, asked=self.asked,
            versions=options.versions.number, in_memories=pins.host.choices if pins.host.is_asked else None,
        ).build()  # fmt: skip
        if choose_recompute:
            self.recomputable = decoder.recomputable
        pins.require(problem)
        return problem, decoder

    def like(self, **options: Any) -> MeshProblem:
        """Return the same problem with other options on memory, of which no failure is explained."""
        other = copy(self)
        other.options = replace(self.options, explains=False, **options)
        other.asked, other.recomputable = other._asked(), None
        return other

    def with_all_recomputed(self) -> MeshProblem | None:
        """Return the same problem with everything recomputed that may be, or None if nothing may."""
        if self.recomputable is None:
            return None
        segments = self.recomputable.segments(self.graph, self.rules, self.recomputable.every(self.folding))
        if not segments:
            return None
        other = copy(self)
        other.segments, other.recomputable = segments, None
        other.options = replace(self.options, explains=False)
        return other

    def realise(self, decided: Decided, like: StagePlan | None = None, weighed: bool = True) -> StagePlan:
        """Return the plan of decisions.

        ``like`` is a plan of the same operators whose recomputed segments are taken; ``weighed`` as for
        :func:`complete`.
        """
        options, segments = self.options, self.segments
        remade: Sequence[str] = ()
        if like is not None:
            segments, remade = like.recompute, like.make_again
        elif decided.recomputed:
            assert self.recomputable is not None
            segments = self.recomputable.segments(self.graph, self.rules, decided.recomputed)
            remade = self.recomputable.results(self.graph, segments, self.folding)
        return complete(
            self.given, self.rules, self.priced, decided.ops, decided.params, decided.outputs,
            inputs={**decided.inputs, **(options.inputs or {})}, buffers=decided.buffers, optimizer=options.optimizer,
            microbatches=options.microbatches, in_flight=options.in_flight,
            memory={**decided.tensors, RECOMPUTE.name: segments, RECOMPUTE_RESULT.name: remade}, weighed=weighed,
            versions=options.versions,
        )  # fmt: skip

    def decided_seconds(self, plan: StagePlan) -> float:
        """Return the seconds of a plan that the problem counts: without operators that follow demand and overheads."""
        follow = 0.0
        for node, rule in zip(self.graph.nodes, self.rules, strict=True):
            if node.kind == "op" and not node.hot and rule is not None:
                strategy = strategy_named(self.graph, node, rule, plan.ops[node.name])
                follow += sum(self.priced.op(self.graph, node, rule, strategy))
        steps = sum(
            cost(
                ParamInStep.of(self.graph, node, plan.optimizer, plan.microbatches), plan.params[node.target],
                self.priced,
            ).step_seconds
            for _, node in self.graph.of_kind("param")
        )  # fmt: skip
        left_out = plan.price.overhead_seconds + plan.price.optimizer_seconds - steps
        return plan.price.seconds - follow * self.options.microbatches - left_out
