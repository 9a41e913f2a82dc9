"""One group of all devices: planned exactly, straight from a bound that is true of every layout.

The program of the whole model is solved in about the time that it takes to solve those of its blocks, which say less of
it: blocks that stand alone store a parameter that several of them share once each, and agree on nothing between them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autopar.errors import AutoparError
from autopar.planner.inter_op.candidates import Candidate
from autopar.planner.inter_op.estimating.block_costs import ALONE
from autopar.planner.inter_op.exact.exact_stages import ExactPlans
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.planner.intra_op.within_memory import UNLIMITED
from autopar.words.meshes import Mesh
from cost_models.costs import costs_of


def least_seconds(search: ExactPlans) -> float:
    """Return a lower bound of any step in the search's microbatches: the model's work shared evenly by speed.

    It is that of one device with all the memory that it wants; 0 if the cost source does not promise that an
    operator cut in n takes an n-th of its time at least, or where no device can run the model alone.
    """
    cluster, request = search.cluster, search.request
    if not costs_of(cluster).share_bounds:
        return 0.0
    options = replace(
        request.options, constraints=None, params=None, inputs=None, outputs=None, recompute=(), may_recompute=False,
        memory_limit_bytes=UNLIMITED, microbatches=request.microbatches,
    )  # fmt: skip
    kinds = Counter(cluster.device(d).name for d in range(search.n_devices))
    firsts = {cluster.device(d).name: d for d in reversed(range(search.n_devices))}
    steps_a_second = 0.0
    for kind, n in kinds.items():
        try:
            alone = plan_graph(search.graph, cluster, ALONE, options, devices=(firsts[kind],))
        except AutoparError:
            return 0.0
        if not alone.price.compute_seconds:
            return 0.0
        steps_a_second += n / alone.price.compute_seconds
    return 1 / steps_a_second


def one_group(mesh: Mesh) -> Candidate:
    """Return all devices as one group, without an estimate."""
    return Candidate((mesh,), (tuple(range(mesh.n_devices)),), "1f1b", (), 0.0)
