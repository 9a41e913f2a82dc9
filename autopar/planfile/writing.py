"""From a plan to the text of its file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path

from autopar.errors import PlanError
from autopar.planfile import pins as pin_section
from autopar.planfile.file_errors import Section
from autopar.planfile.patterns import compress
from autopar.planner.intra_op.plan_completion import demand
from autopar.plans.memory_decisions import RECOMPUTE, RECOMPUTE_RESULT, REGATHER
from autopar.plans.pins import Pins
from autopar.plans.plan import HOST, VERSION, Plan, StagePlan, one_stage, reshard_key
from autopar.plans.stage_graphs import cut
from autopar.rules.option_names import as_written
from autopar.rules.registry import rules_of
from autopar.rules.strategy import strategy_named
from autopar.words.graph import Graph, Ref
from autopar.words.labels import op_labels
from autopar.words.placements import whole_state

SECTIONS = frozenset({"pins", "ops", "params", "buffers", "inputs", "routes", "price"})
"""Tables with one line for every entry."""
LISTS = frozenset({"notes", "schedule"})
"""Lists with one line for every entry."""
MEMORY = "memory"
"""The table of decisions about memory: for each a list with one line for every entry."""


def dumps(plan: Plan, graph: Graph | None = None, model: Section | None = None) -> str:
    """Return the text of a plan; the same plan gives the same bytes.

    Args:
        plan: the plan.
        graph: the graph of the whole model, at the size of a microbatch; by default the one that the plan was made for,
            which plans of :func:`autopar.plan` and of :func:`autopar.planfile.load` remember.
        model: how the command line finds the model again: ``{"spec": "gpt.py:make", "batch": 8, "seq": 128}``.

    Raises:
        PlanError: the plan is for another graph, such as that of another number of microbatches.
    """
    graph = _graph_of(plan, graph)
    whole = plan.schedule.text().splitlines()
    document = {
        "autopar_plan": VERSION,
        "model": dict(model) if model else None,
        "fingerprint": plan.fingerprint,
        "cluster": plan.cluster,
        "optimizer": plan.optimizer,
        "seconds": plan.seconds,
        "pins": pin_section.write(plan.pins),
        "schedule": whole[:1] if plan.schedule == one_stage(plan.microbatches) else whole,
        "stages": [
            _stage(stage, part.graph, plan) for stage, part in zip(plan.stages, cut(graph, plan.starts), strict=True)
        ],
        "notes": list(plan.notes),
        "checksum": step_checksum(plan),
    }
    return _format(document) + "\n"


def _graph_of(plan: Plan, given: Graph | None) -> Graph:
    """Return the graph that a plan is for: the given one, or the one that the plan remembers."""
    for graph in (given, plan.graph):
        if graph is not None and graph.fingerprint == plan.fingerprint:
            return graph
    whose = f"the given graph has {given.fingerprint}" if given is not None else "no graph is given"
    raise PlanError(
        f"the plan is for a graph with fingerprint {plan.fingerprint}, one of {plan.microbatches} microbatches of a "
        f"step; {whose}: give the graph that was planned. A plan of autopar.plan remembers it in the process that made "
        "it; one that was pickled or edited since does not"
    )


def _stage(stage: StagePlan, graph: Graph, plan: Plan) -> Section:
    """Return the entry of a stage."""
    keys = reshard_keys(graph)
    labels = op_labels(graph)
    named = {key: name for name, key in keys.items()}
    routed = {key for key in keys if keys[key] in stage.reshard_paths}
    memory = {
        name: [named[e] if isinstance(e, str) else [labels[op] for op in e] for e in entries]
        for name, entries in stage.memory.items()
    }
    return {
        "first": stage.first,
        "devices": list(stage.devices),
        "mesh": stage.mesh.text,
        "fingerprint": stage.fingerprint,
        **({"in_flight": stage.in_flight} if stage.in_flight != 1 else {}),
        "ops": _ops(stage, graph),
        "params": {
            pattern: {
                "stored": c.stored.text, "used": c.used.text, "lifetime": c.lifetime,
                **({"on_host": True} if c.on_host else {}),
            }
            for pattern, c in compress([n.target for _, n in graph.of_kind("param")], stage.params.__getitem__)
        },
        "buffers": {
            pattern: state.text
            for pattern, state in compress([n.target for _, n in graph.of_kind("buffer")], stage.buffers.__getitem__)
        },
        "inputs": {name: stage.inputs[name].text for name in sorted(stage.inputs)},
        "outputs": [None if state is None else state.text for state in stage.outputs],
        "routes": {
            pattern: [f"{a.text} -> {b.text}" for a, b in path]
            for pattern, path in compress(list(keys), lambda key: stage.reshard_paths.get(keys[key], ()), routed)
        },
        **({MEMORY: memory} if memory else {}),
        "price": _price(stage),
        "solution": asdict(stage.solution) if stage.solution else None,
        "checksum": {"decisions": decisions(stage), "rest": rest(stage, plan.cluster, plan.pins)},
    }


def save(path: str | Path, plan: Plan, graph: Graph | None = None, model: Section | None = None) -> None:
    """Write a plan file; the cluster's file, if it has one, is named by its path from there. Arguments as of `dumps`.

    Raises:
        PlanError: the plan is for another graph; or the folder is not there, or cannot be written to.
    """
    if Path(plan.cluster).is_absolute():
        near = os.path.relpath(plan.cluster, Path(path).parent.resolve())
        plan = replace(plan, cluster=Path(near).as_posix())
    try:
        Path(path).write_text(dumps(plan, graph, model), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write the plan to {path}: {error.strerror}; choose a folder that exists") from error


def _format(document: Section, indent: str = "", lists: Collection[str] = LISTS) -> str:
    """Return JSON with one line for every entry of a section, and of the lists named in `lists`."""
    lines = []
    more = indent + "  "
    for key, value in document.items():
        text = json.dumps(value, ensure_ascii=False)
        if key in SECTIONS and value:
            entries = [f"{more}  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items()]
            text = "{\n" + ",\n".join(entries) + f"\n{more}}}"
        elif key in lists and value:
            text = "[\n" + ",\n".join(f"{more}  {json.dumps(v, ensure_ascii=False)}" for v in value) + f"\n{more}]"
        elif key == MEMORY:
            text = _format(value, more, LISTS | set(value))
        elif key == "stages":
            text = "[\n" + ",\n".join(f"{more}  {_format(stage, more + '  ')}" for stage in value) + f"\n{more}]"
        lines.append(f"{more}{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _price(plan: StagePlan) -> Section:
    """Return the price; fields of what only some plans have are absent where they are zero."""
    price = asdict(plan.price)
    for optional in ("again_bytes", "working_bytes", "buffer_bytes", "version_bytes"):
        if not price[optional]:
            del price[optional]
    return price


def _ops(plan: StagePlan, graph: Graph) -> dict[str, dict[str, str]]:
    """Return the entries of sharded ops, and of those that are neither replicated nor follow their readers."""
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
        differing = {i for i in strategy if chosen[i].names != plan.ops[graph.nodes[i].name]}
        if not differing:
            break
        explicit |= differing
    by_label = {labels[graph.nodes[i].name]: plan.ops[graph.nodes[i].name] for i in strategy}
    needed = {
        labels[graph.nodes[i].name]
        for i in explicit
        if plan.ops[graph.nodes[i].name] != whole or not graph.nodes[i].hot
    }
    entries = compress(list(by_label), by_label.__getitem__, needed)
    return {
        pattern: {axis: as_written(name) for (axis, _), name in zip(plan.mesh, names, strict=True)}
        for pattern, names in entries
    }


def reshard_keys(graph: Graph) -> dict[str, str]:
    """Return ``{name in the file: key in StagePlan.reshard_paths}`` of every tensor; ops go by their label."""
    labels = op_labels(graph)
    keys = {}
    for i, node in enumerate(graph.nodes):
        for number, spec in enumerate(node.outs):
            if spec is not None:
                name = labels.get(node.name, node.name) + (f"#{number}" if number else "")
                keys[name] = reshard_key(graph, Ref(i, number))
    return keys


def decisions(plan: StagePlan) -> str:
    """Return the checksum of all decisions but reshard paths."""
    others = [e for e in plan.memory.items() if e[0] not in (RECOMPUTE.name, REGATHER.name, RECOMPUTE_RESULT.name)]
    return digest(
        plan.fingerprint, plan.mesh, sorted(plan.ops.items()),
        sorted((k, v.stored, v.used, v.lifetime, *([HOST] if v.on_host else [])) for k, v in plan.params.items()),
        sorted(plan.buffers.items()), sorted(plan.inputs.items()), plan.outputs, plan.recompute,
        plan.gather_again, *([plan.make_again] if plan.make_again else []), *others,
    )  # fmt: skip


def rest(plan: StagePlan, cluster: str, pins: Pins) -> str:
    """Return the checksum of the price, of its other inputs, and of the constraints for which it was proven best."""
    return digest(
        cluster, plan.devices, plan.optimizer, plan.microbatches, plan.in_flight, sorted(plan.reshard_paths.items()),
        _price(plan), asdict(plan.solution) if plan.solution else None, pin_section.write(pins),
        *([plan.versions] if plan.versions.number > 1 else []),
    )  # fmt: skip


def step_checksum(plan: Plan) -> str:
    """Return the checksum of the step's seconds and of what decides them in addition to the stages."""
    return digest([(s.first, s.devices) for s in plan.stages], plan.schedule.text(), float(plan.seconds))


def digest(*values: object) -> str:
    """Return some letters that differ where the values differ."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
