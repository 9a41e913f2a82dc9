"""Differences of two plans for one model, decision by decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from autopar.planfile.patterns import compress
from autopar.planfile.writing import reshard_keys
from autopar.planner.inter_op.replan import Replanner
from autopar.plans.memory_decisions import DECISIONS
from autopar.plans.plan import Plan, StagePlan
from autopar.plans.plan_options import pin_words
from autopar.plans.stage_graphs import hot_ops
from autopar.report import Facts
from autopar.rules.option_names import as_written
from autopar.words.graph import Graph
from autopar.words.labels import op_labels
from autopar.words.placements import State

Row = tuple[str, object, object]


def entries(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    """Return ``(path, value in a, value in b)`` of every leaf in which two parsed plan files differ."""
    rows: list[Row] = []

    def walk(path: str, x: object, y: object) -> None:
        if x == y:
            return
        if isinstance(x, dict) and isinstance(y, dict):
            for key in [*x, *(k for k in y if k not in x)]:
                walk(f"{path}.{key}" if path else key, x.get(key), y.get(key))
        else:
            rows.append((path, x, y))

    def by_number(raw: Mapping[str, Any]) -> Facts:
        return {**raw, "stages": {str(number): stage for number, stage in enumerate(raw["stages"])}}

    walk("", by_number(a), by_number(b))
    return [row for row in rows if "checksum" not in row[0] and "solution.solver" not in row[0]]


def differences(graph: Graph, a: Replanner, b: Replanner) -> list[Row]:
    """Return rows ``(what, in a, in b)`` of all decisions that differ: stages, meshes, ops, parameters, prices."""
    x, y = a.plan, b.plan
    rows: list[Row] = [
        ("cluster", x.cluster, y.cluster), ("optimizer", x.optimizer, y.optimizer),
        ("asked for", "; ".join(pin_words(x.pins)) or None, "; ".join(pin_words(y.pins)) or None),
        ("devices", x.n_devices, y.n_devices),
        ("groups", x.schedule.n_ranks, y.schedule.n_ranks), ("stages", len(x.stages), len(y.stages)),
        ("schedule", x.schedule.name, y.schedule.name), ("microbatches", x.microbatches, y.microbatches),
    ]  # fmt: skip
    if all(left == right for _, left, right in rows[-4:]):  # a schedule that was edited
        left, right = (p.schedule.text().splitlines()[1:] for p in (x, y))
        rows.append(("order of actions", left, right))
    rows += _cuts(graph, a, b)
    for number in range(max(len(x.stages), len(y.stages))):
        rows += _stage(number, *(p.stages[number] if number < len(p.stages) else None for p in (x, y)))
    rows += _decisions(graph, x, y)
    rows += _prices(a, b)
    return [row for row in rows if row[1] != row[2]]


def _cuts(graph: Graph, a: Replanner, b: Replanner) -> list[Row]:
    """Return rows of the stages' first ops, with the number of blocks between the two plans' cuts."""
    rows: list[Row] = []
    most = max(len(a.plan.stages), len(b.plan.stages))
    if most == 1:
        return rows
    labels = op_labels(graph)
    place = {graph.nodes[i].name: p for p, i in enumerate(hot_ops(graph))}
    begins = sorted(place[name] for name in a.bounds)

    def block(first: str) -> int:
        return sum(p <= place[first] for p in begins) - 1

    for number in range(1, most):
        firsts = [p.stages[number].first if number < len(p.stages) else None for p in (a.plan, b.plan)]
        words = [None if f is None else f"{labels[f]} (block {block(f)} of {len(begins)})" for f in firsts]
        if firsts[0] is not None and firsts[1] is not None and (by := block(firsts[1]) - block(firsts[0])):
            words[1] = f"{words[1]}, {abs(by)} block{'s' if abs(by) > 1 else ''} {'later' if by > 0 else 'earlier'}"
        rows.append((f"stage {number} begins at", words[0], words[1]))
    return rows


def _stage(number: int, x: StagePlan | None, y: StagePlan | None) -> list[Row]:
    def both(value: Callable[[StagePlan], object]) -> tuple[object, object]:
        return None if x is None else value(x), None if y is None else value(y)

    return [
        (f"stage {number} mesh", *both(lambda s: s.mesh.text)),
        (f"stage {number} devices", *both(lambda s: ",".join(map(str, s.devices)))),
        *((f"stage {number} {name}", *both(partial(_decided, name))) for name in DECISIONS),
    ]


def _decided(name: str, stage: StagePlan) -> list[str] | None:
    """Return a stage's decision of one kind about memory in words; None for nothing."""
    return [entry if isinstance(entry, str) else " to ".join(entry) for entry in stage.memory.get(name, ())] or None


