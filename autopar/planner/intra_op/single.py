"""The plan for one device, on which nothing is cut: the reference that programs are compared with."""

from __future__ import annotations

from autopar.graph import Graph, Ref
from autopar.placements import Mesh
from autopar.plan import ParamChoice, StagePlan, route_key
from autopar.staging import first_op


def one_device(graph: Graph) -> StagePlan:
    """The plan for a mesh of one device.

    What is whole with a whole gradient may also be read where no gradient comes back, and the other way round (a value
    that is detached, a branch without parameters): on one device that step is nothing.
    """
    steps = ((("I",), ("R",)), (("R",), ("I",)))
    routes = {route_key(graph, Ref(i, k)): steps for i, n in enumerate(graph.nodes) for k in range(len(n.outs))}
    mesh: Mesh = (("one", 1),)
    return StagePlan(
        graph.fingerprint, mesh,
        {n.name: ("I",) for n in graph.nodes if n.kind == "op"},
        {n.target: ParamChoice(*(("I" if n.needs_grad else "R",),) * 2) for _, n in graph.of_kind("param")},
        {n.target: ("R",) for _, n in graph.of_kind("buffer")},
        tuple(_whole(graph, o) if isinstance(o, Ref) else None for o in graph.outputs), routes,
        {n.target: ("I",) for _, n in graph.of_kind("input") if n.needs_grad}, first=first_op(graph), devices=(0,),
    )  # fmt: skip


def _whole(graph: Graph, ref: Ref) -> tuple[str, ...]:
    return ("I",) if graph.nodes[ref.node].needs_grad and graph.spec(ref).is_float else ("R",)


__all__ = ["one_device"]
