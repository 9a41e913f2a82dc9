"""Regions without gradients in which rows that a mask selects are worked on, written out among the other operators.

``with torch.no_grad(): self.seen.index_add_(0, rows, ones)`` is one node of an exported program, with a graph of its
own. What becomes of selected rows (:mod:`.selected_rows`) is followed operator by operator, so such a region is written
out; what it reads is detached, since no gradient comes to it from there.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autopar.capture.graph.conditional_writes import writes
from autopar.capture.graph.drafts import TracedProgram
from autopar.capture.graph.exported_nodes import flat, is_symbolic, name_of
from autopar.capture.graph.rows_of_graph import selects
from autopar.capture.passes import PROGRAM, Pass, register

aten = torch.ops.aten
REGION = "wrap_with_set_grad_enabled"


def inline_regions_of_rows(program: TracedProgram) -> None:
    """Write out the regions of a program with selected rows that select rows, are given some, or write."""
    module = program.exported.graph_module
    if not any(node.op == "call_function" and selects(node) for node in module.graph.nodes):
        return
    for node in list(module.graph.nodes):
        if node.op != "call_function" or REGION not in name_of(node.target) or node.args[0]:
            continue
        body = getattr(module, str(node.args[1].target), None)
        if isinstance(body, GraphModule) and _of_rows(node, body):
            _write_out(node, body)


def _of_rows(region: Node, body: GraphModule) -> bool:
    given = [v for n in region.all_input_nodes for v in flat(n.meta.get("val"))]
    if any(n.op == "get_attr" for n in body.graph.nodes):  # regions inside of it
        return False
    return is_symbolic([tuple(v.shape) for v in given if isinstance(v, torch.Tensor)]) or is_symbolic(
        [v for v in given if not isinstance(v, torch.Tensor)]
    ) or any(n.op == "call_function" and (selects(n) or writes(n)) for n in body.graph.nodes)  # fmt: skip


def _write_out(region: Node, body: GraphModule) -> None:
    graph = region.graph
    value: dict[Node, Any] = {}
    given = iter(region.args[2:])
    with graph.inserting_before(region):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                value[node] = _detached(next(given))
            elif node.op == "output":
                results: Any = torch.fx.node.map_arg(node.args[0], lambda n: value[n])
            else:
                value[node] = graph.node_copy(node, lambda n: value[n])
    for user in list(region.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(region)


def _detached(given: Any) -> Any:
    """Detach a value that requires a gradient; return others as they are."""
    val = given.meta.get("val") if isinstance(given, Node) else None
    if not isinstance(val, torch.Tensor) or not val.requires_grad:
        return given
    detached = given.graph.call_function(aten.detach.default, (given,))
    detached.meta = {**given.meta, "val": val.detach()}
    return detached


register(
    Pass("inlined_regions", PROGRAM, inline_regions_of_rows,
         "selected rows are followed operator by operator, also into regions without gradients"),
    before="selected_rows",
)  # fmt: skip
