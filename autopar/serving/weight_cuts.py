"""Cuts of a forward for few tokens, by the integer program of training plans: nothing flows back, weights stay cut.

A step of an engine reads all weights for few tokens, so the cheapest cut divides the weights, and exchanges rows. So
that this holds for small models too, the program is solved for a memory that takes at least :data:`BLOCK_SECONDS`
for the dense weights of a block. What the graph of one call does not show is pinned: attention is cut by its
heads, because the cache is; a product that takes the result of attention, or of other products element by element, is
cut along what it sums over, so that rows are exchanged once; experts are cut by their number, where that
divides: a layout says where they are.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from autopar.errors import InfeasibleError, MeshError, PlanError
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.plans.plan import StagePlan
from autopar.serving.attention_calls import rules_by_number
from autopar.serving.model_work import WorkFinder
from autopar.serving.product_facts import StoredProduct
from autopar.words.meshes import Mesh
from cost_models.serving.work import TOKENS
from hardware_profiles import Cluster

BLOCK_SECONDS = 2e-4
TENSOR, COPIES = "tensor", "copies"
"""Axes of a mesh: ranks with different heads of keys and values, and ranks that have the same."""


class CutsImpossible(Exception):
    """A model cannot be cut over so many ranks; the text says why."""


def weight_cuts(finder: WorkFinder, cluster: Cluster, tensor: int, kv_heads: int) -> StagePlan:
    """Return the cuts of a forward over tensor parallel ranks.

    Where there are fewer heads of keys and values than ranks, several ranks have the same ones.

    Raises:
        CutsImpossible: heads or features do not divide.
    """
    copies = tensor // kv_heads if tensor > kv_heads and tensor % kv_heads == 0 else 1
    mesh = Mesh.of(tensor=tensor) if copies == 1 else Mesh.of(tensor=tensor // copies, copies=copies)
    pins: dict[str, dict[str, str]] = {}
    if tensor > 1:
        for call in finder.calls:
            pins[finder.graph.nodes[call.node].name] = _by_heads(finder, call.node, mesh)
        ends = [product for call in finder.calls for product in finder.after(call)]
        for product in [*ends, *filter(finder.chained, finder.products)]:
            pins[finder.graph.nodes[product.node].name] = dict.fromkeys(mesh.names, _summed(finder, product))
        for i in finder.experts:
            pins[finder.graph.nodes[i].name] = _of_experts(finder, i, mesh)
    options = Options(constraints={name: pin for name, pin in pins.items() if pin} or None)
    try:
        return plan_graph(finder.graph, _streaming(finder, cluster), mesh, options)
    except (InfeasibleError, MeshError, PlanError) as error:
        raise CutsImpossible(str(error).split("\n")[0]) from error


def _by_heads(finder: WorkFinder, number: int, mesh: Mesh) -> dict[str, str]:
    """Return the factor of an attention's heads for each axis that can cut one; others compute the same."""
    rule = rules_by_number(finder.graph)[number]
    assert rule is not None
    heads = [f for dim in rule.outputs[0][:-2] for f in dim if rule.sizes[f] > 1]
    total = prod(rule.sizes[f] for f in heads)
    if total % mesh.n_devices:
        raise CutsImpossible(f"{total} heads do not divide over {mesh.n_devices} ranks")
    first, left, pins = heads[0], rule.sizes[heads[0]], {}  # groups of heads come first
    for axis, size in mesh:
        if left % size == 0:
            left, pins[axis] = left // size, first
    if TENSOR not in pins:
        raise CutsImpossible(f"{rule.sizes[first]} heads of keys do not divide over {mesh.n_devices} ranks")
    return pins


def _summed(finder: WorkFinder, product: StoredProduct) -> str:
    """Return the factor that a product sums over."""
    rule = rules_by_number(finder.graph)[product.node]
    assert rule is not None
    out = {f for dim in rule.outputs[0] for f in dim}
    return next(f for dim in rule.inputs[product.weight] for f in dim if f not in out)


def _of_experts(finder: WorkFinder, number: int, mesh: Mesh) -> dict[str, str]:
    rule = rules_by_number(finder.graph)[number]
    assert rule is not None
    experts = rule.sizes.get("e", 1)
    if experts % mesh.n_devices == 0:
        return dict.fromkeys(mesh.names, "e")
    return {}


def _streaming(finder: WorkFinder, cluster: Cluster) -> Cluster:
    """Return the cluster with a memory that takes a given time for the dense weights of a block."""
    of_experts = {ref.node for i in finder.experts for ref in finder.graph.nodes[i].refs}
    total = sum(
        finder.graph.spec(finder.graph.nodes[product.node].refs[product.weight]).n_bytes for product in finder.products
        if product.rows == TOKENS and finder.graph.nodes[product.node].refs[product.weight].node not in of_experts
    ) / max(1, len(finder.calls))  # fmt: skip
    rate = max(total, 1.0) / BLOCK_SECONDS
    known = {id(device): replace(device, memory_bytes_per_second=min(device.memory_bytes_per_second, rate))
             for device in cluster.devices}  # fmt: skip
    return replace(cluster, devices=tuple(known[id(device)] for device in cluster.devices))
