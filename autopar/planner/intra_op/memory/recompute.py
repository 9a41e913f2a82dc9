"""Activation checkpointing: the stretches of operators that are recomputed in the backward, and what that changes.

A segment is a run of operators in execution order. Its inputs are kept for the backward; everything that autograd would
keep inside is recomputed when the backward arrives there. Reshard steps first needed by an operator of a segment belong
to the segment.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from autopar.errors import PlanError, first_few
from autopar.plans.offload_options import EVERY
from autopar.plans.plan import Recompute
from autopar.rules.notation import Rule
from autopar.rules.saved_tensors import keeps
from autopar.words.graph import Graph, Ref
from autopar.words.placements import State

SHOWN = 12
"""Modules that a message lists."""


def segments_of(graph: Graph, rules: Sequence[Rule | None], patterns: Sequence[str]) -> Recompute:
    """Return the segments of modules whose paths match a pattern, and of regions under activation checkpointing.

    A segment is named by its first and last operator. A module inside another one that matches belongs to that one's
    segment. Operators at the end of a module that keep nothing for the backward (a residual addition, say) are left
    out: to recompute their result would serve nobody.

    Raises:
        PlanError: a pattern matches no module, or the operators of a module are not one contiguous run.
    """
    regions = _regions(graph)
    if not patterns:
        return _segments(graph, rules, regions)
    ops = [i for i, node in enumerate(graph.nodes) if node.kind == "op"]
    modules = _modules(graph)
    chosen: set[str] = set()
    for pattern in patterns:
        chosen |= _matched(modules, pattern, "recompute")
    outermost = [path for path in modules if path in chosen and not _outer(path) & chosen]
    for path in outermost:
        positions = [p for p, i in enumerate(ops) if f"{graph.nodes[i].module}.".startswith(f"{path}.")]
        first, last = positions[0], positions[-1]
        if last - first + 1 != len(positions):
            stranger = next(graph.nodes[ops[p]] for p in range(first, last) if p not in set(positions))
            raise PlanError(
                f"recompute: the operators of module '{path}' are not one contiguous run ({stranger.where} is between "
                "them); name modules inside it, or one around it"
            )
        regions.append((ops[first], ops[last]))
    return _segments(graph, rules, regions)


def check_modules(graph: Graph, patterns: Sequence[str]) -> None:
    """Refuse patterns of the option ``offload`` that match no module.

    Raises:
        PlanError: with the modules that there are.
    """
    modules = _modules(graph) if patterns else {}
    for pattern in patterns:
        if pattern != EVERY:
            _matched(modules, pattern, "offload")


def _matched(modules: Collection[str], pattern: str, option: str) -> set[str]:
    """Return the modules whose paths match a pattern of an option."""
    matched = {path for path in modules if fnmatchcase(path, pattern)}
    if not matched:
        outer = sorted(modules, key=lambda path: (path.count("."), path))
        raise PlanError(f"{option} '{pattern}' matches no module; modules are {first_few(outer, SHOWN) or 'none'}")
    return matched


def _segments(graph: Graph, rules: Sequence[Rule | None], runs: list[tuple[int, int]]) -> Recompute:
    """Return runs of operators as segments; those that have operators in common are one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    segments = [segment(graph, rules, first, last) for first, last in joined]
    return tuple(s for s in segments if s is not None)


def _regions(graph: Graph) -> list[tuple[int, int]]:
    """Return the first and last operator of each region under activation checkpointing."""
    regions: list[tuple[int, int]] = []
    now = -1
    for i, node in enumerate(graph.nodes):
        if node.kind != "op":
            continue
        if node.again >= 0 and node.again == now:
            regions[-1] = regions[-1][0], i
        elif node.again >= 0:
            regions.append((i, i))
        now = node.again
    return regions


def is_asked(graph: Graph, patterns: Sequence[str]) -> bool:
    """Return whether patterns or the model itself decide what is recomputed."""
    return bool(patterns) or any(node.again >= 0 for node in graph.nodes)


def segment(graph: Graph, rules: Sequence[Rule | None], first: int, last: int) -> tuple[str, str] | None:
    """Return the operators from ``first`` to ``last`` without a tail that keeps nothing; None if none keeps any."""
    while last > first and not (graph.nodes[last].kind == "op" and keeps(graph, rules, last)):
        last -= 1
    return (graph.nodes[first].name, graph.nodes[last].name) if keeps(graph, rules, last) else None


def _modules(graph: Graph) -> dict[str, None]:
    """Return the paths of the modules that have operators, outer ones included."""
    paths: dict[str, None] = {}
    for node in graph.nodes:
        parts = node.module.split(".") if node.kind == "op" else [""]
        paths.update(dict.fromkeys(".".join(parts[: k + 1]) for k in range(len(parts)) if parts[0]))
    return paths


def patterns_in(graph: Graph, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns that match a module of a part of a model."""
    modules = _modules(graph) if patterns else {}
    return tuple(p for p in patterns if any(fnmatchcase(path, p) for path in modules))


def _outer(path: str) -> set[str]:
    """Return the modules around a module."""
    parts = path.split(".")
    return {".".join(parts[:k]) for k in range(1, len(parts))}




@dataclass
class Segment:
    """Operators and reshard steps of one segment of a plan.

    Attributes:
        ops: numbers of its operators.
        steps: reshard steps ``(tensor, from, to)``, as lowering makes them: before the first operator that wants them.
        active: some operator keeps something for the backward, so the segment is recomputed.
        asks: the last of those operators, whose backward is the first that reads it; -1 if there is none.
    """

    ops: list[int] = field(default_factory=list)
    steps: list[tuple[Ref, State, State]] = field(default_factory=list)
    active: bool = False
    asks: int = -1
