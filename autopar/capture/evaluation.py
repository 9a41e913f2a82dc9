"""What a model captured in training computes in eval mode.

The graph of training is kept, with its names and shapes, so that every plan of it stays one: operators that are told
whether they are in training (dropout, batch norm, recurrent layers) are told that they are not, and buffers stay as
they are. Whether that is all that ``eval()`` changes is seen by capturing the model again in eval mode, on a copy
without values; if it is not, eval mode is another program (:mod:`autopar.runtime.variants.module_modes`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from autopar.capture import Captured
from autopar.capture.aliasing.schemas import named
from autopar.capture.normalize import DROPOUTS
from autopar.errors import CaptureError, RunError, first_few
from autopar.rules.families.branch import BRANCH
from autopar.words.autocasting import autocast_as
from autopar.words.graph import NORMS, PART, WAY, Graph, Node, Ref, map_refs

ATTENTION = "aten.scaled_dot_product_attention.default"
ATTENTION_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
MOST_LINES = 3
"""Lines with branches on random numbers up to which eval mode may go one way in one and the other way in another."""
MOST_NAMES = 4
"""Buffers that a message names."""
WRITES = "what is written first"
"""Stands among the sides of branches for whether eval mode writes the parameters that training writes first."""
FLAGS = ("train", "training", "use_input_stats")
"""What operators call the argument that says whether they are in training."""


def evaluated(graph: Graph, sides: Mapping[str, int] | None = None) -> Graph:
    """Return the graph in eval mode.

    ``sides`` has, for branches on random numbers by their line, 1 for the side of a true condition and 0 for the
    other; those that are not listed are decided by their numbers, as in training. Operators that stay in training
    (``F.dropout(x, 0.1)``, which no ``self.training`` turns off) have 1 by :func:`_place`. Under :data:`WRITES`, 0 says
    that nothing is written to parameters first.
    """
    settled = sides or {}
    before = graph.before if settled.get(WRITES, 1) else None
    updates = {name: ref for name, ref in graph.updates.items() if name.startswith((WAY, PART))}
    nodes = tuple([_evaluated(node, settled) for node in graph.nodes])
    return replace(graph, nodes=nodes, updates=updates, before=before)


def _evaluated(node: Node, sides: Mapping[str, int]) -> Node:
    if node.target == BRANCH and node.source in sides:
        return replace(node, args=(*node.args[:3], sides[node.source]))
    where = _training_argument(node.target) if node.kind == "op" else None
    if where is None or _place(node) in sides or (node.target in NORMS and not isinstance(node.args[3], Ref)):
        return node
    position, name = where
    off = 0.0 if node.target == ATTENTION else False
    if name in node.kwargs:
        return replace(node, kwargs={**node.kwargs, name: off})
    if position < len(node.args):
        return replace(node, args=(*node.args[:position], off, *node.args[position + 1 :]))
    return node


@cache
def _training_argument(target: str) -> tuple[int, str] | None:
    """Return position and name of the argument that says whether an operator is in training; None without one.

    Attention has none, but a probability of dropout, which is 0 in eval mode.
    """
    if target == ATTENTION:
        return ATTENTION_NAMES.index("dropout_p"), "dropout_p"
    op = named(target)
    arguments = op._schema.arguments if op is not None else ()
    return next(((i, a.name) for i, a in enumerate(arguments) if a.name in FLAGS), None)


def _in_training(node: Node) -> bool:
    """Check whether an operator is told that it is in training."""
    where = _training_argument(node.target) if node.kind == "op" else None
    if where is None:
        return False
    position, name = where
    return bool(node.kwargs.get(name, node.args[position] if position < len(node.args) else False))


def _place(node: Node) -> str:
    """Return operator, module and line of a call: calls that agree in these stay in training together."""
    return f"{node.target} in '{node.module}' at {node.source}"


class OtherGraphError(RunError):
    """A model computes something in eval mode that :func:`evaluated` does not make of its training."""


def sides_in_eval_mode(model: torch.nn.Module, captured: Captured) -> dict[str, int]:
    """Refuse a model whose eval mode is another than :func:`evaluated` makes; return the ``sides`` for it.

    Raises:
        OtherGraphError: it is. RunError: it cannot be captured in eval mode.
    """
    hint = "parallelize model.eval() itself, and load this state_dict()"
    if captured.example is None:
        raise RunError(f"the model cannot be captured again in eval mode (there is no example call); {hint}")
    modes = [(module, module.training) for module in model.modules()]
    try:
        with autocast_as(captured.autocast):
            eval_capture = captured.example.capture(model.eval())
    except CaptureError as error:
        raise RunError(f"the model cannot be captured in eval mode; {hint}\n{error}") from error
    finally:  # it may be the caller's own model
        for module, mode in modes:
            module.training = mode
    theirs, said = _told(eval_capture.graph), ""
    changes = list(eval_capture.graph.written)
    mine, theirs_first = captured.graph.before, eval_capture.graph.before
    if theirs_first is not None and (mine is None or mine.fingerprint != theirs_first.fingerprint):
        changes += theirs_first.updates
    no_writes = {WRITES: 0} if mine is not None and theirs_first is None else {}
    for sides in (way | no_writes for way in _ways(captured.graph, eval_capture.graph)):
        different = _difference(_told(evaluated(captured.graph, sides)), theirs)
        if not different and not changes:
            return sides
        said = said or different
    written = f", and writes to {first_few([repr(name) for name in changes], MOST_NAMES)}" if changes else ""
    raise OtherGraphError(f"in eval mode the model computes something else{said}{written}; {hint}")


def _ways(graph: Graph, eval_graph: Graph) -> list[dict[str, int]]:
    """Return the possible answers of branches that eval mode settles; branches that eval mode keeps stay random.

    Each includes the operators that remain in training mode there.
    """
    stay = {_place(n): 1 for n in eval_graph.nodes if _in_training(n)}
    lines = dict.fromkeys(n.source for n in graph.nodes if n.target == BRANCH)
    there = {n.source for n in eval_graph.nodes if n.target == BRANCH}
    settled = [line for line in lines if line not in there]
    if len(settled) > MOST_LINES:
        return [stay | dict.fromkeys(settled, side) for side in (0, 1)]
    return [stay | dict(zip(settled, sides, strict=True)) for sides in itertools.product((0, 1), repeat=len(settled))]


def _difference(mine: list[tuple[object, str]], theirs: list[tuple[object, str]]) -> str:
    """Return the place from which two graphs differ; empty if they are the same."""
    for (a, what), (b, _) in zip(mine, theirs, strict=False):
        if a != b:
            return f" from {what} on"
    return "" if len(mine) == len(theirs) else ", or less"


def _told(graph: Graph) -> list[tuple[object, str]]:
    """Return the calls that the outputs follow from, in order, without dtypes and inactive dropout."""
    same: dict[Ref, Ref] = {}
    for i, node in enumerate(graph.nodes):
        if node.kind == "op" and node.target in DROPOUTS and not _in_training(node):
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
    """Return the arguments by name or position; of attention those that are not the default."""
    named = {str(k): v for k, v in enumerate(node.args)}
    if node.target == ATTENTION:
        named = dict(zip(ATTENTION_NAMES, node.args, strict=False))
    named.update(node.kwargs)
    if node.target == ATTENTION:
        named = {k: v for k, v in named.items() if v is not None and v is not False and v != 0.0}
    return named


def _plain(call: dict[str, Any], seen: Any) -> str:
    def plain(value: object) -> Any:
        if isinstance(value, torch.dtype):
            return None
        if isinstance(value, (tuple, list)):
            return [plain(v) for v in value]
        return value

    return str({k: plain(map_refs(v, seen)) for k, v in sorted(call.items())})
