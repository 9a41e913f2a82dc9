"""Cards of the model's blocks, coloured by how their operators are sharded.

Stages with equal decisions are shown once, and of a stage its equal blocks: 126 layers in 112 stages are a handful of
cards. A card opens to a table of its operators.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from autopar.planner.intra_op.building.price import pricer
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.stage_graphs import StageGraph
from autopar.report.block_names import block_title
from autopar.report.page.markup import bar, filled, joined, table
from autopar.report.rows import BlockRows, OpRow, ParamRow, block_rows, param_rows
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.texts import show_bytes, show_seconds
from cost_models.schedules import Timeline
from hardware_profiles import Cluster

COLOURS = (
    ("c-0", "sharded along dim 0 (often the batch)"), ("c-1", "sharded along dim 1 (often tokens or heads)"),
    ("c-2", "sharded along dim 2 (often features)"), ("c-3", "sharded along a later dim"),
    ("c-sum", "partial sums"), ("c-whole", "replicated"),
)  # fmt: skip


@dataclass(frozen=True)
class StageCards:
    """Stages that look the same: their numbers, and the rows of the first one."""

    numbers: list[int]
    stage: StagePlan
    blocks: list[BlockRows]
    params: list[ParamRow]


def colour(row: OpRow, mesh: Mesh, axis: int) -> str:
    """Return the CSS class of an operator on an axis: the placement of its first output."""
    name, size = mesh[axis]
    if name not in row.cuts or size == 1 or not row.outs:
        return "c-whole"
    placement = State.parse(row.outs[0], mesh, row.label)[axis]
    if placement.is_shard:
        return f"c-{min(3, placement.dim or 0)}"
    return "c-whole" if placement.is_replicated else "c-sum"


def stage_cards(graphs: Sequence[StageGraph], plan: Plan, cluster: Cluster) -> list[StageCards]:
    """Return the cards of all stages; stages that look the same share one."""
    by_look: dict[object, StageCards] = {}
    for part, stage in zip(graphs, plan.stages, strict=True):
        look = _look(part.graph, stage)
        if look in by_look:
            by_look[look].numbers.append(part.number)
            continue
        priced = pricer(cluster, stage.mesh, stage.devices)
        blocks = block_rows(part.graph, stage, priced)
        by_look[look] = StageCards([part.number], stage, blocks, param_rows(part.graph, stage, priced))
    return list(by_look.values())


def _look(graph: Graph, stage: StagePlan) -> object:
    """Return a key shared by stages that look the same: everything but the numbers in names."""

    def plain(name: str) -> str:
        return re.sub(r"\d+", "*", name)

    ops = tuple((n.target, plain(n.module), n.outs, stage.ops[n.name]) for n in graph.nodes if n.kind == "op")
    params = tuple((plain(name), choice) for name, choice in stage.params.items())
    reshard_paths = tuple((plain(name), steps) for name, steps in stage.reshard_paths.items())
    return stage.mesh, ops, params, reshard_paths, len(stage.recompute), stage.price.seconds


def model_section(
    cards: Sequence[StageCards], plan: Plan, timeline: Timeline, lists: Mapping[str, str]
) -> Markup:
    """Return all cards as HTML; ``lists`` are the names of the model's lists of blocks."""
    longest = max((_seconds(b) for c in cards for b in c.blocks), default=0.0)
    return joined(_stage(card, plan, timeline, longest, lists) for card in cards)


def _stage(card: StageCards, plan: Plan, timeline: Timeline, longest: float, lists: Mapping[str, str]) -> Markup:
    first, n, times = card.numbers[0], len(card.numbers), timeline.times
    facts = f"{card.stage.mesh.shown() or 'one device'}, {_devices(card.stage.devices)}" + (
        f" and {n - 1} more groups or turns" if n > 1 else ""
    )
    spent = (
        f"forward {show_seconds(times.forward_seconds[first])}, backward "
        f"{show_seconds(times.backward_seconds[first])} a microbatch"
    )
    where = f" (in stage {first})" if n > 1 else ""
    blocks = joined(
        _block(b, (block_title(lists, b) or "operators outside of modules") + where, card.stage.mesh, longest)
        for b in card.blocks
    )
    heading = Markup("") if len(plan.stages) == 1 else filled("<h3>{}</h3>", _stage_words(card.numbers))
    return filled(
        '<section class="stage">{}<p class="muted">{}; {}</p>{}{}</section>', heading, facts, spent, blocks,
        _params(card),
    )  # fmt: skip


def _stage_words(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"stage {numbers[0]}"
    whole = list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    some = f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers[:12]))
    more = "" if whole or len(numbers) <= 12 else f" and {len(numbers) - 12} more"
    return f"stages {some}{more}: {len(numbers)} alike"


