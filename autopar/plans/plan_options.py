"""Options of a plan: one record each.

From these records come the checks of arguments (:mod:`autopar.parallelizing.arguments`), the docstrings of
:func:`autopar.plan` and :func:`autopar.parallelize`, the options of ``autopar plan`` with their help, the ``pins`` of
plan files (:mod:`autopar.planfile.pins`), those of each stage of a pipeline, and the words for what a user chose. A new
option is a record here, an argument in both signatures (a test compares them), a field of
:class:`~autopar.plans.pins.Pins` if a plan remembers it, and whatever honours it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autopar.errors import AutoparError
from autopar.plans.offload_options import is_offload
from autopar.plans.pins import Pins
from autopar.words.load_shares import MEASURED, UNIFORM
from autopar.words.precision import ALLOWED, AUTO, OR, PRESETS, Precision
from autopar.words.texts import show_bytes
from hardware_profiles import COUNT_MARGIN, UNKNOWN_FRACTION
from hardware_profiles.strict import MOST_COUNTED, Unreadable, parse_count, shortened

TRAINING, INFERENCE = MODES = "training", "inference"
"""Uses of a plan."""

OPTIMIZERS = ("adamw", "adam", "adamw8bit", "sgd", "sgd_momentum", "muon")
MOST_AXES = 3
"""Axes of the mesh shapes that are tried, at most, by default."""


@dataclass(frozen=True)
class Flag:
    """An option of the command line that gives an option of a plan, or a part of it.

    Attributes:
        names: ``--mesh``, and a short form if there is one.
        read: from the text (of a repeatable option: the texts) to the argument's value; of several options for one
            wish to tables, which are joined.
        kind: what the text is before it is read.
    """

    names: tuple[str, ...]
    help: str
    read: Callable[[Any], Any] = lambda text: text
    repeatable: bool = False
    kind: type = str

    @property
    def parameter(self) -> str:
        """``pin_param`` of ``--pin-param``."""
        return self.names[0].removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Pin:
    """A field of :class:`~autopar.plans.pins.Pins`.

    Attributes:
        form: how it is written in a plan file, a key of ``autopar.planfile.pins.FORMS``.
        stages: what a stage of a pipeline gets: nothing, because it concerns the ``pipeline``; the ``same``; or its
            ``part`` (``autopar.planner.inter_op.stage_pins.PARTS``).
        words: what is said of it where a plan is described; one entry for each thing that was asked for.
    """

    name: str
    form: Literal[
        "count", "bytes", "texts", "mesh", "ops", "kept", "inputs", "outputs", "precision", "loads", "offload", "text"
    ]
    stages: Literal["pipeline", "same", "part"]
    words: Callable[[Any], list[str]]


@dataclass(frozen=True)
class PlanOption:
    """One option of a plan.

    Attributes:
        name: the name of the argument of ``plan`` and ``parallelize``.
        default: its value when not given.
        right, wanted: whether a value has the right type, and what one is, for messages.
        told: its text in docstrings.
        flags: the options of ``autopar plan`` for it.
        pins: the fields of :class:`~autopar.plans.pins.Pins` that remember it.
        pipelines: only a pipeline can honour it, so it requires one.
    """

    name: str
    default: Any
    right: Callable[[Any], bool]
    wanted: str
    told: str
    flags: tuple[Flag, ...] = ()
    pins: tuple[Pin, ...] = ()
    pipelines: bool = False


# --- types -----------------------------------------------------------------------------------------------------------


def is_integer(value: object) -> bool:
    """Return whether a value is a whole number that counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and value <= MOST_COUNTED


def is_number(value: object) -> bool:
    """Return whether a value is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def are_texts(value: object) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)


def is_table(value: object) -> bool:
    """Return whether a value is a mapping."""
    return isinstance(value, Mapping)


def optional(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check that also allows None."""
    return lambda value: value is None or right(value)


def _is_mesh(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, str):
        return True
    return isinstance(value, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[0], str) and is_integer(pair[1])
        for pair in value
    )


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _are_counts(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(is_integer(m) for m in value)
    return is_integer(value) or _is_auto(value)


# --- texts of the command line ---------------------------------------------------------------------------------------


def parse_choices(text: str) -> dict[str, str] | None:
    """Return ``tensor=k,data=b`` as a dict; None if it is nothing like that."""
    wanted = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\w+)\s*", part)
        if match is None or match[1] in wanted:
            return None
        wanted[match[1]] = match[2]
    return wanted


