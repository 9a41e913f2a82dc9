"""The file of a serving plan: JSON with one key for every field of its records, all of them, and nothing else.

An example, shortened::

    {
      "kind": "autopar-serving-plan", "version": 1,
      "model": "hf:llama/config.json", "cluster": "dgx-h100", "engine": "vllm",
      "load": {"input_tokens": 4000, "output_tokens": 500, "prefix_tokens": 0, ...},
      "formats": {"weights": "fp8", "activations": "fp8", "cache": "fp8"},
      "workers": [{"phase": "both", "layout": {"tensor": 4, "stages": 1, ...}, "replicas": 2, ...}],
      "served": {"first_token_seconds": 0.42, "token_seconds": 0.018, ...},
      "devices": 8, "longest": 4500, "cuts": {}, "notes": []
    }

Reading runs nothing and loads no model. All that is wrong is told at once, each failure with its place in the file.
"""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from autopar.errors import PlanError, closest
from autopar.planfile.file_errors import FileErrors
from autopar.planfile.parsing import SERVING_KIND, is_serving
from autopar.planfile.reading import read
from autopar.serving.records import BOTH, DECODE, PREFILL, ServingPlan, Worker, WorkerLayout
from hardware_profiles.strict import Unreadable, parse_json, shortened

VERSION = 1
"""Version of the format: raised when a file of it would be read otherwise."""
ENGINES = ("autopar", "vllm", "sglang", "tensorrt-llm")
WORDS = {
    "phase": (BOTH, PREFILL, DECODE),
    "engine": ENGINES,
    "weights": ("bf16", "fp8", "nvfp4", "mxfp4", "int4"),
    "activations": ("bf16", "fp8", "nvfp4", "mxfp4"),
    "cache": ("bf16", "fp8", "nvfp4", "mxfp4"),
}
"""Values of strings that name one of a few things, by the name of the field; ``cache`` is also a number of bytes."""
MAY_BE_ZERO = frozenset({"prefix_tokens"})
"""Whole numbers that may be 0; all others count something that there is."""
LIMITS = frozenset({"first_token_seconds", "token_seconds", "tokens_per_second_per_device",
                    "tokens_per_second_per_user", "requests_per_second", "limit"})  # fmt: skip
"""Numbers that are more than 0; all others are 0 or more."""
MAY_BE_EMPTY = frozenset({"binding"})
"""Strings that may be empty."""


def dumps(plan: ServingPlan) -> str:
    """Return the text of a serving plan; the same plan gives the same bytes, and :func:`loads` gives the same plan.

    Raises:
        PlanError: a number is not finite, or the plan is one that :func:`loads` would refuse.
    """
    lines = [f'  "kind": "{SERVING_KIND}"', f'  "version": {VERSION}']
    for key, value in asdict(plan).items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, tuple) and value:
            text = "[\n" + ",\n".join(f"    {json.dumps(entry, ensure_ascii=False)}" for entry in value) + "\n  ]"
        lines.append(f"  {json.dumps(key)}: {text}")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    loads(text, where="the serving plan")
    return text


def loads(text: str, *, where: str = "serving plan") -> ServingPlan:
    """Return the serving plan of a text.

    Args:
        text: the text of the file.
        where: the file's name, for messages.

    Raises:
        PlanError: it is no serving plan of this version, or fields are missing, unknown or no such values; all of them
            are in one message.
    """
    try:
        raw = parse_json(text)
    except Unreadable as error:
        raise PlanError(f"{where}: {error}") from None
    if not is_serving(raw):
        raise PlanError(
            f"{where}: no serving plan (its 'kind' is not '{SERVING_KIND}'); make one with 'autopar plan --mode "
            "inference'"
        )
    version = raw.get("version")
    if version != VERSION or isinstance(version, bool):
        raise PlanError(
            f"{where}: version: the file has {shortened(repr(version))}, this autopar reads {VERSION}; plan again, or "
            "use the autopar that wrote it"
        )
    bad = FileErrors(where)
    plan = _record({key: value for key, value in raw.items() if key not in ("kind", "version")}, ServingPlan, "", bad)
    bad.raise_if_any()
    assert isinstance(plan, ServingPlan)
    _check_together(plan, bad)
    bad.raise_if_any()
    return plan


