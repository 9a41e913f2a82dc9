"""A model planned freely beside the same model with decisions pinned at random: no pinned problem has a better plan.

    python benchmarks/pins.py gpt2                       200 sets of pins, half of them without a limit that binds
    python benchmarks/pins.py --count 40 --axes data=2,tensor=4 llama t5 vit mixtral
    python benchmarks/pins.py --precision bf16-mixed --limit 0.6 gpt2

A pin leaves strategies out, so the best plan under pins is a plan of the free problem, too. Where one is faster than
the free search's, that search has missed it. Pins name kinds of operators of all blocks at once (as people do), with
options that are drawn at random or taken from the free plan: with many of its own decisions pinned, the problem is
easier, and a better plan near it shows. A pinned problem whose bound is above the free plan is not searched to its end.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

COUNT = 200
"""Sets of pins of a model, unless another number is asked for."""
LIMITS = (None, 0.75, 0.55)
"""Limits, as parts of what the fastest plan needs; None where memory does not bind."""
SIZES = (1, 2, 4, 8, 16)
"""Pins in a set."""
OWN = 0.6
"""How often a pin is the free plan's own decision."""
BEHIND = 1.01
"""The free search is behind where a pinned plan is faster by more than this factor."""

PLENTY = 1e15
"""Bytes that no limit binds."""

Pins = dict[str, dict[str, str]]


@dataclass
class Found:
    """What became of the sets of pins.

    Attributes:
        seconds: of the free plan; infinite where none was found that fits.
        behind: pins whose plan is faster than the free one by more than :data:`BEHIND`, with its seconds.
        fastest: seconds of the fastest pinned plan.
        searched: pinned problems that were searched to their end.
        slower: those whose bound is above the free plan.
        refused: those that cannot be, or do not fit.
    """

    seconds: float
    behind: list[tuple[float, Pins]] = field(default_factory=list)
    fastest: float = inf
    searched: int = 0
    slower: int = 0
    refused: int = 0


def pattern_of(label: str) -> str:
    """The pattern that names an operator of every block: numbers of modules stand for all."""
    module, _, op = label.partition(":")
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module) + ":" + op


def kinds_of(graph: Any, mesh: Any) -> dict[str, tuple[list[str], str]]:
    """By pattern, the options that an operator of this kind has on an axis, and the name of one of its nodes."""
    from autopar.rules.registry import rules_of
    from autopar.rules.strategy import options_of
    from autopar.words.labels import op_labels

    kinds: dict[str, tuple[list[str], str]] = {}
    rules, labels = rules_of(graph), op_labels(graph)
    for i, node in graph.of_kind("op"):
        rule = rules[i]
        if node.hot and rule is not None:
            kinds[pattern_of(labels[node.name])] = list(options_of(graph, node, rule, rule.blocks_on(mesh))), node.name
    return kinds


def random_pins(graph: Any, mesh: Any, plan: Any, count: int, seed: int = 0) -> Iterator[Pins]:
    """So many sets of pins, of random kinds of operators on one axis or all, as the plan has them or at random."""
    rng, kinds = random.Random(seed), kinds_of(graph, mesh)
    axes = [a for a, (_, size) in enumerate(mesh) if size > 1]
    for _ in range(count):
        pins: Pins = {}
        own = rng.choice((0.0, OWN, 1.0))
        for pattern in rng.sample(sorted(kinds), min(rng.choice(SIZES), len(kinds))):
            options, node = kinds[pattern]
            for a in axes if rng.random() < 0.5 else [rng.choice(axes)]:
                option = plan.ops[node][a] if rng.random() < own else rng.choice(options)
                pins.setdefault(pattern, {})[mesh.names[a]] = option
        yield pins


