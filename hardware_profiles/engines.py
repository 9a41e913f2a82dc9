"""Engines that serve models, one record each: what a step costs beside its work. From data/engines.toml.

What an engine fuses, captures in graphs and schedules are facts about its code. ``factor`` is the only number of a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from .errors import ProfileError
from .reader import ProfileErrors, Table, closest, read_document

_FILE = Path(__file__).parent / "data" / "engines.toml"


@dataclass(frozen=True)
class Engine:
    """One engine's execution of a step.

    Attributes:
        name: ``vllm``, ``sglang``, ``tensorrt-llm`` or ``autopar``.
        description: what is meant, for people.
        general_factor: seconds of measured steps over prices with factor 1, on GPUs that ``factors`` leaves out.
        factors: the same by name of a device, each fitted on the half of its rows that ``sources`` names.
        prefill_factors: factors of steps with prefills by name of a device, where they were fitted apart.
        graph_requests: most new tokens of a step that is captured as a graph; 0 for an engine without graphs.
        launch_seconds: seconds of the host for a kernel outside a graph.
        host_seconds: seconds of the host in a step, in which the device waits: scheduling, inputs, the sampled tokens.
        request_seconds: seconds that each request of a step adds to them.
        first_token_seconds: seconds between a request and its first token beside queues and steps: the server, the
            words of the prompt, the way back.
        apart_seconds: least seconds between two requests that reach the scheduler: one process reads their words.
        tokens_per_step: most new tokens of a step by default.
        drift: part of an answer by which requests that began together end apart.
        mixes: one step holds prefills and decodes (chunked prefill); else decodes wait for prefills.
        memory_share: part of the device's memory that it takes by default.
        output_reserved: part of an answer for which a request gets cache when it begins: all of it, or about half on
            average where cache grows with the answer.
        lookahead: steps that are scheduled ahead: a new request waits for so many more.
        expert_kernels: kernels of a layer of experts: the choice, the sorting of rows, casts, two grouped products, the
            activation, the sum.
        expert_factors: seconds of products of experts over their price, where an engine's kernels are slow, by the
            format of their weights, ``fp8``, or by that and the GPU, ``mxfp4 on H200-SXM-141GB``.
        expert_kernels_on: ``expert_kernels`` by name of a device, where they are others.
        expert_host_on: seconds of the host for a layer of experts outside a graph, by name of a device, whose kernels
            it starts one by one.
        widens_cache: names of devices on which attention over an 8-bit cache takes as long as over a 16-bit one.
        fuses: operators between two products run as one kernel; else each runs on its own.
        fuses_casts: casts of activations to 8 or 4 bits run in these kernels; else each is one of its own.
        pushes: small all-reduces in one kernel of its own (one-shot, two-shot); else by the library alone.
        sources: where the numbers come from, by name.
    """

    name: str
    description: str = ""
    general_factor: float = 1.0
    factors: Mapping[str, float] = field(default_factory=dict, compare=False)
    prefill_factors: Mapping[str, float] = field(default_factory=dict, compare=False)
    graph_requests: int = 512
    launch_seconds: float = 4e-6
    host_seconds: float = 0.0
    request_seconds: float = 0.0
    first_token_seconds: float = 0.0
    apart_seconds: float = 2e-3
    tokens_per_step: int = 8192
    drift: float = 0.0
    mixes: bool = True
    memory_share: float = 0.9
    output_reserved: float = 0.5
    lookahead: int = 0
    expert_kernels: float = 8.0
    expert_factors: Mapping[str, float] = field(default_factory=dict, compare=False)
    expert_kernels_on: Mapping[str, float] = field(default_factory=dict, compare=False)
    expert_host_on: Mapping[str, float] = field(default_factory=dict, compare=False)
    widens_cache: tuple[str, ...] = ()
    fuses: bool = True
    fuses_casts: bool = False
    pushes: bool = True
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def factor(self, device_name: str, prefill: bool = False) -> float:
        """Return the factor of a step on a GPU, with prefills or without: the fitted one, or the general one."""
        if prefill and device_name in self.prefill_factors:
            return self.prefill_factors[device_name]
        return self.factors.get(device_name, self.general_factor)

    def expert_factor(self, weights: str, device_name: str) -> float:
        """Return the factor of layers of experts with weights in a format on a GPU; 1 where nothing is known."""
        return self.expert_factors.get(f"{weights} on {device_name}", self.expert_factors.get(weights, 1.0))

    def factor_note(self, device_name: str) -> str:
        """Say which factor is taken for a GPU, and from where."""
        if device_name in self.factors:
            said = self.sources.get(f"factors.{device_name}") or self.sources.get("factors", "fitted")
            return f"{self.name} on {device_name}: times {self.factors[device_name]:.3g} ({said})"
        return (
            f"{self.name} was not measured on {device_name}: times {self.general_factor:.3g}, its factor on other GPUs "
            f"({', '.join(sorted(self.factors)) or 'none'})"
        )


@functools.cache
def engines() -> dict[str, Engine]:
    """Return all records by name, from data/engines.toml."""
    failures = ProfileErrors("data/engines.toml")
    root = Table(read_document(_FILE), "", failures)
    records = {name: _read(name, root.table(name)) for name in root.data}
    failures.raise_if_any()
    return records


def _read(name: str, table: Table) -> Engine:
    values: dict[str, object] = {}
    for each in fields(Engine):
        if each.name == "name" or not table.has(each.name):
            continue
        if isinstance(each.default, bool):
            values[each.name] = table.flag(each.name, False)
        elif isinstance(each.default, int):
            values[each.name] = table.integer(each.name, low=0)
        elif isinstance(each.default, str):
            values[each.name] = table.text(each.name)
        elif each.name == "widens_cache":
            values[each.name] = tuple(device.strip() for device in table.text(each.name).split(","))
        elif each.name in ("factors", "prefill_factors", "expert_factors", "expert_kernels_on", "expert_host_on"):
            values[each.name] = table.numbers(each.name, {}, positive=True)
        elif each.name == "sources":
            values[each.name] = table.texts(each.name, {})
        else:
            values[each.name] = table.number(each.name)
    table.close()
    return Engine(name, **values)  # type: ignore[arg-type]


def engine_named(name: str) -> Engine:
    """Return one record, or raise a ProfileError with the known names."""
    if name not in engines():
        raise ProfileError("engine", [f"unknown engine '{name}': {closest(name, engines())}"])
    return engines()[name]
