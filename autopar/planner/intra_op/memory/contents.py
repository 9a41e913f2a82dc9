"""Contents of a device's memory, tensor by tensor: at the fullest moment of a stage, and over a microbatch.

The bytes are those of the price: the walk that counts them (:mod:`.memory_walk`, :mod:`.moments`) is repeated for a
finished plan, and this time every piece of memory is remembered with what it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.planner.intra_op.building import parameter_sharding
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.memory.ledger import Ledger
from autopar.planner.intra_op.memory.memory_walk import Walk
from autopar.planner.intra_op.memory.microbatch_timeline import SLOTS
from autopar.planner.intra_op.memory.moments import StepMoments
from autopar.planner.intra_op.memory.stage_peaks import with_working_bytes
from autopar.planner.intra_op.memory.walked_ledger import ledger_of
from autopar.plans.memory_decisions import KEEP
from autopar.plans.plan import StagePlan
from autopar.plans.prices import Fullest, Moment, StagePeaks
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from autopar.words.graph import Graph, Ref

PARAMETERS, MASTERS, GRADIENTS, OPTIMIZER = "parameters", "masters", "gradients", "optimizer"
GATHERED, VERSIONS, ACTIVATIONS, LOSS = "gathered copies", "weight versions", "activations", "logits and loss"
ACTIVATION_GRADIENTS, COMMUNICATION, WORKSPACE = "gradients of activations", "communication", "inside operators"
CATEGORIES: Mapping[str, str] = {
    PARAMETERS: "as they are stored, in the format in which they are used",
    MASTERS: "parameters that are stored in another format than that in which they are used",
    GRADIENTS: "of parameters, as they are stored",
    OPTIMIZER: "the optimizer's state",
    GATHERED: "parameters, and their gradients, as the operators use them",
    VERSIONS: "older weights, with which microbatches in flight are computed",
    ACTIVATIONS: "results of operators: kept for the backward, passing, or made again",
    LOSS: "logits, and what is computed of them, with its gradients",
    ACTIVATION_GRADIENTS: "of results of other operators",
    COMMUNICATION: "buffers of collectives, and tensors from and to other stages",
    WORKSPACE: "what operators, or the optimizer's step, need beside while they run",
}
"""What fills a device, in the order in which it is told."""
PRODUCTS = ("matmul", "conv", "attention")


class HeldMemory(NamedTuple):
    """Some memory at a moment.

    Attributes:
        category: one of :data:`CATEGORIES`.
        node: number of the operator or parameter that it belongs to; None for what belongs to none.
        n_bytes: bytes on one rank, of all ``microbatches`` that have it.
    """

    category: str
    node: int | None
    n_bytes: int
    microbatches: int = 1


@dataclass(frozen=True)
class StageContents:
    """A stage of a finished plan, as the source of the memory contents of one of its ranks."""

    graph: Graph
    plan: StagePlan
    pricer: Pricer

    @cached_property
    def fullest(self) -> Fullest:
        """The fullest moment."""
        return self.peaks.at_fullest(self.plan.in_flight)

    @cached_property
    def peaks(self) -> StagePeaks:
        """The moments from which the peak of the stage follows, which plan files do not have."""
        plan, (walk, holds) = self.plan, self._walked
        params = {i: plan.params[node.target] for i, node in self.graph.of_kind("param")}
        return with_working_bytes(
            plan.price, walk, holds, params, plan.outputs, plan.optimizer, plan.microbatches, plan.in_flight,
            plan.versions,
        )[1]  # fmt: skip

    @cached_property
    def _walked(self) -> tuple[Walk, Ledger]:
        rules = rules_of(self.graph)
        chosen = {
            i: strategy_named(self.graph, node, rules[i], self.plan.ops[node.name])
            for i, node in enumerate(self.graph.nodes) if node.kind == "op"
        }  # fmt: skip
        plan = self.plan
        walk = Walk(self.graph, rules, plan.mesh, chosen, plan.reshard_paths, plan.memory, kernels=self.pricer.kernels)
        return walk, ledger_of(walk)

    def moments(self, accumulates: bool) -> StepMoments:
        """Return a microbatch with the lifetime of everything in it.

        Args:
            accumulates: gradients of parameters are there already.
        """
        walk, holds = self._walked
        params = {i: self.plan.params[node.target] for i, node in self.graph.of_kind("param")}
        return StepMoments(walk, holds, params, self.plan.outputs, accumulates, remembers=True)

    @cached_property
    def of_loss(self) -> frozenset[int]:
        """Operators between the last product and the loss, and that product.

        Their results are as large as the logits.
        """
        rules, found = rules_of(self.graph), set[int]()
        out = self.graph.outputs[self.graph.loss] if self.graph.loss is not None else None
        new = [out.node] if isinstance(out, Ref) else []
        while new:
            i = new.pop()
            node, rule = self.graph.nodes[i], rules[i]
            if i not in found and node.kind == "op" and rule is not None and node.needs_grad:
                found.add(i)
                new += [] if rule.kind in PRODUCTS else [ref.node for ref in node.refs]
        return frozenset(found)

    def category(self, kind: str, node: int) -> str:
        """Return the category of some memory of a microbatch; ``kind`` as in :class:`.Lifetime`."""
        if kind == "parameter gradient":
            return GRADIENTS
        if node in self.of_loss:
            return LOSS
        if kind == "gradient" and self.graph.nodes[node].kind == "param":
            return GATHERED
        return ACTIVATION_GRADIENTS if kind == "gradient" else ACTIVATIONS

    def stored(self) -> list[HeldMemory]:
        """Return what is there all the time: parameters, their gathered copies and the optimizer's state."""
        graph, plan, held = self.graph, self.plan, []
        largest: tuple[int, int] = 0, -1
        for i, node in graph.of_kind("param"):
            choice = plan.params[node.target]
            param = parameter_sharding.ParamInStep.of(
                graph, node, plan.optimizer, plan.microbatches, plan.versions.number
            )  # fmt: skip
            cost = parameter_sharding.cost(param, choice, self.pricer)
            category = PARAMETERS if graph.stored(node).dtype == node.out.dtype else MASTERS
            held += [HeldMemory(category, i, cost.parameter_bytes), HeldMemory(OPTIMIZER, i, cost.optimizer_bytes)]
            held += [HeldMemory(GATHERED, i, cost.gathered_bytes), HeldMemory(VERSIONS, i, cost.version_bytes)]
            largest = max(largest, (cost.peak_bytes, i))
        if largest[0]:
            held.append(HeldMemory(GATHERED, largest[1], largest[0]))
        return [each for each in held if each.n_bytes]

    def gradients(self) -> list[HeldMemory]:
        """Return the gradients of all parameters, as they are stored."""
        graph, plan, held = self.graph, self.plan, []
        for i, node in graph.of_kind("param"):
            param = parameter_sharding.ParamInStep.of(graph, node, plan.optimizer, plan.microbatches)
            cost = parameter_sharding.cost(param, plan.params[node.target], self.pricer)
            held.append(HeldMemory(GRADIENTS, i, cost.gradient_bytes))
        return [each for each in held if each.n_bytes]

    def kept(self, count: int) -> list[HeldMemory]:
        """Return what `count` microbatches keep between their forward and their backward."""
        _, holds = self._walked
        return [
            HeldMemory(self.category("activation", entry.since), entry.since, count * entry.n_bytes, count)
            for entry in holds.entries if entry.decision == KEEP.name and count and entry.n_bytes
        ]  # fmt: skip

    def at_fullest(self) -> list[HeldMemory]:
        """Return all that is there at the fullest moment; the bytes add up to the price's."""
        fullest, held = self.fullest, self.stored()
        if fullest.moment is None:
            there = [*self.gradients(), *self.kept(fullest.in_flight)]
            beside = fullest.n_bytes - sum(each.n_bytes for each in there)
            return [*held, *there, *([HeldMemory(WORKSPACE, None, beside)] if beside else [])]
        moments = self.moments(not fullest.is_first)
        at = self._at(moments, fullest.moment)
        held += self.kept(fullest.in_flight - 1)
        held += [] if fullest.is_first else self.gradients()
        assert moments.lifetimes is not None
        held += [
            HeldMemory(self.category(life.kind, life.node), life.node, life.n_bytes)
            for life in moments.lifetimes if life.first <= at <= life.last
        ]  # fmt: skip
        if moments.beside[at]:
            held.append(HeldMemory(self.beside(moments, at), fullest.moment.node, moments.beside[at]))
        if fullest.stage_edge_bytes:
            held.append(HeldMemory(COMMUNICATION, None, fullest.stage_edge_bytes))
        return held

    def _at(self, moments: StepMoments, moment: Moment) -> int:
        """Return the number of the fullest moment: that of an operator, or of a step on the way to one."""
        side = self.peaks.first if self.fullest.is_first else self.peaks.later
        assert side is not None
        totals = moments.totals()
        wanted = side.backward_bytes if moment.backward else side.forward_bytes
        return next(at for at, n_bytes in enumerate(totals) if n_bytes == wanted and moments.moment(at) == moment)

    def beside(self, moments: StepMoments, at: int) -> str:
        """Return the category of working memory at a moment: communication in a reshard or a gradient's sum."""
        place = moments.n - 1 - (at - moments.n) // SLOTS if at >= moments.n else at
        reduces = at >= moments.n and (at - moments.n) % SLOTS == SLOTS - 1
        return WORKSPACE if isinstance(moments.order[place], int) and not reduces else COMMUNICATION


def by_category(held: Sequence[HeldMemory]) -> dict[str, int]:
    """Return the bytes of each category, in the order of :data:`CATEGORIES`."""
    return {name: sum(each.n_bytes for each in held if each.category == name) for name in CATEGORIES}