def compare(
    graph: Any, cluster: Any, mesh: Any, limit: float | None, count: int, seed: int = 0, near: float = BEHIND,
    options: Mapping[str, Any] | None = None,
) -> Found:  # fmt: skip
    """The free plan of a graph on a mesh beside plans under random pins.

    Args:
        limit: bytes of a device; None for all that it has.
        near: pinned problems whose bound is below the free plan by less than this factor are not searched.
        options: what else is asked, of both.
    """
    from autopar.errors import AutoparError, InfeasibleError
    from autopar.planner.intra_op.building.integer_program import Beaten
    from autopar.planner.intra_op.mesh_plan import Options, plan_graph

    base = {"memory_limit_bytes": limit, **(options or {})}
    try:
        free = plan_graph(graph, cluster, mesh, Options(**base, explains=False))
        found = Found(free.price.seconds)
    except InfeasibleError:  # then nothing that is pinned may fit
        free = plan_graph(graph, cluster, mesh, Options(**{**base, "memory_limit_bytes": PLENTY}))
        found = Found(inf)
    for pins in random_pins(graph, mesh, free, count, seed):
        asked = Options(**base, constraints=pins, worth_seconds=found.seconds / near, explains=False)
        try:
            plan = plan_graph(graph, cluster, mesh, asked)
        except Beaten:
            found.slower += 1
            continue
        except AutoparError:
            found.refused += 1
            continue
        found.searched += 1
        found.fastest = min(found.fastest, plan.price.seconds)
        if plan.price.seconds * near < free.price.seconds:
            found.behind.append((plan.price.seconds, pins))
    return found


def small(family: str, precision: str | None) -> Any:
    """The graph of a small model of a family, with a loss: four blocks, of the shapes of a real one."""
    import layouts

    import autopar.rules  # noqa: F401
    from autopar.capture import capture
    from autopar.words.precision import parse_precision

    shape, rows, seq = {
        "gpt2": (layouts.GPT2_SMALL, 16, 1024),
        "llama": (layouts.LLAMA_8B, 8, 2048),
        "t5": (layouts.T5_3B, 16, 512),
        "vit": (layouts.VIT_22B, 32, 224),
        "mixtral": (layouts.MIXTRAL, 8, 2048),
    }[family]
    model = layouts.model_of(family, {**shape, "layers": 4}, seq)
    if precision is not None:
        model = model.float()
    batch = layouts.batch_of(family, rows, seq, model)
    return capture(model, (), batch, precision=parse_precision(precision)).graph


def measure(family: str, axes: str, precision: str | None, part: float | None, count: int, seed: int) -> dict[str, Any]:
    """One model on one mesh under one limit, in this process."""
    from autopar.planner.intra_op.mesh_plan import Options, plan_graph
    from autopar.words.meshes import Mesh
    from hardware_profiles import load_cluster

    mesh = Mesh((name, int(size)) for name, _, size in (word.partition("=") for word in axes.split(",")))
    graph, cluster = small(family, precision), load_cluster("dgx-h100" if mesh.n_devices <= 8 else "dgx-h100-x2")
    limit = None
    if part is not None:
        limit = part * plan_graph(graph, cluster, mesh, Options(memory_limit_bytes=PLENTY)).price.memory_bytes
    start = time.process_time()
    found = compare(graph, cluster, mesh, limit, count, seed)
    row: dict[str, Any] = {
        "model": family, "mesh": axes, "precision": precision or "as the model is", "limit": part,
        "seconds": found.seconds, "fastest pinned": found.fastest, "pins": count,
        "searched": found.searched, "bound above": found.slower, "refused": found.refused,
        "behind": len(found.behind), "CPU s": round(time.process_time() - start, 1),
    }  # fmt: skip
    if found.behind:
        row["best pins"] = min(found.behind, key=lambda f: f[0])[1]
    return row


def main() -> None:
    """Print a line for every model and limit."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--axes", default="data=2,tensor=4")
    parser.add_argument("--precision")
    parser.add_argument("--limit", type=float, action="append")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for family in options.models:
        for part in options.limit or LIMITS:
            row = measure(family, options.axes, options.precision, part, options.count, options.seed)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
