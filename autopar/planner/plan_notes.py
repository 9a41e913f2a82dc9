"""Notes of a plan: operators without a rule, large masks, statistics of microbatches, the next best layouts."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.microbatches import ATTENTION, taken_of_batch
from autopar.planner.inter_op.stage_search import Planned
from autopar.planner.intra_op.building.matrix_prices import pieces_of
from autopar.plans.plan import Plan
from autopar.plans.stepped_by import matrices_of
from autopar.rules.discovery import why_not_found
from autopar.rules.registry import rules_of, source_of_rule
from autopar.words.graph import Graph
from autopar.words.texts import show_bytes, show_seconds
from cost_models.matrix_steps import WholeMatrix, loads, newton_schulz_flops
from cost_models.optimizer_bytes import MUON

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


def notes_on_matrices(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """Return a note on how steps on whole matrices are spread over ranks, of the stage where that is most uneven."""
    found = [(node.target, node.out.shape) for _, node in matrices_of(graph, plan.optimizer)]
    if plan.optimizer != MUON:
        return ()
    uneven, text = 0.0, ""
    for stage in plan.stages:
        matrices = [
            WholeMatrix(shape, pieces_of(stage.params[name].stored, stage.mesh), newton_schulz_flops(shape))
            for name, shape in found if name in stage.params
        ]  # fmt: skip
        of_buckets = loads(matrices, len(stage.devices))
        most, mean = (sum(load[k] for load in of_buckets) for k in (0, 1))
        if mean and most / mean > uneven:
            uneven = most / mean
            there, back = (sum(load[k] for load in of_buckets) for k in (2, 3))
            text = (
                f"over {len(stage.devices)} ranks, of which the busiest computes {uneven:.2f} times the average, gets "
                f"{show_bytes(there)} for it and sends {show_bytes(back)}"
            )
    others = "embeddings, the last layer and other parameters are counted as AdamW's"
    return (f"muon: {len(found)} matrices are spread {text}; {others}" if text else f"muon: no matrices; {others}",)


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
