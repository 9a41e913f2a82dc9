"""The plan for one device, on which nothing is cut: the reference that programs are compared with."""

from __future__ import annotations

from autopar.plans.plan import ParamChoice, StagePlan, reshard_key
from autopar.plans.stage_graphs import first_op
from autopar.rules.option_names import WHOLE
from autopar.words.graph import Graph, Ref
from autopar.words.meshes import Mesh
from autopar.words.placements import INVARIANT, REPLICATED, State, whole_state


def one_device(graph: Graph) -> StagePlan:
    """Return the plan for a mesh of one device.

    A value with a complete gradient may also be read where no gradient comes back, and the other way round (a detached
    value, a branch without parameters): on one device that step is nothing.
    """
    whole, pending_gradient = State((INVARIANT,)), State((REPLICATED,))
    steps = ((whole, pending_gradient), (pending_gradient, whole))
    refs = [Ref(i, k) for i, n in enumerate(graph.nodes) for k in range(len(n.outs))]
    reshard_paths = {reshard_key(graph, ref): steps for ref in refs}
    mesh = Mesh.of(one=1)
    return StagePlan(
        graph.fingerprint, mesh,
        {n.name: (WHOLE,) for n in graph.nodes if n.kind == "op"},
        {n.target: ParamChoice(*(whole_state(mesh, n.needs_grad),) * 2) for _, n in graph.of_kind("param")},
        {n.target: whole_state(mesh) for _, n in graph.of_kind("buffer")},
        tuple(whole_state(mesh, _has_gradient(graph, o)) if isinstance(o, Ref) else None for o in graph.outputs),
        reshard_paths,
        {n.target: whole for _, n in graph.of_kind("input") if n.needs_grad}, first=first_op(graph), devices=(0,),
    )  # fmt: skip


def _has_gradient(graph: Graph, ref: Ref) -> bool:
    return graph.nodes[ref.node].needs_grad and graph.spec(ref).is_float
