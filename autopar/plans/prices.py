"""Predicted cost of a stage: seconds and bytes, and the peak of its memory by microbatches in flight.

A stage of a pipeline is at its fullest with as many microbatches between forward and backward as the schedule lets it
have. All but one of them keep what autograd saved. One runs, its forward or its backward, with the working memory of
operators. And tensors of others are pending: received before they are needed, or sent and not taken yet.

Two steps matter, because gradients of parameters are there from the first backward on. The *first* backward has most
microbatches in flight if all of them are then; where a step has more, the forward and the backward behind it are as
full, and the gradients are there, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.plans.transfer import RECEIVED_AHEAD


@dataclass(frozen=True)
class Price:
    """Predicted cost of one training step on one rank.

    Attributes:
        compute_seconds: forward and backward of the ops.
        activation_seconds: collectives on activations, forward and backward, those inside distributed ops included.
        parameter_seconds: gradient reductions and parameter gathers, as long as they take by themselves.
        hidden_seconds: the part of the collectives' seconds that passes while operators compute
            (:mod:`cost_models.parameter_overlap`).
        overhead_seconds: what the executor takes besides operators in all microbatches, sums of gradients included.
        optimizer_seconds: the optimizer's step, and what else is done once.
        parameter_bytes, gradient_bytes, optimizer_bytes: stored state of one rank; exact.
        gathered_bytes: copies of parameters (and their gradients) in the used placement, alive at once.
        version_bytes: older versions of weights that microbatches in flight are computed with.
        activation_bytes: what autograd keeps for the backward of all microbatches in flight; of recomputed segments
            their inputs, and the rest of the largest one while it lives again.
        again_bytes: the part of `activation_bytes` that is the rest of that largest segment: there once, however many
            microbatches are in flight.
        working_bytes: what operators need while they run, at the fullest moment of the step: gradients of what they
            make and read, copies pending. Of what is counted above, gradients and activations are not all there at
            once; what is not there at that moment is taken off here, so this can be negative.
        buffer_bytes: buffers of one rank, caches among them, of a plan that runs forward alone; exact. Buffers of
            training, which are small, are not counted.
    """

    compute_seconds: float = 0.0
    activation_seconds: float = 0.0
    parameter_seconds: float = 0.0
    hidden_seconds: float = 0.0
    overhead_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    gathered_bytes: int = 0
    activation_bytes: int = 0
    again_bytes: int = 0
    working_bytes: int = 0
    buffer_bytes: int = 0
    version_bytes: int = 0

    @property
    def seconds(self) -> float:
        """The whole step."""
        return (
            self.compute_seconds + self.activation_seconds + self.exposed_seconds + self.overhead_seconds
            + self.optimizer_seconds
        )  # fmt: skip

    @property
    def exposed_seconds(self) -> float:
        """Seconds that a step waits for gradient reductions and parameter gathers."""
        return self.parameter_seconds - self.hidden_seconds

    @property
    def microbatch_seconds(self) -> float:
        """Forwards and backwards of all microbatches, without collectives of parameters."""
        return self.compute_seconds + self.activation_seconds + self.overhead_seconds

    @property
    def memory_bytes(self) -> int:
        """The most that lives at once on one rank, at the fullest moment of a step: what limits are held against."""
        return self.stored_bytes + self.activation_bytes + self.working_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes that do not grow with the microbatches in flight."""
        return self.state_bytes + self.gathered_bytes + self.version_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of what is stored from step to step."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.buffer_bytes

    @property
    def transient_bytes(self) -> int:
        """Bytes of the peak beyond persistent state and the activations of all microbatches in flight.

        Of the stages on one device, one at a time has them.
        """
        return self.again_bytes + self.working_bytes


def bytes_together(prices: Sequence[Price]) -> int:
    """Return the peak bytes of a rank of several stages."""
    return sum(p.memory_bytes - p.transient_bytes for p in prices) + max(p.transient_bytes for p in prices)


class KeptVersions(NamedTuple):
    """The versions of a stage's trained weights that a schedule keeps at one time.

    Attributes:
        number: one, but in asynchronous schedules.
        each_microbatch: every microbatch is followed by an update, so that gradients never add up.
    """

    number: int = 1
    each_microbatch: bool = False


