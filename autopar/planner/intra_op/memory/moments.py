"""The peak of memory over a training step: what lives at each moment of the forward and the backward of a microbatch.

Each piece of memory of the ledger's walk lives from the operator that makes it to its last reader, or, if it is kept,
to the backward of the first operator that keeps it; gradients (:mod:`.gradient_moments`) live from the backward that
makes them to that of the operator whose result they belong to; what an operator needs beside all that while it runs was
tried out (:mod:`autopar.rules.working_memory`). A segment is recomputed right before the first backward that reads
something of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from autopar.planner.intra_op.memory.gradient_moments import GradientMoments
from autopar.planner.intra_op.memory.ledger import Entry, Ledger
from autopar.planner.intra_op.memory.memory_walk import Walk
from autopar.planner.intra_op.memory.microbatch_timeline import MicrobatchTimeline, Span
from autopar.planner.intra_op.memory.reshard_needs import step_needs
from autopar.plans.memory_decisions import KEEP
from autopar.plans.plan import ParamChoice
from autopar.rules.saved_tensors import is_contiguous
from autopar.words.graph import Ref
from autopar.words.placements import State


class StepMoments(MicrobatchTimeline):
    """One microbatch on one rank: the begin and end of all memory, and working memory, moment by moment.

    Args:
        params, accumulates: as for :class:`.GradientMoments`.
        remembers: note :attr:`lifetimes`.
    """

    def __init__(
        self, walk: Walk, holds: Ledger, params: Mapping[int, ParamChoice], outputs: Sequence[State | None],
        accumulates: bool, remembers: bool = False,
    ) -> None:  # fmt: skip
        last = []
        for out, state in zip(walk.graph.outputs, outputs, strict=True):
            if isinstance(out, Ref) and state is not None:
                last.append(walk.place(out, state, -1)[0])
        super().__init__(walk, remembers)
        for memory in last:
            walk.read_at[memory] = self.n - 1
        self.holds = holds
        self._forward()
        self._memory()
        GradientMoments(self, params, accumulates).follow(outputs)

    def _forward(self) -> None:
        for at, what in enumerate(self.order):
            if isinstance(what, int) and self.walk.is_fused(what):
                continue
            if isinstance(what, int):
                self.beside[at] = max(0, self.walk.needs(what).forward_bytes - self.walk.makes.get(what, 0))
            else:
                ref, src, dst = what
                self.beside[at] = step_needs(self.graph.spec(ref), src, dst, self.mesh, self._is_strided(ref, src))

    def _is_strided(self, ref: Ref, state: State) -> bool:
        """Return whether a value is not contiguous."""
        place = self.walk.lies.get((ref, state))
        return place is not None and not is_contiguous(self.walk.shape((ref, state)), place[1])

    def _memory(self) -> None:
        """Note the ledger's memory with its readers and keepers.

        A stage of a pipeline holds what it received to the end of its forward; then that lives, as what it sent, as
        long as autograd keeps it.
        """
        walk = self.walk
        self._note_away()
        of_segment: dict[int, list[int]] = {}
        last_asks: dict[int, int] = {}  # of pieces, the operator whose backward is the last to ask for a copy
        for copy, piece in walk.piece_of.items():
            asking = walk.readers.get(copy, ())
            last_asks[piece] = min([last_asks.get(piece, self.n), *(self.at_of[i] for i in asking)])
        for memory, (n_bytes, _, given, segment) in enumerate(walk.memories):
            if given or not n_bytes:
                continue
            made_at, until = walk.made_at[memory], walk.read_at[memory]
            until = max(until, self._leaves_at.get(memory, until))
            if memory in walk.arrived:
                made_at, until = 0, self.n - 1
            if segment >= 0:
                of_segment.setdefault(segment, []).append(memory)
            for entry in walk.entries_of.get(memory, ()):
                first = self.back(min((self._let_go(keeper.node, entry) for keeper in entry.keepers), default=made_at))
                if entry.decision == KEEP.name:
                    until = max(until, first)
                    if last_asks.get(memory, self.n) < self.n:
                        until = max(until, self.back(last_asks[memory]))
                elif entry.segment is not None:
                    begin = self.back(self.at_of[self.holds.lives[entry.segment][0]], 0)
                    # what is given up comes back until the backward of its maker, beside what that keeps of its own
                    last = max(self.back(made_at, 0), first) if self._comes_back(entry) else first
                    self.lives("recomputed", n_bytes, begin, last, entry.since)
                elif memory in walk.waiting:
                    self.lives("recomputed", n_bytes, *self._back_for(memory, entry), entry.since)
            readers = walk.readers.get(memory) if memory in walk.piece_of else None
            if readers:  # its backward asks for the copy, even where autograd keeps nothing of it
                again = self.back(self.at_of[max(readers)], 0)
                self.lives("recomputed", n_bytes, again, self.back(made_at, 0), walk.memories[memory].since)
                self.beside[again] = max(self.beside[again], self._gathered_again(memory, n_bytes))
            self.lives("activation", n_bytes, made_at, until, walk.memories[memory].since)
            if not any(entry.decision == KEEP.name for entry in walk.entries_of.get(memory, ())):
                self.spans.append(Span(n_bytes, made_at, until, walk.memories[memory].since))
        for segment, memories in of_segment.items():
            if self.holds.segments[segment].active:
                self._second_run(segment, memories)

    def _back_for(self, memory: int, entry: Entry) -> tuple[int, int]:
        """Return from when to when memory is there that was given up by a decision about tensors.

        It is from the backward of its last reader, or of that of a copy regathered from it, to that of its maker, or
        through it if that keeps it.
        """
        mine = any(keeper.node == entry.since for keeper in entry.keepers)
        begin = self.back(self.at_of[self.walk.first_asked(memory)], 0)
        return min(begin, self._comes_at.get(memory, begin)), self.back(self.at_of[entry.since], 1 if mine else 0)

    def _note_away(self) -> None:
        """Note when memory that leaves beside compute is free, and when it is taken for the way back.

        It is free at the last reader of what leaves so many tensors later, or at the end of the forward, and it comes
        when the first backward asks for that one, or at the beginning of the backward.
        """
        walk = self.walk
        self._leaves_at: dict[int, int] = {}
        self._comes_at: dict[int, int] = {}
        for number, memory in enumerate(walk.away):
            number += walk.waiting[memory][1].ahead
            later = walk.away[number] if number < len(walk.away) else None
            self._leaves_at[memory] = walk.read_at[later] if later is not None else self.n - 1
            asked = self.at_of[walk.first_asked(later)] if later is not None else self.n - 1
            self._comes_at[memory] = self.back(asked, 0)

    def _gathered_again(self, memory: int, n_bytes: int) -> int:
        """Return the bytes to regather a copy, besides itself: it is gathered elsewhere and copied into its place."""
        ref, steps = self.walk.steps_again[memory]
        spec = self.graph.spec(ref)
        most = before = 0
        for src, dst in steps:
            gathered = self.walk.local_bytes(ref, dst)
            most = max(most, before + step_needs(spec, src, dst, self.mesh, False) + gathered)
            before = gathered
        return max(n_bytes, most - n_bytes)

    def _let_go(self, keeper: int, entry: Entry) -> int:
        """Return the place of the last operator whose backward needs a keeper's memory: that of a segment's end."""
        segment = self.walk.segment_of.get(keeper)
        if entry.segment is None and segment is not None:
            keeper = self.holds.segments[segment].ops[0]
        return self.at_of.get(keeper, 0)  # what came from another stage is kept to the end

    def _comes_back(self, entry: Entry) -> bool:
        """Return whether an entry is a segment's result that is filled once more for its readers outside.

        It is other memory than what the second run makes and what is in the segment keeps.
        """
        return any(self.walk.segment_of.get(keeper.node) != entry.segment for keeper in entry.keepers)

    def _second_run(self, number: int, memories: Sequence[int]) -> None:
        """Note the working memory of a segment while it is recomputed, besides what it keeps then."""
        walk, ops = self.walk, self.holds.segments[number].ops
        first, last = min(self.at_of[ops[0]], *(walk.made_at[m] for m in memories)), self.at_of[ops[-1]]
        kept = copied = 0
        more = [0] * (last - first + 2)
        for memory in memories:
            n_bytes = walk.memories[memory].n_bytes
            entries = [entry for entry in walk.entries_of.get(memory, ()) if entry.segment == number]
            comes_back = sum(map(self._comes_back, entries))
            more[walk.made_at[memory] - first] += n_bytes
            if len(entries) == comes_back and walk.read_at[memory] <= last:
                more[walk.read_at[memory] - first + 1] -= n_bytes
            kept += len(entries) * n_bytes
            copied += comes_back * n_bytes  # into the memory that others know
        live = list(accumulate(more[:-1]))
        most = max(n + beside for n, beside in zip(live, self.beside[first : last + 1], strict=True))
        at = self.back(self.at_of[self.holds.lives[number][0]], 0)
        self.beside[at] = max(self.beside[at], max(most, live[-1] + copied) - kept)