def _decisions(graph: Graph, x: Plan, y: Plan) -> list[Row]:
    """Return rows of op and parameter decisions by pattern; of several equal entries the first stage's."""
    labels = op_labels(graph)
    rows: list[Row] = []
    ops = {labels[n.name]: n.name for n in graph.nodes if n.kind == "op" and n.hot}
    params = {n.target: n.target for _, n in graph.of_kind("param")}
    keys = reshard_keys(graph)
    for section, names, text in (
        ("op", ops, _op_texts), ("parameter", params, _param_texts), ("route", keys, _route_texts)
    ):  # fmt: skip
        left, right = text(x), text(y)
        pairs = {label: (left.get(name), right.get(name)) for label, name in names.items()}
        changed = {label for label, (p, q) in pairs.items() if p != q}
        rows += [
            (f"{section} {pattern}", p, q) for pattern, (p, q) in compress(list(names), pairs.__getitem__, changed)
        ]
    names = [node.target for _, node in graph.of_kind("input")]
    before, after = ({name: at for stage in plan.stages for name, at in stage.inputs.items()} for plan in (x, y))
    rows += [(f"input {name}", _text(before.get(name)), _text(after.get(name))) for name in names]
    if len(x.stages) == len(y.stages) == 1:
        outputs = enumerate(zip(x.outputs, y.outputs, strict=True))
        rows += [(f"output {number}", _text(p), _text(q)) for number, (p, q) in outputs]
    return rows


def _text(state: State | None) -> str | None:
    return None if state is None else state.text


def _route_texts(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {
        key: tuple(f"{a.text} -> {b.text}" for a, b in steps)
        for stage in reversed(plan.stages) for key, steps in stage.reshard_paths.items()
    }  # fmt: skip


def _op_texts(plan: Plan) -> dict[str, str]:
    texts: dict[str, str] = {}
    for choice in reversed(plan.stages):
        for name, names in choice.ops.items():
            cuts = zip(choice.mesh, names, strict=True)
            texts[name] = " ".join(f"{axis}={as_written(n)}" for (axis, size), n in cuts if size > 1) or "on one device"
    return texts


def _param_texts(plan: Plan) -> dict[str, str]:
    texts: dict[str, str] = {}
    for choice in reversed(plan.stages):
        for name, c in choice.params.items():
            life = f", per {c.lifetime}" if c.is_copied else ""
            where = " on the host" if c.on_host else ""
            texts[name] = f"stored {c.stored.text}{where}, used {c.used.text}{life}"
    return texts


def _prices(a: Replanner, b: Replanner) -> list[Row]:
    """Return rows of predicted times of the step and the stages, and of memory."""
    left, right = (_price(r) for r in (a, b))
    return [(key, left.get(key), right.get(key)) for key in {**left, **right}]


def _price(replanner: Replanner) -> Mapping[str, object]:
    if len(replanner.plan.stages) == 1:
        price = replanner.plan.price
        values = {f"price.{key}": value for key, value in asdict(price).items()}
        return {**values, "price.seconds": price.seconds, "price.memory_bytes": price.memory_bytes}
    plan, timeline = replanner.simulated()
    t = timeline.times
    values = {}
    for number, choice in enumerate(plan.stages):
        values[f"stage {number} forward_seconds"] = t.forward_seconds[number]
        values[f"stage {number} backward_seconds"] = t.backward_seconds[number]
        values[f"stage {number} step_seconds"] = choice.price.exposed_seconds + choice.price.optimizer_seconds
        values[f"stage {number} memory_bytes"] = choice.price.memory_bytes
    values["price.makespan_seconds"] = timeline.makespan_seconds
    values["price.bubble_fraction"] = timeline.bubble_fraction
    values["price.seconds"] = plan.seconds
    values["price.memory_bytes"] = plan.memory_bytes
    return values
