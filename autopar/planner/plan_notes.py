"""Notes of a plan: operators without a rule, large masks, statistics of microbatches, the next best layouts."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.microbatches import ATTENTION, taken_of_batch
from autopar.planner.inter_op.stage_search import Planned
from autopar.plans.plan import Plan
from autopar.rules.discovery import why_not_found
from autopar.rules.registry import rules_of, source_of_rule
from autopar.words.graph import Graph
from autopar.words.texts import show_bytes, show_seconds

ROUNDING = 1e-9
"""Two sums of the same prices differ by less than this part."""
MASK = 3
"""Position of the mask among the tensors of an attention."""
LARGE_MASKS_BYTES = 2**28
"""Masks from which on a plan tells of them: those of 16,384 places."""
NEXT_BEST = 3
"""Ways that the notes of a plan name."""
NEXT_WORDS = "next best"
"""The beginning of notes that name the next best layouts."""


def notes_on(graph: Graph) -> tuple[str, ...]:
    """Return the notes of any plan for this model."""
    notes: dict[str, str] = {}
    for node, rule in zip(graph.nodes, rules_of(graph), strict=True):
        source = "written" if rule is None else source_of_rule(node, rule)
        if source == "none":
            why = f" (it {text})" if (text := why_not_found(node, graph)) else ""
            notes[node.target] = f"no rule for {node.target}: replicated{why}"
        elif source == "discovered" and node.target not in notes:
            notes[node.target] = f"no rule for {node.target}: found by trying it on small tensors: {rule}"
    return (*(notes[target] for target in sorted(notes)), *_note_on_masks(graph))


def _note_on_masks(graph: Graph) -> tuple[str, ...]:
    """Return a note on the bytes of computed attention masks, as large as all queries by all keys."""
    masks = {node.refs[MASK] for node in graph.nodes if node.target == ATTENTION and len(node.refs) > MASK}
    specs = [graph.spec(mask) for mask in masks if graph.nodes[mask.node].kind == "op"]
    n_bytes = sum(spec.n_bytes for spec in specs)
    if n_bytes < LARGE_MASKS_BYTES:
        return ()
    largest = max(specs, key=lambda spec: spec.n_bytes)
    return (
        f"attention: {len(specs)} mask(s) of queries by keys, the largest {list(largest.shape)}, take "
        f"{show_bytes(n_bytes)} in all, included in the memory; ranks that shard the sequence make only their rows, "
        "and the work that a mask hides is not skipped",
    )


def with_note_on_statistics(plan: Plan, graph: Graph) -> Plan:
    """Add a note about statistics that are computed per microbatch instead of per batch."""
    taken = taken_of_batch(graph) if plan.microbatches > 1 else ""
    if not taken:
        return plan
    said = f"{taken}: each of the {plan.microbatches} microbatches has its own; with another number, training differs"
    return replace(plan, notes=(*plan.notes, said))


def next_best(planned: Planned) -> list[str]:
    """Return notes on the layouts that came next."""
    best = planned.plan.seconds
    others = dict(reversed([t for t in planned.tried if t[1] > best * (1 + ROUNDING)]))
    layouts = sorted(others.items(), key=lambda t: t[1])[:NEXT_BEST]
    return [
        f"{NEXT_WORDS}: {what}, {show_seconds(seconds)} a step ({seconds / best - 1:+.1%})" for what, seconds in layouts
    ]
