"""Graphs of the same structure share a plan: it is solved for one and written for the other with its names.

Middle stages of a pipeline differ in the names of their layers only.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from autopar.plans.plan import StagePlan, reshard_key
from autopar.words.graph import Graph, Ref


def structure(graph: Graph) -> str:
    """Return a hash that is equal for graphs that differ in names alone."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        target = node.target if node.kind == "op" else ""
        digest.update(
            f"{node.kind}|{target}|{node.args}|{node.kwargs}|{node.outs}|{node.needs_grad}|{node.hot}\n".encode()
        )
    updates = sorted((ref.node, ref.out) for ref in graph.updates.values())
    digest.update(f"{graph.outputs}|{graph.loss}|{graph.sends}|{updates}".encode())
    # how many peers there are, and what comes from and goes to the same: that is received ahead one after the other
    sources = list(dict.fromkeys(graph.arriving.values()))
    targets = list(dict.fromkeys(stage for stages in graph.targets for stage in stages))
    came = [sources.index(stage) for stage in graph.arriving.values()]
    goes = [[targets.index(stage) for stage in stages] for stages in graph.targets]
    digest.update(f"{came}|{goes}".encode())
    return digest.hexdigest()


def transplant(plan: StagePlan, source: Graph, target: Graph) -> StagePlan:
    """Return the plan of ``source`` for ``target``, which has the same :func:`structure`."""
    nodes = list(zip(source.nodes, target.nodes, strict=True))
    ops = {a.name: b.name for a, b in nodes if a.kind == "op"}
    names = {kind: {a.target: b.target for a, b in nodes if a.kind == kind} for kind in ("param", "buffer", "input")}
    reshard_paths = {
        reshard_key(source, Ref(i, k)): reshard_key(target, Ref(i, k))
        for i, node in enumerate(source.nodes) for k in range(len(node.outs))
    }  # fmt: skip
    return replace(
        plan,
        fingerprint=target.fingerprint,
        first=ops.get(plan.first, ""),
        ops={ops[name]: cut for name, cut in plan.ops.items()},
        params={names["param"][name]: choice for name, choice in plan.params.items()},
        buffers={names["buffer"][name]: state for name, state in plan.buffers.items()},
        inputs={names["input"][name]: state for name, state in plan.inputs.items()},
        reshard_paths={reshard_paths[key]: steps for key, steps in plan.reshard_paths.items()},
        memory={
            name: tuple(reshard_paths[e] if isinstance(e, str) else (ops[e[0]], ops[e[1]]) for e in entries)
            for name, entries in plan.memory.items()
        },
    )
