"""Collectives of parameters beside computing: how many of their seconds a training step still waits for.

A parameter is gathered ahead of its use, and its gradient is reduced while the backward goes on to earlier layers. So
what a pass takes is the longer of what it computes and of the collectives that run beside it, in four groups:

    the first forward     gathers that are kept for the step, and those of one use
    every other forward   gathers of one use
    the last backward     reductions of the step's gradients, and what every backward has
    every other backward  gathers of one use, and reductions of one microbatch (lifetime "use")

Both are slower while they run at once: of ``n`` such seconds :data:`SLOWDOWN` times ``n`` are lost. Parameters that are
read first in the model have nothing before them: their gathers are waited for, and so are the reductions of their
gradients, which are the last ones of a backward. Reductions of a step wait for the last microbatch's backward, however
many there are.
"""

from __future__ import annotations

from typing import NamedTuple

from hardware_profiles import Cluster

SLOWDOWN = 0.15
"""Of seconds in which a device computes and communicates, the fraction that both lose together. Lee et al. 2025
(arXiv:2507.03114) measured that computing takes 18.9% longer beside collectives on the mean, on four A100, H100, MI210
and MI250; collectives of large models take 5 to 15% of the multiprocessors. The upper end of these stands for all."""


class Shares(NamedTuple):
    """Fractions of a pass beside which collectives may run: gathers of parameters beside a forward, reductions of
    gradients beside a backward. 0 where they are waited for."""

    gathers: float
    reductions: float

    @property
    def backward(self) -> float:
        """Of a backward, which may have both."""
        return self.reductions or self.gathers


HIDES_NOTHING = Shares(0.0, 0.0)
HIDES_ALL = Shares(1.0, 1.0)


def shares_of(cluster: Cluster) -> Shares:
    """Return how far collectives of parameters run beside computing: as the software says, and not at all where
    collectives use the cores that compute, or where the cluster states no compute."""
    if not cluster.overlap or cluster.abstract:
        return HIDES_NOTHING
    return Shares(cluster.software.hides_gathers, cluster.software.hides_reductions)


class ParameterSeconds(NamedTuple):
    """Seconds that collectives of parameters take by themselves.

    Attributes:
        gathers: once a step, in the forward of the first microbatch.
        reductions: once a step, in the backward of the last microbatch.
        forward_each: in the forward of every microbatch.
        backward_each: in the backward of every microbatch.
    """

    gathers: float = 0.0
    reductions: float = 0.0
    forward_each: float = 0.0
    backward_each: float = 0.0

    def of_step(self, microbatches: int) -> float:
        """Seconds of a whole step."""
        return self.gathers + self.reductions + microbatches * (self.forward_each + self.backward_each)

    def passes(self, microbatches: int) -> tuple[tuple[bool, int, float], ...]:
        """``(whether it is a backward, times a step, seconds)`` of the four kinds of passes."""
        return (
            (False, 1, self.gathers + self.forward_each), (False, microbatches - 1, self.forward_each),
            (True, 1, self.reductions + self.backward_each), (True, microbatches - 1, self.backward_each),
        )  # fmt: skip

    def plus(self, more: ParameterSeconds, times: float = 1) -> ParameterSeconds:
        """These and ``times`` more."""
        return ParameterSeconds(*[a + times * b for a, b in zip(self, more, strict=True)])


class Computing(NamedTuple):
    """Seconds that one device computes of a microbatch: its forward and its backward, without collectives and without
    what is computed a second time."""

    forward: float
    backward: float

    def side(self, backward: bool, shares: Shares) -> float:
        """Seconds of a pass beside which collectives may run."""
        return self.backward * shares.backward if backward else self.forward * shares.gathers


def hidden_seconds(collectives: float, computing: float) -> float:
    """Return the seconds that a pass takes less than its computing and its collectives one after the other."""
    return (1 - SLOWDOWN) * min(collectives, computing)


def exposed(
    parameters: ParameterSeconds, may_hide: ParameterSeconds, computing: Computing, shares: Shares
) -> ParameterSeconds:
    """Return what of the collectives of parameters a step still takes.

    Args:
        parameters: what they take by themselves.
        may_hide: the part of it beside which anything may be computed.
    """
    forward, backward = computing.side(False, shares), computing.side(True, shares)
    forward_each = hidden_seconds(may_hide.forward_each, forward)
    backward_each = hidden_seconds(may_hide.backward_each, backward)
    first = hidden_seconds(may_hide.gathers + may_hide.forward_each, forward) - forward_each
    last = hidden_seconds(may_hide.reductions + may_hide.backward_each, backward) - backward_each
    return parameters.plus(ParameterSeconds(first, last, forward_each, backward_each), -1)


def tensor_exposed(cluster: Cluster) -> float:
    """Return the fraction that a step waits for of collectives of tensor parallelism: of those that run in parts beside
    the products that they belong to, what both lose together."""
    if not cluster.overlap or cluster.abstract:
        return 1.0
    return 1 - (1 - SLOWDOWN) * cluster.software.hides_tensor


TENSOR = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
"""Collectives of tensor and sequence parallelism between operators."""

__all__ = [
    "HIDES_ALL", "HIDES_NOTHING", "SLOWDOWN", "TENSOR", "Computing", "ParameterSeconds", "Shares", "exposed",
    "hidden_seconds", "shares_of", "tensor_exposed",
]  # fmt: skip
