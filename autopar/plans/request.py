"""Requests: from the arguments of a call, or the options of a command, to the options of a plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import AutoparError, MeshError, PlanError
from autopar.plans.offload_options import parse_offload
from autopar.plans.pins import Pins
from autopar.plans.plan import LIFETIMES, MEMORIES
from autopar.plans.plan_options import BY_NAME, MOST_AXES, PLAN_OPTIONS
from autopar.words.load_shares import MEASURED, parse_load
from autopar.words.meshes import Mesh
from autopar.words.placements import REPLICATE, State
from autopar.words.precision import parse_precision
from autopar.words.texts import mesh_of, parse_bytes
from cost_models.schedules.actions import check_size

NOTHING = "none"
"""What is recomputed where nothing may be."""


@dataclass(frozen=True)
class PlanRequest:
    """All options of one call, checked.

    Attributes:
        pins: the pins that the plan will remember.
        microbatches: into how many a step's batch is cut, where their number is fixed.
        numbers: numbers of microbatches, to choose from; none for all that divide the batch; None if the number is
            fixed.
        piped: stages are looked at, too; where none are asked for, only of a model that can be trained in stages.
        insisted: something is asked of stages or microbatches, so a model that cannot have them is refused.
        whole: the caller runs the batch of a step at once (``pm(batch)``, ``loss.backward()``) unless told otherwise.
        may_recompute: blocks may be recomputed in the backward, where the planner finds that best.
        top: how many of the best layouts of a pipeline are planned exactly.
        measure_load: the load of routed experts is what the model routes of the example batch.
        input_rows: the inputs that have the rows of the batch; None to find them.
    """

    pins: Pins = field(default_factory=Pins)
    optimizer: str = "adamw"
    microbatches: int = 1
    numbers: tuple[int, ...] | None = ()
    time_limit_seconds: float | None = None
    max_axes: int = MOST_AXES
    piped: bool = True
    insisted: bool = False
    whole: bool = False
    may_recompute: bool = True
    top: int = 1
    measure_load: bool = False
    input_rows: Collection[str | int] | None = None

    @property
    def everything(self) -> bool:
        """Nothing is fixed of meshes, stages and microbatches, so that all that the planner knows is searched."""
        return self.piped and not self.insisted and self.numbers == () and self.pins.mesh is None


Spelled = Callable[..., str]
"""The spelling of an option in messages, by its name and a key of its table."""


def as_argument(name: str, key: object = None) -> str:
    """Return an option's name as an argument: ``microbatches``, ``params['*.weight']``."""
    return name if key is None else f"{name}[{key!r}]"


def as_option(name: str, key: object = None) -> str:
    """Return an option's name as one of the command: ``--microbatches``, ``--pin-param *.weight``."""
    flags = BY_NAME[name].flags
    option = flags[0 if isinstance(key, str) and name == "placements" else -1].names[0]
    return option if key is None else f"{option} {key}"


def request_of(given: Mapping[str, Any], *, whole: bool = False, spelled: Spelled = as_argument) -> PlanRequest:
    """Return the request of a call's arguments; arguments that are no options are ignored.

    The given batch is that of a step. Where neither it nor stages are fixed, everything is searched; with a mesh, or
    for a caller that runs the batch ``whole``, there is one group of devices and one microbatch. ``given`` have the
    right types (:func:`autopar.parallelizing.arguments.check`), the optimizer by name; ``spelled`` names options in
    messages.

    Raises:
        AutoparError: an option means nothing, with its name, what was given and what to give.
    """
    option = {w.name: given.get(w.name, w.default) for w in PLAN_OPTIONS}
    mesh = mesh_of(option["mesh"])
    staged = any(option[w.name] is not None for w in PLAN_OPTIONS if w.pipelines)
    parts, free = option["microbatches"], mesh is None and not whole
    one, numbers = _microbatches(parts if parts is not None else "auto" if staged or free else 1, spelled)
    chosen = parts is not None and numbers is None  # the caller's own number
    if option["max_axes"] < 1:
        raise MeshError(f"{spelled('max_axes')} is {option['max_axes']}; give 1 or more")
    if option["time_limit"] is not None and option["time_limit"] <= 0:
        raise AutoparError(f"{spelled('time_limit')} is {option['time_limit']:g} s; give more than 0")
    limit = parse_bytes(option["memory_limit"])
    if limit is not None and limit < 1:
        raise AutoparError(
            f"{spelled('memory_limit')} is {option['memory_limit']}; give more than 0 bytes, or nothing for what the "
            "device has"
        )
    groups = None if option["stages"] == "auto" else option["stages"]
    if numbers is not None and not staged and not free:
        groups = 1  # only their number is to be chosen
    if groups is not None and groups < 1:
        raise PlanError(f"{spelled('stages')} is {groups!r}; give a number of groups of devices from 1 on, or 'auto'")
    _check_tables(option)
    if mesh is None and option["placements"]:
        said = " and ".join(dict.fromkeys(spelled("placements", key) for key in option["placements"]))
        raise MeshError(f"{said}: a placement has one part per mesh axis; give the mesh with it ({spelled('mesh')})")
    states = {
        k: State.parse(v, mesh or Mesh(), spelled("placements", k)) for k, v in (option["placements"] or {}).items()
    }  # fmt: skip
    measured = isinstance(option["expert_load"], str) and option["expert_load"] == MEASURED
    load = {} if measured else parse_load(option["expert_load"], spelled("expert_load"))
    again = [option["recompute"]] if isinstance(option["recompute"], str) else list(option["recompute"])
    nothing_again = again == [NOTHING]
    names = option["schedule"]
    pins = Pins(
        groups, tuple(option["cuts"] or ()), (names,) if isinstance(names, str) else tuple(names or ()),
        one if chosen else None, mesh,
        {pattern: dict(axes) for pattern, axes in (option["constraints"] or {}).items()},
        {k: parse_kept(v, mesh, spelled("params", k)) for k, v in (option["params"] or {}).items()},
        {k: state for k, state in states.items() if isinstance(k, str)},
        {k: state for k, state in states.items() if isinstance(k, int)},
        None if limit is None else int(limit), () if nothing_again else tuple(again),
        parse_precision(option["precision"]), load,
        offload=parse_offload(option["offload"], spelled("offload")).text,
    )  # fmt: skip
    optimizer = "adamw" if option["optimizer"] == "adam" else option["optimizer"]
    return PlanRequest(
        pins, optimizer, one, numbers, option["time_limit"], option["max_axes"], staged or free or numbers is not None,
        staged or parts is not None, whole, not nothing_again, measure_load=measured,
    )  # fmt: skip


