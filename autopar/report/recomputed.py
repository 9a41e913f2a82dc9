"""A plan's recomputation and other memory decisions in words.

Example: ``model.layers 0-11 selective (mlp: mul; mlp.act_fn: silu), 12-31 none``. Modules with a number in their path
are blocks. A block is *full* if all of its operators but those at its end that keep nothing are recomputed, *selective*
if some are; blocks with the same recomputed operators share an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import groupby

from autopar.plans.memory_decisions import about_tensors
from autopar.plans.plan import StagePlan, segment_numbers
from autopar.rules.registry import rules_of
from autopar.rules.saved_tensors import keeps
from autopar.words.graph import Graph


def runs_again(graph: Graph, plan: StagePlan) -> list[str]:
    """Return an entry for each group of blocks, and for what is outside of blocks; empty without recomputation."""
    segment_of = segment_numbers(graph, plan.recompute)
    rules = rules_of(graph)
    return _by_block(graph, segment_of, lambda i: keeps(graph, rules, i)) if segment_of else []


def waits(graph: Graph, plan: StagePlan) -> dict[str, list[str]]:
    """Return the blocks' entries for each decision about tensors, by the operators that make the tensors."""
    described = {}
    for record in about_tensors():
        if keys := plan.memory.get(record.name):
            described[record.name] = _by_block(graph, {graph.index[key] for key in keys}, lambda _: True)
    return described


def _by_block(graph: Graph, chosen: Collection[int], counts: Callable[[int], bool]) -> list[str]:
    """Return an entry for each group of blocks in which the same operators are chosen.

    A block counts as chosen as a whole without the operators for which ``counts`` is False.
    """
    blocks: dict[str, dict[int, dict[str, dict[str, None]]]] = {}  # path, number, module inside: operators
    partly: set[tuple[str, int]] = set()
    others: dict[str, dict[str, None]] = {}
    for i, node in graph.of_kind("op"):
        path, number, inside = _place(node.module)
        op = node.target.split(".")[1]
        if number is None:
            if i in chosen:
                others.setdefault(node.module, {})[op] = None
            continue
        of_block = blocks.setdefault(path, {}).setdefault(number, {})
        if i in chosen:
            of_block.setdefault(inside, {})[op] = None
        elif counts(i):
            partly.add((path, number))
    described = []
    for path, numbers in blocks.items():
        entries = []
        for text, run in groupby(sorted(numbers), key=lambda n: _what(numbers[n], (path, n) in partly)):
            alike = list(run)
            span = f"{alike[0]}-{alike[-1]}" if len(alike) > 1 else f"{alike[0]}"
            entries.append(f"{span} {text}")
        if any(not entry.endswith(" none") for entry in entries):
            described.append(f"{path} {', '.join(entries)}")
    return described + [_modules({module: ops}) for module, ops in others.items()]


def _place(module: str) -> tuple[str, int | None, str]:
    """Return ``("model.layers", 3, "mlp.act_fn")`` of a module path; the number is None outside of blocks."""
    parts = module.split(".")
    for k, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:k]), int(part), ".".join(parts[k + 1 :])
    return module, None, ""


def _what(again: dict[str, dict[str, None]], partly: bool) -> str:
    if not again:
        return "none"
    return f"selective ({_modules(again)})" if partly else "full"


def _modules(again: dict[str, dict[str, None]]) -> str:
    return "; ".join(f"{module}: {', '.join(ops)}" if module else ", ".join(ops) for module, ops in again.items())
