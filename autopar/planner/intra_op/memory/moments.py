"""The peak of memory over a training step: what lives at each moment of the forward and the backward of a microbatch.

Moments are operators and steps of reshards: those of the forward in their order, then those of the backward in the
reverse order, as autograd runs them (of all nodes whose gradients are there, the one that was made last). Each piece of
memory of the ledger's walk lives from the operator that makes it to its last reader, or, if it is kept, to the backward
of the first operator that keeps it; gradients live from the backward that makes them to that of the operator whose
result they belong to; what an operator needs beside all that while it runs was tried out
(:mod:`autopar.rules.working_memory`). A segment is recomputed right before the first backward that reads something of
it.

Gradients are followed as torch handles them: the gradient of an output can go on as that of an input; where two arrive
for one tensor, the second is added to the first in its memory, unless somebody else has that; and a parameter takes its
gradient as it is if that lies as the parameter does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from autopar.planner.intra_op.memory.ledger import Entry, Ledger
from autopar.planner.intra_op.memory.memory_walk import Value, Walk
from autopar.planner.intra_op.memory.reshard_needs import (
    copies_gradient,
    is_alias,
    reduction_needs,
    step_back_needs,
    step_needs,
)  # fmt: skip
from autopar.plans.memory_decisions import KEEP
from autopar.plans.plan import ParamChoice
from autopar.plans.prices import MicrobatchPeaks, Moment
from autopar.rules.saved_tensors import Strides, contiguous, is_contiguous, lie_alike, strides_of_copy
from autopar.rules.strategy import grads_of
from autopar.words.graph import Ref
from autopar.words.placements import State, path
from autopar.words.shards import local_shape

SLOTS = 4
"""Moments of one operator or step in the backward: what is recomputed for it, itself, the sums of its gradients with
others, and what becomes of gradients of parameters."""

MADE = -1
"""Position that stands for what an operator makes, among those of what it reads."""


class Span(NamedTuple):
    """Some memory that is no entry of the ledger, from one moment to another, both included.

    ``node`` and ``position`` say which tensor is as large as it: what a node reads there, or makes (:data:`MADE`).
    """

    n_bytes: int
    first: int
    last: int
    node: int
    position: int = MADE


class Lifetime(NamedTuple):
    """Some memory of a microbatch, from one moment to another, both included.

    Attributes:
        kind: ``activation``, ``gradient`` of one, ``parameter gradient``, which stays, or ``recomputed``.
        node: the node that makes it, or whose gradient it is.
    """

    kind: str
    n_bytes: int
    first: int
    last: int
    node: int


class StepMoments:
    """One microbatch on one rank: the begin and end of all memory, and working memory, moment by moment.

    Attributes:
        accumulates: gradients of parameters are there already, of microbatches before.
        spans: results that are read in the forward only, and gradients but for those that stay.
        lifetimes: the lifetimes of all memory that lives; None if nobody reads it.
    """

    def __init__(
        self, walk: Walk, holds: Ledger, params: Mapping[int, ParamChoice], outputs: Sequence[State | None],
        accumulates: bool, remembers: bool = False,
    ) -> None:  # fmt: skip
        self.lifetimes: list[Lifetime] | None = [] if remembers else None
        self.walk, self.holds, self.params, self.accumulates = walk, holds, params, accumulates
        self.graph, self.mesh = walk.graph, walk.mesh
        last = []
        for out, state in zip(self.graph.outputs, outputs, strict=True):
            if isinstance(out, Ref) and state is not None:
                last.append(walk.place(out, state, -1)[0])
        self.order = walk.order
        self.n = len(self.order)  # moments of the forward
        for memory in last:
            walk.read_at[memory] = self.n - 1
        self.at_of = {what: at for at, what in enumerate(self.order) if isinstance(what, int)}
        self.more = [0] * ((1 + SLOTS) * self.n + 2)  # bytes that begin to live, less those that cease to
        self.beside = [0] * ((1 + SLOTS) * self.n + 1)
        self.spans: list[Span] = []
        self.gradients: list[list[int]] = []  # bytes, how many have it, since when, and of what: node and position
        self.of_value: dict[Value, int] = {}
        self.strides_of: dict[Value, Strides] = {}  # how the gradients of values lie
        self.known_steps: dict[object, int] = {}
        self._forward()
        self._memory()
        self._backward(outputs)

    def back(self, at: int, slot: int = 1) -> int:
        """Return the moment of the backward of the operator at ``at`` in the order."""
        return self.n + SLOTS * (self.n - 1 - at) + slot

    def lives(self, kind: str, n_bytes: int, first: int, last: int, node: int) -> None:
        """Note memory that lives from one moment to another, both included; words as in :class:`Lifetime`."""
        self.more[first] += n_bytes
        self.more[last + 1] -= n_bytes
        if self.lifetimes is not None and n_bytes:
            self.lifetimes.append(Lifetime(kind, n_bytes, first, last, node))

    def stays(self, n_bytes: int, first: int, node: int) -> None:
        """Note that the gradient of a parameter is there from a moment on."""
        self.more[first] += n_bytes
        if self.lifetimes is not None and n_bytes:
            self.lifetimes.append(Lifetime("parameter gradient", n_bytes, first, self.back(0, SLOTS - 1), node))

    def peaks(self) -> MicrobatchPeaks:
        """Return the fullest moment of the forward and that of the backward, the earlier of equal moments."""
        if not self.n:
            return MicrobatchPeaks(0, 0, None, None)
        totals = self.totals()
        forward, backward = (
            max(range(first, end), key=totals.__getitem__) for first, end in ((0, self.n), (self.n, len(totals)))
        )
        return MicrobatchPeaks(totals[forward], totals[backward], self.moment(forward), self.moment(backward))

    def totals(self) -> list[int]:
        """Return the bytes at each moment."""
        return [live + beside for live, beside in zip(accumulate(self.more), self.beside, strict=False)]

    def moment(self, at: int) -> Moment:
        """Return a moment by the operator that runs then, or for which a reshard step is made."""
        backward = at >= self.n
        place = self.n - 1 - (at - self.n) // SLOTS if backward else at
        place = min(max(place, 0), self.n - 1)
        operators = [what for what in self.order[place:] if isinstance(what, int)]
        if not operators:
            operators = [what for what in self.order if isinstance(what, int)][-1:]
        return Moment(operators[0], backward, (at - self.n) % SLOTS if backward else 0)

    def at(self, moment: Moment) -> int:
        """Return the number of a moment."""
        return self.back(self.at_of[moment.node], moment.slot) if moment.backward else self.at_of[moment.node]

    # -- the forward

    def _forward(self) -> None:
        for at, what in enumerate(self.order):
            if isinstance(what, int) and self.walk.is_fused(what):
                continue
            if isinstance(what, int):
                self.beside[at] = max(0, self.walk.needs(what).forward_bytes - self.walk.makes.get(what, 0))
            else:
                ref, src, dst = what
                self.beside[at] = self._step(ref, src, dst, self._is_strided(ref, src))

    def _shape(self, value: Value) -> tuple[int, ...]:
        """Return the shape of a value on one rank."""
        return local_shape(self.graph.spec(value[0]).shape, value[1], self.mesh)

    def _is_strided(self, ref: Ref, state: State) -> bool:
        """Return whether a value is not contiguous."""
        place = self.walk.lies.get((ref, state))
        return place is not None and not is_contiguous(self._shape((ref, state)), place[1])

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
        most = before = 0
        for src, dst in steps:
            gathered = self.walk.local_bytes(ref, dst)
            most = max(most, before + self._step(ref, src, dst, False) + gathered)
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

    def _step(self, ref: Ref, src: State, dst: State, is_strided: bool) -> int:
        key = self.graph.spec(ref), src, dst, is_strided
        if key not in self.known_steps:
            self.known_steps[key] = step_needs(key[0], src, dst, self.mesh, is_strided)
        return self.known_steps[key]

    def _step_back(self, ref: Ref, src: State, dst: State, is_strided: bool, stays: bool) -> int:
        key = self.graph.spec(ref), src, dst, is_strided, stays
        if key not in self.known_steps:
            self.known_steps[key] = step_back_needs(key[0], src, dst, self.mesh, is_strided, stays)
        return self.known_steps[key]

    # -- the backward

    def _backward(self, outputs: Sequence[State | None]) -> None:
        graph = self.graph
        begin, end = self.back(self.n - 1, 0), self.back(0, SLOTS - 1)
        for number in {*range(graph.sends), *([graph.loss] if graph.loss is not None else [])}:
            out, state = graph.outputs[number], outputs[number]
            if isinstance(out, Ref) and state is not None and graph.nodes[out.node].needs_grad:
                if graph.spec(out).is_float:
                    gradient = self._new(self.walk.local_bytes(out, state), begin, out.node)
                    self.gradients[gradient][1] += number < graph.sends  # the stage holds it, too
                    self._deposit((out, state), gradient, begin, contiguous(self._shape((out, state))))
        complete_at = self._complete_at()
        for at in range(self.n - 1, -1, -1):
            what = self.order[at]
            if isinstance(what, int):
                self._operator(what, self.back(at))
            else:
                self._adjoint(*what, self.back(at))
            for value in complete_at.get(at, ()):
                if value in self.of_value:
                    self._parameter(value, self.back(at, 3))
        for entry in self.gradients:  # of the model's inputs, and of what nobody asks for
            if entry[1]:
                self._lived(entry, end)

    def _complete_at(self) -> dict[int, list[Value]]:
        """Return the place of each parameter's first reader: after its backward all of the gradient is there."""
        first: dict[Value, int] = {}
        for at, what in enumerate(self.order):
            if isinstance(what, int):
                node = self.graph.nodes[what]
                read = zip(node.refs, self.walk.strategy(what, node).ins, strict=True)
                for ref, state in read:
                    if ref.node in self.params and state == self.params[ref.node].used:
                        first.setdefault((ref, state), at)
            elif what[0].node in self.params and what[1] == self.params[what[0].node].used:
                first.setdefault((what[0], what[1]), at)
        values: dict[int, list[Value]] = {}
        for value, at in first.items():
            values.setdefault(at, []).append(value)
        return values

    def _operator(self, i: int, at: int) -> None:
        graph, walk = self.graph, self.walk
        node = graph.nodes[i]
        if not node.needs_grad:
            return
        strategy = walk.strategy(i, node)
        outs = [Ref(i, k) for k, spec in enumerate(node.outs) if spec is not None]
        values = [
            (ref, state) for ref, state, grad in zip(outs, strategy.outs, grads_of(graph, node)[1], strict=True) if grad
        ]
        arrived = [self.of_value.pop(value, None) for value in values]
        if all(gradient is None for gradient in arrived):
            return
        needs = walk.needs(i, self._arriving(values))
        read_at = {g.memory: k for k, g in enumerate(needs.gradients) if g is not None and g.source is None}
        read = list(zip(node.refs, strategy.ins, strict=True))
        inside = {k for k, position in read_at.items() if walk.is_inside(read[position])}
        mine = [
            self._new(0 if k in inside else n_bytes, at, i, read_at.get(k, MADE))
            for k, n_bytes in enumerate(needs.memories)
        ]
        if not walk.is_fused(i):
            self.beside[at] += needs.backward_bytes - needs.kept_bytes - needs.out_bytes - sum(needs.memories)
        deposits: list[tuple[Value, int, Strides]] = []
        for position, ((ref, state), gradient) in enumerate(zip(read, needs.gradients, strict=True)):
            if gradient is None:
                continue
            passed_on = arrived[gradient.source] if gradient.source is not None else mine[gradient.memory]
            memory = passed_on
            if memory is None:
                n_bytes = 0 if walk.is_inside((ref, state)) else walk.local_bytes(ref, state)
                memory = self._new(n_bytes, at, i, position)
            self.gradients[memory][1] += passed_on is not None
            deposits.append(((ref, state), memory, gradient.strides))
        for memory in (*mine, *(gradient for gradient in arrived if gradient is not None)):
            self._drop(memory, at)
        for value in values:
            self.strides_of.pop(value, None)
        for value, memory, strides in deposits:
            self._deposit(value, memory, at, strides)

    def _arriving(self, values: Sequence[Value]) -> tuple[Strides, ...]:
        """Return the strides of the gradients of an operator's outputs; nothing if they are those of copies."""
        usual = [strides_of_copy(self._shape(value), self.walk.lies[value][1]) for value in values]
        arriving = [self.strides_of.get(value, strides) for value, strides in zip(values, usual, strict=True)]
        alike = all(lie_alike(self._shape(v), a, b) for v, a, b in zip(values, arriving, usual, strict=True))
        return () if alike else tuple(arriving)

    def _adjoint(self, ref: Ref, src: State, dst: State, at: int) -> None:
        gradient = self.of_value.pop((ref, dst), None)
        if gradient is None:
            return
        strides = self.strides_of.pop((ref, dst), None)
        if is_alias(src, dst, self.mesh):
            self._deposit((ref, src), gradient, at, strides)
            return
        is_strided = strides is not None and not is_contiguous(self._shape((ref, dst)), strides)
        self.beside[at] += self._step_back(ref, src, dst, is_strided, stays=self.gradients[gradient][1] > 1)
        mine = self._new(self.walk.local_bytes(ref, src), at, ref.node)
        self._drop(gradient, at)
        shape = self._shape((ref, src))
        keeps_order = strides if copies_gradient(src, dst) else None
        self._deposit((ref, src), mine, at, strides_of_copy(shape, keeps_order or contiguous(shape)))

    def _new(self, n_bytes: int, at: int, node: int, position: int = MADE) -> int:
        self.gradients.append([n_bytes, 1, at, node, position])
        return len(self.gradients) - 1

    def _lived(self, gradient: Sequence[int], last: int) -> None:
        n_bytes, _, first, node, position = gradient
        self.lives("gradient", n_bytes, first, last, node)
        self.spans.append(Span(n_bytes, first, last, node, position))

    def _drop(self, gradient: int, at: int) -> None:
        """Let go of a gradient for one of its holders."""
        entry = self.gradients[gradient]
        entry[1] -= 1
        if not entry[1]:
            self._lived(entry, at)

    def _deposit(self, value: Value, gradient: int, at: int, strides: Strides | None) -> None:
        """Add a gradient of a value that arrives; its sum with an earlier one is new memory, with that one's strides.

        Its sum with one that is there is new memory, strided as the first's copy.
        """
        there = self.of_value.get(value)
        if there is None:
            self.of_value[value] = gradient
            if strides is not None:
                self.strides_of[value] = strides
            return
        if value in self.strides_of:
            self.strides_of[value] = strides_of_copy(self._shape(value), self.strides_of[value])
        self.of_value[value] = self._new(self.gradients[there][0], at + 1, value[0].node)
        self._drop(there, at + 1)
        self._drop(gradient, at + 1)

    def _parameter(self, value: Value, at: int) -> None:
        """Reduce the complete gradient of a parameter to where that is stored, where it stays.

        Under a policy it is cast to the master's format.
        """
        ref, used = value
        gradient, choice = self.of_value.pop(value), self.params[ref.node]
        spec, stored = self.graph.spec(ref), self.graph.stored(self.graph.nodes[ref.node])
        is_cast = stored.dtype != spec.dtype
        reduced_bytes = self.walk.local_bytes(ref, choice.stored)
        stored_bytes = reduced_bytes // spec.item_bytes * stored.item_bytes
        steps = [(src, dst) for axis, src, dst in path(choice.stored, used) or () if self.mesh.size(axis) > 1]
        taken = not (steps or self.accumulates or is_cast or choice.on_host) and self.gradients[gradient][1] == 1
        strides = self.strides_of.pop(value, None)
        if taken and (strides is None or is_contiguous(self._shape(value), strides)):
            self.stays(self.gradients[gradient][0], self.gradients[gradient][2], ref.node)
            self.gradients[gradient][1] = 0
            return
        self._drop(gradient, at)
        needs = reduction_needs(spec, choice, self.mesh, self.accumulates)
        if choice.on_host:
            needs += stored_bytes if is_cast and not self.accumulates else 0  # what is copied out
        elif not self.accumulates:
            self.stays(stored_bytes, at, ref.node)
            needs -= 0 if is_cast and steps else reduced_bytes
        elif is_cast:
            needs += stored_bytes  # what is added to the sum
        self.beside[at] += max(0, needs)
