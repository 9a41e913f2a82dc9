"""What a branch on whether a mask selects rows writes beside its rows: ``self.calls += 1`` in the forward of an expert.

Such a branch is entered always (:mod:`.selected_rows`). Its own lines do nothing but work on the rows, but modules that
they call may write to buffers. Those writes are made so that they change nothing if the mask selects no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.capture.graph.exported_nodes import name_of
from autopar.errors import CaptureError

aten = torch.ops.aten


def write_where_there_are_rows(
    graph: Graph, masks: Mapping[Node, Node], questions: Mapping[Node, Node], leaving: Mapping[Node, Node],
    of_rows: Collection[Node], emit: Callable[..., Node], refused: Callable[[Node, str], CaptureError],
) -> None:  # fmt: skip
    """Make the writes in branches that are entered where a mask selects rows conditional.

    Args:
        graph: the program.
        masks: the mask of every node that works on selected rows or finds them.
        questions: the masks for which the code asks whether they select any rows, and the node of the question, or the
            last one that was made before it.
        leaving: nodes at which selected rows become part of a tensor of all rows, and the mask that selects them.
        of_rows: nodes that write rows.
        emit: makes a node.
        refused: makes the error of a node.

    Raises:
        CaptureError: a write has no form that leaves the tensor as it is.
    """
    order = {node: k for k, node in enumerate(graph.nodes)}
    calls: dict[str, Node] = {}  # modules that a branch calls, and the mask that it asks for
    for node, mask in masks.items():
        if mask in questions:
            around = set(_modules(mask))
            calls.update({module: mask for module in _modules(node) if module not in around})
    spans = {mask: (order[question], order[question]) for mask, question in questions.items()}
    for node, mask in leaving.items():
        if mask in spans:
            spans[mask] = spans[mask][0], max(spans[mask][1], order[node])
    for node in list(graph.nodes):
        if node in of_rows or not writes(node):
            continue
        inside = next((calls[module] for module in reversed(_modules(node)) if module in calls), None)
        if inside is None:
            inside = next((mask for mask, (begin, end) in spans.items() if begin < order[node] < end), None)
        if inside is not None:
            with graph.inserting_before(node):
                _write_if_any(node, inside, emit, refused)


def _write_if_any(
    node: Node, mask: Node, emit: Callable[..., Node], refused: Callable[[Node, str], CaptureError]
) -> None:
    base: Any = node.args[0]
    packet, _, overload = name_of(node.target).removeprefix("aten.").partition(".")
    pure = getattr(getattr(aten, packet.removesuffix("_"), None), overload, None)
    if node.target is aten.copy_.default:
        new: Any = node.args[1]
    elif packet.endswith("_") and pure is not None:
        new = emit(pure, node.args, dict(node.kwargs))
    else:
        raise refused(node, f"'{node.target}' writes to more than")
    written = emit(aten.copy_.default, (base, emit(aten.where.self, (emit(aten.any.default, (mask,)), new, base))))
    node.replace_all_uses_with(written)
    node.graph.erase_node(node)


def _modules(node: Node) -> list[str]:
    """Return the calls of modules in which a node was made, from the outermost to the innermost."""
    return list(node.meta.get("nn_module_stack") or {})


def writes(node: Node) -> bool:
    """Check whether an operator writes to what it is given."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)
