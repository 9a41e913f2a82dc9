"""Abstract meshes: compute is free and every axis has an alpha and a beta, as in Alpa's own tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import networkx as nx

from .model import AbstractAxis, Cluster, Device, EfficiencyCurve
from .reader import MOST_DEVICES, ProfileErrors, Table, shown

# The constants of Alpa's LogicalDeviceMesh, one per collective, in its own units.
ALPA_CONSTANTS = {"all_reduce": 0.01, "all_gather": 0.1, "reduce_scatter": 0.001, "all_to_all": 0.001}
HUGE_BYTES = 1e18


def abstract_cluster(
    shape: Mapping[str, int],
    alpha: Sequence[float] | float = 0.0,
    beta: Sequence[float] | float = 1.0,
    constants: Mapping[str, float] | None = None,
    memory_bytes: float = HUGE_BYTES,
) -> Cluster:
    """Return a mesh that has prices and no devices.

    `shape` maps axis names to sizes; `alpha` and `beta` (per byte) hold one number per axis, or one for all.
    `constants` replaces Alpa's constant of the collectives that it names. Wrong values raise ProfileError.
    """

    def listed(value: Sequence[float] | float) -> list[float]:
        return [value] * len(shape) if isinstance(value, (int, float)) else list(value)

    failures = ProfileErrors("abstract_cluster")
    table = Table(
        {"shape": dict(shape), "alpha": listed(alpha), "beta": listed(beta),
         "constants": dict(constants or {}), "memory_bytes": memory_bytes},
        "", failures,
    )  # fmt: skip
    cluster = read_abstract(table, "abstract-" + "x".join(str(size) for size in shape.values()), "")
    failures.raise_if_any()
    return cluster


def read_abstract(table: Table, name: str, description: str) -> Cluster:
    """Read the [abstract] table of a cluster file; failures go to the table's list."""
    shape_table = table.table("shape")
    shape = {axis: shape_table.integer(axis) for axis in shape_table.data}
    columns = {}
    for key in ("alpha", "beta"):
        values = table.take(key, expected="a list with one number per axis")
        if not isinstance(values, list) or len(values) != len(shape):
            table.failures.add(
                f"{table.path}.{key}", f"got {shown(values)}, expected one number per axis ({len(shape)})"
            )
            values = [0.0] * len(shape)
        inner = Table({str(i): v for i, v in enumerate(values)}, f"{table.path}.{key}", table.failures)
        columns[key] = [inner.number(str(i)) for i in range(len(shape))]
    given = table.table("constants", {})
    constants = {kind: given.number(kind, value) for kind, value in ALPA_CONSTANTS.items()}
    given.close()
    memory_bytes = table.number("memory_bytes", HUGE_BYTES, positive=True)
    table.close()
    free = {kind: EfficiencyCurve(1.0) for kind in ("matmul", "conv", "attention", "pointwise")}
    device = Device("abstract", memory_bytes, math.inf, {"float32": math.inf}, 0.0, free)
    count = math.prod(shape.values())
    if count > MOST_DEVICES:
        table.failures.add(f"{table.path}.shape", f"makes more than {MOST_DEVICES:,} devices, which is the most")
        count = 1
    graph = nx.DiGraph()
    graph.add_nodes_from(range(count))
    axes = tuple(
        AbstractAxis(axis, size, columns["alpha"][i], columns["beta"][i], constants)
        for i, (axis, size) in enumerate(shape.items())
    )
    return Cluster(name, (device,) * count, graph, (0,) * count, {}, True, axes, description)
