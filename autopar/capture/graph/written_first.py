"""Trained parameters that a forward writes before it reads them: masked weights, a bounded scale, unit prototypes.

Such a write happens before the program runs: the parameter has the new value then, as it has in eager mode, and the
program reads it like any other. That is equivalent wherever the new value follows from parameters and buffers alone,
and nobody reads the old one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.capture.aliasing.schemas import seeded
from autopar.capture.graph.dead_operators import has_effect
from autopar.capture.graph.drafts import Draft, Refusal
from autopar.rules.families.value_without_history import WITH_VALUE
from autopar.rules.function import PREFIX
from autopar.words.graph import Graph, Node, Ref, map_refs, refs_in

DETACH = "aten.detach.default"
FROM_BATCH = (
    "requires_grad_(False) it, keep it as a buffer, or change it outside; what only a first call writes is there once "
    "the model has been called, before this"
)
READ_BEFORE = (
    "write to it before anything of the forward reads it, or after the optimizer's step; or compute with the new value "
    "(w = self.weight * self.mask) and write nothing"
)


def write_parameters_first(draft: Draft) -> Draft:
    """Move the writes of the forward to trained parameters before the program.

    Raises:
        CaptureError: a new value depends on inputs, is drawn, or the old one is read.
    """
    nodes, updates, refusals = draft.nodes, draft.updates, draft.refusals
    trained = {name: updates[name] for name in refusals if name in updates}
    if not trained:
        return draft
    rest = {name: ref for name, ref in updates.items() if name not in trained}
    first = {node.target: Ref(i) for i, node in enumerate(nodes) if node.kind == "param"}
    new = {first[name]: ref for name, ref in trained.items()}
    makers: set[int] = set()
    for name, ref in trained.items():
        of_value = _ancestors(nodes, [ref])
        _check_known_before(nodes, of_value, refusals[name])
        makers |= of_value
    program = _reading_new(nodes, new)

    def move(ref: Ref) -> Ref:
        return _as_param(nodes, new, ref) or ref

    outputs, rest = map_refs(draft.outputs, move), {name: move(ref) for name, ref in rest.items()}
    alive = _ancestors(program, [*refs_in(outputs), *rest.values()])
    alive |= {i for i, node in enumerate(program) if has_effect(node.target)}
    reads = [*refs_in(draft.outputs), *(updates[name] for name in rest)]
    for i in alive - makers:
        reads += [ref for k, ref in enumerate(nodes[i].refs) if not (_is_write(nodes[i]) and k == 1)]
    old = _old_values(nodes, makers, new)
    for ref in reads:
        if ref.node in old and _as_param(nodes, new, ref) is None:
            name = nodes[old[ref.node]].target
            raise refusals[name]("and reads it before", READ_BEFORE)
    return replace(draft, nodes=program, outputs=outputs, updates=rest, before=_alone(nodes, makers, trained))


def _is_write(node: Node) -> bool:
    """Check whether a node gives a value with another's history."""
    return node.kind == "op" and node.target == WITH_VALUE


def _as_param(nodes: Sequence[Node], new: Mapping[Ref, Ref], ref: Ref) -> Ref | None:
    """Return the parameter whose new value, with its gradient, a tensor is; None for other tensors."""
    if not _is_write(nodes[ref.node]):
        return None
    value, history = nodes[ref.node].args
    while _is_write(nodes[history.node]):
        history = nodes[history.node].args[1]
    while value != new.get(history) and nodes[value.node].target == DETACH:
        value = nodes[value.node].args[0]
    return history if value == new.get(history) else None


def _reading_new(nodes: Sequence[Node], new: Mapping[Ref, Ref]) -> list[Node]:
    """Return the nodes, reading the parameters in place of their new values."""
    program = list(nodes)
    for param, value in new.items():
        made = nodes[value.node]
        if _is_replaced(made):
            program[value.node] = replace(made, target=DETACH, args=(param,), kwargs={}, needs_grad=False, hot=True)

    def move(ref: Ref) -> Ref:
        return _as_param(nodes, new, ref) or ref

    return [node.moved(move) if node.kind == "op" and node.refs else node for node in program]


def _ancestors(nodes: Sequence[Node], refs: Sequence[Ref]) -> set[int]:
    """Return the nodes that values follow from."""
    found: set[int] = set()
    todo = [ref.node for ref in refs]
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            todo.extend(r.node for r in nodes[i].refs)
    return found


def _check_known_before(nodes: Sequence[Node], ancestors: set[int], refused: Refusal) -> None:
    """Refuse a new value that follows from the batch, or differs between calls."""
    for node in (nodes[i] for i in sorted(ancestors)):
        if node.kind == "input":
            raise refused("by values of the batch", FROM_BATCH)
        if node.kind == "op" and (seeded(node.target) or has_effect(node.target) or node.target.startswith(PREFIX)):
            raise refused(f"by what {node.where} gives, which another call gives otherwise", FROM_BATCH)


def _old_values(nodes: Sequence[Node], makers: set[int], new: Mapping[Ref, Ref]) -> dict[int, int]:
    """Return the nodes that are, or follow from, parameters before they are written, each with such a parameter.

    Nodes that the program replaces are left out.
    """
    old = {param.node: param.node for param in new}
    for i in sorted(makers):
        from_old = next((old[r.node] for r in nodes[i].refs if r.node in old), None)
        if nodes[i].kind == "op" and from_old is not None:
            old[i] = from_old
    replaced = {value.node for value in new.values() if _is_replaced(nodes[value.node])}
    return {i: param for i, param in old.items() if i not in replaced}


def _is_replaced(made: Node) -> bool:
    """Check whether readers of a new value can read the parameter instead."""
    return made.kind == "op" and len(made.outs) == 1


def _alone(nodes: Sequence[Node], makers: set[int], trained: Mapping[str, Ref]) -> Graph:
    """Return the graph that computes the new values, and nothing else."""
    number = {i: k for k, i in enumerate(sorted(makers))}

    def move(ref: Ref) -> Ref:
        return Ref(number[ref.node], ref.out)

    kept = [nodes[i].moved(move) if nodes[i].refs else nodes[i] for i in sorted(makers)]
    return Graph(tuple(kept), (), None, {}, {name: move(ref) for name, ref in trained.items()})
