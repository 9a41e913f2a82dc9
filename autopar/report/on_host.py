"""What a plan keeps in the memory of the host, and what copies there and back cost: of both kinds, in one way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.planner.host_bytes import moved_bytes, stored_bytes
from autopar.planner.intra_op.building import parameter_sharding as P
from autopar.planner.intra_op.building.parameter_load import parameter_load
from autopar.planner.intra_op.building.price import Pricer, pricer
from autopar.planner.intra_op.memory.ledger import use_of_link
from autopar.planner.intra_op.memory.walked_ledger import ledger
from autopar.plans.memory_decisions import OFFLOAD
from autopar.plans.plan import ParamChoice, Plan, StagePlan
from autopar.plans.stage_graphs import cut
from autopar.report import Facts
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_in_plan
from autopar.words.graph import Graph, Node
from autopar.words.texts import show_bytes, show_seconds
from cost_models.host_link import UNUSED
from cost_models.parameter_overlap import ParameterSeconds
from hardware_profiles import Cluster


class KeptOnHost(NamedTuple):
    """One kind of what a device has on its host.

    Attributes:
        what: ``activations``, or ``parameters``: with their gradients and the state of the optimizer.
        bytes: on the host, for one device.
        copy_seconds: of a step's copies out and in, each alone on the link.
        waited_seconds: the part of a step that waits for them.
        step_seconds: of the optimizer's step on the host.
    """

    what: str
    bytes: int
    copy_seconds: float
    waited_seconds: float
    step_seconds: float = 0.0

    @property
    def line(self) -> str:
        """In words."""
        step = f"; the optimizer's step there takes {show_seconds(self.step_seconds)}" if self.step_seconds else ""
        return (
            f"on the host: {self.what}, {show_bytes(self.bytes)} for each device; copies take "
            f"{show_seconds(self.copy_seconds)} a step, {show_seconds(self.waited_seconds)} of it not hidden{step}"
        )


def on_host(graph: Graph, stage: StagePlan, priced: Pricer) -> list[KeptOnHost]:
    """Return what a device of a stage has on its host, kind by kind; empty where that is nothing."""
    if not keeps_on_host(stage):
        return []
    moved, stored = moved_bytes(graph, stage), stored_bytes(graph, stage)
    rules, times, found = rules_of(graph), stage.microbatches, []
    chosen = {
        i: strategy_in_plan(graph, node, rule, stage.ops[node.name], stage.mesh)
        for (i, node), rule in ((each, rules[each[0]]) for each in graph.of_kind("op")) if rule is not None
    }  # fmt: skip
    link = UNUSED
    if moved:
        holds = ledger(graph, rules, stage.mesh, chosen, stage.reshard_paths, stage.memory, kernels=priced.kernels)
        link = use_of_link(graph, rules, priced, chosen, holds)
        found.append(KeptOnHost("activations", moved, times * sum(link.copied), times * sum(link.waits)))
    if stored:
        owned = {i: stage.params[node.target] for i, node in graph.of_kind("param")}
        load = parameter_load(graph, rules, priced, chosen, owned, times, stage.optimizer, link)
        shown = [waits / alone if alone else 0.0 for waits, alone in zip(load.exposed(), load.collectives, strict=True)]
        copies = ParameterSeconds()
        for i, choice in owned.items():
            copies = copies.plus(parameter_copies(graph, graph.nodes[i], choice, priced))
        waited = ParameterSeconds(*[share * alone for share, alone in zip(shown, copies, strict=True)])
        found.append(KeptOnHost("parameters", stored, copies.of_step(times), waited.of_step(times), load.host_seconds))
    return found


def on_hosts(graph: Graph, plan: Plan, cluster: Cluster) -> dict[int, list[KeptOnHost]]:
    """Return :func:`on_host` of every stage of a plan, by number; ``graph`` is the whole model's."""
    parts = cut(graph, plan.starts) if any(map(keeps_on_host, plan.stages)) else ()
    return {
        part.number: on_host(part.graph, stage, pricer(cluster, stage.mesh, stage.devices))
        for part, stage in zip(parts, plan.stages, strict=bool(parts))
    }  # fmt: skip


def keeps_on_host(stage: StagePlan) -> bool:
    """Return whether a stage keeps anything on the host."""
    return bool(stage.memory.get(OFFLOAD)) or any(choice.on_host for choice in stage.params.values())


def lines(of_stages: Mapping[int, Sequence[KeptOnHost]], n_stages: int) -> list[str]:
    """Return lines about stages by number, of so many that the plan has."""
    return [
        (f"stage {number}, " if n_stages > 1 else "") + each.line
        for number, of_stage in of_stages.items() for each in of_stage
    ]  # fmt: skip


def facts(of_stages: Mapping[int, Sequence[KeptOnHost]]) -> Facts:
    """Return the same as values for JSON: nothing where nothing is on the host."""
    rows = [{"stage": number, **each._asdict()} for number, of_stage in of_stages.items() for each in of_stage]
    return {"on_host": rows} if rows else {}


def parameter_copies(graph: Graph, node: Node, choice: ParamChoice, priced: Pricer) -> ParameterSeconds:
    """Return the seconds of a parameter's copies between device and host, by when they run."""
    if not choice.on_host:
        return ParameterSeconds()
    n_bytes = priced.local_bytes(graph.stored(node), choice.stored)
    return P.host_copy_seconds(n_bytes, node.needs_grad, choice, priced).both