ONE_VERSION = KeptVersions()
"""As in every schedule that trains as one device does."""


class Moment(NamedTuple):
    """A moment of a step: operator ``node`` runs, forward or backward.

    ``slot`` says what of its backward it is (:data:`autopar.planner.intra_op.memory.microbatch_timeline.SLOTS`).
    """

    node: int
    backward: bool
    slot: int


class Crossed(NamedTuple):
    """A tensor that a pipeline's stage gets from another one or gives to others, of one microbatch on one rank.

    Attributes:
        gradient_bytes: the bytes of what goes the other way for it, to or from each peer; 0 if nothing does.
        peers: the stage that it comes from, or those that it goes to.
    """

    n_bytes: int
    gradient_bytes: int
    peers: tuple[int, ...]


class OnTheirWay(NamedTuple):
    """Numbers of other microbatches whose tensors are pending where a stage is fullest.

    Attributes:
        forwards: their forwards are still to come: of these activations are received ahead.
        backwards: their backwards are: of these gradients are received ahead.
        sent: activations sent and not taken yet.
        sent_back: gradients sent and not taken yet.
    """

    forwards: int
    backwards: int
    sent: int
    sent_back: int

    @staticmethod
    def at(in_flight: int, microbatches: int, backward: bool, is_first: bool) -> OnTheirWay:
        """Return the pending tensors with `in_flight` microbatches, which include the running one.

        Under 1F1B a sent tensor stays until the peer has taken it, which is known from what it sends next: of an
        activation the gradient that comes next but one, of a gradient the activation that comes next but one.

        ``backward``: the running microbatch is in its backward, else its forward; ``is_first``: no backward was before.
        """
        forwards = microbatches - in_flight - (not is_first)
        if is_first:
            sent = int(in_flight > 1) if backward else min(RECEIVED_AHEAD, in_flight - 1)
        else:
            sent = int(in_flight > 1 and forwards >= 0)
        return OnTheirWay(max(0, forwards), microbatches - backward - (not is_first), sent, int(not is_first))


def copies_ahead(peers: Sequence[Sequence[int]], microbatches: int) -> list[int]:
    """Return how often each tensor is received before it is needed: the next messages of every peer.

    On GPUs it is one fewer: there this is a little more than there is. ``peers`` has the peer of each tensor, in the
    order in which they are sent; ``microbatches`` are those whose messages are still to come.
    """
    copies = [0] * len(peers)
    for peer in {peer for of_tensor in peers for peer in of_tensor}:
        messages = [number for number, of_tensor in enumerate(peers) if peer in of_tensor]
        for number in (messages * min(RECEIVED_AHEAD, max(0, microbatches)))[:RECEIVED_AHEAD]:
            copies[number] += 1
    return copies


class Fullest(NamedTuple):
    """The fullest moment of a stage, and what is there of other microbatches than the one that runs.

    Attributes:
        n_bytes: all but parameters, their gathered copies and the optimizer's state.
        moment: the moment of the microbatch that runs; None if the optimizer steps.
        in_flight: microbatches between forward and backward, the one that runs among them.
        is_first: no backward was before, so no gradients of parameters are there but its own.
        crossing_bytes: bytes of tensors pending between stages.
    """

    n_bytes: int
    moment: Moment | None
    in_flight: int = 0
    is_first: bool = False
    stage_edge_bytes: int = 0


class MicrobatchPeaks(NamedTuple):
    """The most that a microbatch has on one rank while its forward runs, and its backward, in bytes, and when.

    Moments are None if nothing runs.
    """

    forward_bytes: int
    backward_bytes: int
    forward: Moment | None
    backward: Moment | None


