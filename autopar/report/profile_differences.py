"""Differences of two profiles: operators by kind, the largest ones, collectives, the optimizer."""

from __future__ import annotations

from collections import Counter, defaultdict

from hardware_profiles import Cluster
from hardware_profiles.measurements import Measured

FARTHEST = 10
"""Number of operators that are named, those with the largest ratio of seconds."""
MATTERS = 0.005
"""Least share of the common operators' seconds of an operator that is named."""


def profile_differences(a: Cluster, b: Cluster) -> tuple[list[tuple[str, float, float]], list[str]]:
    """Return rows ``(what, seconds in a, seconds in b)``, and notes about what only one profile has."""
    first, second = a.measured, b.measured
    assert isinstance(first, Measured) and isinstance(second, Measured), "both are profiles"
    both = [key for key in first.ops if key in second.ops]
    kinds: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    pairs: list[tuple[str, float, float]] = []
    for key in both:
        x, y = (of.ops[key].forward_seconds + of.ops[key].backward_seconds for of in (first, second))
        kinds[first.ops[key].kind][0] += x
        kinds[first.ops[key].kind][1] += y
        pairs.append((key, x, y))
    counts = Counter(first.ops[key].kind for key in both)
    rows: list[tuple[str, float, float]] = [
        (f"{kind}, {counts[kind]} ops", kinds[kind][0], kinds[kind][1]) for kind in sorted(kinds)
    ]
    least = MATTERS * sum(x for _, x, _ in pairs)
    named = [pair for pair in pairs if max(pair[1:]) >= least > 0 and min(pair[1:]) > 0]
    named.sort(key=lambda pair: -max(pair[1] / pair[2], pair[2] / pair[1]))
    rows += named[:FARTHEST]
    for kind in sorted(first.transfers.keys() & second.transfers.keys()):
        x_of, y_of = dict(first.transfers[kind]), dict(second.transfers[kind])
        sizes = x_of.keys() & y_of.keys()
        rows += [(f"{kind}, {n:.0f} bytes", x_of[n], y_of[n]) for n in ((min(sizes), max(sizes)) if sizes else ())]
    for name in sorted(first.optimizers.keys() & second.optimizers.keys()):
        x, y = (of.optimizers[name].tensor_seconds for of in (first, second))
        rows.append((f"{name}, a tensor", x, y))
    notes = [
        f"{name} was measured {of.provenance['date']} on {of.provenance['processor']} with torch "
        f"{of.provenance['torch']}, of {of.provenance['model']}" for name, of in ((a.name, first), (b.name, second))
    ]  # fmt: skip
    for name, ours, others in ((a.name, first, second), (b.name, second, first)):
        if alone := len(ours.ops.keys() - others.ops.keys()):
            notes.append(f"{alone} ops are in {name} alone")
    return rows, notes