def _microbatches(given: Any, spelled: Spelled) -> tuple[int, tuple[int, ...] | None]:
    """Return the number of microbatches.

    And where it is to be chosen, from which (none for all that divide the batch).
    """
    if isinstance(given, int):
        if given < 1:
            raise AutoparError(f"{spelled('microbatches')} is {given}; give a whole number of 1 or more")
        _check_most(given, spelled)
        return given, None
    several = isinstance(given, (list, tuple)) and given and all(isinstance(m, int) and m > 0 for m in given)
    if given != "auto" and not several:
        raise AutoparError(
            f"{spelled('microbatches')} is {given!r}; give a whole number of 1 or more, several to choose from, or "
            "'auto'"
        )
    for number in () if given == "auto" else given:
        _check_most(number, spelled)
    return 1, () if given == "auto" else tuple(given)


def _check_most(microbatches: int, spelled: Spelled) -> None:
    try:
        check_size(1, microbatches)
    except ValueError as error:
        raise AutoparError(f"{spelled('microbatches')} is {microbatches}: {error}") from None


def _check_tables(option: Mapping[str, Any]) -> None:
    """Refuse tables of something else than text."""
    for name, example in (
        ("constraints", {"layers.*.up": {"tensor": "n"}}), ("params", {"*.weight": "S0,I"}),
        ("placements", {"x": "S0,R"}),
    ):  # fmt: skip
        for key, value in (option[name] or {}).items():
            texts = value.values() if name == "constraints" and isinstance(value, Mapping) else [value]
            if (name == "constraints") != isinstance(value, Mapping) or not all(isinstance(t, str) for t in texts):
                raise AutoparError(f"{name}[{key!r}] is {value!r}; give it like {example}")


def parse_kept(text: str, mesh: Mesh | None, where: str) -> str:
    """Return how a parameter is to be stored, normalized: ``replicate``, ``S0,I``, with a lifetime ``S0,I use``.

    Behind them may stand ``host`` or ``device``: where it is stored.

    ``mesh``: None if it is still to be chosen; then the number of placements is not checked; ``where``: whose words
    they are, for messages.

    Raises:
        PlanError: there is no such lifetime, or too many words.
        MeshError: one of the placements is none, or there are more or fewer than axes.
    """
    words = re.sub(r"\s*,\s*", ",", text.strip()).split()
    if len(words) not in (1, 2, 3):
        raise PlanError(
            f"{where}: '{text}' has {len(words)} words; write 'replicate', or like 'S0,I', 'S0,I use' or 'S0,I use "
            "host'"
        )
    for word in words[1:]:
        if word not in (*LIFETIMES, *MEMORIES) or words.count(word) > 1:
            raise PlanError(
                f"{where}: '{word}' is no lifetime; write '{words[0]} step' (gathered once a step), '{words[0]} use' "
                f"(gathered again for the backward), or '{words[0]}' for whichever is cheaper, each with 'host' or "
                "'device' behind it, where it is to be stored"
            )
    if words[0] == REPLICATE:
        return " ".join(words)
    axes = mesh if mesh is not None else Mesh([("", 1)] * (words[0].count(",") + 1))
    return " ".join([State.parse(words[0], axes, where).text, *words[1:]])
