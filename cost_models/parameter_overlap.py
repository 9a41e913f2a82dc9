"""Overlap of parameter collectives with compute: the seconds of them that remain exposed in a step.

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

Copies of parameters between a device and the memory of its host hide as collectives do, but no more of them than the
link carries beside the copies of activations (:class:`cost_models.host_link.HostLinkUse`).
"""

from __future__ import annotations

from typing import NamedTuple

from cost_models.host_link import UNUSED, HostLinkUse
from hardware_profiles import Cluster

SLOWDOWN = 0.15
"""The fraction of seconds in which a device computes and communicates that both lose together. Lee et al. 2025
(arXiv:2507.03114) measured that computing takes 18.9% longer beside collectives on the mean, on four A100, H100, MI210
and MI250; collectives of large models take 5 to 15% of the multiprocessors. The upper end of these stands for all."""


class Shares(NamedTuple):
    """Fractions of a pass that collectives can overlap: parameter gathers, and gradient reductions (backward only)."""

    gathers: float
    reductions: float

    @property
    def backward(self) -> float:
        """Fraction of a backward, which may have both."""
        return self.reductions or self.gathers


HIDES_NOTHING = Shares(0.0, 0.0)
HIDES_ALL = Shares(1.0, 1.0)


def shares_of(cluster: Cluster) -> Shares:
    """Return how far collectives of parameters overlap compute: as the software does.

    Not at all where collectives use the computing cores, or where the cluster states no compute.
    """
    if not cluster.overlap or cluster.abstract:
        return HIDES_NOTHING
    return Shares(cluster.software.hides_gathers, cluster.software.hides_reductions)


class ParameterSeconds(NamedTuple):
    """Seconds of parameter collectives by themselves.

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
        """Return the seconds of a whole step."""
        return self.gathers + self.reductions + microbatches * (self.forward_each + self.backward_each)

    def passes(self, microbatches: int) -> tuple[tuple[bool, int, float], ...]:
        """Return ``(is backward, times per step, seconds)`` of the four kinds of passes."""
        return (
            (False, 1, self.gathers + self.forward_each), (False, microbatches - 1, self.forward_each),
            (True, 1, self.reductions + self.backward_each), (True, microbatches - 1, self.backward_each),
        )  # fmt: skip

    def plus(self, more: ParameterSeconds, times: float = 1) -> ParameterSeconds:
        """Return the sum with ``times`` more."""
        return ParameterSeconds(*[a + times * b for a, b in zip(self, more, strict=True)])


class Computing(NamedTuple):
    """Compute seconds of a microbatch on one device, forward and backward, without recomputation."""

    forward: float
    backward: float

    def side(self, backward: bool, shares: Shares) -> float:
        """Return the seconds of a pass that collectives can overlap."""
        return self.backward * shares.backward if backward else self.forward * shares.gathers


def hidden_seconds(collectives: float, computing: float) -> float:
    """Return the seconds by which a pass is shorter than its compute and collectives in sequence."""
    return (1 - SLOWDOWN) * min(collectives, computing)


NONE = ParameterSeconds()
"""Of no collectives."""


class HostSeconds(NamedTuple):
    """Seconds of parameters' copies between a device and its host, each direction alone, by when they run."""

    coming: ParameterSeconds = NONE
    going: ParameterSeconds = NONE

    @property
    def both(self) -> ParameterSeconds:
        """Of both directions, one after another: what prices have, since a gradient and a value seldom meet."""
        return self.coming.plus(self.going)

    def plus(self, more: HostSeconds, times: float = 1) -> HostSeconds:
        """Return the sum with ``times`` more."""
        return HostSeconds(self.coming.plus(more.coming, times), self.going.plus(more.going, times))


NO_COPIES = HostSeconds()
"""Of parameters that stay on the device."""


def exposed(
    parameters: ParameterSeconds, may_hide: ParameterSeconds, computing: Computing, shares: Shares,
    copies: HostSeconds = NO_COPIES, link: HostLinkUse = UNUSED,
) -> ParameterSeconds:  # fmt: skip
    """Return the exposed seconds of parameter collectives in a step; ``may_hide`` is the part that can overlap.

    ``copies`` are the part of ``may_hide`` that is copied from and to the host, ``link`` how activations use that link.
    """
    passes = zip(may_hide.passes(1), copies.coming.passes(1), copies.going.passes(1), strict=True)
    hidden = []
    for (backward, _, seconds), (*_, coming), (*_, going) in passes:
        on_link = seconds - coming - going + link.room(backward, coming, going) if coming or going else seconds
        hidden.append(hidden_seconds(min(seconds, on_link), computing.side(backward, shares)))
    first, forward_each, last, backward_each = hidden
    first, last = first - forward_each, last - backward_each
    left = parameters.plus(ParameterSeconds(first, last, forward_each, backward_each), -1)
    return ParameterSeconds(*[max(0.0, seconds) for seconds in left])  # rounding: all of it may be hidden


def tensor_exposed(cluster: Cluster) -> float:
    """Return the exposed fraction of tensor-parallel collectives.

    They run in parts next to the products that they belong to; exposed is what both lose together.
    """
    if not cluster.overlap or cluster.abstract:
        return 1.0
    return 1 - (1 - SLOWDOWN) * cluster.software.hides_tensor


TENSOR = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
"""Collectives of tensor and sequence parallelism between operators."""
