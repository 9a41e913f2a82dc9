"""Branches that are entered only where a mask selects rows, and the parameters that are read in nothing else.

``if mask.any(): out[mask] = expert(x[mask])`` leaves the gradients of ``expert`` as they were where the mask selects
nothing. A program computes all rows always (:mod:`.selected_rows`); which parameters the gradient would have come to is
noted for it (:mod:`autopar.capture.trace.unused_parameters`).

A gradient comes from the outputs to a parameter along the operators between them. All that comes to selected rows
passes where they are added to a tensor, or put in it, and there only if the mask selects any. So for every value there
is a set of masks, one of which has to select rows for a gradient to come there, or :data:`ALWAYS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.capture.branches.data_branches import TAKEN
from autopar.capture.graph.conditional_writes import writes
from autopar.capture.graph.drafts import TracedProgram
from autopar.capture.graph.expert_turns import routing
from autopar.capture.graph.exported_nodes import flat, name_of
from autopar.capture.passes import PROGRAM, Pass, register
from autopar.capture.trace.unused_parameters import TOOK_PART

aten = torch.ops.aten
ALWAYS = "always"
PASSES_NOTHING = ("aten.detach.default", TAKEN, TOOK_PART)
Emit = Callable[..., Node]


def note_parameters_taking_part(program: TracedProgram) -> None:
    """Note which parameters take part in a call only where masks select rows."""
    if (rows := program.rows) is None:
        return
    graph, leaving, emit = program.graph, rows.leaving, rows.emit
    parameters = program.exported.graph_signature.inputs_to_parameters
    reached = _reached_by(graph, leaving, set(rows.asked))
    masks_of = {
        node: reached[node] for node in graph.nodes
        if node.op == "placeholder" and node.name in parameters and reached[node] and ALWAYS not in reached[node]
    }  # fmt: skip
    order = {node: k for k, node in enumerate(graph.nodes)}
    last = {mask: node for node, mask in sorted(leaving.items(), key=lambda item: order[item[0]])}
    groups: dict[object, list[Node]] = {}
    for mask in sorted({mask for masks in masks_of.values() for mask in masks}, key=lambda mask: order[mask]):
        compared = routing(mask)
        groups.setdefault(mask if compared is None else compared[0], []).append(mask)
    for masks in groups.values():
        place = max((last[mask] for mask in masks), key=lambda node: order[node])
        with graph.inserting_before(place):
            taken, element = _taken(masks, partial(_emitted_at, place, emit))
            pairs = [(param, element[mask]) for param, of in masks_of.items() for mask in masks if mask in of]
            args = (taken, [param for param, _ in pairs], [e for _, e in pairs])
            _emitted_at(place, emit, torch.ops.autopar.took_part.default, args)


def _emitted_at(place: Node, emit: Emit, *call: object) -> Node:
    """Make a node in the module and at the line of another."""
    emitted = emit(*call)
    emitted.meta = {**place.meta, "val": emitted.meta["val"]}
    return emitted


def _taken(masks: list[Node], emit: Emit) -> tuple[Node, dict[Node, int]]:
    """Check whether each mask selects any rows, bool [n], and the element of each."""
    numbers = [compared[1] for mask in masks if (compared := routing(mask)) is not None]
    first = masks[0]
    if first.target is aten.eq.Scalar and numbers == list(range(len(masks))):  # of one tensor of numbers: all at once
        of_rows = emit(aten.reshape.default, (first.args[0], [1, -1]))
        device = first.meta["val"].device
        expert = emit(aten.arange.start_step, (0, len(masks), 1), {"dtype": torch.int64, "device": device})
        hits = emit(aten.eq.Tensor, (of_rows, emit(aten.reshape.default, (expert, [-1, 1]))))
        return emit(aten.any.dim, (hits, 1)), {mask: k for k, mask in enumerate(masks)}
    each = [emit(aten.any.default, (mask,)) for mask in masks]
    return emit(aten.stack.default, (each,)), {mask: k for k, mask in enumerate(masks)}


def _reached_by(graph: Graph, leaving: Mapping[Node, Node], asked: set[Node]) -> dict[Node, frozenset[Any]]:
    """Return, by node, the masks of which one must select rows for a gradient to reach it; empty if none can."""
    reached: dict[Node, frozenset[Any]] = {}
    always = frozenset([ALWAYS])
    for node in reversed(graph.nodes):
        if node.op == "output":
            reached[node] = always
            continue
        masks: frozenset[Any] = frozenset().union(*(_passed(user, reached, leaving, asked) for user in node.users))
        if writes(node):  # other views of what it writes to may be read
            masks = always
        reached[node] = masks
    return reached


def _passed(
    user: Node, reached: Mapping[Node, frozenset[object]], leaving: Mapping[Node, Node], asked: set[Node]
) -> frozenset[Any]:
    """Return the masks under which a reader of a value passes its gradient on."""
    masks = reached[user]
    if not masks or (user.op == "call_function" and not _is_differentiable(user)):
        return frozenset()
    mask = leaving.get(user)
    return frozenset([mask]) if mask in asked else masks


def _is_differentiable(node: Node) -> bool:
    if name_of(node.target) in PASSES_NOTHING:
        return False
    values = flat(node.meta.get("val"))
    return any(not isinstance(v, torch.Tensor) or v.is_floating_point() or v.is_complex() for v in values)


register(
    Pass("parameters_taking_part", PROGRAM, note_parameters_taking_part,
         "an expert without rows has no gradient in eager mode", ("selected_rows",)),
)  # fmt: skip
