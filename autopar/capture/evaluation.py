"""What a model captured in training computes in eval mode.

The graph of training is kept, with its names and shapes, so that every plan of it stays one: dropout passes its input
on, batch norm reads its running statistics, and buffers stay as they are. Whether that is all that ``eval()`` changes
is seen by capturing the model again in eval mode, on a copy without values.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.capture import Captured
from autopar.errors import CaptureError, RunError
from autopar.graph import Graph, Node, Ref, map_refs
from autopar.rules.branch import BRANCH

DROPOUTS = ("aten.dropout.default", "aten.feature_dropout.default")
ATTENTION = "aten.scaled_dot_product_attention.default"
ATTENTION_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
MOST_LINES = 3
"""Lines with branches on random numbers up to which eval mode may go one way in one and the other way in another."""
NORMS = ("aten.batch_norm.default", "aten.instance_norm.default")


def evaluated(graph: Graph, sides: Mapping[str, int] | None = None) -> Graph:
    """The graph in eval mode.

    Args:
        sides: of branches on random numbers, by their line: 1 for the one where the condition is true, 0 for the other.
            Those that are not listed are decided by their numbers, as in training.
    """
    settled = sides or {}
    return replace(graph, nodes=tuple([_evaluated(node, settled) for node in graph.nodes]), updates={})


def _evaluated(node: Node, sides: Mapping[str, int]) -> Node:
    args, kwargs = list(node.args), dict(node.kwargs)
    if node.kind == "op" and node.target in DROPOUTS:
        args, kwargs = [args[0], args[1] if len(args) > 1 else kwargs["p"], False], {}
    elif node.kind == "op" and node.target == ATTENTION:
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        elif len(args) > 4:
            args[4] = 0.0
    elif node.target == BRANCH and node.source in sides:
        args = [*args[:3], sides[node.source]]
    elif node.kind == "op" and node.target in NORMS and isinstance(args[3], Ref):
        args[5] = False
    else:
        return node
    return replace(node, args=tuple(args), kwargs=kwargs)


class Skeleton:
    """A copy of a model without the values of its parameters, to capture it in eval mode later."""

    def __init__(self, model: torch.nn.Module) -> None:
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            value = parameter.detach().new_zeros(()).expand(parameter.shape)
            memo[id(parameter)] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
        self.model: torch.nn.Module | None
        try:
            self.model = copy.deepcopy(model, memo)
        except Exception as error:  # models may hold anything
            self.model, self.error = None, error

    def check(self, captured: Captured) -> dict[str, int]:
        """Refuse a model whose eval mode is another than :func:`evaluated` makes; the ``sides`` that it makes it with.

        Raises:
            RunError: it is, or it cannot be captured in eval mode.
        """
        hint = "parallelize model.eval() itself, and load this state_dict()"
        if self.model is None or captured.example is None:
            reason = "there is no example call" if self.model is not None else str(self.error)
            raise RunError(f"the model cannot be captured again in eval mode ({reason}); {hint}")
        try:
            eval_capture = captured.example.capture(self.model.eval())
        except CaptureError as error:
            raise RunError(f"the model cannot be captured in eval mode; {hint}\n{error}") from error
        theirs, said = _told(eval_capture.graph), ""
        for sides in _ways(captured.graph, eval_capture.graph):
            different = _difference(_told(evaluated(captured.graph, sides)), theirs)
            if not different and not eval_capture.graph.updates:
                return sides
            said = said or different
        raise RunError(f"in eval mode the model computes something else{said or ', or changes buffers'}; {hint}")


def _ways(graph: Graph, eval_graph: Graph) -> list[dict[str, int]]:
    """The ways that the branches of a graph may go in eval mode; those that are there too stay random."""
    lines = dict.fromkeys(n.source for n in graph.nodes if n.target == BRANCH)
    there = {n.source for n in eval_graph.nodes if n.target == BRANCH}
    settled = [line for line in lines if line not in there]
    if len(settled) > MOST_LINES:
        return [dict.fromkeys(settled, side) for side in (0, 1)]
    return [dict(zip(settled, sides, strict=True)) for sides in itertools.product((0, 1), repeat=len(settled))]


def _difference(mine: list[tuple[object, str]], theirs: list[tuple[object, str]]) -> str:
    """From where on two graphs compute something else; empty where they are the same."""
    for (a, what), (b, _) in zip(mine, theirs, strict=False):
        if a != b:
            return f" from {what} on"
    return "" if len(mine) == len(theirs) else ", or less"


def _told(graph: Graph) -> list[tuple[object, str]]:
    """What is computed for the outputs, operator by operator, without dtypes and inactive dropout."""
    same: dict[Ref, Ref] = {}
    for i, node in enumerate(graph.nodes):
        if node.kind == "op" and node.target in DROPOUTS:
            same[Ref(i)] = same.get(node.args[0], node.args[0])
        elif node.target == BRANCH and len(node.args) > 3:  # it is decided
            passed = node.args[1] if node.args[3] else node.args[2]
            same[Ref(i)] = same.get(passed, passed)
        elif node.target == "aten.clone.default" and graph.nodes[node.args[0].node].kind == "buffer":
            same[Ref(i)] = node.args[0]
    wanted: set[int] = set()
    todo = [r for r in graph.outputs if isinstance(r, Ref)]
    while todo:
        ref = todo.pop()
        ref = same.get(ref, ref)
        if ref.node not in wanted:
            wanted.add(ref.node)
            todo.extend(graph.nodes[ref.node].refs)
    number: dict[int, int] = {}
    told: list[tuple[object, str]] = []

    def seen(ref: Ref) -> object:
        ref = same.get(ref, ref)
        node = graph.nodes[ref.node]
        return ("made", number[ref.node], ref.out) if node.kind == "op" else (node.kind, node.target)

    for i in sorted(wanted):
        node = graph.nodes[i]
        if node.kind == "op":
            number[i] = len(number)
            shapes = tuple(None if s is None else s.shape for s in node.outs)
            told.append(((node.target, node.module, _plain(_call(node), seen), shapes), node.where))
    outs = [seen(r) if isinstance(r, Ref) else None for r in graph.outputs]
    return [*told, (str(outs), "its outputs")]


def _call(node: Node) -> dict[str, Any]:
    """Arguments by name or position; of attention those that are not the default."""
    named = {str(k): v for k, v in enumerate(node.args)}
    if node.target == ATTENTION:
        named = dict(zip(ATTENTION_NAMES, node.args, strict=False))
    named.update(node.kwargs)
    if node.target == ATTENTION:
        named = {k: v for k, v in named.items() if v is not None and v is not False and v != 0.0}
    return named


def _plain(call: dict[str, Any], seen: Any) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return None
        if isinstance(value, (tuple, list)):
            return [plain(v) for v in value]
        return value

    return str({k: plain(map_refs(v, seen)) for k, v in sorted(call.items())})


__all__ = ["Skeleton", "evaluated"]
