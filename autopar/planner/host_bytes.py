"""The memory of the host that a plan takes: a note of the plan, or an error where a machine has less."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autopar.errors import InfeasibleError
from autopar.plans.plan import StagePlan
from autopar.words.graph import Graph
from autopar.words.shards import local_shape
from autopar.words.texts import show_bytes
from cost_models import optimizer_state_bytes
from cost_models.host_link import devices_of_a_host, host_copies
from hardware_profiles import Cluster


def host_bytes(graph: Graph, stage: StagePlan) -> int:
    """Return the bytes of the host that one device of a stage takes: values, gradients and state stored there.

    ``graph``: the whole model's, or the stage's.
    """
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
    """Return a note on the memory of the host that a plan takes; none where nothing is stored there.

    Raises:
        InfeasibleError: a host has less.
    """
    of_device: dict[int, int] = {}
    for stage in stages:
        n_bytes = host_bytes(graph, stage)
        for device in stage.devices if n_bytes else ():
            of_device[device] = of_device.get(device, 0) + n_bytes
    if not of_device:
        return ()
    fullest = max(of_device, key=lambda device: (of_device[device], -device))
    room = host_copies(cluster.device(fullest), devices_of_a_host(cluster)).memory_bytes
    if of_device[fullest] > room:
        raise InfeasibleError(
            f"the host has {show_bytes(room)} for each device, and the plan keeps {show_bytes(of_device[fullest])} "
            f"there for device {fullest}: give a smaller share (offload), more devices, or a host with more memory"
        )
    return (
        f"on the host: {show_bytes(of_device[fullest])} of parameters, gradients and state for each device at most, of "
        f"{show_bytes(room)}",
    )