def _pins_of_ops(texts: list[str]) -> dict[str, dict[str, str]]:
    """Return ``layers.*.mlp.up:tensor=n`` as its pattern and ``{axis: factor}``."""
    table: dict[str, dict[str, str]] = {}
    for text in texts:
        pattern, colon, rest = text.rpartition(":")
        wanted = parse_choices(rest) if colon and pattern else None
        if wanted is None:
            raise AutoparError(f"pin '{text}' is no PATTERN:axis=factor; write it like 'layers.*.mlp.up:tensor=n'")
        entry = table.setdefault(pattern, {})
        for axis, factor in wanted.items():
            if axis in entry:
                raise AutoparError(
                    f"--pin '{pattern}' is given twice for axis '{axis}': {entry[axis]} and {factor}; keep one of them"
                )
            entry[axis] = factor
    return table


def _replicated(texts: list[str]) -> dict[str, str]:
    """Return patterns of parameters, each of them replicated."""
    for k, pattern in enumerate(texts):
        if pattern in texts[:k]:
            raise AutoparError(f"--keep-replicated '{pattern}' is given twice; keep one of them")
    return dict.fromkeys(texts, "replicate")


def _named(option: str, example: str) -> Callable[[list[str]], dict[str, str]]:
    """Return a reader of ``NAME=VALUE`` texts."""

    def read(texts: list[str]) -> dict[str, str]:
        table: dict[str, str] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or not name:
                raise AutoparError(f"{option} '{text}' is no {example.partition(' ')[0]}; write it like {option} "
                                   f"{example.partition(' ')[2]}")  # fmt: skip
            if name in table:
                raise AutoparError(
                    f"{option} '{name}' is given twice: {table[name]} and {value}; keep one of them"
                )
            table[name] = value
        return table

    return read


def _count(text: str) -> int | None:
    """Return a whole number that counts something; None if the text is none."""
    try:
        return parse_count(text)
    except Unreadable:
        return None


def _numbered(option: str, example: str) -> Callable[[list[str]], dict[int, str]]:
    def read(texts: list[str]) -> dict[int, str]:
        table = _named(option, example)(texts)
        for name in table:
            if _count(name) is None:
                raise AutoparError(f"{option} '{name}={table[name]}': '{name}' is no output number; outputs count from "
                                   "0")  # fmt: skip
        return {int(name): value for name, value in table.items()}

    return read


def _counts(text: str) -> int | str | list[int]:
    if text == "auto":
        return text
    parts = [_count(part.strip()) for part in text.split(",")]
    numbers = list(dict.fromkeys(part for part in parts if part is not None))
    if None in parts:
        raise AutoparError(
            f"--microbatches is '{shortened(text)}'; give a number, several such as 4,8,16, or auto, each at most "
            f"{MOST_COUNTED:,}"
        )
    return numbers[0] if len(numbers) == 1 else numbers


def _groups(text: str) -> int | str:
    if text == "auto":
        return text
    number = _count(text)
    if number is None:
        raise AutoparError(
            f"--stages is '{shortened(text)}'; give a number of groups of devices, at most {MOST_COUNTED:,}, or auto"
        )
    return number


# --- the options -----------------------------------------------------------------------------------------------------


def _plural(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n > 1 else ''}"


