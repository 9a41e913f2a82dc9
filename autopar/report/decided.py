"""The log message of ``parallelize`` about its plan, written once by the first rank.

The logger is ``autopar``, at level INFO: ``logging.getLogger("autopar").setLevel(logging.WARNING)`` silences it.
Without logging configured by the program, the lines go to standard error.
"""

from __future__ import annotations

import logging
from math import prod

from autopar.errors import first_few
from autopar.plans.plan import Plan
from autopar.report.axes_in_words import axes_in_words, axis_shares
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from autopar.words.texts import show_bytes, show_seconds

LOGGER = logging.getLogger("autopar")
SHOWN = 3
"""Most names in a line."""


def say(plan: Plan, graph: Graph, random: str = "sharded") -> None:
    """Log :func:`decided` if the logger is enabled."""
    if LOGGER.level == logging.NOTSET and not LOGGER.hasHandlers():
        LOGGER.setLevel(logging.INFO)
        LOGGER.addHandler(logging.StreamHandler())
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info("\n".join(decided(plan, graph, random)))


def decided(plan: Plan, graph: Graph, random: str = "sharded") -> list[str]:
    """Return five lines: time and memory, mesh, operators, sharded parameters, replicated parameters.

    A sixth line is about random numbers, where the model draws some. ``graph`` is of the whole model, for the sizes of
    its parameters; ``random`` is the argument of :func:`autopar.parallelize`.
    """
    meshes = {stage.mesh.shown(): stage for stage in plan.stages}
    stages = f"{len(plan.stages)} stage{'s' * (len(plan.stages) > 1)}"
    n = plan.microbatches
    single = all(stage.n_devices == 1 for stage in plan.stages)
    unsharded = "not sharded, every stage has one device" if single else "no matrix products or attention to shard"
    return [
        f"autopar: {plan.n_devices} devices of {plan.cluster or 'the given mesh'}, predicted "
        f"{show_seconds(plan.seconds)} a step, at most {show_bytes(plan.memory_bytes)} on a device",
        f"  mesh {', '.join(meshes) or 'of one device'}; {stages}, {n} microbatch{'es' * (n > 1)}",
        f"  operators: {axes_in_words(axis_shares(graph, plan)) or unsharded}",
        *_parameters(plan, graph),
        *_random_numbers(graph, random),
    ]


def _random_numbers(graph: Graph, random: str) -> list[str]:
    """Return the line about random numbers."""
    n = sum(rule is not None and rule.random for rule in rules_of(graph))
    if not n:
        return []
    drawn = f"  random numbers: {n} operator{'s' * (n > 1)} draw{'s' * (n == 1)} "
    if random == "torch":
        return [drawn + "eager mode's numbers of one device, by torch's generator on every rank"]
    return [
        drawn + "from a seed that each call takes from torch's generator: the same on any mesh and with any number of "
        "microbatches, but not eager mode's (random='torch' draws those)"
    ]


def _parameters(plan: Plan, graph: Graph) -> tuple[str, str]:
    """Return the two lines about parameters."""
    shapes: dict[str, tuple[int, ...]] = {}
    for _, node in graph.of_kind("param"):
        spec = node.outs[0]
        shapes[str(node.target)] = tuple(spec.shape) if spec is not None else ()
    in_shards: list[str] = []
    whole: list[str] = []
    small: list[str] = []
    alone: list[str] = []  # of a stage on one device
    for stage in plan.stages:
        axes = [size for size in stage.mesh.sizes if size > 1]
        for name, choice in stage.params.items():
            if not axes:
                alone.append(name)
            elif any(p.is_shard for p in choice.stored):
                in_shards.append(name)
            elif max(shapes.get(name, ()), default=1) < min(axes):
                small.append(name)
            else:
                whole.append(name)

    def count(names: list[str]) -> int:
        return sum(prod(shapes[name]) for name in names if name in shapes)

    names = [*in_shards, *whole, *small, *alone]
    total = max(1, count(names))
    pinned = ", or pinned by params=" if plan.pins.params else ""
    kept = [
        f"{first_few(whole, SHOWN)} (cheaper than gathering{pinned})" if whole else "",
        f"{first_few(small, SHOWN)} (too small to shard)" if small else "",
    ]
    return (
        f"  parameters: {len(in_shards)} of {len(names)} are sharded, {count(in_shards) / total:.0%} of all elements"
        f"{f'; {len(alone)} are on the one device of their stage' if alone else ''}",
        f"  replicated parameters: {', '.join(filter(None, kept)) or 'none'}",
    )
