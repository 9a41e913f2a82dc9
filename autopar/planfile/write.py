"""Plan -> text."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.graph import Graph, Ref
from autopar.labels import op_labels
from autopar.placements import format_mesh, format_state, whole_state
from autopar.plan import VERSION, Pins, Plan, route_key
from autopar.planfile.patterns import compress
from autopar.planner.intra_op.complete import demand
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named

SECTIONS = frozenset({"pins", "ops", "params", "buffers", "inputs", "routes", "price"})


def dumps(plan: Plan, graph: Graph, model: Mapping[str, Any] | None = None) -> str:
    """The text of a plan; the same plan gives the same bytes.

    Args:
        model: how the command line finds the model again: ``{"spec": "gpt.py:make", "batch": 8, "seq": 128}``.
    """
    keys = route_keys(graph)
    labels = op_labels(graph)
    named = {key: name for name, key in keys.items()}
    routed = {key for key in keys if keys[key] in plan.routes}
    document = {
        "autopar_plan": VERSION,
        "model": dict(model) if model else None,
        "fingerprint": plan.fingerprint,
        "cluster": plan.cluster,
        "mesh": format_mesh(plan.mesh),
        "optimizer": plan.optimizer,
        "microbatches": plan.microbatches,
        **({"in_flight": plan.in_flight} if plan.in_flight != 1 else {}),
        "pipeline": {"stages": plan.stages},
        "pins": _pins(plan.pins),
        "ops": _ops(plan, graph),
        "params": {
            pattern: {"stored": format_state(c.stored), "used": format_state(c.used), "lifetime": c.lifetime}
            for pattern, c in compress([n.target for _, n in graph.of_kind("param")], plan.params.__getitem__)
        },
        "buffers": {
            pattern: format_state(state)
            for pattern, state in compress([n.target for _, n in graph.of_kind("buffer")], plan.buffers.__getitem__)
        },
        "inputs": {name: format_state(plan.inputs[name]) for name in sorted(plan.inputs)},
        "outputs": [None if state is None else format_state(state) for state in plan.outputs],
        "routes": {
            pattern: [f"{format_state(a)} -> {format_state(b)}" for a, b in route]
            for pattern, route in compress(list(keys), lambda key: plan.routes.get(keys[key], ()), routed)
        },
        **({"recompute": [[labels[first], labels[last]] for first, last in plan.recompute]} if plan.recompute else {}),
        **({"gather_again": [named[key] for key in plan.gather_again]} if plan.gather_again else {}),
        "price": _price(plan),
        "solution": asdict(plan.solution) if plan.solution else None,
        "notes": list(plan.notes),
        "checksum": {"decisions": decisions(plan), "rest": rest(plan)},
    }
    return _format(document) + "\n"


def save(path: str | Path, plan: Plan, graph: Graph, model: Mapping[str, Any] | None = None) -> None:
    """Write a plan file; the cluster's file, if it has one, is named by its path from there."""
    if Path(plan.cluster).is_absolute():
        near = os.path.relpath(plan.cluster, Path(path).parent.resolve())
        plan = replace(plan, cluster=Path(near).as_posix())
    try:
        Path(path).write_text(dumps(plan, graph, model), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write the plan to {path}: {error.strerror}; choose a folder that exists") from error


def _format(document: Mapping[str, Any]) -> str:
    """JSON with one line for every entry of a section."""
    lines = []
    for key, value in document.items():
        text = json.dumps(value, ensure_ascii=False)
        if key in SECTIONS and value:
            entries = [f"    {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items()]
            text = "{\n" + ",\n".join(entries) + "\n  }"
        elif key in ("notes", "recompute", "gather_again") and value:
            text = "[\n" + ",\n".join(f"    {json.dumps(v, ensure_ascii=False)}" for v in value) + "\n  ]"
        lines.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _pins(pins: Pins) -> dict[str, Any]:
    """What was asked for; nothing stands for nothing. Patterns keep their order, in which later ones override."""
    document: dict[str, Any] = {
        "ops": {pattern: dict(axes) for pattern, axes in pins.ops.items()},
        "params": dict(pins.params),
        "inputs": {name: format_state(pins.inputs[name]) for name in sorted(pins.inputs)},
        "outputs": {str(number): format_state(pins.outputs[number]) for number in sorted(pins.outputs)},
        "memory_limit_bytes": pins.memory_limit_bytes,
        "recompute": list(pins.recompute),
    }
    return {key: value for key, value in document.items() if value}


def _price(plan: Plan) -> dict[str, Any]:
    """The price; what only recomputing has is left out without it."""
    price = asdict(plan.price)
    if not price["again_bytes"]:
        del price["again_bytes"]
    return price


def _ops(plan: Plan, graph: Graph) -> dict[str, dict[str, str]]:
    """Entries for the ops that are cut, and for those that neither follow demand nor are whole."""
    rules = rules_of(graph)
    labels = op_labels(graph)
    whole = whole_state(plan.mesh, True)
    strategy = {
        i: strategy_named(graph, node, rules[i], plan.ops[node.name])
        for i, node in enumerate(graph.nodes)
        if node.kind == "op"
    }
    explicit = {i for i in strategy if graph.nodes[i].hot}
    while True:
        chosen, _ = demand(graph, rules, plan.mesh, {i: strategy[i] for i in explicit}, partly=True)
        other = {i for i in strategy if chosen[i].names != plan.ops[graph.nodes[i].name]}
        if not other:
            break
        explicit |= other
    by_label = {labels[graph.nodes[i].name]: plan.ops[graph.nodes[i].name] for i in strategy}
    needed = {
        labels[graph.nodes[i].name]
        for i in explicit
        if plan.ops[graph.nodes[i].name] != whole or not graph.nodes[i].hot
    }
    entries = compress(list(by_label), by_label.__getitem__, needed)
    return {
        pattern: {axis: written(name) for (axis, _), name in zip(plan.mesh, names, strict=True)}
        for pattern, names in entries
    }


def written(name: str) -> str:
    return "replicate" if name == "I" else name


def route_keys(graph: Graph) -> dict[str, str]:
    """``{name in the file: key in Plan.routes}`` of every tensor; ops go by their label."""
    labels = op_labels(graph)
    keys = {}
    for i, node in enumerate(graph.nodes):
        for number, spec in enumerate(node.outs):
            if spec is not None:
                name = labels.get(node.name, node.name) + (f"#{number}" if number else "")
                keys[name] = route_key(graph, Ref(i, number))
    return keys


def decisions(plan: Plan) -> str:
    """Checksum of everything that is decided, routes apart."""
    return digest(
        plan.fingerprint, plan.mesh, plan.stages, sorted(plan.ops.items()),
        sorted((k, v.stored, v.used, v.lifetime) for k, v in plan.params.items()),
        sorted(plan.buffers.items()), sorted(plan.inputs.items()), plan.outputs,
        *([plan.recompute] if plan.recompute else ()),
        *([("gather_again", plan.gather_again)] if plan.gather_again else ()),
    )  # fmt: skip


def rest(plan: Plan) -> str:
    """Checksum of what else decides the price, of the price, and of the wishes under which it was proven best."""
    return digest(
        plan.cluster, plan.optimizer, plan.microbatches, sorted(plan.routes.items()), _price(plan),
        asdict(plan.solution) if plan.solution else None, *([_pins(plan.pins)] if _pins(plan.pins) else ()),
        *([plan.in_flight] if plan.in_flight != 1 else ()),
    )  # fmt: skip


def digest(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
