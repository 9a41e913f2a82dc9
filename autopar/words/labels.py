"""The names of operators, as plan files, pins and reports write them."""

from __future__ import annotations

from fnmatch import fnmatchcase

from autopar.words.graph import Graph, Node


def op_labels(graph: Graph) -> dict[str, str]:
    """Return ``{node name: label}`` of every op; a label is ``module:op``, numbered where a module has several."""
    seen: dict[str, int] = {}
    labels: dict[str, str] = {}
    for node in graph.nodes:
        if node.kind == "op":
            base = f"{node.module}:{node.target.split('.')[1]}"
            count = seen.get(base, 0)
            seen[base] = count + 1
            labels[node.name] = base if count == 0 else f"{base}.{count}"
    return labels


def common_depth(before: str, after: str) -> int:
    """Return how many modules are around both of two paths: the fewer, the more of a model's structure lies between.

    ``layers.0.mlp`` and ``layers.1.norm`` have one in common, ``layers.0.attn`` and ``layers.0.norm`` two.
    """
    depth = 0
    for a, b in zip(before.split("."), after.split("."), strict=False):
        if a != b or not a:
            break
        depth += 1
    return depth


def matches(pattern: str, node: Node, label: str) -> bool:
    """Return whether a pattern names an op: by label, by the path of its module, or by node name."""
    return fnmatchcase(label, pattern) or fnmatchcase(node.module, pattern) or node.name == pattern