@dataclass(frozen=True)
class StagePeaks:
    """Terms of the peak of a stage.

    Attributes:
        first: the peaks of a microbatch whose backward makes the gradients of parameters; None if there never are all
            microbatches in flight, or gradients are there all the time.
        later: the peaks of one whose backward adds to them; None if a step has one microbatch, whose backward makes
            them.
        gradient_bytes: bytes of gradients of parameters, as they are stored.
        optimizer_bytes: what the optimizer needs in addition to its state while it steps.
        kept_bytes: bytes saved for every microbatch in flight.
        arrived, sent: what the stage gets from others, and what it gives.
        flows: the optimizer steps while microbatches are in flight.
    """

    first: MicrobatchPeaks | None
    later: MicrobatchPeaks | None
    gradient_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    arrived: tuple[Crossed, ...]
    sent: tuple[Crossed, ...]
    microbatches: int
    flows: bool = False

    def added_to(self, price: Price, in_flight: int) -> Price:
        """Return the price with `in_flight` microbatches."""
        activation_bytes = in_flight * self.kept_bytes + price.again_bytes
        always = price.stored_bytes - price.gradient_bytes
        most = always + self.at_fullest(in_flight).n_bytes
        working_bytes = most - price.stored_bytes - activation_bytes
        return replace(price, activation_bytes=activation_bytes, working_bytes=working_bytes)

    def fullest(self, in_flight: int) -> Moment | None:
        """Return the fullest moment; None if that is when the optimizer steps."""
        return self.at_fullest(in_flight).moment

    def at_fullest(self, in_flight: int) -> Fullest:
        """Return what is there at the fullest moment."""
        others = in_flight - 1 if self.flows else 0
        in_step = self.gradient_bytes + self.optimizer_bytes + others * self.kept_bytes
        fullest = self._fullest_of_microbatches(in_flight)
        is_running = fullest.moment is not None and fullest.n_bytes >= in_step
        return fullest if is_running else Fullest(in_step, None, others)

    def transient_bytes(self) -> int:
        """Return the most transient bytes while microbatches run, however many are in flight.

        A searched schedule keeps to a limit with this.
        """
        last = range(max(1, self.microbatches - RECEIVED_AHEAD - 1), self.microbatches + 1)
        numbers = {1, min(2, self.microbatches), *last}  # between them nothing changes but what is kept
        of_number = ((n, self._fullest_of_microbatches(n).n_bytes) for n in sorted(numbers))
        return max(n_bytes - n * self.kept_bytes for n, n_bytes in of_number) - self.gradient_bytes

    def _fullest_of_microbatches(self, in_flight: int) -> Fullest:
        """Return the fullest moment while microbatches run, the optimizer's step apart."""
        most = Fullest(0, None)
        all_at_once = self.first is not None and in_flight >= self.microbatches
        moments = []
        if self.first is not None and all_at_once:
            moments += [(self.first, in_flight, False), (self.first, in_flight, True)]
        if self.flows:  # as in the middle of a step, whatever the number of its microbatches
            both = self.first or self.later
            moments = [(both, in_flight, False), (both, in_flight, True)] if both is not None else []
        elif self.later is not None:
            if not all_at_once:
                moments += [(self.later, in_flight, False)]
            moments += [(self.later, max(1, in_flight - all_at_once), True)]
        for peaks, n, backward in moments:
            moment = peaks.backward if backward else peaks.forward
            if moment is None:
                continue
            is_first = peaks is self.first
            n_bytes = peaks.backward_bytes if backward else peaks.forward_bytes
            n_bytes += (n - 1) * self.kept_bytes + (not is_first) * self.gradient_bytes
            microbatches = n + 2 * RECEIVED_AHEAD if self.flows else self.microbatches
            there = OnTheirWay.at(n, microbatches, backward, is_first and not self.flows)
            if self.flows:  # what nothing answers within a step stays through the next one
                there = there._replace(sent_back=2)
            stage_edge_bytes = self._crossing(there)
            n_bytes += stage_edge_bytes
            if n_bytes >= most.n_bytes:
                most = Fullest(n_bytes, moment, n, is_first, stage_edge_bytes)
        return most

    def _crossing(self, there: OnTheirWay) -> int:
        """Return the bytes of pending tensors."""
        arrived, sent = self.arrived, self.sent
        gradients = [crossed for crossed in sent if crossed.gradient_bytes]
        ahead = copies_ahead([crossed.peers for crossed in arrived], there.forwards)
        gradients_ahead = copies_ahead([crossed.peers for crossed in gradients], there.backwards)
        return (
            sum(n * crossed.n_bytes for n, crossed in zip(ahead, arrived, strict=True))
            + sum(n * crossed.gradient_bytes for n, crossed in zip(gradients_ahead, gradients, strict=True))
            + there.sent * sum(crossed.n_bytes for crossed in sent)
            + there.sent_back * sum(crossed.gradient_bytes for crossed in arrived)
        )