def _devices(devices: Sequence[int]) -> str:
    if len(devices) == 1:
        return f"device {devices[0]}"
    return f"devices {devices[0]} to {devices[-1]} ({len(devices)})"


def _seconds(block: BlockRows) -> float:
    return sum(op.compute_seconds + op.collective_seconds for op in block.ops)


def _block(block: BlockRows, name: str, mesh: Mesh, longest: float) -> Markup:
    compute, moved = (sum(getattr(op, f"{k}_seconds") for op in block.ops) for k in ("compute", "collective"))
    stripes = joined(
        filled('<span class="stripe"><span class="axis-name">{}</span>{}</span>', f"{name}={size}",
               _stripe(block, mesh, k))
        for k, (name, size) in enumerate(mesh) if size > 1
    )  # fmt: skip
    collectives = Counter(c["kind"] for op in block.ops for c in op.collectives)
    counted = ", ".join(f"{n} {kind}" for kind, n in collectives.items()) or "no collectives"
    times = filled('<span class="times">&times;{}</span>', block.count) if block.count > 1 else ""
    length = (compute + moved) / longest if longest else 0.0
    rows = [_op(op, mesh) for op in block.ops if op.moves or op.cuts]
    heads = ("operator", "cut", "in", "out", "moves to", "collectives", "compute", "communication")
    return filled(
        '<details class="block"><summary><span class="block-name">{} {}</span>'
        '<span class="block-stripes">{}</span><span class="block-time"><span class="meter">{}</span>{}</span>'
        '</summary><p class="muted">{}; one copy, one microbatch, forward and backward: compute {}, communication '
        '{}.</p>'
        "{}</details>",
        name, times, stripes,
        bar([("t-compute", compute, f"compute {show_seconds(compute)}"),
             ("X", moved, f"communication {show_seconds(moved)}")], max(longest, 1e-30)) if length else "",
        show_seconds(compute + moved), counted, show_seconds(compute), show_seconds(moved),
        table(heads, rows, numbers=(6, 7), label=f"operators of {name}"),
    )  # fmt: skip


def _stripe(block: BlockRows, mesh: Mesh, axis: int) -> Markup:
    """Return a bar that shows how a block's compute is sharded on one axis."""
    shares: Counter[str] = Counter()
    for op in block.ops:
        shares[colour(op, mesh, axis)] += op.compute_seconds  # type: ignore[assignment]
    total = sum(shares.values())
    parts = [(kind, shares[kind], f"{shares[kind] / total:.0%} {words}") for kind, words in COLOURS if shares[kind]]
    return bar(parts, total)


def _op(op: OpRow, mesh: Mesh) -> list[object]:
    chips = joined(
        filled('<span class="chip"><i class="{}"></i>{}={}</span>', colour(op, mesh, k), name, op.cuts[name])
        for k, (name, _) in enumerate(mesh) if name in op.cuts
    )  # fmt: skip
    collectives = Counter((c["kind"], c["axis"], c["pass"], c["bytes"]) for c in op.collectives)
    moved = joined(
        (filled("{}{} over {}, {}: {}", f"{n} x " if n > 1 else "", kind, axis, way, show_bytes(n_bytes))
         for (kind, axis, way, n_bytes), n in collectives.items()), "<br>",
    )  # fmt: skip
    name = filled('<span title="{}">{}</span>', op.source, op.label)
    return [
        name, chips, " ".join(f"[{s}]" for s in op.ins), " ".join(f"[{s}]" for s in op.outs), joined(op.steps, "<br>"),
        moved, show_seconds(op.compute_seconds) if op.compute_seconds else "",
        show_seconds(op.collective_seconds) if op.collective_seconds else "",
    ]  # fmt: skip


def _params(card: StageCards) -> Markup:
    if not card.params:
        return Markup("")
    n, size = sum(row.count for row in card.params), sum(row.stored_bytes for row in card.params)
    rows = [
        [
            row.name, row.count, " x ".join(map(str, row.shape)), row.dtype, row.stored, row.used, row.lifetime,
            joined((f"{k} x {kind} over {axis}: {show_bytes(b)}" for (kind, axis, b), k in
                    Counter((c["kind"], c["axis"], c["bytes"]) for c in row.collectives).items()), "<br>"),
            show_bytes(row.stored_bytes), show_seconds(row.seconds) if row.seconds else "",
        ] for row in card.params
    ]  # fmt: skip
    heads = (
        "parameters", "how many", "shape", "dtype", "stored", "used", "a copy lives for", "collectives of each",
        "bytes of a device", "seconds",
    )  # fmt: skip
    return filled(
        '<details class="block params"><summary><span class="block-name">parameters '
        '<span class="times">{}</span></span>'
        '<span></span><span class="block-time">{} on a device</span></summary>{}</details>',
        n, show_bytes(size), table(heads, rows, numbers=(1, 8, 9), label="parameters"),
    )  # fmt: skip
