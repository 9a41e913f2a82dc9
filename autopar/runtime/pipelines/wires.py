"""Point-to-point messages of a pipeline: sent at once, received ahead of need, told apart by their order alone.

Both ends derive from plan and schedule which messages pass from one rank to another, and in which order the sender
sends them; the receiver posts its receives in that order, a few ahead of the one it waits for. So no message has a tag:
NCCL knows none, and gloo keeps the order of those that are alike.

NCCL does what two ranks post between them in the order of posting, sends and receives alike, one after the other. A
receive that is posted ahead would hold up every send behind it, on both sides, for ever. So messages from one rank to
another have a *channel* of their own, a process group that is used in this direction alone: what is posted on it is
sends on one side and receives on the other, in one order, and nothing there waits for anything but its own message.

What is sent has to stay until it has left. NCCL says when; gloo does not, unless one waits for it. But when a message
comes that the peer sends only after it has taken another one, that other one must have left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autopar.errors import PlanError
from autopar.lower.collectives import state_step
from autopar.plans.plan import Plan, StageEdge
from autopar.plans.stage_graphs import StageGraph
from autopar.plans.transfer import RECEIVED_AHEAD, RECEIVED_AHEAD_ON_DEVICE, Piece, Transfer, box_at, transfer
from autopar.runtime.ranks.collectives import as_sent
from autopar.runtime.ranks.streams import StepStream
from autopar.words.placements import path
from cost_models.schedules.actions import Action


@dataclass(frozen=True)
class Wire:
    """A tensor that a stage sends to another one; ``back`` is what its gradient takes.

    ``number`` is the same on all ranks; ``crossing`` is what the stages' graphs say of the tensor, None for gradients
    of tied parameters.
    """

    number: int
    name: str
    source: int
    target: int
    there: Transfer
    back: Transfer | None
    stage_edge: StageEdge | None = None

    def transfer(self, backward: bool) -> Transfer:
        """Return the forward's messages, or the backward's."""
        direction = self.back if backward else self.there
        assert direction is not None
        return direction


@dataclass(frozen=True)
class Message:
    """One piece of one microbatch."""

    wire: int
    backward: bool
    microbatch: int
    part: int


class UnderWay(NamedTuple):
    """A tensor that has perhaps not left yet.

    Attributes:
        answer: number, among the messages that come from the target, of the first that says that it has; infinite
            where none does in this step.
    """

    work: Any
    value: torch.Tensor
    target: int
    answer: float


def wires_of(parts: Sequence[StageGraph], plan: Plan) -> tuple[Wire, ...]:
    """Make a wire for every tensor and every later stage that reads it.

    Raises:
        PlanError: a stage gives a pending sum.
    """
    wires: list[Wire] = []
    for part in parts:
        for stage_edge in part.takes:
            here, there = stage_edge.sides(plan.stages, part.number)
            if any(p.is_pending for p in here.state):
                raise PlanError(
                    f"stage {stage_edge.source} gives '{stage_edge.tensor}' as {here.state.text}: a pending sum "
                    "cannot be sent; plan again"
                )
            forward = transfer(stage_edge.spec, here, there)
            back = transfer(stage_edge.spec, there, here) if stage_edge.needs_grad else None
            number = len(wires)
            wires.append(Wire(number, stage_edge.tensor, stage_edge.source, part.number, forward, back, stage_edge))
    return tuple(wires)


def messages_of(action: Action, wires: Sequence[Wire]) -> Iterator[tuple[Message, Piece]]:
    """Yield the messages after an action: activations after a forward, gradients after a backward of the input."""
    for wire in wires:
        if action.kind == "F" and wire.source == action.stage:
            backward = False
        elif action.kind in "BI" and wire.target == action.stage and wire.back is not None:
            backward = True
        else:
            continue
        for part, piece in enumerate(wire.transfer(backward).pieces):
            yield Message(wire.number, backward, action.microbatch, part), piece


def answers_of(
    going: Sequence[tuple[Message, Piece]], coming: Sequence[tuple[Message, Piece]], row: Sequence[Action],
    wires: Sequence[Wire],
) -> dict[Message, float]:  # fmt: skip
    """Map messages to a rank to the number of the first message that it sends back after it has taken them.

    Args:
        going: messages to that rank.
        coming: messages from that rank, in its order.
        row: what that rank does in a step.
    """
    place = {
        (action.stage, action.kind != "F", action.microbatch): at for at, action in enumerate(row) if action.kind != "W"
    }

    def done_at(message: Message, sends: bool) -> int:
        """Return where in the row the rank sends or takes a message; past its end if it does not."""
        wire = wires[message.wire]
        stage = wire.source if sends != message.backward else wire.target
        return place.get((stage, message.backward, message.microbatch), len(row))

    sent_at = [done_at(message, True) for message, _ in coming]
    first = {message: bisect_left(sent_at, done_at(message, False)) for message, _ in going}
    return {message: number for message, number in first.items() if number < len(coming)}


def pairs_of(wires: Iterable[Wire]) -> list[tuple[int, int]]:
    """Return sender and receiver of everything that `wires` carry, in the order in which channels are made."""
    transfers = [t for wire in wires for t in (wire.there, wire.back) if t is not None]
    return sorted({(p.source, p.target) for t in transfers for p in t.pieces if p.source != p.target})


@dataclass
class Post:
    """The messages of one rank: what it sends is kept until it has left, what it receives until it is taken."""

    rank: int
    device: torch.device
    wires: Sequence[Wire]
    microbatches: int
    coming: dict[int, list[tuple[Message, Piece]]]
    going: dict[int, list[tuple[Message, Piece]]] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    posted: dict[int, int] = field(default_factory=dict)
    place: dict[Message, tuple[int, int]] = field(default_factory=dict)
    channels: Mapping[tuple[int, int], Any] = field(default_factory=dict)
    inbox: dict[Message, tuple[Any, torch.Tensor]] = field(default_factory=dict)
    answers: dict[Message, float] = field(default_factory=dict)
    outbox: list[UnderWay] = field(default_factory=list)
    late: list[UnderWay] = field(default_factory=list)
    stream: StepStream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = StepStream(self.device)

    @staticmethod
    def of(
        rank: int, device: torch.device, wires: Sequence[Wire], rows: Mapping[int, Sequence[Action]], microbatches: int,
        channels: Mapping[tuple[int, int], Any],
    ) -> Post:  # fmt: skip
        """Make the messages of a rank, given every group's row by the rank of each of its members.

        Args:
            channels: by sender and receiver, the process group for what passes from the one to the other.
        """
        post = Post(rank, device, wires, microbatches, {}, channels=channels)
        post.add(rows)
        return post

    def add(self, rows: Mapping[int, Sequence[Action]]) -> None:
        """Expect the messages of further actions, which all ranks do behind those that are known.

        Args:
            rows: for every rank, those of its group.
        """
        coming: dict[int, list[tuple[Message, Piece]]] = {}
        for sender, row in rows.items():
            if sender == self.rank:
                continue
            for action in row:
                for message, piece in messages_of(action, self.wires):
                    if piece.source == sender and piece.target == self.rank:
                        coming.setdefault(sender, []).append((message, piece))
        going: dict[int, list[tuple[Message, Piece]]] = {}
        for action in rows[self.rank]:
            for message, piece in messages_of(action, self.wires):
                if piece.source == self.rank != piece.target:
                    going.setdefault(piece.target, []).append((message, piece))
        for target, messages in going.items():
            before = len(self.coming.get(target, ()))
            answers = answers_of(messages, coming.get(target, ()), rows[target], self.wires)
            self.answers.update({message: before + number for message, number in answers.items()})
            self.going.setdefault(target, []).extend(messages)
        for sender, messages in coming.items():
            known = self.coming.setdefault(sender, [])
            for i, (message, _) in enumerate(messages, len(known)):
                self.place[message] = (sender, i)
            known.extend(messages)
            if self.posted:
                self.posted.setdefault(sender, 0)
        if self.sent:
            self.sent = {**dict.fromkeys(self.going, 0), **self.sent}

    @property
    def _ahead(self) -> int:
        return RECEIVED_AHEAD if self.device.type == "cpu" else RECEIVED_AHEAD_ON_DEVICE

    def begin(self) -> None:
        """Begin a step on the current stream: what is sent is computed on it, what arrives is read on it."""
        self.stream.begin(same_step=False)
        self.posted, self.sent = dict.fromkeys(self.coming, 0), dict.fromkeys(self.going, 0)
        for sender in self.coming:
            self._receive(sender, self._ahead)

    def end(self) -> None:
        """Wait until everything has left.

        Raises:
            AssertionError: a message was received and not taken: the schedule forgot an action.
        """
        for sent in self.outbox:
            sent.work.wait()
        self.outbox, self.late = [], []
        assert not self.inbox, f"rank {self.rank}: nobody took {list(self.inbox)[:3]}"
        self.posted, self.sent = {}, {}

    def forget(self) -> None:
        """Forget messages that are over, where all actions that are known have been done and more may follow.

        What no message answers stays one such time longer: by then its receiver has gone on, and it has left.
        """
        for sent in self.late:
            sent.work.wait()
        self.outbox = [sent for sent in self.outbox if not any(sent is other for other in self.late)]
        for sender, messages in self.coming.items():
            waiting = [self.place[m][1] for m in self.inbox if m in self.place and self.place[m][0] == sender]
            over = min([*waiting, self.posted[sender]])
            for message, _ in messages[:over]:
                del self.place[message]
            del messages[:over]
            self.place.update({message: (sender, i) for i, (message, _) in enumerate(messages)})
            self.posted[sender] -= over
            self.outbox = [s._replace(answer=s.answer - over) if s.target == sender else s for s in self.outbox]
        self.answers.clear()
        for target, gone in self.going.items():
            gone.clear()
            self.sent[target] = 0
        self.late = [sent for sent in self.outbox if sent.answer == inf]

    def _receive(self, sender: int, upto: int) -> None:
        messages = self.coming[sender]
        while self.posted[sender] < min(upto, len(messages)):
            message, piece = messages[self.posted[sender]]
            buffer = self._buffer(message, piece)
            work = dist.irecv(as_sent(buffer), src=sender, group=self.channels[sender, self.rank])
            self.inbox[message] = work, buffer
            self.posted[sender] += 1

    def _buffer(self, message: Message, piece: Piece) -> torch.Tensor:
        spec = self.wires[message.wire].there.spec
        return torch.empty([n for _, n in piece.box], dtype=getattr(torch, spec.dtype), device=self.device)

    def send(self, wire: Wire, backward: bool, microbatch: int, value: torch.Tensor) -> None:
        """Send this rank's part of a tensor, as far as this rank is to send it; what stays here is put aside.

        Raises:
            RunError: it is not on the stream of the step.
        """
        self.stream.check(f"what stage {wire.source} and stage {wire.target} send each other")
        messages = wire.transfer(backward)
        have = box_at(messages.spec.shape, messages.source, messages.source.devices.index(self.rank))
        for part, piece in enumerate(messages.pieces):
            if piece.source != self.rank:
                continue
            cut = value.detach()
            for d, ((start, n), (own_start, _)) in enumerate(zip(piece.box, have, strict=True)):
                cut = cut.narrow(d, start - own_start, n)
            message = Message(wire.number, backward, microbatch, part)
            if piece.target == self.rank:
                self.inbox[message] = None, cut
                continue
            cut = cut.contiguous()
            self.sent[piece.target] += 1
            self._send(cut, piece.target, self.answers.get(message, inf))
        self.outbox = [sent for sent in self.outbox if not sent.work.is_completed()]

    def _send(self, value: torch.Tensor, target: int, answer: float = inf) -> None:
        work = dist.isend(as_sent(value), dst=target, group=self.channels[self.rank, target])
        self.outbox.append(UnderWay(work, value, target, answer))

    def _answered(self, sender: int, number: int) -> None:
        """Note that ``number`` messages of a peer, and one more, are here: those that they answer have left."""
        for sent in self.outbox:
            if sent.target == sender and sent.answer <= number:
                sent.work.wait()  # at most for the thread that notes it
        self.outbox = [sent for sent in self.outbox if sent.target != sender or sent.answer > number]

    def clear(self, posted: Mapping[int, int], sent: Mapping[int, int]) -> None:
        """Receive all that was sent to this rank, and send what others wait for; then nothing is under way.

        Args:
            posted: how many receives every other rank has posted for messages of this one.
            sent: how many messages every other rank has sent to this one.
        """
        for target, count in posted.items():
            for message, piece in self.going.get(target, ())[self.sent.get(target, 0) : count]:
                nothing = self._buffer(message, piece).zero_()
                self._send(nothing, target)
        for sender, count in sent.items():
            if sender in self.coming:
                self.posted.setdefault(sender, 0)
                self._receive(sender, count)
        for work in [*(work for work, _ in self.inbox.values()), *(sent.work for sent in self.outbox)]:
            if work is not None:
                work.wait()
        self.inbox, self.outbox, self.posted, self.sent = {}, [], {}, {}

    @torch.no_grad()
    def take(self, wire: Wire, backward: bool, microbatch: int) -> torch.Tensor:
        """Return this rank's part of a tensor in the state of the target, assembled there.

        The caller has set the target's mesh for collectives.

        Raises:
            RunError: it is not on the stream of the step.
        """
        self.stream.check(f"what stage {wire.source} and stage {wire.target} send each other")
        messages = wire.transfer(backward)
        target = messages.target
        box = box_at(messages.spec.shape, target, target.devices.index(self.rank), messages.landing)
        whole: torch.Tensor | None = None
        for part, piece in enumerate(messages.pieces):
            if piece.target != self.rank:
                continue
            message = Message(wire.number, backward, microbatch, part)
            if message in self.place:
                sender, i = self.place[message]
                self._receive(sender, i + 1 + self._ahead)
            work, got = self.inbox.pop(message)
            if work is not None:
                work.wait()
                self._answered(*self.place[message])
            if piece.box == box:
                whole = got
                continue
            if whole is None:
                whole = got.new_empty([n for _, n in box])
            view = whole
            for d, ((start, n), (own_start, _)) in enumerate(zip(piece.box, box, strict=True)):
                view = view.narrow(d, start - own_start, n)
            view.copy_(got)
        if whole is None:  # of a cut into fewer pieces than ranks (4 rows over 3) this rank has nothing
            dtype = getattr(torch, messages.spec.dtype)
            whole = torch.empty([n for _, n in box], dtype=dtype, device=self.device)
            assert not whole.numel(), "a part of a tensor that nobody sends"
        steps = path(messages.landing, target.state)
        assert steps is not None
        for axis, src, dst in steps:
            if target.mesh.size(axis) > 1:
                fn, args = state_step(messages.spec.shape, src, dst, target.mesh)
                whole = fn(whole, *args)  # type: ignore[operator]
        return whole


def clear(posts: Sequence[Post], group: Any) -> None:
    """End a step that broke off, on every rank: nothing stays under way. All ranks call it with their posts, alike.

    Args:
        group: the group of all ranks.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, [(post.posted, post.sent) for post in posts], group=group)
    for i, post in enumerate(posts):
        posted = {rank: state[i][0].get(post.rank, 0) for rank, state in enumerate(everyone) if rank != post.rank}
        sent = {rank: state[i][1].get(post.rank, 0) for rank, state in enumerate(everyone) if rank != post.rank}
        post.clear(posted, sent)
