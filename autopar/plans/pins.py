"""Pins: what the user decided about a plan, which it remembers so that it can be solved again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.words.load_shares import Load
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.precision import Precision


@dataclass(frozen=True)
class Pins:
    """Choices that the user made, by the names of the whole model; the plan is the fastest that honours them.

    What is empty or None was left to the planner. :mod:`autopar.plans.plan_options` has the spelling of each.

    Attributes:
        stages: groups of devices.
        cuts: what all stages but the first begin with, as it was given: module paths or operators.
        schedules: names to choose from.
        microbatches: the number of them in a step.
        mesh: the mesh of every group of devices.
        ops: ``{pattern: {axis: factor}}``; a later pattern overrides an earlier one.
        params: ``{pattern: "replicate", a placement "S0,I", or one with a lifetime "S0,I use"}``.
        inputs, outputs: placements by input name and output position.
        memory_limit_bytes: the limit of a device; None for what the device has.
        recompute: patterns of module paths that are recomputed in the backward.
        precision: the policy that the graph was captured for.
        expert_load: shares of rows of routed experts, by patterns of modules; prices are for them.
        layout: the words that decide everything, such as ``tp=8,sp,dp=4,zero=1``; empty for a plan that was searched.
        target: the trainer that the plan is for (:mod:`autopar.targets`); empty for autopar's own runtime.
        mode: ``inference`` for a plan that runs forward alone; empty for one of training.
        offload: what may be kept on the host, as :attr:`autopar.plans.offload_options.Offload.text` writes it.
    """

    stages: int | None = None
    cuts: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    microbatches: int | None = None
    mesh: Mesh | None = None
    ops: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, State] = field(default_factory=dict)
    outputs: Mapping[int, State] = field(default_factory=dict)
    memory_limit_bytes: int | None = None
    recompute: tuple[str, ...] = ()
    precision: Precision | None = None
    expert_load: Mapping[str, Load] = field(default_factory=dict)
    layout: str = ""
    target: str = ""
    mode: str = ""
    offload: str = ""