PLAN_OPTIONS: tuple[PlanOption, ...] = (
    PlanOption(
        "mesh", None, optional(_is_mesh), "axes and their sizes, such as 'data=2,tensor=4' or {'data': 8}",
        '``{"data": 2, "tensor": 4}`` or ``"data=2,tensor=4"``; None tries every shape of up to ``max_axes`` axes. Of '
        "a pipeline, of every group of devices.",
        (Flag(("--mesh", "-m"), "Axes and sizes: data=8,tensor=8. Default: the fastest of several."),),
        (Pin("mesh", "mesh", "pipeline", lambda mesh: [f"mesh {mesh.shown()}"]),),
    ),
    PlanOption(
        "constraints", None, optional(is_table), "a dict such as {'layers.*.up': {'tensor': 'n'}}",
        "``{module pattern: {axis: factor}}`` pins how ops are cut.",
        (Flag(("--pin",), "PATTERN:axis=factor: how ops are cut, such as 'layers.*.mlp.up:tensor=n'. Repeatable.",
              _pins_of_ops, True),),
        (Pin("ops", "ops", "part", lambda ops: [
            f"{pattern}: " + " ".join(f"{axis}={factor}" for axis, factor in axes.items())
            for pattern, axes in ops.items()]),),
    ),
    PlanOption(
        "params", None, optional(is_table), "a dict such as {'*.weight': 'S0,I'}",
        '``{parameter pattern: how}`` pins how parameters are stored: ``"replicate"``, placements ``"S0,I"``, or '
        'placements with the lifetime of the gathered copy, ``"S0,I step"`` (ZeRO-1/2) or ``"S0,I use"`` (ZeRO-3).',
        (Flag(("--keep-replicated",), "Pattern of parameters that stay replicated. Repeatable.",
              _replicated, True),
         Flag(("--pin-param",), "How parameters are stored: 'PATTERN=S0,I', with 'S0,I step' (gathered once a step) or "
              "'S0,I use' (regathered for the backward). Repeatable.",
              _named("--pin-param", "PATTERN=PLACEMENT '*.weight=S0,I use'"), True)),
        (Pin("params", "kept", "part", lambda params: [f"{pattern}: {how}" for pattern, how in params.items()]),),
    ),
    PlanOption(
        "placements", None, optional(lambda v: is_table(v) and all(isinstance(k, str) or is_integer(k) for k in v)),
        "a dict such as {'x': 'S0,R'}, by names of inputs or numbers of outputs",
        '``{input name or output number: placements}``, such as ``{"x": "S0,R"}``.',
        (Flag(("--pin-input",), "How an input arrives: NAME=S0,R. Repeatable.",
              _named("--pin-input", "NAME=PLACEMENT x=S0,R"), True),
         Flag(("--pin-output",), "How an output comes out: NUMBER=S0,I. Repeatable.",
              _numbered("--pin-output", "NUMBER=PLACEMENT 0=I,I"), True)),
        (Pin("inputs", "inputs", "part",
             lambda states: [f"input {name}: {states[name].text}" for name in sorted(states)]),
         Pin("outputs", "outputs", "part",
             lambda states: [f"output {number}: {states[number].text}" for number in sorted(states)])),
    ),
    PlanOption(
        "recompute", (), lambda v: are_texts(v) or (isinstance(v, str) and v == "none"),
        "a list of patterns of module paths, such as ['layers.*'], or 'none'",
        'patterns of module paths, such as ``["layers.*"]``; each module that matches keeps only its inputs for the '
        'backward, and is recomputed there (activation checkpointing). ``"none"``: nothing is. By default the planner '
        "chooses.",
        (Flag(("--recompute",), "Modules that keep only their inputs and are recomputed in the backward: a "
              "pattern of paths. Repeatable. none: nothing is. Default: the planner chooses.", list, True),),
        (Pin("recompute", "texts", "same", lambda patterns: [f"{pattern}: recompute" for pattern in patterns]),),
    ),
    PlanOption(
        "offload", None, optional(is_offload),
        "what may be kept on the host, such as 'optimizer' or {'optimizer': 0.5}",
        'what may be kept in the memory of the host: ``"activations"``, ``"optimizer"`` (its state, and its step), '
        '``"parameters"`` (the same, and the device has no copy between uses), several with commas, ``"auto"`` for '
        "all. The planner chooses which tensors; ``{\"optimizer\": 0.5}`` asks for half of the bytes at least, 1 for "
        "all of them. "
        '``"none"``: nothing is.',
        (Flag(("--offload",), "What may be kept in the host's memory: activations, optimizer, parameters, with commas; "
              "optimizer=0.5 asks for half of it at least. auto: all. Default: nothing."),),
        (Pin("offload", "offload", "same", lambda text: [f"on the host: {text}"]),),
    ),
    PlanOption(
        "memory_limit", None, optional(lambda v: isinstance(v, str) or (is_number(v) and v < math.inf)),
        "bytes, or such as '40GiB'",
        'per device, in bytes or as ``"40GiB"``; None for what the driver gives of the device, less '
        f"the context, the software's buffers and a margin of {COUNT_MARGIN:.0%} or what the allocator's gaps take, "
        f"{UNKNOWN_FRACTION:.0%} of the data sheet's where that is not known.",
        (Flag(("--memory-limit",), "Bytes per device: 70GiB. Default: what the driver gives of it, less context, "
              f"buffers and a margin of {COUNT_MARGIN:.0%} or more; {UNKNOWN_FRACTION:.0%} of unknown devices."),),
        (Pin("memory_limit_bytes", "bytes", "same", lambda n: [f"at most {show_bytes(n)} per device"]),),
    ),
    PlanOption(
        "optimizer", "adamw", lambda _: True, f"{', '.join(OPTIMIZERS)}, or a torch.optim.Optimizer",
        "``adamw``, ``adamw8bit`` (states in 8 bits), ``sgd``, ``sgd_momentum`` or ``muon`` (of hidden matrices, AdamW "
        "of the rest), for bytes of state and seconds of the step; or an optimizer, whose class says which.",
        (Flag(("--optimizer",), "adamw, adamw8bit, sgd, sgd_momentum or muon: of matrices, AdamW of the rest."),),
    ),
    PlanOption(
        "precision", None, optional(lambda v: isinstance(v, (str, Precision, list, tuple))),
        f"{', '.join(PRESETS)}, {AUTO}, autopar.Precision(...), or a list to choose from",
        "what is kept and computed in which format: ``bf16-mixed`` computes in bfloat16 on casts of float32 masters, "
        "which the module's parameters are; ``fp8-mixed`` multiplies in eight bits beside; or an "
        ":class:`autopar.Precision`. Of a list the fastest that fits is taken, and a note says so; ``auto`` is "
        f"``{list(ALLOWED)}``. None: as the model is.",
        (Flag(("--precision",), f"{', '.join(PRESETS)}, or fields such as params=bfloat16,reduce=bfloat16. bf16-mixed: "
              f"bfloat16 compute on float32 masters and moments. '{OR.join(ALLOWED)}', or {AUTO}: the faster that "
              "fits."),),
        (Pin("precision", "precision", "same", lambda policy: [f"precision {policy}"]),),
    ),
    PlanOption(
        "expert_load", None, optional(lambda v: isinstance(v, (str, Path, list, tuple)) or is_table(v)),
        f"'{UNIFORM}', '{MEASURED}', one number for each expert such as [3, 1, 1, 1], a dict of these by patterns of "
        "modules, or the path of a JSON file that holds one",
        "how rows spread over routed experts, for prices alone: rows or shares of each expert, a dict of these by "
        'patterns of modules, such as ``{"layers.0.*": [3, 1, 1, 1]}``, the path of a JSON file that holds one, '
        '``"measured"``: what the model routes of the example batch, or ``"uniform"``. The rank whose experts have '
        "most is the one that is priced, and a note of the plan names it.",
        (Flag(("--expert-load",), "How rows spread over routed experts, for prices: a JSON file of rows or shares, "
              "measured (with the model's values, on its example batch) or uniform, which is the default."),),
        (Pin("expert_load", "loads", "same", lambda loads: [
            f"{pattern}: load of {len(load)} experts, {max(load):.1%} for the fullest"
            for pattern, load in loads.items()]),),
    ),
    PlanOption(
        "microbatches", None, optional(_are_counts), "a whole number of 1 or more, several to choose from, or 'auto'",
        "number of microbatches; the example inputs are one full step's batch: a number, several to choose from, or "
        '``"auto"`` for the best of those that divide it (1 with batch norms, which would compute other statistics).',
        (Flag(("--microbatches",), "Number of microbatches; the example inputs are one full step's batch. A number, "
              "several such as 4,8,16 to choose from, or auto (1 with batch norms). Default: auto; 1 with --mesh and "
              "no stages.",
              _counts),),
        (Pin("microbatches", "count", "pipeline", lambda n: [_plural(n, "microbatch").replace("hs", "hes")]),),
    ),
    PlanOption(
        "stages", None, optional(lambda v: is_integer(v) or _is_auto(v)),
        "a number of groups of devices from 1 on, or 'auto'",
        'pipeline over so many groups of devices (``"auto"``: the best number; 1: none); ``mesh`` is then that of a '
        "group, and the plan has several :attr:`~autopar.plans.plan.Plan.stages`, if that is best.",
        (Flag(("--stages",), "Pipeline over so many groups of devices, or auto. Default: auto; 1 group with --mesh.",
              _groups),),
        (Pin("stages", "count", "pipeline", lambda n: [_plural(n, "group")]),), True,
    ),
    PlanOption(
        "schedule", None, optional(lambda v: isinstance(v, str) or (are_texts(v) and len(v) > 0)),
        "a schedule's name, or several to choose from",
        "the pipeline's: ``gpipe``, ``1f1b``, ``interleaved-1f1b``, ``zb-h1``, ``zb-v``, ``dualpipe-v``, ``searched`` "
        "(an order found for the stages' own times, within the memory), or several to choose from; ``pipedream`` and "
        "``pipedream-2bw`` never drain, and change the training result.",
        (Flag(("--schedule",), "gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v, dualpipe-v, searched; pipedream and "
              "pipedream-2bw change training. Repeatable", list, True),),
        (Pin("schedules", "texts", "pipeline", lambda names: [f"schedule {' or '.join(names)}"]),), True,
    ),
    PlanOption(
        "cuts", None, optional(are_texts), "a list of what stages begin with, such as ['layers.12']",
        'where the pipeline is cut: what all stages but the first begin with, such as ``["layers.12"]`` (the path of a '
        "module, or an operator as ``module:op``); by default the planner cuts.",
        (Flag(("--cut",), "What a stage begins with: path of a module, or module:op. Once for every stage but the "
              "first.", list, True),),
        (Pin("cuts", "texts", "pipeline", lambda cuts: [f"cut at {', '.join(cuts)}"]),), True,
    ),
    PlanOption(
        "max_axes", MOST_AXES, is_integer, "a whole number of 1 or more",
        "of the mesh shapes that are tried where none is given.",
    ),
    PlanOption(
        "time_limit", None, optional(is_number), "seconds, more than 0",
        "seconds of the clock for one run of the solver; by default it ends after a fixed amount of work, so that "
        "plans do not depend on how busy the machine is.",
        (Flag(("--time-limit",), "Seconds of the clock for one run of the solver. Default: a fixed amount of work, "
              "about two minutes, or a few seconds where memory binds.", kind=float),),
    ),
)  # fmt: skip
"""In the order in which options are listed."""
BY_NAME = {option.name: option for option in PLAN_OPTIONS}
_FIRST = ("stages", "mesh", "cuts", "schedules", "microbatches")
_OF_LAYOUTS = (
    Pin("layout", "text", "pipeline", lambda words: [f"layout {words}"]),
    Pin("target", "text", "pipeline", lambda name: [f"for {name}"]),
    Pin("mode", "text", "same", lambda mode: [f"for {mode}: forward alone"]),
)
"""Pins of plans of layouts, for other trainers and for inference; no options of a search."""
PINS = tuple(
    sorted(
        (*(pin for option in PLAN_OPTIONS for pin in option.pins), *_OF_LAYOUTS),
        key=lambda pin: (_FIRST.index(pin.name) if pin.name in _FIRST else len(_FIRST), pin.name.startswith("memory")),
    )
)
"""What plans remember: first of the pipeline, then of what is in it, last of the device."""


def pin_words(pins: Pins) -> list[str]:
    """Return the choices of a user, one entry each: ``2 groups``, ``layers.*.up: tensor=n``."""
    return [words for pin in PINS if (value := getattr(pins, pin.name)) for words in pin.words(value)]


def documented(function: Callable[..., Any]) -> Any:
    """Return the function with lines ``{wishes}`` or ``{name}`` of its docstring replaced by those of the options.

    A name is one option; ``{wishes}`` all that are not named.
    """
    import textwrap

    text = function.__doc__ or ""
    named = set(re.findall(r"^ *\{(\w+)\}$", text, re.M)) - {"wishes"}
    every = [option for option in PLAN_OPTIONS if option.name not in named]

    def told(match: re.Match[str]) -> str:
        chosen = every if match[2] == "wishes" else [BY_NAME[match[2]]]
        return "\n".join(
            textwrap.fill(f"{option.name}: {option.told}", 119, initial_indent=match[1],
                          subsequent_indent=match[1] + "    ", break_long_words=False)
            for option in chosen
        )  # fmt: skip

    function.__doc__ = re.sub(r"^( *)\{(\w+)\}$", told, text, flags=re.M)
    return function
