"""From a graph to a :class:`~autopar.planner.intra_op.problem.Problem`, and from a choice back to strategies.

Only hot nodes (those that depend on a parameter) are decided here; masks, positions and the like follow demand
afterwards. A chain of operators is one item where nothing is lost by it: an operator that moves or maps its one input
follows its producer if it can follow every strategy of the producer and its result is no larger, since a reshard
after the pair then costs no more than between the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from autopar.graph import Graph, Node, Ref
from autopar.memory_decisions import KEEP, about_tensors, memory
from autopar.meshes import Mesh
from autopar.pieces import fits
from autopar.placements import INVARIANT, REPLICATED, State, Step, shard, step_collectives, whole_placement, whole_state
from autopar.plan import ParamChoice, Recompute, segment_numbers
from autopar.planner.intra_op import params as P
from autopar.planner.intra_op.chains import Chain, is_plain, most_cut
from autopar.planner.intra_op.decoder import Decoder
from autopar.planner.intra_op.fold import Fold
from autopar.planner.intra_op.kept import OUT, KeptBytes, StrategyRows, share_of
from autopar.planner.intra_op.ledger import Ledger
from autopar.planner.intra_op.memory_walk import ledger
from autopar.planner.intra_op.moment_rows import MomentRows
from autopar.planner.intra_op.price import Pricer
from autopar.planner.intra_op.problem import Item, Problem, Tensor
from autopar.planner.intra_op.recompute_choices import Again, again
from autopar.planner.intra_op.reshard import axis_sets, state_graph
from autopar.planner.intra_op.space import strategies
from autopar.regather import can_gather_again, is_gather, is_same, may_wait
from autopar.rules.notation import Rule
from autopar.rules.strategy import Strategy

FOLLOWERS = frozenset({"none", "pointwise", "copy", "reduce"})
Allowed = Callable[[Node, Strategy], bool]


@dataclass
class _Group:
    """Tensors of one class with the same readers."""

    ref: Ref
    count: int = 0
    again: int = 0  # of these, whose first reader belongs to a segment that is recomputed
    readers: tuple[tuple[int, int], ...] = ()
    outputs: tuple[int, ...] = ()
    updates: tuple[str, ...] = ()


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
        recompute: segments that run again in the backward.
        keep_memory: keep strategies that are slower and smaller; needed when a memory limit binds.
        choose_again: let operators run again in the backward instead of keeping what they make.
        choose_gathers: let gathered copies be gathered again in the backward instead of being kept, and results be
            given up by decisions about tensors.
        blocks: names of the operators with which blocks begin, where they are known.
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
    choose_again: bool = False
    choose_gathers: bool = False
    blocks: Sequence[str] = ()

    def build(self) -> tuple[Problem, Decoder]:
        """The problem, and what reads its solution."""
        graph, rep = self.graph, self.fold.representative
        counts = self.fold.counts
        groups = self._groups()
        chains, chain_of = self._chains(groups, counts)
        for chain in chains if self.choose_again else ():
            self._offer_again(chain, counts)
        for chain in chains if self.choose_gathers else ():
            self._offer_waiting(chain, counts)
            self._offer_gathers(chain, chains, chain_of)
        items: list[Item] = []
        item_of: dict[int, int] = {}
        decoded_chains = []
        for chain in chains:
            for node in chain.nodes:
                item_of[node] = len(items)
            decoded_chains.append((len(items), tuple(chain.nodes), tuple(chain.rows)))
            items.append(Item(graph.nodes[chain.nodes[-1]].name, tuple(chain.seconds), tuple(chain.n_bytes)))
        row_of = {node: (chain.rows, k) for chain in chains for k, node in enumerate(chain.nodes)}
        again_of = {item_of[chain.nodes[0]]: chain.again for chain in chains if chain.again}
        gathers_of = {item_of[chain.nodes[0]]: chain.gathers for chain in chains if chain.gathers}
        waits_of = {item_of[chain.nodes[0]]: chain.waits for chain in chains if chain.waits}

        def wanted(node: int, position: int) -> list[State]:
            rows, k = row_of[node]
            return [row[k].ins[position] for row in rows]

        def gathered(node: int, position: int) -> tuple[bool, ...]:
            return tuple((node, position) in row for row in gathers_of.get(item_of[node], ()))

        parameters = []
        made_by_param: dict[int, list[State]] = {}
        for i, node in enumerate(graph.nodes):
            if node.kind != "param" or rep[i] != i:
                continue
            uses = {
                s.started(node.needs_grad)
                for g in groups.get(i, ()) for reader, position in g.readers for s in wanted(reader, position)
            }  # fmt: skip
            options = self._param_options(node, uses, counts[i])
            parameters.append((len(items), i, tuple(o[0] for o in options)))
            made_by_param[i] = [o[0].used for o in options]
            item_of[i] = len(items)
            peaks = tuple(o[3] for o in options) if self.keep_memory and any(o[3] for o in options) else ()
            items.append(Item(node.name, tuple(o[1] for o in options), tuple(o[2] for o in options), peaks))
        arrivals = []
        for i, node in enumerate(graph.nodes):
            if node.kind == "input" and node.hot:
                made_by_param[i] = self._arrivals(node)
                arrivals.append((len(items), node.target, tuple(made_by_param[i])))
                item_of[i] = len(items)
                seconds = tuple(self._arrival_seconds(node, s) for s in made_by_param[i])
                items.append(Item(node.name, seconds, (0.0,) * len(seconds)))
        tensors: list[Tensor] = []
        outputs = []
        for i, of_node in sorted(groups.items()):
            for group in of_node:
                made_as = (
                    made_by_param[i]
                    if i in made_by_param
                    else [row[row_of[i][1]].outs[_position(graph.nodes[i], group.ref.out)] for row in row_of[i][0]]
                )
                readers: list[tuple[int, list[State], tuple[bool, ...]]] = []
                for reader, position in group.readers:
                    if chain_of.get(reader) is not None and chain_of.get(reader) == chain_of.get(i):
                        continue
                    entry = (item_of[reader], wanted(reader, position), gathered(reader, position))
                    if entry not in readers:
                        readers.append(entry)
                for number in group.outputs:
                    states = self._output_states(number, group.ref, made_as)
                    outputs.append((len(items), number, tuple(states)))
                    readers.append((len(items), states, ()))
                    items.append(Item(f"output{number}", (0.0,) * len(states), (0.0,) * len(states)))
                for name in group.updates:
                    states = [whole_state(self.pricer.mesh)]
                    readers.append((len(items), states, ()))
                    items.append(Item(f"update {name}", (0.0,), (0.0,)))
                if readers:
                    tensors.append(self._tensor(group, item_of[i], made_as, readers))
        kept = None
        if self.keep_memory:
            rows = StrategyRows(self.graph, self.pricer, item_of, row_of, again_of, gathers_of, waits_of)
            kept = KeptBytes(
                rows, self.rules, self.fold, self._memory, self._segment_of, self.in_flight,
                self._may_again if self.choose_again else None,
            )  # fmt: skip
            items = kept.added_to(items)
        problem = Problem(tuple(items), tuple(tensors), kept.shared() if kept is not None else ())
        moments = None
        if kept is not None:
            moments = MomentRows(kept, self.fold, problem, parameters, self.optimizer, self.microbatches)
        repeats = tuple((item, tuple(rows)) for item, rows in again_of.items())
        may = self._may_again if self.choose_again else None
        return problem, Decoder(
            tuple(decoded_chains), tuple(parameters), tuple(outputs), tuple(arrivals), repeats, may,
            tuple((item, tuple(map(frozenset, rows))) for item, rows in gathers_of.items()), graph,
            moments, tuple((item, tuple(rows)) for item, rows in waits_of.items()),
        )  # fmt: skip

    # -- tensors

    def _groups(self) -> dict[int, list[_Group]]:
        """Hot tensors by representative of their producer, those with the same readers together."""
        graph, rep, again = self.graph, self.fold.representative, self._segment_of
        by_node: dict[int, dict[object, _Group]] = {}
        out_of: dict[Ref, list[int]] = {}
        for number, out in enumerate(graph.outputs):
            if isinstance(out, Ref):
                out_of.setdefault(out, []).append(number)
        update_of: dict[Ref, list[str]] = {}
        for name, ref in graph.updates.items():
            update_of.setdefault(ref, []).append(name)
        for i, node in enumerate(graph.nodes):
            if not node.hot:
                continue
            for k, spec in enumerate(node.outs):
                if spec is None:
                    continue
                ref = Ref(i, k)
                read = graph.consumers.get(ref, ())
                if len(read) == 1:
                    ((c, p),) = read
                    readers: tuple[tuple[int, int], ...] = ((rep[c], p),)
                else:
                    readers = tuple(sorted({(rep[c], p) for c, p in read}))
                outs, updates = tuple(out_of.get(ref, ())), tuple(update_of.get(ref, ()))
                of_node = by_node.setdefault(rep[i], {})
                key = (k, readers, outs, updates)
                if key not in of_node:
                    of_node[key] = _Group(Ref(rep[i], k), 0, 0, readers, outs, updates)
                of_node[key].count += 1
                of_node[key].again += 1 if read and read[0][0] in again else 0
        return {i: list(g.values()) for i, g in by_node.items()}

    def _tensor(
        self, group: _Group, producer: int, made_as: Sequence[State],
        readers: Sequence[tuple[int, Sequence[State], Sequence[bool]]],
    ) -> Tensor:  # fmt: skip
        """The flow of a tensor to its readers.

        Args:
            made_as: states by strategy of the producer.
            readers: item, states by strategy, and by strategy whether the copy is gathered again in the backward (empty
                if none is).
        """
        spec = self.graph.spec(group.ref)
        grad = self.graph.nodes[group.ref.node].needs_grad and spec.is_float
        mesh = self.pricer.mesh
        n = len(mesh)
        whole = (INVARIANT, REPLICATED) if grad else (REPLICATED,)
        goals = axis_sets([s for _, states, _ in readers for s in states], n)
        sources = axis_sets(list(made_as), n)
        goals = tuple(
            tuple(dict.fromkeys((*g, *(p for p in s if p in whole)))) for g, s in zip(goals, sources, strict=True)
        )
        states, edges = state_graph(spec.shape, mesh, sources, goals)
        if self.graph.nodes[group.ref.node].kind == "param" and len(readers) == 1:
            # gathering a parameter is the business of its stored placement and lifetime, not of a reshard
            edges = tuple((a, b) for a, b in edges if _is_free(a, b))
        number = {s: k for k, s in enumerate(states)}
        for s in (*made_as, *(s for _, all_, _ in readers for s in all_)):
            if s not in number:
                raise AssertionError(f"{self.graph.nodes[group.ref.node].where}: state {s} of {spec} is not legal")
        price, parts = self.pricer.step, self.pricer.step_parts
        times, again = group.count * self.microbatches, group.again * self.microbatches
        steps = tuple(
            (number[a], number[b], times * price(spec, grad, a, b) + again * (again and parts(spec, grad, a, b)[0]))
            for a, b in edges
        )
        twice = {s for _, states, flags in readers for s, flag in zip(states, flags, strict=False) if flag}
        copies, more = _gathered_twice(twice, edges, mesh, len(states))
        steps += tuple(
            (copies[a] if from_copy else number[a], copies[b],
             times * (price(spec, grad, a, b) + (is_gather(a, b, mesh) and parts(spec, grad, a, b)[0])))
            for a, b, from_copy in more
        )  # fmt: skip
        consumers = tuple(
            (item, tuple((copies if k < len(flags) and flags[k] else number)[s] for k, s in enumerate(states)))
            for item, states, flags in readers
        )
        return Tensor(
            self.graph.nodes[group.ref.node].name, producer, tuple(number[s] for s in made_as), consumers, steps
        )

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
            State(whole_placement(grad) if p.is_pending or (grad and p.is_whole) else p for p in s)
            for s in made_as if not s.has_units
        }  # fmt: skip
        return sorted({whole, *fixed})

    # -- tensors of earlier stages

    def _arrivals(self, node: Node) -> list[State]:
        """States in which a tensor of an earlier stage may arrive: whole, or sharded on one of its first dims.

        An input of the model that wants a gradient is whole, and so is its gradient: both are the caller's.
        """
        whole = whole_placement(node.needs_grad)
        if node.target not in self.graph.arriving:
            return [self.input_states.get(node.target, whole_state(self.pricer.mesh, node.needs_grad))]
        shards = [shard(d) for d in range(min(3, len(node.out.shape)))]
        mesh = self.pricer.mesh
        options = [[whole] if size == 1 else [whole, *shards] for size in mesh.sizes]
        return [s for s in map(State, product(*options)) if fits(node.out.shape, s, mesh)]

    def _arrival_seconds(self, node: Node, state: State) -> float:
        """A whole tensor of an earlier stage is sent in pieces and gathered on this side."""
        if node.target not in self.graph.arriving:
            return 0.0
        n_bytes = self.pricer.local_bytes(node.out, state)
        axes = [name for p, (name, size) in zip(state, self.pricer.mesh, strict=True) if not p.is_shard and size > 1]
        return self.microbatches * sum(self.pricer.axes[a].seconds("all_gather", n_bytes) for a in axes)

    # -- parameters

    def _param_options(self, node: Node, uses: set[State], count: int) -> list[tuple[ParamChoice, float, float, float]]:
        """``(choice, seconds, bytes, peak bytes)``; seconds and bytes are those of all parameters of the class."""
        mesh = self.pricer.mesh
        whole = whole_state(mesh, node.needs_grad)
        spec = node.out
        options: list[tuple[ParamChoice, float, float, float]] = []
        by_use: dict[State, list[tuple[ParamChoice, float, float, float]]] = {}
        every = self.allowed_params is not None
        for choice in P.choices(spec, node.needs_grad, uses or {whole}, mesh, all_dims=every):
            if self.allowed_params is not None and not self.allowed_params(node, choice):
                continue
            cost = P.cost(
                spec, node.needs_grad, choice, self.pricer, self.optimizer, self.microbatches, self.graph.precision
            )  # fmt: skip
            row = (choice, cost.seconds * count, cost.n_bytes * count, cost.peak_bytes)
            by_use.setdefault(choice.used, []).append(row)
        for of_use in by_use.values():
            # peaks of several parameters do not add up, so a choice with one is compared by the bytes it adds at least
            options.extend(of_use[k] for k in P.cheapest([(o[1], o[2]) for o in of_use], self.keep_memory))
        return options

    # -- what is recomputed

    @cached_property
    def _segment_of(self) -> dict[int, int]:
        """Segment numbers of the operators that run again."""
        return segment_numbers(self.graph, self.recompute)

    @cached_property
    def _recomputed(self) -> Counter[int]:
        """How many nodes that a representative stands for run again."""
        return Counter(self.fold.representative[i] for i in self._segment_of)

    @cached_property
    def _memory(self) -> Ledger:
        """The ledger of whole tensors."""
        decided = memory(recompute=self.recompute)
        return ledger(self.graph, self.rules, self.pricer.mesh, None, {}, decided, every=self.choose_again)

    @cached_property
    def _may_again(self) -> Again:
        return again(self.graph, self.fold, self._memory.entries, self.blocks)

    def _offer_again(self, chain: Chain, counts: Mapping[int, int]) -> None:
        """Add rows in which operators of a chain run again: all that may from one of them on.

        What is made again is there for the backward of one block at a time: this is counted for the blocks of which
        there are most and for the largest one, and seen of others in the price of the finished plan alone.
        """
        graph, able = self.graph, self._may_again.able
        places = [k for k, node in enumerate(chain.nodes) if node in able]
        if not places:
            return
        once = counts[chain.nodes[0]] == self._most_repeated or chain.nodes[0] in self._in_largest_block
        plain = list(zip(chain.rows, chain.seconds, chain.n_bytes, strict=True))
        chain.again = [frozenset()] * len(plain)
        spent: dict[tuple[int, int], tuple[float, float]] = {}  # seconds and bytes of a place, by its strategy
        for first in places:
            usable = [k for k in places if k >= first]
            for row, seconds, n_bytes in plain:
                more = lives = 0.0
                for k in usable:
                    if (k, id(row[k])) not in spent:
                        node, rule = graph.nodes[chain.nodes[k]], self.rules[chain.nodes[k]]
                        assert rule is not None
                        seconds_again = sum(self.pricer.forward(graph, node, rule, row[k]))
                        share = share_of(graph, self.pricer, chain.nodes[k], OUT, row[k])
                        spent[k, id(row[k])] = seconds_again, once * self._made.get(chain.nodes[k], 0) * share
                    more += spent[k, id(row[k])][0]
                    lives += spent[k, id(row[k])][1]
                chain.rows.append(row)
                chain.seconds.append(seconds + counts[chain.nodes[0]] * self.microbatches * more)
                chain.n_bytes.append(n_bytes + lives)
                chain.again.append(frozenset(chain.nodes[k] for k in usable))

    def _offer_waiting(self, chain: Chain, counts: Mapping[int, int]) -> None:
        """Add rows in which results of a chain are given up by decisions about tensors: for each of them all results
        that may be, from one on. No more than what comes back for one operator is there at once, which is counted
        moment by moment."""
        graph, pricer = self.graph, self.pricer
        plain = [r for r in range(len(chain.rows)) if not (chain.again and chain.again[r])]
        before = len(chain.rows)
        waits: list[dict[int, str]] = []
        for record in about_tensors():
            places = [k for k, node in enumerate(chain.nodes) if node in self._may_wait[record.name]]
            for first in places:
                usable = [k for k in places if k >= first]
                for r in plain:
                    more = sum(
                        record.price(pricer.costs, pricer.device, pricer.local_bytes(graph.nodes[chain.nodes[k]].out,
                                                                                     chain.rows[r][k].outs[0]))
                        for k in usable
                    )  # fmt: skip
                    chain.rows.append(chain.rows[r])
                    chain.seconds.append(chain.seconds[r] + counts[chain.nodes[0]] * self.microbatches * more)
                    chain.n_bytes.append(chain.n_bytes[r])
                    waits.append({chain.nodes[k]: record.name for k in usable})
        if waits:
            chain.waits = [{} for _ in range(before)] + waits
            chain.again += [frozenset()] * len(waits) if chain.again else []

    @cached_property
    def _may_wait(self) -> dict[str, set[int]]:
        """By decision about tensors, the operators, by representative, for whose results it may be made, which somebody
        keeps."""
        graph, rep = self.graph, self.fold.representative
        keeps = {
            rep[entry.since] for entry in self._memory.entries
            if entry.decision == KEEP.name and entry.keepers and entry.keepers[0].what != "inside"
        }  # fmt: skip
        may: dict[str, set[int]] = {}
        for record in about_tensors():
            cannot = {
                rep[i] for i, _ in graph.of_kind("op") if rep[i] in keeps
                and not (may_wait(graph, Ref(i), self._segment_of) and record.may(graph, Ref(i)))
            }  # fmt: skip
            may[record.name] = keeps - cannot
        return may

    def _offer_gathers(self, chain: Chain, chains: Sequence[Chain], chain_of: Mapping[int, int]) -> None:
        """Add rows in which copies that operators of a chain keep are gathered again: all that can be of a row.

        The price of the second gather is in the flow of the tensor. Rows in which something runs again have none: the
        gathers on the way to it belong to its segment.
        """
        graph, mesh = self.graph, self.pricer.mesh
        reads: dict[tuple[int, int], tuple[int, list[State]]] = {}  # by node and position: place in the chain, made as
        for k, i in enumerate(chain.nodes):
            for position, ref in enumerate(graph.nodes[i].refs):
                if (i, position) not in self._gatherable or chain_of.get(ref.node) == chain_of[i]:
                    continue
                maker = self.fold.representative[ref.node]
                if maker in chain_of:
                    makers = chains[chain_of[maker]]
                    place, out = makers.nodes.index(maker), _position(graph.nodes[maker], ref.out)
                    reads[i, position] = k, [row[place].outs[out] for row in makers.rows]
                elif graph.nodes[ref.node].kind == "input":
                    reads[i, position] = k, self._arrivals(graph.nodes[ref.node])
        cut = {
            key: [any(state[a].is_shard for state in made) for a in range(len(mesh))]
            for key, (_, made) in reads.items()
        }
        found = []
        for r, row in enumerate(chain.rows):
            shares = {}
            for key, (k, _) in reads.items():
                state = row[k].ins[key[1]]
                share = 1.0
                for a, (_, size) in enumerate(mesh):
                    share /= size if cut[key][a] and state[a].is_whole else 1
                if share < 1.0:
                    shares[key] = share
            if shares and not (chain.again and chain.again[r]):
                found.append((r, shares))
        if not found:
            return
        chain.gathers = [{} for _ in chain.rows] + [shares for _, shares in found]
        for r, _ in found:
            chain.rows.append(chain.rows[r])
            chain.seconds.append(chain.seconds[r])
            chain.n_bytes.append(chain.n_bytes[r])
            if chain.again:
                chain.again.append(frozenset())
            if chain.waits:
                chain.waits.append(chain.waits[r])

    @cached_property
    def _gatherable(self) -> set[tuple[int, int]]:
        """Inputs that operators keep and that may be gathered again, by representative and position."""
        graph, rep = self.graph, self.fold.representative
        return {
            (rep[keeper.node], keeper.number)
            for entry in self._memory.entries if entry.decision == KEEP.name and entry.segment is None
            for keeper in entry.keepers if keeper.what == "in"
            and can_gather_again(graph, graph.nodes[keeper.node].refs[keeper.number], self._segment_of)
        }  # fmt: skip

    @cached_property
    def _most_repeated(self) -> int:
        """How many blocks there are of the commonest; more than any where none repeat."""
        return max((repeats for _, _, repeats in self.fold.blocks), default=2)

    @cached_property
    def _in_largest_block(self) -> set[int]:
        """Representatives of the operators of the block that makes most."""
        block_of = self._may_again.block_of
        size: Counter[int] = Counter()
        for i, n_bytes in self._made.items():
            if i in block_of:
                size[block_of[i]] += n_bytes
        largest = max(size, key=lambda block: size[block], default=-1)
        return {self.fold.representative[i] for i, block in block_of.items() if block == largest}

    @cached_property
    def _made(self) -> Counter[int]:
        """Bytes of whole tensors that an operator makes and someone keeps."""
        made: Counter[int] = Counter()
        for entry in self._memory.entries:
            if entry.keepers and entry.decision == KEEP.name:
                made[entry.since] += entry.n_bytes
        return made

    # -- chains

    def _chains(
        self, groups: dict[int, list[_Group]], counts: Mapping[int, int]
    ) -> tuple[list[Chain], dict[int, int]]:
        graph, rep = self.graph, self.fold.representative
        chains: list[Chain] = []
        chain_of: dict[int, int] = {}
        cache: dict[tuple[int, bool, tuple[bool, ...]], list[Strategy]] = {}
        for i, node in enumerate(graph.nodes):
            if node.kind != "op" or not node.hot or rep[i] != i:
                continue
            rule = self.rules[i]
            assert rule is not None
            key = (id(rule), node.needs_grad, tuple(graph.nodes[r.node].needs_grad for r in node.refs))
            if key not in cache:
                cache[key] = strategies(graph, node, rule, self.pricer.mesh)
            usable = cache[key]
            if self.allowed is not None:
                usable = [s for s in usable if self.allowed(node, s)]
            if rule.kind in ("pointwise", "reduce") and i in self._from_inputs:
                usable = [s for s in usable if is_plain(s, rule)] or usable
            if self.cut_contractions and rule.kind in ("matmul", "conv", "attention"):
                usable = most_cut(usable, rule)
            times = counts[i] * self.microbatches
            seconds = [times * sum(self.pricer.op(graph, node, rule, s)) for s in usable]
            again = self._recomputed[i] * self.microbatches
            if again:
                more = [again * sum(self.pricer.forward(graph, node, rule, s)) for s in usable]
                seconds = [a + b for a, b in zip(seconds, more, strict=True)]
            n_bytes = [0.0] * len(usable)
            leader = self._leader(i, node, rule, groups, counts, chain_of)
            if leader is not None:
                chain = chains[chain_of[leader[0]]]
                if chain.nodes[-1] == leader[0] and chain.follow(i, leader[1], usable, seconds, n_bytes):
                    chain_of[i] = chain_of[leader[0]]
                    continue
            chain_of[i] = len(chains)
            chains.append(Chain([i], [(s,) for s in usable], seconds, n_bytes))
        return chains, chain_of

    @cached_property
    def _from_inputs(self) -> set[int]:
        """Nodes whose value depends on an input of the model: activations, as opposed to functions of parameters."""
        activations: set[int] = set()
        for i, node in enumerate(self.graph.nodes):
            if node.kind == "input" or not activations.isdisjoint([r.node for r in node.refs]):
                activations.add(i)
        return activations

    def _leader(
        self, i: int, node: Node, rule: Rule, groups: dict[int, list[_Group]], counts: Mapping[int, int],
        chain_of: Mapping[int, int],
    ) -> tuple[int, int] | None:  # fmt: skip
        """``(producer, position)`` of the one tensor that node ``i`` alone reads and may follow."""
        if rule.kind not in FOLLOWERS or len(node.outs) != 1:
            return None
        for position, ref in enumerate(node.refs):
            u = ref.node
            of_u = groups.get(u, ())
            if (
                u in chain_of and node.out.n_bytes <= self.graph.spec(ref).n_bytes
                and len(of_u) == 1 and of_u[0].readers == ((i, position),) and not of_u[0].outputs
                and not of_u[0].updates and of_u[0].count == counts[i] and len(self.graph.nodes[u].outs) == 1
            ):  # fmt: skip
                return u, position
        return None


def _gathered_twice(
    wanted: Collection[State], edges: Sequence[tuple[State, State]], mesh: Mesh, first: int
) -> tuple[dict[State, int], list[tuple[State, State, bool]]]:
    """``(numbers, steps)``: copies that are gathered again in the backward, counted from ``first``, and the steps to
    them, with whether they start from such a copy too."""
    into: dict[State, list[State]] = {}
    for a, b in edges if wanted else ():
        if is_gather(a, b, mesh) or is_same(a, b):
            into.setdefault(b, []).append(a)
    numbers = {state: first + k for k, state in enumerate(sorted(wanted))}
    steps: list[tuple[State, State, bool]] = []
    waiting = list(numbers)
    for b in waiting:
        for a in into.get(b, ()):
            if is_gather(a, b, mesh):
                steps.append((a, b, False))
            if any(is_gather(c, a, mesh) for c in into.get(a, ())):  # a is gathered itself
                if a not in numbers:
                    numbers[a] = first + len(numbers)
                    waiting.append(a)
                steps.append((a, b, True))
    return numbers, steps


def _is_free(src: State, dst: State) -> bool:
    """Whether a step makes no collective, forward or backward."""
    axis = Step.between(src, dst).axis
    return step_collectives(src[axis], dst[axis]) == (None, None)


def _position(node: Node, out: int) -> int:
    """Position of output ``out`` among the outputs that are tensors."""
    return sum(o is not None for o in node.outs[:out])
