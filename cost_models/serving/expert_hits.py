"""Experts that a step hits: how many different ones, and how many tokens come to the busiest device."""

from __future__ import annotations

import math

from .work import Experts

SKEW = 1.0
"""Variance of the tokens of a device over that of tokens which choose evenly: routers of trained models are uneven."""


def experts_hit(experts: Experts, tokens: float) -> float:
    """Return the expected number of different local experts that get at least one of a step's tokens.

    Each token takes ``top_k`` of ``total`` experts, all alike and independent of the others.
    """
    missed = (1.0 - experts.top_k / experts.total) ** tokens if experts.top_k < experts.total else 0.0
    return experts.local * (1.0 - missed)


def pairs_on_busiest(experts: Experts, tokens: float) -> float:
    """Return the (token, expert) pairs of the device that gets most, of all tokens that share the experts.

    The mean and, over ranks with experts of their own, the expected largest deviation of so many even draws.
    """
    mean = tokens * experts.top_k * experts.local / experts.total
    ranks = experts.total // max(1, experts.local)
    if ranks <= 1 or mean <= 0:
        return mean
    most = tokens * min(experts.top_k, experts.local)
    deviation = math.sqrt(2.0 * math.log(ranks) * SKEW * mean * (1.0 - 1.0 / ranks))
    return min(most, mean + deviation)
