"""The bytes that are there at one moment of a step, for every strategy of the integer program.

A plan fits if its fullest moment does. There are as many moments as operators, twice, and nearly all of them say
nothing that others do not, so the program has the rows of those only that were the fullest of some solution (see
:mod:`.within_memory`): when all of the forward is kept, when the optimizer steps, and a few more.

What is there at a moment is linear in the choices: stored state, gradients of parameters that are complete by then,
what autograd keeps and has not let go of yet (:mod:`.kept`), pending gradients and results, and what the operator
needs that runs then. Each takes the share that a strategy leaves of the whole tensor. What depends on two choices is
left out (copies from one layout to another), and so is what is recomputed in addition to what it keeps: a row may say
less than there is, and the finished plan says the rest.

A block that repeats has one choice for all. Of a moment within one of the blocks, this one is taken to be like all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from autopar.planner.intra_op.building import parameter_sharding as P
from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.building.integer_program import MomentBytes, Problem
from autopar.planner.intra_op.building.matrix_prices import bytes_of, share_at_once
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.memory.kept import KeptBytes
from autopar.planner.intra_op.memory.ledger import Entry
from autopar.planner.intra_op.memory.memory_walk import Walk
from autopar.planner.intra_op.memory.microbatch_timeline import MADE, SLOTS, Span
from autopar.planner.intra_op.memory.moments import StepMoments
from autopar.planner.intra_op.memory.operator_memory import local_layouts
from autopar.planner.intra_op.memory.reshard_needs import reduction_needs
from autopar.planner.intra_op.memory.stage_peaks import OPTIMIZER_COPIES, sends_back
from autopar.planner.intra_op.memory.walked_ledger import ledger_of
from autopar.plans.memory_decisions import KEEP
from autopar.plans.plan import ParamChoice
from autopar.plans.prices import Moment, OnTheirWay, copies_ahead
from autopar.plans.stepped_by import stepped_by
from autopar.rules.operator_call import call_of
from autopar.rules.saved_tensors import contiguous, saved_of
from autopar.rules.strategy import Strategy
from autopar.rules.working_memory import needs_of
from autopar.words.graph import Graph, Ref
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.shards import local_shape
from cost_models.optimizer_bytes import MUON


class MomentRows:
    """Rows of moments for one problem.

    Args:
        kept: what autograd keeps.
        parameters: by item, the node and the choices of a parameter (of a class).
        storage: the items of stored buffers.

    Attributes:
        at_once: all that is recomputed of a block is counted as recomputed at once. Else less is counted: no more than
            there is, however that is divided.
    """

    def __init__(
        self, kept: KeptBytes, fold: Fold, problem: Problem,
        parameters: Mapping[int, tuple[int, Sequence[ParamChoice]]], optimizer: str, microbatches: int,
        storage: Collection[int] = (), versions: int = 1,
    ) -> None:  # fmt: skip
        self.kept, self.fold, self.problem, self.parameters = kept, fold, problem, parameters
        self.optimizer, self.microbatches, self.storage, self.versions = optimizer, microbatches, storage, versions
        self.at_once = True
        self._first: dict[bool, tuple[MomentBytes, ...]] = {}
        self.graph: Graph = kept.rows.graph
        self.pricer: Pricer = kept.rows.pricer
        stay = self.pricer.kernels.keeps_gradients
        self.accumulates = stay or microbatches > max(1, kept.in_flight)  # when it is fullest

    def first(self) -> tuple[MomentBytes, ...]:
        """Return the first rows of a program: when all of the forward is kept, and when the optimizer steps."""
        if self.at_once not in self._first:
            self._first[self.at_once] = self.at_the_end_of_the_forward(), self.stepping()
        return self._first[self.at_once]

    def stepping(self) -> MomentBytes:
        """Return the row of the optimizer's step: all state, all gradients, its copies of the largest parameter."""
        items = self._state(lambda _: 1.0)
        nodes = self.graph.nodes
        trained = [(nodes[i].out.n_bytes, item) for item, (i, _) in self.parameters.items() if nodes[i].needs_grad]
        copies = OPTIMIZER_COPIES.get(self.optimizer, 0)
        for _, item in sorted(trained)[-1:] if copies else ():
            items[item] = [n + copies * c.parameter_bytes for n, c in zip(items[item], self._costs[item], strict=True)]
        for item, (i, choices) in self.parameters.items() if self.optimizer == MUON else ():
            if nodes[i].needs_grad and stepped_by(self.graph, nodes[i], MUON) == MUON:
                more = [bytes_of(self.pricer.mesh, nodes[i].out, c.stored, self._share_at_once) for c in choices]
                items[item] = [n + len(self._nodes_of[i]) * m for n, m in zip(items[item], more, strict=True)]
        return self._of(items, None)

    @cached_property
    def _share_at_once(self) -> float:
        return share_at_once(self.graph, self.pricer.mesh, self.optimizer)

    def at_the_end_of_the_forward(self) -> MomentBytes:
        """Return the row of the moment when the last operator has run: all that is kept."""
        return self.at(Moment(max(i for i, _ in self.graph.of_kind("op")), False, 0))

    def at(self, moment: Moment) -> MomentBytes:
        """Return the row of a moment."""
        return self._of(self._state(lambda node: self._gradient_is_there(node, moment)), moment)

    def _of(self, items: list[list[float]], moment: Moment | None) -> MomentBytes:
        shared_bytes = (0.0,) * len(self.problem.shared)
        if moment is not None:
            at = self.timeline.at(moment)

            def times(entry: Entry) -> float:
                return self._times(entry, moment, at)

            empty = [replace(item, n_bytes=(0.0,) * len(item.n_bytes)) for item in self.problem.items]
            for row, item in zip(items, self.kept.added_to(empty, times), strict=True):
                row[:] = [a + b for a, b in zip(row, item.n_bytes, strict=True)]
            shared_bytes = tuple(shared.n_bytes for shared in self.kept.shared(times))
            self._add_recomputed(items, moment, at)
            self._add_waiting(items, at)
            self._add_passing(items, moment, at)
            self._add_stage_edge(items, moment)
            self._add_needs(items, moment, at)
            self._add_reductions(items, moment, at)
        return MomentBytes(tuple(map(tuple, items)), shared_bytes)

    # -- what is stored

    @cached_property
    def _costs(self) -> dict[int, list[P.ParamCost]]:
        """Costs of every parameter's choices, by item."""
        nodes, optimizer, n, versions = self.graph.nodes, self.optimizer, self.microbatches, self.versions
        params = {
            item: P.ParamInStep.of(self.graph, nodes[i], optimizer, n, versions)
            for item, (i, _) in self.parameters.items()
        }  # fmt: skip
        return {
            item: [P.cost(params[item], choice, self.pricer) for choice in choices]
            for item, (_, choices) in self.parameters.items()
        }  # fmt: skip

    @cached_property
    def _nodes_of(self) -> dict[int, list[int]]:
        """The nodes of every class."""
        nodes_of: dict[int, list[int]] = {}
        for i, r in enumerate(self.fold.representative):
            nodes_of.setdefault(r, []).append(i)
        return nodes_of

    def _state(self, gradient: Callable[[int], float]) -> list[list[float]]:
        """Return stored state, gathered copies, and gradients of the parameters of a class that have theirs."""
        items = [[0.0] * len(item.n_bytes) for item in self.problem.items]
        for item in self.storage:
            items[item] = [*self.problem.items[item].n_bytes]
        nodes_of = self._nodes_of
        for item, (i, _) in self.parameters.items():
            n = len(nodes_of[i])
            there = sum(map(gradient, nodes_of[i]))
            items[item] = [
                n * (c.parameter_bytes + c.optimizer_bytes + c.gathered_bytes + c.version_bytes)
                + there * c.gradient_bytes
                for c in self._costs[item]
            ]
        return items

    def _add_reductions(self, items: list[list[float]], moment: Moment, at: int) -> None:
        """Add the bytes to reduce gradients that are complete now to where their parameters are stored."""
        if not moment.backward or moment.slot != SLOTS - 1:
            return
        passing = {self._tensor_of(span) for span in self.timeline.spans if span.first <= at <= span.last}
        accumulates = self.accumulates
        nodes_of = self._nodes_of
        for item, (i, choices) in self.parameters.items():
            spec = self.graph.nodes[i].out
            for node in nodes_of[i]:
                readers = [reader for reader, _ in self.graph.consumers.get(Ref(node), ())]
                if not self.graph.nodes[node].needs_grad or not readers or min(readers) != moment.node:
                    continue
                for r, choice in enumerate(choices):
                    items[item][r] += reduction_needs(spec, choice, self.pricer.mesh, accumulates)
                    if node not in passing and choice.is_copied:
                        items[item][r] += self.pricer.local_bytes(spec, choice.used)

    def _gradient_is_there(self, node: int, moment: Moment) -> float:
        """Return whether a parameter's gradient is complete: the backward has passed all its readers."""
        if self.accumulates:
            return 1.0
        readers = [reader for reader, _ in self.graph.consumers.get(Ref(node), ())]
        return float(moment.backward and bool(readers) and min(readers) > moment.node)

    # -- what is kept

    @cached_property
    def timeline(self) -> StepMoments:
        """Moments of the global tensors, with nothing recomputed."""
        params = {i: ParamChoice(State(), State()) for i, _ in self.graph.of_kind("param")}
        outputs = [State() if isinstance(out, Ref) else None for out in self.graph.outputs]
        walk = Walk(self.graph, self.kept.rules, Mesh(), None, {}, {}, kernels=self.pricer.kernels)
        holds = ledger_of(walk)
        return StepMoments(walk, holds, params, outputs, self.accumulates)

    def _times(self, entry: Entry, moment: Moment, at: int) -> float:
        """Return how often an entry is there."""
        timeline = self.timeline
        made_at = timeline.at_of.get(entry.since, -1)
        let_go = [timeline.at_of.get(keeper.node, 0) for keeper in entry.keepers]
        is_there = float(made_at <= at <= timeline.back(min(let_go, default=max(made_at, 0))))
        if entry.segment is None:
            if is_there and self._is_counted_by_its_reader(entry, moment, at):
                is_there = 0.0
            return self.kept.in_flight - 1 + is_there
        return is_there * (moment.backward and self.kept.segment_of.get(moment.node) == entry.segment)

    def _is_counted_by_its_reader(self, entry: Entry, moment: Moment, at: int) -> bool:
        """Return whether :meth:`_add_recomputed` counts an entry, kept or recomputed."""
        may, reader = self.kept.recomputable, self._only_recomputed_reader(entry)
        if may is None or reader is None or not moment.backward or moment.node not in may.block_of:
            return False
        gives_up = self.fold.representative[entry.since] in may.gives_up
        return gives_up and self._is_recomputed_then(entry, [reader[0]], may.block_of[moment.node], at)

    def _add_recomputed(self, items: list[list[float]], moment: Moment, at: int) -> None:
        """Add recomputed memory in the backward of its own block, until the backward of the first that keeps it.

        It is there from the begin of the block's backward on if the block is recomputed at once, else at least from the
        last operator on that keeps it.
        """
        may, rows = self.kept.recomputable, self.kept.rows
        if may is None or not moment.backward or moment.node not in may.block_of:
            return
        block = may.block_of[moment.node]

        def inside_is_there(entry: Entry) -> float:
            return self._is_recomputed_then(entry, [keeper.node for keeper in entry.keepers], block, at)

        for i in {self.fold.representative[node] for node in may.block_of if may.block_of[node] == block} & may.able:
            if i in rows.row_of:
                is_recomputed = rows.is_recomputed(i)
                for r, n_bytes in enumerate(self.kept.inside_of(i, inside_is_there) if any(is_recomputed) else ()):
                    items[rows.item_of[i]][r] += is_recomputed[r] * n_bytes
        for entry in self.kept.whole.entries:
            maker = self.fold.representative[entry.since]
            if entry.decision != KEEP.name or entry.segment is not None or maker not in may.gives_up:
                continue
            reader = self._only_recomputed_reader(entry)
            asking = [keeper.node for keeper in entry.keepers] if reader is None else [reader[0]]
            if not asking or maker not in rows.row_of or not self._is_recomputed_then(entry, asking, block, at):
                continue
            if entry.keepers and entry.keepers[0].what == "inside":
                continue
            # what only the second run of a reader asks for is there with that, whether it is kept or recomputed
            i, position = (maker, MADE) if reader is None else (self.fold.representative[reader[0]], reader[1])
            shares, is_recomputed = rows.shares(i, position), rows.is_recomputed(i)
            for r, again in enumerate(is_recomputed):
                items[rows.item_of[i]][r] += again * shares[r] * entry.n_bytes

    def _is_recomputed_then(self, entry: Entry, asking: Sequence[int], block: int, at: int) -> bool:
        """Return whether memory that a block recomputes for operators is there at a moment of its backward."""
        may, timeline = self.kept.recomputable, self.timeline
        if may is None or may.block_of.get(entry.since) != block or not asking:
            return False
        places = [timeline.at_of.get(node, 0) for node in asking]
        return at <= timeline.back(min(places)) and (self.at_once or at >= timeline.back(max(places)))

    def _only_recomputed_reader(self, entry: Entry) -> tuple[int, int] | None:
        """Return the one reader of memory that nobody keeps, and its position, if it may be recomputed apart.

        It is in the same block, but another segment: within one, what is read next is not kept for it.
        """
        may, graph = self.kept.recomputable, self.graph
        if may is None or entry.keepers or len(entry.readers) != 1:
            return None
        ((reader, position),) = entry.readers
        if reader >= len(graph.nodes) or may.block_of.get(reader) != may.block_of.get(entry.since):
            return None
        i = self.fold.representative[reader]
        if i not in may.able or i not in self.kept.rows.row_of:
            return None
        joins = may.may_join(graph, self.kept.rules, self.fold, entry.since, reader)
        return None if joins else (reader, position)

    def _add_waiting(self, items: list[list[float]], at: int) -> None:
        """Add results that are given up by decisions, while they are there.

        They are until the last reader has run, and from the backward of that until their maker's.
        """
        timeline, rows = self.timeline, self.kept.rows
        rep = self.fold.representative
        for entry in self.kept.whole.entries if rows.given_up_of else ():
            maker = rep[entry.since]
            if entry.decision != KEEP.name or not entry.keepers or entry.keepers[0].what == "inside":
                continue
            if maker not in rows.row_of or not any(rows.given_up(maker)):
                continue
            made_at = timeline.at_of.get(entry.since, -1)
            last = max(timeline.at_of.get(keeper.node, 0) for keeper in entry.keepers)
            if made_at <= at <= last or timeline.back(last, 0) <= at <= timeline.back(made_at, 0):
                row, shares = items[rows.item_of[maker]], rows.shares(maker, MADE)
                for r, waits in enumerate(rows.given_up(maker)):
                    row[r] += waits * shares[r] * entry.n_bytes

    # -- what passes

    def _add_passing(self, items: list[list[float]], moment: Moment, at: int) -> None:
        """Add the bytes of results and gradients on their way at this moment.

        The gradient of a tensor that is read now is as large as that tensor.
        """
        rep = self.fold.representative
        for span in self.timeline.spans:
            if not span.first <= at <= span.last or not span.n_bytes:
                continue
            reads_now = span.position != MADE and span.node == moment.node
            node = span.node if reads_now else self._tensor_of(span)
            for r, share in enumerate(self._shares(rep[node], span.position if reads_now else MADE)):
                items[self.kept.rows.item_of[rep[node]]][r] += share * span.n_bytes

    def _add_stage_edge(self, items: list[list[float]], moment: Moment) -> None:
        """Add what a stage sends of other microbatches, and receives for it, which is no choice of its own."""
        graph, microbatches, in_flight = self.graph, self.microbatches, self.kept.in_flight
        there = OnTheirWay.at(in_flight, microbatches, moment.backward, in_flight >= microbatches)
        peers = [
            stages if isinstance(out, Ref) and sends_back(graph, out) else ()
            for out, stages in zip(graph.outputs, graph.targets, strict=False)
        ]
        for out, copies in zip(graph.outputs, copies_ahead(peers, there.backwards), strict=False):
            assert isinstance(out, Ref), "what is sent is a tensor"
            node, n_bytes = self.fold.representative[out.node], (there.sent + copies) * graph.spec(out).n_bytes
            for r, share in enumerate(self._shares(node, MADE)):
                items[self.kept.rows.item_of[node]][r] += share * n_bytes

    def _tensor_of(self, span: Span) -> int:
        """Return the node that makes the tensor as large as a span."""
        return span.node if span.position == MADE else self.graph.nodes[span.node].refs[span.position].node

    def _shares(self, node: int, position: int) -> Sequence[float]:
        """Return the share of a tensor on one rank, by row of its item; nothing of what is not decided."""
        if node in self.kept.rows.row_of:
            return self.kept.rows.shares(node, position)
        return self._param_shares.get(node, ())

    @cached_property
    def _param_shares(self) -> Mapping[int, list[float]]:
        """Return the shares of parameters as they are used."""
        nodes = self.graph.nodes
        return {
            i: [self.pricer.local_bytes(nodes[i].out, c.used) / max(1, nodes[i].out.n_bytes) for c in choices]
            for i, choices in self.parameters.values()
        }

    def _add_needs(self, items: list[list[float]], moment: Moment, at: int) -> None:
        """Add the working memory of the operator that runs at the moment."""
        node = self.fold.representative[moment.node]
        if not self.timeline.beside[at] or node not in self.kept.rows.row_of:
            return
        rows, k = self.kept.rows.row_of[node]
        needs_of_names: dict[tuple[str, ...], float] = {}
        item = items[self.kept.rows.item_of[node]]
        for r, row in enumerate(rows):
            strategy = row[k]
            if strategy.names not in needs_of_names:
                needs_of_names[strategy.names] = self._needs(node, strategy, moment.backward)
            item[r] += needs_of_names[strategy.names]

    def _needs(self, i: int, strategy: Strategy, backward: bool) -> float:
        graph, node, rule, mesh = self.graph, self.graph.nodes[i], self.kept.rules[i], self.pricer.mesh
        assert rule is not None
        strides = [
            contiguous(local_shape(graph.spec(ref).shape, state, mesh))
            for ref, state in zip(node.refs, strategy.ins, strict=True)
        ]
        layouts = local_layouts(graph, i, strategy, mesh, strides)
        gpu = self.pricer.kernels.gpu
        needs = needs_of(call_of(node, graph.spec), rule, strategy.options, mesh, layouts, gpu=gpu)
        if backward:
            return needs.backward_bytes - needs.kept_bytes - needs.out_bytes - sum(needs.memories)
        saved = saved_of(graph, i, rule, strategy, mesh, gpu)
        return max(0, needs.forward_bytes - saved.inside_bytes - sum(n_bytes for n_bytes, _ in saved.memories))
