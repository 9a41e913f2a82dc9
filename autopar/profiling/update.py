"""A profile corrected by the measured seconds of a step that was run with it."""

from __future__ import annotations

import copy
import datetime
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from autopar.profiling.by_kind import COLLECTIVE, kind_of

LEAST_SHARE = 0.02
"""Share of a step's predicted seconds below which a kind is not corrected."""
FARTHEST = 5.0
"""Largest correction of a kind at once; a larger ratio means that something else was measured."""


def ratios(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Return measured over predicted seconds, of the kinds that are large enough to tell."""
    whole = sum(predicted.values())
    return {
        kind: min(FARTHEST, max(1 / FARTHEST, measured[kind] / seconds))
        for kind, seconds in predicted.items()
        if seconds >= LEAST_SHARE * whole and measured.get(kind, 0.0) > 0
    }


def updated(
    profile: Mapping[str, Any], predicted: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, Any]:
    """Return a profile's document with its seconds scaled by the measured over the predicted ones of each kind.

    ``predicted`` (:func:`autopar.profiling.by_kind.predicted`) is priced with this profile.
    """
    document: dict[str, Any] = copy.deepcopy(dict(profile))
    factors = ratios(predicted, measured)
    of_kind: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for key, op in document["ops"].items():
        factor = factors.get(kind_of(key.partition("(")[0]), 1.0)
        seconds = op["forward_seconds"] + op["backward_seconds"]
        of_kind[op["kind"]].append((seconds, factor * seconds))
        for name in ("forward_seconds", "backward_seconds", "input_seconds", "weight_seconds"):
            op[name] *= factor
    for kind, row in document["corrections"].items():
        pairs = of_kind[kind] if kind in of_kind else [pair for pairs in of_kind.values() for pair in pairs]
        before, after = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (1.0, 1.0)
        for way in ("forward", "backward"):
            row[way] = [value * after / before if before else value for value in row[way]]
    for points in document["transfers"].values():
        for point in points:
            point[1] *= factors.get(COLLECTIVE, 1.0)
    changes = ", ".join(f"{kind} x {factor:.2f}" for kind, factor in sorted(factors.items()))
    document["provenance"].setdefault("updated", []).append(f"{datetime.date.today().isoformat()}: {changes}")
    return document
