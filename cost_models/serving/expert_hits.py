"""Experts that a step hits: how many different ones, and how many tokens come to the busiest device."""

from __future__ import annotations

import math

from .work import Experts

UNEVEN = 0.5
"""Squared relative deviation of how often experts are chosen: routers of trained models prefer some. Read off the
growth of measured steps with the requests in flight; 0 for experts that are all alike."""


def experts_hit(experts: Experts, tokens: float) -> float:
    """Return the expected number of different local experts that get at least one of a step's tokens.

    Tokens choose on their own; how often an expert is chosen varies by a gamma distribution with deviation
    ``UNEVEN``, so that the tokens of an expert follow a negative binomial one.
    """
    mean = tokens * experts.top_k / experts.total
    missed = (1.0 + UNEVEN * mean) ** (-1.0 / UNEVEN) if UNEVEN else math.exp(-mean)
    least = min(experts.local, experts.top_k * experts.local / experts.total * min(1.0, tokens))
    return max(least, experts.local * (1.0 - missed))


def pairs_on_busiest(experts: Experts, tokens: float) -> float:
    """Return the (token, expert) pairs of the device that gets most, of all tokens that share the experts.

    The mean and, over ranks with experts of their own, the expected largest of their deviations: of the draws, and of
    how often each rank's experts are chosen.
    """
    mean = tokens * experts.top_k * experts.local / experts.total
    ranks = experts.total // max(1, experts.local)
    if ranks <= 1 or mean <= 0:
        return mean
    most = tokens * min(experts.top_k, experts.local)
    variance = (mean + UNEVEN * mean * mean / max(1, experts.local)) * (1.0 - 1.0 / ranks)
    return min(most, mean + math.sqrt(2.0 * math.log(ranks) * variance))
