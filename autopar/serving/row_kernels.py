"""Kernels of operators on rows: norms, activations, rotary embeddings, residuals, as an engine fuses them.

Operators that are bound by memory and stand between the same products are one kernel where they are joined: it reads
what comes from outside, and writes what is read outside.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.rules.operator_work import FUSED
from autopar.serving.attention_calls import rules_by_number
from autopar.words.graph import Graph, Ref
from cost_models.operator_cost import COMPUTE_KINDS


@dataclass(frozen=True)
class RowKernel:
    """Operators on rows that run as one.

    Attributes:
        path: module of the last one.
        moved: tensors that it reads or writes, of activations.
    """

    path: str
    moved: tuple[Ref, ...]


def row_kernels(graph: Graph, tokens: int) -> list[RowKernel]:
    """Return the kernels on rows of a graph of one request of so many tokens, without those inside of attention."""
    rules, group_of = rules_by_number(graph), _groups(graph, tokens)
    members: dict[int, list[int]] = {}
    for i in group_of:
        members.setdefault(_root(group_of, i), []).append(i)
    kernels = []
    given = {ref.node for ref in graph.outputs if isinstance(ref, Ref)}
    for nodes in members.values():
        inside = set(nodes)
        if all((rule := rules[i]) is None or rule.kind == "none" for i in nodes):
            continue
        reads = [
            ref for i in nodes for ref in graph.nodes[i].refs
            if ref.node in graph.from_inputs and ref.node not in inside and graph.nodes[ref.node].hot
        ]  # fmt: skip
        writes = [
            Ref(i, k) for i in nodes for k, spec in enumerate(graph.nodes[i].outs) if spec is not None
            and (i in given or any(reader not in inside for reader, _ in graph.consumers.get(Ref(i, k), ())))
        ]  # fmt: skip
        kernels.append(RowKernel(graph.nodes[nodes[-1]].module, tuple(dict.fromkeys((*reads, *writes)))))
    return kernels


def _groups(graph: Graph, tokens: int) -> dict[int, int]:
    """Return for each operator on rows another one of its kernel, at last one that stands for itself."""
    rules = rules_by_number(graph)
    depth: dict[int, int] = {}
    parent: dict[int, int] = {}
    for i, node in graph.of_kind("op"):
        rule = rules[i]
        before = max((depth.get(ref.node, 0) for ref in node.refs), default=0)
        depth[i] = before + (rule is not None and rule.kind in COMPUTE_KINDS)
        scores = any(spec is not None and spec.shape.count(tokens) > 1 for spec in node.outs)
        if rule is None or not node.hot or scores or i not in graph.from_inputs:
            continue
        if rule.kind == "none" or rule.kind in FUSED:
            parent[i] = i
            for ref in node.refs:
                if ref.node in parent and depth[ref.node] == depth[i]:
                    parent[_root(parent, ref.node)] = i
    return parent


def _root(parent: dict[int, int], i: int) -> int:
    while parent[i] != i:
        i = parent[i]
    return i
