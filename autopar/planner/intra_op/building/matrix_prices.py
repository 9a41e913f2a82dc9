"""The price of steps on whole matrices: each matrix computed by its owner, gathered before and scattered after.

:mod:`cost_models.matrix_steps` has who owns what, as at run time. The integer program counts each matrix as if work and
bytes were divided evenly; a finished plan has the owner with most to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from autopar.planner.intra_op.building.price import Pricer
from autopar.plans.plan import ParamChoice
from autopar.plans.stepped_by import matrices_of
from autopar.words.graph import Graph, Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from cost_models.matrix_steps import AT_ONCE_BYTES, SENT_ITEM_BYTES, MatrixLoad, WholeMatrix, is_alone, loads


def pieces_of(state: State, mesh: Mesh) -> int:
    """Return into how many different pieces the ranks of a mesh cut a tensor."""
    return prod(size for placement, size in zip(state, mesh.sizes, strict=True) if placement.dim is not None)


def seconds_of(pricer: Pricer, spec: Spec, stored: State) -> float:
    """Return the seconds of the step on a matrix on each rank, if all matrices are divided evenly."""
    n, pieces = prod(pricer.mesh.sizes), pieces_of(stored, pricer.mesh)
    seconds = pricer.iteration(spec.shape)
    if not seconds or n == 1 or is_alone(spec.shape, pieces > 1):
        return seconds
    n_bytes = SENT_ITEM_BYTES * prod(spec.shape)
    return seconds / n + _sent_seconds(pricer, n_bytes / n) + _sent_seconds(pricer, n_bytes / pieces)


def bytes_of(mesh: Mesh, spec: Spec, stored: State, share: float = 1.0) -> float:
    """Return the bytes that a matrix adds to a step's peak on a rank, if all matrices are divided evenly.

    Args:
        share: of all matrices those that are whole at once (:func:`share_at_once`).
    """
    n, pieces = prod(mesh.sizes), pieces_of(stored, mesh)
    if n == 1 or is_alone(spec.shape, pieces > 1):
        return 0.0
    n_bytes = SENT_ITEM_BYTES * prod(spec.shape)
    return share * (n_bytes / pieces + n_bytes / n + max(n_bytes / n, n_bytes / pieces))


def share_at_once(graph: Graph, mesh: Mesh, optimizer: str) -> float:
    """Return the part of all matrices that is under way at once: of many, two buckets."""
    n_bytes = SENT_ITEM_BYTES * sum(prod(node.out.shape) for _, node in matrices_of(graph, optimizer))
    return min(1.0, 2.0 * AT_ONCE_BYTES * prod(mesh.sizes) / n_bytes) if n_bytes else 0.0


def matrix_loads(
    graph: Graph, pricer: Pricer, owned: Mapping[int, ParamChoice], optimizer: str
) -> list[MatrixLoad]:  # fmt: skip
    """Return the load of each bucket of a plan's matrices; ``owned`` are its choices by node."""
    found = matrices_of(graph, optimizer)
    matrices = [
        WholeMatrix(node.out.shape, pieces_of(owned[i].stored, pricer.mesh), pricer.iteration(node.out.shape))
        for i, node in found
    ]
    return loads(matrices, prod(pricer.mesh.sizes))


def matrix_seconds(pricer: Pricer, of_buckets: list[MatrixLoad]) -> float:
    """Return the seconds of a step on whole matrices, one bucket after the other."""
    return sum(
        load.seconds + sum(_sent_seconds(pricer, n) for n in (load.gathered_bytes, load.scattered_bytes) if n)
        for load in of_buckets
    )


def _sent_seconds(pricer: Pricer, n_bytes: float) -> float:
    return pricer.all_ranks.seconds("all_to_all", n_bytes)
