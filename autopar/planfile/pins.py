"""The pins of a plan file: the user's constraints, kept for solving the plan again.

:mod:`autopar.plans.plan_options` lists them; this module checks, reads and writes each form of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from autopar.errors import AutoparError, PlanError, closest
from autopar.planfile.file_errors import FileErrors, Section
from autopar.planfile.states import read_state
from autopar.planner.intra_op.memory.recompute import segments_of
from autopar.plans.offload_options import parse_offload
from autopar.plans.pins import Pins
from autopar.plans.plan_options import PINS
from autopar.plans.request import parse_kept
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph, Ref
from autopar.words.labels import matches, op_labels
from autopar.words.load_shares import parse_load
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.precision import parse_precision
from hardware_profiles.strict import LARGEST_WHOLE, Unreadable, parse_count


@dataclass(frozen=True)
class Model:
    """The model that pins are about: patterns, axes and names must exist in it.

    Attributes:
        mesh: the mesh for the placements of inputs, outputs and parameters.
        axes: the axes of the meshes of all stages.
    """

    graph: Graph
    mesh: Mesh
    axes: tuple[str, ...]
    bad: FileErrors


@dataclass(frozen=True)
class Form:
    """The written form of a pin.

    Attributes:
        check: checks the form alone, without the model.
        read: returns the value of a text of the right form.
        write: the inverse of ``read``.
    """

    check: Callable[[str, Any, FileErrors], object]
    read: Callable[[str, Any, Model], Any]
    write: Callable[[Any], Any]


def _parsed_by(kind: type, parser: Callable[[Any, str], object]) -> Callable[[str, Any, FileErrors], object]:
    """Return a check that a value has the type and can be parsed."""

    def check(at: str, value: Any, bad: FileErrors) -> None:
        if bad.type(at, value, kind):
            try:
                parser(value, at)
            except AutoparError as error:
                bad.add(at, str(error))

    return check


def _check_table(at: str, value: Any, bad: FileErrors) -> bool:
    return bad.type(at, value, dict) and all(
        [bad.type(f"{at}[{json.dumps(name)}]", entry, str) for name, entry in value.items()]
    )


def _check_ops(at: str, value: Any, bad: FileErrors) -> None:
    for pattern, entry in value.items() if bad.type(at, value, dict) else ():
        place = f"{at}[{json.dumps(pattern)}]"
        for axis, factor in entry.items() if bad.type(place, entry, dict) else ():
            bad.type(f"{place}.{axis}", factor, str)


def _check_outputs(at: str, value: Any, bad: FileErrors) -> None:
    for number in value if _check_table(at, value, bad) else ():
        try:
            parse_count(number)
        except Unreadable as error:
            bad.add(f"{at}[{json.dumps(number)}]", f"{error}: no output number; outputs count from 0")


def _read_ops(at: str, value: Section, model: Model) -> dict[str, dict[str, str]]:
    labels = op_labels(model.graph)
    nodes = [node for node in model.graph.nodes if node.kind == "op"]
    for pattern, entry in value.items():
        place = f"{at}[{json.dumps(pattern)}]"
        if not any(matches(pattern, node, labels[node.name]) for node in nodes):
            model.bad.add(place, f"matches no op of the model; {closest(pattern, list(labels.values()))}")
        for axis in entry:
            if axis not in model.axes:
                model.bad.add(f"{place}.{axis}", f"the mesh has no axis '{axis}'; it has {', '.join(model.axes)}")
    return {pattern: dict(entry) for pattern, entry in value.items()}


def _read_kept(at: str, value: Mapping[str, str], model: Model) -> dict[str, str]:
    names = [node.target for _, node in model.graph.of_kind("param")]
    table = {}
    for pattern, how in value.items():
        place = f"{at}[{json.dumps(pattern)}]"
        if not any(fnmatchcase(name, pattern) for name in names):
            model.bad.add(place, f"matches no parameter of the model; {closest(pattern, names)}")
        try:
            table[pattern] = parse_kept(how, model.mesh, place)
        except AutoparError as error:
            model.bad.say(str(error))
    return table


def _read_inputs(at: str, value: Mapping[str, str], model: Model) -> dict[str, State]:
    inputs = {node.target: node for _, node in model.graph.of_kind("input")}
    table = {}
    for name, text in value.items():
        place = f"{at}[{json.dumps(name)}]"
        if name not in inputs:
            model.bad.add(place, f"no input of the model; {closest(name, list(inputs))}")
            continue
        kinds = "SI" if inputs[name].needs_grad else "SR"
        state = read_state(place, text, model.mesh, inputs[name].out.shape, kinds, model.bad)
        table.update({} if state is None else {name: state})
    return table


def _read_outputs(at: str, value: Mapping[str, str], model: Model) -> dict[int, State]:
    outputs, table = model.graph.outputs, {}
    for text, placement in value.items():
        place, number = f"{at}[{json.dumps(text)}]", int(text)
        out = outputs[number] if number < len(outputs) else None
        if not isinstance(out, Ref):
            model.bad.add(place, f"no tensor among the {len(outputs)} outputs of the model, which count from 0")
            continue
        state = read_state(place, placement, model.mesh, model.graph.spec(out).shape, "SIRP", model.bad)
        table.update({} if state is None else {number: state})
    return table


def _read_texts(at: str, value: list[str], model: Model) -> tuple[str, ...]:
    for k, pattern in enumerate(value) if at.endswith(".recompute") else ():
        try:
            segments_of(model.graph, rules_of(model.graph), (pattern,))
        except PlanError as error:
            model.bad.add(f"{at}[{k}]", str(error))
    return tuple(value)


def _as_is(_at: str, value: object, _model: Model) -> object:
    return value


FORMS: dict[str, Form] = {
    "count": Form(lambda at, value, bad: bad.count(at, value), _as_is, lambda n: n),
    "bytes": Form(lambda at, value, bad: bad.count(at, value, LARGEST_WHOLE), _as_is, lambda n: n),
    "text": Form(lambda at, value, bad: bad.type(at, value, str), _as_is, str),
    "texts": Form(lambda at, value, bad: bad.texts(at, value), _read_texts, list),
    "mesh": Form(
        _parsed_by(str, lambda text, _: Mesh.parse(text)), lambda _at, value, _model: Mesh.parse(value),
        lambda mesh: mesh.text,
    ),
    "ops": Form(_check_ops, _read_ops, lambda ops: {pattern: dict(axes) for pattern, axes in ops.items()}),
    "kept": Form(_check_table, _read_kept, dict),
    "inputs": Form(
        _check_table, _read_inputs, lambda states: {name: states[name].text for name in sorted(states)}
    ),
    "precision": Form(
        _parsed_by(str, lambda text, _: parse_precision(text)), lambda _at, value, _model: parse_precision(value), str
    ),
    "loads": Form(
        _parsed_by(dict, lambda table, at: parse_load(table, at)), lambda at, value, _model: parse_load(value, at),
        lambda loads: {pattern: list(load) for pattern, load in loads.items()},
    ),
    "offload": Form(
        _parsed_by(str, parse_offload), lambda at, value, _model: parse_offload(value, at).text, str
    ),
    "outputs": Form(
        _check_outputs, _read_outputs, lambda states: {str(k): states[k].text for k in sorted(states)}
    ),
}  # fmt: skip


def check(raw: Section, bad: FileErrors) -> None:
    """Check the form of a file's pins."""
    forms = {pin.name: FORMS[pin.form] for pin in PINS}
    for key, value in raw.items():
        if key not in forms:
            bad.unknown(f"pins.{key}", key, forms)
        else:
            forms[key].check(f"pins.{key}", value, bad)


def read(raw: Section, model: Model) -> Pins:
    """Return the pins of a file whose form is right; what does not fit the model becomes a failure."""
    return Pins(
        **{pin.name: FORMS[pin.form].read(f"pins.{pin.name}", raw[pin.name], model) for pin in PINS if pin.name in raw}
    )


def write(pins: Pins) -> Section:
    """Return the pins as JSON values; patterns keep their order, in which later ones override earlier ones."""
    return {pin.name: FORMS[pin.form].write(value) for pin in PINS if (value := getattr(pins, pin.name))}