def load(path: str | Path) -> ServingPlan:
    """Return the serving plan of a file; see :func:`loads`."""
    return loads(read(path), where=str(path))


@cache
def _hints(record: type) -> Mapping[str, Any]:
    return get_type_hints(record)


def _record(raw: Mapping[str, Any], record: type, path: str, bad: FileErrors) -> Any:
    """Return a record of a table; None where something in it is wrong, which ``bad`` then has."""
    hints = _hints(record)
    names = [field.name for field in fields(record)]
    for key in raw:
        if key not in names:
            bad.unknown(f"{path}{shortened(key)}", key, names)
    values, before = {}, len(bad.lines)
    for name in names:
        if name not in raw:
            bad.add(f"{path}{name}", "is missing; add it, or plan again")
        else:
            values[name] = _value(raw[name], hints[name], f"{path}{name}", name, bad)
    return record(**values) if len(bad.lines) == before and len(values) == len(names) else None


def _value(value: Any, kind: Any, path: str, name: str, bad: FileErrors) -> Any:
    """Return a value of a file as its field's type has it, after checking it."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _value(value, next(one for one in inside if one is not type(None)), path, name, bad)
    if origin is tuple:
        entries = value if bad.type(path, value, list) else []
        return tuple(_value(entry, inside[0], f"{path}[{k}]", name, bad) for k, entry in enumerate(entries))
    if origin is dict:
        table = value if bad.type(path, value, dict) else {}
        return {key: _value(entry, inside[1], f"{path}[{json.dumps(key)}]", name, bad)
                for key, entry in table.items()}  # fmt: skip
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return _record(value, kind, f"{path}.", bad) if bad.type(path, value, dict) else None
    if kind is int and name not in MAY_BE_ZERO:
        bad.count(path, value)
    elif bad.type(path, value, kind):
        _check(value, path, name, bad)
    return float(value) if kind is float and isinstance(value, int) else value


def _check(value: Any, path: str, name: str, bad: FileErrors) -> None:
    """Check a string or a number of the right type."""
    if isinstance(value, str):
        if name in WORDS and value not in WORDS[name]:
            bad.add(path, f"got '{shortened(value)}'; {closest(value, WORDS[name])}")
        elif not value and name not in MAY_BE_EMPTY:
            bad.add(path, "is empty; write it out")
    elif value < 0 or (value == 0 and name in LIMITS):
        bad.add(path, f"got {value}; expected {'more than 0' if name in LIMITS else '0 or more'}")


def _check_together(plan: ServingPlan, bad: FileErrors) -> None:
    """Check what several fields say together."""
    phases = sorted(worker.phase for worker in plan.workers)
    if phases not in ([BOTH], sorted([PREFILL, DECODE])):
        bad.add("workers", f"are for {', '.join(phases) or 'nothing'}; a plan has one entry for '{BOTH}', or one for "
                           f"'{PREFILL}' and one for '{DECODE}'")  # fmt: skip
    for k, worker in enumerate(plan.workers):
        _check_layout(worker.layout, f"workers[{k}].layout", bad)
    used = sum(map(devices_of, plan.workers))
    if used != plan.devices:
        bad.add("devices", f"got {plan.devices}; the workers take {used}, replicas x devices of a layout")
    load = plan.load
    if load.prefix_tokens > load.input_tokens:
        bad.add("load.prefix_tokens", f"got {load.prefix_tokens}; the prompt has {load.input_tokens} tokens, with it")
    if plan.longest < load.longest:
        bad.add("longest", f"got {plan.longest}; prompt and answer are {load.input_tokens} + {load.output_tokens}")


def _check_layout(layout: WorkerLayout, path: str, bad: FileErrors) -> None:
    ranks = layout.tensor * layout.attention_data * layout.context
    experts = layout.expert * layout.expert_tensor
    if experts not in (1, ranks):
        bad.add(path, f"expert x expert_tensor is {layout.expert} x {layout.expert_tensor}; it has to be {ranks}, "
                      "tensor x attention_data x context, or 1 without experts")  # fmt: skip
    if layout.tensor % layout.kv_replicas:
        bad.add(f"{path}.kv_replicas", f"got {layout.kv_replicas}, which does not divide tensor, {layout.tensor}")


def devices_of(worker: Worker) -> int:
    """Return the devices of all replicas of a worker."""
    return worker.replicas * worker.layout.devices
