"""The walk that makes the :mod:`.ledger`: a graph in the order in which its program runs, and what becomes of memory.

An operator's result lies in memory of its own or in that of an input (a view), a step of a reshard makes new memory or
does not, and what autograd keeps of each call is asked of :mod:`autopar.rules.saved_tensors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from autopar.planner.intra_op.memory.fused_chains import FusedChains, is_loss
from autopar.planner.intra_op.memory.ledger import Entry, Keeper
from autopar.planner.intra_op.memory.operator_memory import OperatorMemory
from autopar.planner.intra_op.memory.recompute import Segment
from autopar.planner.intra_op.memory.reshard_needs import shape_in_memory
from autopar.plans.memory_decisions import RECOMPUTE, RECOMPUTE_RESULT, REGATHER, Memory, MemoryDecision
from autopar.plans.plan import reshard_key, segment_numbers
from autopar.plans.regather import makes_memory, regathered, segment_outputs, waiting
from autopar.rules.aliasing import may_alias
from autopar.rules.kernels import CPU, Kernels
from autopar.rules.notation import Rule
from autopar.rules.operator_call import call_of
from autopar.rules.saved_tensors import Saved, Strides, contiguous
from autopar.rules.strategy import Strategy
from autopar.rules.working_memory import Needs
from autopar.words.graph import Graph, Node, Ref
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.shards import local_shape

Value = tuple[Ref, State]
"""A tensor in one state."""


class _Memory(NamedTuple):
    """A storage: ``given`` ones are parameters, buffers and the batch. Made in ``segment`` (-1: in none)."""

    n_bytes: int
    since: int
    given: bool
    segment: int


class Walk:
    """The walk of :func:`.ledger`; values are a tensor in one state.

    Args:
        every: note all readers of memory, and memory that nobody keeps.
    """

    def __init__(
        self, graph: Graph, rules: Sequence[Rule | None], mesh: Mesh, chosen: Mapping[int, Strategy] | None,
        reshard_paths: Mapping[str, Sequence[tuple[State, State]]], memory: Memory, every: bool = False,
        kernels: Kernels = CPU,
    ) -> None:  # fmt: skip
        self.calls, self.kernels = OperatorMemory(graph, rules, mesh, chosen, kernels), kernels
        self.chains: FusedChains | None = None
        if kernels.fused:
            self.chains = FusedChains(graph, kernels.norms_only, kernels.loss_in_place)
        self.graph, self.rules, self.mesh, self.reshard_paths = graph, rules, mesh, reshard_paths
        self.decided = memory
        recompute = memory.get(RECOMPUTE.name, ())
        self.segment_of = segment_numbers(graph, recompute)
        self.segments = tuple(Segment() for _ in recompute)
        self.copies_again = regathered(
            graph, mesh, reshard_paths, memory.get(REGATHER.name, ()), self.segment_of, chosen or {}
        )
        self.piece_of: dict[int, int] = {}  # by the memory of a copy that is regathered
        self.steps_again: dict[int, tuple[Ref, Sequence[tuple[State, State]]]] = {}  # on the way from that piece
        self.made_again = frozenset(segment_outputs(graph, memory.get(RECOMPUTE_RESULT.name, ()), self.segment_of))
        self.given_up: dict[int, Ref] = {}  # memory that a segment recomputes for its readers outside
        self.readers: dict[int, list[int]] = {}  # operators whose backward asks for memory that was given up
        self.waits = waiting(graph, memory, self.segment_of)
        self.away: list[int] = []  # memory that leaves beside compute, in this order
        self.waiting: dict[int, tuple[Ref, MemoryDecision]] = {}  # memory that is given up by a decision about tensors
        self.may_lie: dict[Value, frozenset[int]] = {}  # memory that a value may be a view of, for the emitted program
        self.every = every
        self.reads: dict[int, list[tuple[int, int]]] = {}  # operators and positions, by memory, if all is asked for
        self.memories: list[_Memory] = []
        self.lies: dict[Value, tuple[int, Strides]] = {}  # memory number and strides of every value
        self.before: dict[Ref, dict[State, State]] = {}
        self.keepers: dict[tuple[int, int | None], list[Keeper]] = {}  # by memory and the segment that is recomputed
        self.taken: list[tuple[int, int, Keeper]] = []  # what segments take from outside
        self.copies: dict[tuple[int, int], int] = {}  # by segment and memory, of buffers that are renewed
        self.order: list[int | tuple[Ref, State, State]] = []  # operators and steps as the program runs them
        self.arrived: set[int] = set()  # memory that comes from earlier stages
        self.made_at: list[int] = []  # by memory, where in that order it is made and read last
        self.read_at: list[int] = []
        self.places: dict[int, list[tuple[int, Strides]]] = {}  # of the inputs of operators
        self.makes: dict[int, int] = {}  # bytes of memory that operators make and leave behind
        self.entries_of: dict[int, list[Entry]] = {}  # by memory, when all operators were walked through

    def new(self, n_bytes: int, since: int, segment: int, given: bool = False) -> int:
        """Add some memory and return its number."""
        self.memories.append(_Memory(n_bytes, since, given, segment))
        self.made_at.append(len(self.order) - 1)
        self.read_at.append(len(self.order) - 1)
        return len(self.memories) - 1

    def keep(self, memory: int, keeper: Keeper, segment: int) -> None:
        """Note that an operator keeps memory; in a segment, only the segment's own and only while it is recomputed."""
        kept = self.memories[memory]
        if kept.given and (segment >= 0 or self.graph.nodes[kept.since].kind == "param"):
            return
        if segment < 0:
            self.keepers.setdefault((memory, None), []).append(keeper)
        elif kept.segment == segment:
            self.keepers.setdefault((memory, segment), []).append(keeper)

    def place(self, ref: Ref, state: State, segment: int) -> tuple[int, Strides]:
        """Return the memory and strides of a value in a state; reshard steps to it are walked through here."""
        there_already = self.lies.get((ref, state))
        if there_already is not None:
            return there_already
        src = self.way(ref).get(state)
        spec = self.graph.spec(ref)
        if src is None:
            node = self.graph.nodes[ref.node]
            assert node.kind != "op", f"{node.where}: no way to {state}"
            shape = local_shape(spec.shape, state, self.mesh)
            given = node.kind != "input" or node.target not in self.graph.arriving
            place = self.new(_bytes(shape, spec.item_bytes), ref.node, -1, given), contiguous(shape)
            if not given:
                self.arrived.add(place[0])
        else:
            memory, strides = self.place(ref, src, segment)
            self.read_at[memory] = len(self.order)
            if self.chains is not None and makes_memory(src, state, self.mesh):
                self.chains.written(memory)
            self.order.append((ref, src, state))
            if segment >= 0:
                self.segments[segment].steps.append((ref, src, state))
            if makes_memory(src, state, self.mesh):
                shape = shape_in_memory(spec.shape, src, state, self.mesh)
                memory, strides = self.new(_bytes(shape, spec.item_bytes), ref.node, segment), contiguous(shape)
            if (ref, state) in self.copies_again:
                piece, steps = self.copies_again[ref, state]
                self.piece_of[memory] = self.lies[ref, piece][0]
                self.steps_again[memory] = ref, steps
            place = memory, strides
        self.lies[ref, state] = place
        return place

    def go(self) -> None:
        """Walk through all operators."""
        for i, node in enumerate(self.graph.nodes):
            if node.kind == "op":
                rule = self.rules[i]
                assert rule is not None
                self.op(i, node, rule)

    def needs(self, i: int, arriving: tuple[Strides, ...] = ()) -> Needs:
        """Return the working memory of an operator; ``arriving`` as in :func:`.needs_of`."""
        return self.calls.needs(i, tuple([lies for _, lies in self.places[i]]), arriving)

    def op(self, i: int, node: Node, rule: Rule) -> None:
        """Walk through one operator: its inputs, what autograd keeps of it, and its results."""
        segment = self.segment_of.get(i, -1)
        strategy = self.calls.strategy(i)
        if segment >= 0:
            self.segments[segment].ops.append(i)
            self.inputs(i, node, strategy, segment)
        places = [self.place(ref, state, segment) for ref, state in zip(node.refs, strategy.ins, strict=True)]
        self.places[i] = places
        for memory, _ in places:
            self.read_at[memory] = len(self.order)
        self.order.append(i)
        for position, (memory, _) in enumerate(places) if self.every else ():
            self.reads.setdefault(memory, []).append((i, position))
        saved = self.calls.saved(i, tuple([lies for _, lies in places]))
        if self.chains is not None:
            self.chain(self.chains, i, rule, strategy, saved, segment)
            if self.kernels.loss_in_place and is_loss(node):
                saved = self.in_place(node, strategy, saved)
        fresh = [self.new(n_bytes, i, segment) for n_bytes, _ in saved.memories]
        if self.chains is not None:
            most_read = max([self.memories[memory].n_bytes for memory, _ in places], default=0)
            for memory in fresh:
                self.chains.made(memory, i, self.memories[memory].n_bytes, most_read)
        self.makes[i] = sum([n_bytes for n_bytes, _ in saved.memories])
        self._results(i, node, strategy, saved, fresh)
        if self.made_again or self.copies_again or self.waits:
            self.asks(i, node, strategy)
        if node.needs_grad and saved.keeps:
            self._kept(i, saved, fresh, segment)

    def _results(self, i: int, node: Node, strategy: Strategy, saved: Saved, fresh: Sequence[int]) -> None:
        """Note the memory of an operator's results, and which of it is given up until the backward."""
        outs = [k for k, spec in enumerate(node.outs) if spec is not None]
        for k, state, result in zip(outs, strategy.outs, saved.results, strict=True):
            memory = fresh[result.memory] if result.source is None else self.places[i][result.source][0]
            self.lies[Ref(i, k), state] = memory, result.strides
            if result.source is None and Ref(i, k) in self.made_again:
                self.given_up[memory] = Ref(i, k)
            if result.source is None and Ref(i, k) in self.waits:
                self.waiting[memory] = Ref(i, k), self.waits[Ref(i, k)]

    def _kept(self, i: int, saved: Saved, fresh: Sequence[int], segment: int) -> None:
        """Note the memory that an operator keeps for its backward."""
        places = self.places[i]
        if segment >= 0:
            self.segments[segment].active, self.segments[segment].asks = True, i
        for position in saved.ins:
            self.keep(places[position][0], Keeper(i, "in", position), segment)
        for memory, (_, kept), number in zip(fresh, saved.memories, range(len(fresh)), strict=True):
            if kept:
                first = next(k for k, r in enumerate(saved.results) if r.source is None and r.memory == number)
                self.keep(memory, Keeper(i, "out", first), segment)
        if saved.inside_bytes:
            self.makes[i] += saved.inside_bytes
            self.keep(self.new(saved.inside_bytes, i, segment), Keeper(i, "inside"), segment)

    def chain(
        self, chains: FusedChains, i: int, rule: Rule, strategy: Strategy, saved: Saved, segment: int
    ) -> None:  # fmt: skip
        """Note what an operator is to fused chains, and what it reads of theirs.

        A view passes on what it is a view of.
        """
        is_view = bool(saved.results) and all(result.source is not None for result in saved.results)
        chains.op(i, rule, strategy, is_view)
        for memory, _ in self.places[i] if not is_view else ():
            chains.read(memory, i, segment, self.memories[memory].segment)

    def in_place(self, node: Node, strategy: Strategy, saved: Saved) -> Saved:
        """Return what a loss keeps that is computed in place: one float32 number for each class, and its targets."""
        spec = self.graph.spec(node.refs[0])
        classes = prod(local_shape(spec.shape, strategy.ins[0], self.mesh))
        kept = tuple(position for position in saved.ins if not self.graph.spec(node.refs[position]).is_float)
        memories = tuple((n_bytes, False) for n_bytes, _ in saved.memories)
        return replace(saved, ins=kept, memories=memories, inside_bytes=4 * classes)

    def is_inside(self, value: Value) -> bool:
        """Return whether a tensor lies inside of a fused chain, so that neither it nor its gradient is written."""
        return self.chains is not None and self.lies[value][0] in self.chains.inside

    def is_fused(self, i: int) -> bool:
        """Return whether an operator may be in a fused kernel without working memory."""
        return self.chains is not None and i in self.chains.fused

    def asks(self, i: int, node: Node, strategy: Strategy) -> None:
        """Note what the operator's backward reads of memory that was given up, as the emitted program does."""
        reads = frozenset[int]().union(*map(self.may_be, zip(node.refs, strategy.ins, strict=True)))
        if may_alias(call_of(node, self.graph.spec)):
            outs = (k for k, spec in enumerate(node.outs) if spec is not None)
            for k, state in zip(outs, strategy.outs, strict=True):
                self.may_lie[Ref(i, k), state] = reads | {self.lies[Ref(i, k), state][0]}
        elif node.needs_grad:
            for memory in reads:
                self.readers.setdefault(memory, []).append(i)

    def may_be(self, value: Value) -> frozenset[int]:
        """Return the memory of a value: its own, or that of what it may be a view of."""
        if value not in self.may_lie:
            ref, state = value
            src = self.way(ref).get(state)
            if src is not None and not makes_memory(src, state, self.mesh):
                self.may_lie[value] = self.may_be((ref, src))
            else:
                self.may_lie[value] = frozenset([self.lies[value][0]])
        return self.may_lie[value]

    def inputs(self, i: int, node: Node, strategy: Strategy, segment: int) -> None:
        """Keep what a segment takes from outside for its second run, in its layout outside."""
        for position, (ref, state) in enumerate(zip(node.refs, strategy.ins, strict=True)):
            while (ref, state) not in self.lies and self.way(ref).get(state) is not None:
                state = self.way(ref)[state]
            place = self.lies.get((ref, state))
            memory = place[0] if place is not None else self.place(ref, state, -1)[0]
            kept, node_of = self.memories[memory], self.graph.nodes[ref.node]
            if node_of.kind == "buffer" and node_of.target in self.graph.updates:
                # it gets its new value before the backward: the segment keeps a copy of the old one
                if (segment, memory) not in self.copies:
                    self.copies[segment, memory] = self.new(kept.n_bytes, i, -1)
                self.taken.append((segment, self.copies[segment, memory], Keeper(i, "in", position)))
            elif not kept.given and kept.segment != segment:
                self.taken.append((segment, memory, Keeper(i, "in", position)))

    def way(self, ref: Ref) -> dict[State, State]:
        """Return the steps of a tensor's reshard path, as the state before each state."""
        if ref not in self.before:
            self.before[ref] = {dst: src for src, dst in self.reshard_paths.get(reshard_key(self.graph, ref), ())}
        return self.before[ref]

    def local_bytes(self, ref: Ref, state: State) -> int:
        """Return the bytes of a tensor on one rank."""
        return _bytes(self.shape((ref, state)), self.graph.spec(ref).item_bytes)

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return the shape of a value on one rank."""
        return local_shape(self.graph.spec(value[0]).shape, value[1], self.mesh)

    def first_asked(self, memory: int) -> int:
        """Return the operator whose backward is the first to ask for memory that was given up.

        It is its last reader, or that of a copy regathered from it.
        """
        since = self.memories[memory].since
        mine = any(keeper.node == since for entry in self.entries_of.get(memory, ()) for keeper in entry.keepers)
        asking = [*self.readers.get(memory, ()), *([since] if mine else [])]
        for copy, piece in self.piece_of.items():
            asking += self.readers.get(copy, ()) if piece == memory else ()
        return max(asking)


def _bytes(shape: Sequence[int], item_bytes: int) -> int:
    n = item_bytes
    for size in shape:
        n *= size
    return n
