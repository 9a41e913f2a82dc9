"""The memory of the host that a plan takes: a note of the plan, or an error where a machine has less."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.errors import InfeasibleError
from autopar.plans.memory_decisions import OFFLOAD
from autopar.plans.plan import StagePlan
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from autopar.words.graph import Graph
from autopar.words.shards import local_shape
from autopar.words.texts import show_bytes
from cost_models import optimizer_state_bytes
from cost_models.host_link import host_of
from hardware_profiles import Cluster


def host_bytes(graph: Graph, stage: StagePlan) -> int:
    """Return the bytes of the host that one device of a stage takes: what is stored there, and what is moved there.

    ``graph``: the whole model's, or the stage's, of one microbatch.
    """
    return stored_bytes(graph, stage) + moved_bytes(graph, stage)


def moved_bytes(graph: Graph, stage: StagePlan) -> int:
    """Return the bytes of activations that wait on the host for one device, of all microbatches in flight."""
    moved = stage.memory.get(OFFLOAD, ())
    rules, n_bytes = rules_of(graph) if moved else (), 0
    for key in moved:
        i = graph.index[key.partition("#")[0]]
        node, rule = graph.nodes[i], rules[i]
        assert rule is not None
        made = strategy_named(graph, node, rule, stage.ops[node.name]).outs[0]
        n_bytes += prod(local_shape(node.out.shape, made, stage.mesh)) * node.out.item_bytes
    return stage.in_flight * n_bytes


def stored_bytes(graph: Graph, stage: StagePlan) -> int:
    """Return the bytes of parameters on the host of one device: their values, gradients and optimizer state."""
    total = 0
    nodes = {node.target: node for _, node in graph.of_kind("param")}
    for name, choice in stage.params.items():
        node = nodes.get(name)
        if not choice.on_host or node is None:
            continue
        n = prod(local_shape(node.out.shape, choice.stored, stage.mesh))
        total += n * graph.stored(node).item_bytes * (1 + node.needs_grad)
        if node.needs_grad:
            total += optimizer_state_bytes(stage.optimizer, n, graph.moments(node).item_bytes, 1)
    return total


def notes_on_host(graph: Graph, stages: Sequence[StagePlan], cluster: Cluster) -> tuple[str, ...]:
    """Return a note on the memory of the host that a plan takes; none where nothing is kept there.

    Raises:
        InfeasibleError: a host has less.
    """
    of_device: dict[int, int] = {}
    what: set[str] = set()
    for stage in stages:
        n_bytes = host_bytes(graph, stage)
        what |= {"activations"} if stage.memory.get(OFFLOAD) else set()
        what |= {"parameters, gradients and state"} if any(c.on_host for c in stage.params.values()) else set()
        for device in stage.devices if n_bytes else ():
            of_device[device] = of_device.get(device, 0) + n_bytes
    if not of_device:
        return ()
    fullest = max(of_device, key=lambda device: (of_device[device], -device))
    room = host_of(cluster, cluster.device(fullest)).memory_bytes
    if of_device[fullest] > room:
        raise InfeasibleError(
            f"the host has {show_bytes(room)} for each device, and the plan keeps {show_bytes(of_device[fullest])} "
            f"there for device {fullest}: give a smaller share (offload), more devices, or a host with more memory"
        )
    return (
        f"on the host: {show_bytes(of_device[fullest])} of {', '.join(sorted(what))} for each device at most, of "
        f"{show_bytes(room)}",
    )
