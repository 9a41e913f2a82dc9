"""The integer program of a graph, and the decoder of its solutions.

Only hot nodes (those that depend on a parameter) are decided here; masks, positions and the like follow demand
afterwards. Chains of operators (:mod:`.chains`) are one item each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from autopar.planner.intra_op.building.chains import Allowed, Chain, ChainMaker, position_of
from autopar.planner.intra_op.building.decoder import Decoder
from autopar.planner.intra_op.building.flows import ReadAlike, flow, pieces_for_copies, read_alike
from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.building.integer_program import Item, OnlyWith, Problem, Tensor
from autopar.planner.intra_op.building.overlap_terms import overlaps, pass_overlaps
from autopar.planner.intra_op.building.parameter_items import ParameterItems
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.kept_state import storage_options
from autopar.planner.intra_op.memory.kept import KeptBytes, StrategyRows
from autopar.planner.intra_op.memory.ledger import Ledger
from autopar.planner.intra_op.memory.memory_choices import MemoryOffers
from autopar.planner.intra_op.memory.moment_rows import MomentRows
from autopar.planner.intra_op.memory.walked_ledger import ledger
from autopar.plans.memory_decisions import OFFLOAD, memory
from autopar.plans.plan import ParamChoice, Recompute, segment_numbers
from autopar.rules.notation import Rule
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph, Node, Ref
from autopar.words.placements import State, replicated_placement, shard, whole_state
from autopar.words.shards import fits


@dataclass
class Builder:
    """Builds the problem of one graph on one mesh.

    Attributes:
        allowed: what pins leave of an op's strategies; None allows all.
        allowed_params: the same for parameters, given the node and the choice.
        output_states: pinned placements by output position.
        input_states: pinned placements by input name.
        cut_contractions: a contraction or attention must be cut on every axis, where it can be. For clusters that state
            no compute speed: there, computing everything everywhere would be free (Alpa does the same).
        in_flight: microbatches whose activations are kept at once.
        recompute: segments that are recomputed in the backward.
        keep_memory: keep strategies that are slower and smaller; needed when a memory limit binds.
        choose_recompute: let operators be recomputed in the backward instead of keeping what they make.
        choose_memory: let gathered copies be regathered in the backward instead of being kept, and results be
            given up by decisions about tensors.
        blocks: names of the operators with which blocks begin, if they are known.
        offloads: results may be moved to the memory of the host, of ``choose_memory``.
        asked: operators whose results the user asked to be moved there.
        versions: versions of weights at one time; with several, nothing is gathered anew for a backward.
        stored: buffers whose storage is decided (:mod:`autopar.planner.intra_op.kept_state`).
        stored_states: pinned placements of these, by name.
        in_memories: gives the choices of a parameter, from one for the device, in all memories in which it may be
            stored; None where that is the device's.
    """

    graph: Graph
    rules: Sequence[Rule | None]
    fold: Fold
    pricer: Pricer
    optimizer: str = "adamw"
    microbatches: int = 1
    allowed: Allowed | None = None
    allowed_params: Callable[[Node, ParamChoice], bool] | None = None
    output_states: Mapping[int, State] = field(default_factory=dict)
    input_states: Mapping[str, State] = field(default_factory=dict)
    keep_memory: bool = False
    cut_contractions: bool = False
    in_flight: int = 1
    recompute: Recompute = ()
    choose_recompute: bool = False
    choose_memory: bool = False
    blocks: Sequence[str] = ()
    stored: frozenset[int] = frozenset()
    stored_states: Mapping[str, State] = field(default_factory=dict)
    offloads: bool = False
    asked: frozenset[int] = frozenset()
    versions: int = 1
    in_memories: Callable[[Node, ParamChoice], list[ParamChoice]] | None = None

    def build(self) -> tuple[Problem, Decoder]:
        """Return the integer program, and the decoder of its solutions."""
        graph = self.graph
        names = {graph.nodes[i].target: i for i in self.stored}
        groups = read_alike(graph, self.fold, self._segment_of, names)
        again = Counter(self.fold.representative[i] for i in self._segment_of)
        chains, chain_of = ChainMaker(
            graph, self.rules, self.fold, self.pricer, self.microbatches, self.allowed, self.cut_contractions, again
        ).chains(groups)
        self._add_memory_choices(chains, chain_of)
        items = [Item(graph.nodes[c.nodes[-1]].name, tuple(c.seconds), tuple(c.n_bytes)) for c in chains]
        item_of = dict(chain_of)  # chains are the first items
        row_of = {node: (chain.rows, k) for chain in chains for k, node in enumerate(chain.nodes)}
        recomputed_of = {item: chain.recomputed for item, chain in enumerate(chains) if chain.recomputed}
        regathered_of = {item: chain.regathered for item, chain in enumerate(chains) if chain.regathered}
        given_up_of = {item: chain.given_up for item, chain in enumerate(chains) if chain.given_up}

        def wanted(node: int, position: int) -> list[State]:
            rows, k = row_of[node]
            return [row[k].ins[position] for row in rows]

        def gathered(node: int, position: int) -> tuple[bool, ...]:
            return tuple((node, position) in row for row in regathered_of.get(item_of[node], ()))

        parameters, may_hide, made_as = ParameterItems(
            graph, self.fold, self.pricer, self.optimizer, self.microbatches, self.versions, self.keep_memory,
            self.allowed_params, self.in_memories, self.offloads or bool(self.asked),
        ).add(items, item_of, groups, wanted)  # fmt: skip
        arrivals = self._add_arrivals(items, item_of, made_as)
        storage = self._add_storage(items, item_of, groups, made_as, wanted, row_of)
        tensors: list[Tensor] = []
        only_with: list[OnlyWith] = []
        outputs: dict[int, tuple[int, list[State]]] = {}
        for i, of_node in sorted(groups.items()):
            for group in of_node:
                states = made_as[i] if i in made_as else [
                    row[row_of[i][1]].outs[position_of(graph.nodes[i], group.ref.out)] for row in row_of[i][0]
                ]  # fmt: skip
                readers: list[tuple[int, list[State], tuple[bool, ...]]] = []
                for reader, position in group.readers:
                    if chain_of.get(reader) is not None and chain_of.get(reader) == chain_of.get(i):
                        continue
                    entry = (item_of[reader], wanted(reader, position), gathered(reader, position))
                    if entry not in readers:
                        readers.append(entry)
                        only_with += pieces_for_copies(self.pricer.mesh, item_of[i], states, *entry)
                readers += self._add_outputs(items, outputs, group, states)
                readers += [(item_of[buffer], made_as[buffer], ()) for buffer in dict.fromkeys(group.kept)]
                if readers:
                    tensors.append(flow(graph, self.pricer, self.microbatches, group, item_of[i], states, readers))
        if not items:  # no parameter and no gradient: solvers want one decision, and this one changes nothing
            items.append(Item("nothing to decide", (0.0,), (0.0,)))
        kept = None
        if self.keep_memory:
            rows = StrategyRows(self.graph, self.pricer, item_of, row_of, recomputed_of, regathered_of, given_up_of)
            kept = KeptBytes(
                rows, self.rules, self.fold, self._memory, self._segment_of, self.in_flight,
                self._offers.recomputable if self.choose_recompute else None,
            )  # fmt: skip
            items = kept.added_to(items)
        problem = Problem(
            tuple(items), tuple(tensors), kept.shared() if kept is not None else (),
            overlaps=(
                *overlaps(graph, self.rules, self.fold, self.pricer, self.microbatches, item_of, row_of),
                *pass_overlaps(
                    graph, self.rules, self.fold, self.pricer, self.microbatches, may_hide,
                    {item: chain.copied for item, chain in enumerate(chains) if chain.copied}, item_of, row_of,
                    recomputed_of,
                ),
            ),
            only_with=tuple(only_with),
        )  # fmt: skip
        moments = None
        if kept is not None:
            moments = MomentRows(
                kept, self.fold, problem, parameters, self.optimizer, self.microbatches, storage, self.versions
            )
        may = self._offers.recomputable if self.choose_recompute else None
        return problem, Decoder(graph, self.fold, chains, parameters, outputs, arrivals, may, moments, storage)

    def _add_memory_choices(self, chains: Sequence[Chain], chain_of: Mapping[int, int]) -> None:
        """Add the rows of decisions about memory to all chains, or the one that was asked for to all rows."""
        counts = self.fold.counts
        for chain in chains if self.choose_recompute else ():
            self._offers.recompute(chain, counts)
        for chain in chains if self.asked else ():
            self._offers.move_asked(chain, counts, OFFLOAD)
        for chain in chains if self.choose_memory else ():
            if not self.asked:
                self._offers.give_up(chain, counts)
            self._offers.regather(chain, chains, chain_of)

    # -- outputs

    def _add_outputs(
        self, items: list[Item], outputs: dict[int, tuple[int, list[State]]], group: ReadAlike, made_as: list[State]
    ) -> list[tuple[int, list[State], tuple[bool, ...]]]:
        """Add an item for each output and each new value of a buffer; return them as readers of the tensor."""
        readers: list[tuple[int, list[State], tuple[bool, ...]]] = []
        for number in group.outputs:
            states = self._output_states(number, group.ref, made_as)
            outputs[len(items)] = number, states
            readers.append((len(items), states, ()))
            items.append(Item(f"output{number}", (0.0,) * len(states), (0.0,) * len(states)))
        for name in group.updates:
            readers.append((len(items), [whole_state(self.pricer.mesh)], ()))
            items.append(Item(f"update {name}", (0.0,), (0.0,)))
        return readers

    def _output_states(self, number: int, ref: Ref, made_as: Sequence[State]) -> list[State]:
        graph, mesh = self.graph, self.pricer.mesh
        if number in self.output_states:
            return [self.output_states[number]]
        grad = graph.nodes[ref.node].needs_grad and graph.spec(ref).is_float
        whole = whole_state(mesh, grad)
        sent = number < graph.sends
        stands_alone = graph.loss is None and not graph.sends  # the loss of a stage that sends is made by a later one
        if (not sent and (stands_alone or graph.loss == number)) or not graph.spec(ref).shape:
            return [whole]
        fixed = {
            State(replicated_placement(grad) if p.is_pending or (grad and p.is_replicated) else p for p in s)
            for s in made_as if not s.has_units
        }  # fmt: skip
        return sorted({whole, *fixed})

    # -- buffers that are kept from call to call

    def _add_storage(
        self, items: list[Item], item_of: dict[int, int], groups: Mapping[int, list[ReadAlike]],
        made_as: dict[int, list[State]], wanted: Callable[[int, int], list[State]],
        row_of: Mapping[int, tuple[list[tuple[Strategy, ...]], int]],
    ) -> dict[int, tuple[int, list[State]]]:  # fmt: skip
        """Add an item for each class of stored buffers; return by item its node and placements.

        What a buffer is written from is read by this item, and what it holds is made by it: both in one placement.
        """
        graph, rep = self.graph, self.fold.representative
        classes = sorted({rep[i] for i in self.stored})
        near: dict[int, list[State]] = {i: [] for i in classes}
        for i, of_node in groups.items():
            for group in of_node:
                if i in near:
                    near[i] += [s for reader, position in group.readers for s in wanted(reader, position)]
                for buffer in group.kept:
                    rows, k = row_of.get(i, ([], 0))
                    near[buffer] += [row[k].outs[position_of(graph.nodes[i], group.ref.out)] for row in rows]
        storage: dict[int, tuple[int, list[State]]] = {}
        for i in classes:
            node = graph.nodes[i]
            made_as[i] = storage_options(node, near[i], self.pricer.mesh, self.stored_states.get(node.target))
            n_bytes = tuple(self.fold.counts[i] * float(self.pricer.local_bytes(node.out, s)) for s in made_as[i])
            item_of[i] = len(items)
            storage[len(items)] = i, made_as[i]
            items.append(Item(node.name, (0.0,) * len(n_bytes), n_bytes))
        return storage

    # -- tensors of earlier stages

    def _add_arrivals(
        self, items: list[Item], item_of: dict[int, int], made_as: dict[int, list[State]]
    ) -> dict[int, tuple[str, list[State]]]:
        """Add an item for each tensor of an earlier stage; return by item its name and the states of its strategies."""
        arrivals: dict[int, tuple[str, list[State]]] = {}
        for i, node in enumerate(self.graph.nodes):
            if node.kind == "input" and node.hot:
                made_as[i] = self._arrivals(node)
                arrivals[len(items)] = node.target, made_as[i]
                item_of[i] = len(items)
                seconds = tuple(self._arrival_seconds(node, s) for s in made_as[i])
                items.append(Item(node.name, seconds, (0.0,) * len(seconds)))
        return arrivals

    def _arrivals(self, node: Node) -> list[State]:
        """Return the states in which a tensor of an earlier stage may arrive.

        Replicated, or sharded on one of its first dims.

        An input of the model that wants a gradient is whole, and so is its gradient: both are the caller's.
        """
        whole = replicated_placement(node.needs_grad)
        if node.target not in self.graph.arriving:
            return [self.input_states.get(node.target, whole_state(self.pricer.mesh, node.needs_grad))]
        shards = [shard(d) for d in range(min(3, len(node.out.shape)))]
        mesh = self.pricer.mesh
        options = [[whole] if size == 1 else [whole, *shards] for size in mesh.sizes]
        return [s for s in map(State, product(*options)) if fits(node.out.shape, s, mesh)]

    def _arrival_seconds(self, node: Node, state: State) -> float:
        """Return the seconds to gather a replicated tensor of an earlier stage, which is sent in shards."""
        if node.target not in self.graph.arriving:
            return 0.0
        n_bytes = self.pricer.local_bytes(node.out, state)
        axes = [name for p, (name, size) in zip(state, self.pricer.mesh, strict=True) if not p.is_shard and size > 1]
        return self.microbatches * sum(self.pricer.axes[a].seconds("all_gather", n_bytes) for a in axes)

    # -- what is recomputed

    @cached_property
    def _segment_of(self) -> dict[int, int]:
        """Segment numbers of the operators that are recomputed."""
        return segment_numbers(self.graph, self.recompute)

    @cached_property
    def _memory(self) -> Ledger:
        """The ledger of global tensors."""
        decided = memory(recompute=self.recompute)
        return ledger(
            self.graph, self.rules, self.pricer.mesh, None, {}, decided, self.choose_recompute, self.pricer.kernels
        )

    @cached_property
    def _offers(self) -> MemoryOffers:
        return MemoryOffers(
            self.graph, self.rules, self.fold, self.pricer, self.microbatches, self._segment_of, self._memory,
            self.blocks, self._arrivals, self.offloads, self.asked,
        )  # fmt: skip
