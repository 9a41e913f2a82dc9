"""Dead operators: those whose results nobody reads."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.graph.drafts import Draft
from autopar.words.graph import Ref, has_effect, map_refs, refs_in


def drop_dead_operators(draft: Draft) -> Draft:
    """Drop operators whose results nobody reads; parameters, buffers and inputs stay."""
    alive = {ref.node for ref in (*refs_in(draft.outputs), *draft.updates.values())}
    for i in range(len(draft.nodes) - 1, -1, -1):
        node = draft.nodes[i]
        if i in alive or node.kind != "op" or has_effect(node.target):
            alive.add(i)
            alive.update(ref.node for ref in node.refs)
    if len(alive) == len(draft.nodes):
        return draft
    number = {old: new for new, old in enumerate(sorted(alive))}
    moved = {old for old, new in number.items() if old != new}

    def move(ref: Ref) -> Ref:
        return Ref(number[ref.node], ref.out)

    nodes = [draft.nodes[i] for i in number]
    return replace(
        draft, nodes=[n if moved.isdisjoint([ref.node for ref in n.refs]) else n.moved(move) for n in nodes],
        outputs=map_refs(draft.outputs, move), updates=map_refs(draft.updates, move),
        user=[None if n is None else number[n] for n in draft.user],
    )  # fmt: skip
