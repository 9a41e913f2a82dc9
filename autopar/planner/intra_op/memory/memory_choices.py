"""Decisions about memory as more strategies of operators: recompute, give a result up, regather a copy.

Each is offered in addition to keeping, with its seconds; :mod:`.kept` and :mod:`.moment_rows` count the bytes that it
leaves. :mod:`autopar.plans.memory_decisions` lists the decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.planner.intra_op.building.chains import Chain, position_of
from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.memory.kept import OUT, share_of
from autopar.planner.intra_op.memory.ledger import Ledger
from autopar.planner.intra_op.memory.recomputable import Recomputable, recomputable_of
from autopar.plans.memory_decisions import DECISIONS, KEEP, MemoryDecision, about_tensors
from autopar.plans.regather import can_regather, may_wait
from autopar.rules.notation import Rule
from autopar.words.graph import Graph, Node, Ref
from autopar.words.placements import State


@dataclass
class MemoryOffers:
    """Strategies that recompute, regather or give up, to be added to the chains of one problem.

    Attributes:
        segment_of: numbers of the segments that were asked to be recomputed, by operator: nothing is offered there.
        whole: the ledger of global tensors.
        blocks: names of the operators with which blocks begin, if they are known.
        arrivals: the states in which an input may arrive.
        offloads: results may be moved to the memory of the host.
        asked: representatives of the operators whose results the user asked to be moved.
    """

    graph: Graph
    rules: Sequence[Rule | None]
    fold: Fold
    pricer: Pricer
    microbatches: int
    segment_of: Mapping[int, int]
    whole: Ledger
    blocks: Sequence[str]
    arrivals: Callable[[Node], list[State]]
    offloads: bool = False
    asked: frozenset[int] = frozenset()

    @cached_property
    def recomputable(self) -> Recomputable:
        """The operators that may be recomputed."""
        found = recomputable_of(self.graph, self.fold, self.whole.entries, self.blocks)
        return replace(found, able=found.able - self.asked)

    def recompute(self, chain: Chain, counts: Mapping[int, int]) -> None:
        """Add rows in which operators of a chain are recomputed: all that may be from one of them on.

        Recomputed memory is there for the backward of one block at a time: it is counted for the most frequent and the
        largest block, and for others in the price of the finished plan alone.
        """
        graph, able = self.graph, self.recomputable.able
        places = [k for k, node in enumerate(chain.nodes) if node in able]
        if not places:
            return
        once = counts[chain.nodes[0]] == self._most_repeated or chain.nodes[0] in self._in_largest_block
        plain = list(zip(chain.rows, chain.seconds, chain.n_bytes, strict=True))
        chain.recomputed = [frozenset()] * len(plain)
        spent: dict[tuple[int, int], tuple[float, float]] = {}  # seconds and bytes of a place, by its strategy
        for first in places:
            usable = [k for k in places if k >= first]
            for row, seconds, n_bytes in plain:
                more = lives = 0.0
                for k in usable:
                    if (k, id(row[k])) not in spent:
                        node, rule = graph.nodes[chain.nodes[k]], self.rules[chain.nodes[k]]
                        assert rule is not None
                        recompute_seconds = sum(self.pricer.forward(graph, node, rule, row[k]))
                        share = share_of(graph, self.pricer, chain.nodes[k], OUT, row[k])
                        spent[k, id(row[k])] = recompute_seconds, once * self._made.get(chain.nodes[k], 0) * share
                    more += spent[k, id(row[k])][0]
                    lives += spent[k, id(row[k])][1]
                chain.rows.append(row)
                chain.seconds.append(seconds + counts[chain.nodes[0]] * self.microbatches * more)
                chain.n_bytes.append(n_bytes + lives)
                chain.recomputed.append(frozenset(chain.nodes[k] for k in usable))

    def give_up(self, chain: Chain, counts: Mapping[int, int]) -> None:
        """Add choices in which a chain's results, from some operator on, are given up by a decision about tensors.

        At most one operator's results are back at once; moments count them.
        """
        plain = [r for r in range(len(chain.rows)) if not (chain.recomputed and chain.recomputed[r])]
        before = len(chain.rows)
        waits: list[dict[int, str]] = []
        copied: list[tuple[float, float]] = []
        for record in self._offered:
            places = [k for k, node in enumerate(chain.nodes) if node in self._may_give_up[record.name]]
            for first in places:
                usable = [k for k in places if k >= first]
                for r in plain:
                    out, back, waited = self._seconds_away(record, chain, r, usable, counts)
                    chain.rows.append(chain.rows[r])
                    chain.seconds.append(chain.seconds[r] + out + back + waited)
                    chain.n_bytes.append(chain.n_bytes[r])
                    waits.append({chain.nodes[k]: record.name for k in usable})
                    copied.append((out, back))
        if waits:
            chain.given_up = [{} for _ in range(before)] + waits
            chain.copied = [(0.0, 0.0)] * before + copied if any(map(any, copied)) else []
            chain.recomputed += [frozenset()] * len(waits) if chain.recomputed else []

    def move_asked(self, chain: Chain, counts: Mapping[int, int], name: str) -> None:
        """Let every row of a chain give up the results that the user asked to be moved (:attr:`asked`)."""
        record, may = DECISIONS[name], self._may_give_up[name]
        usable = [k for k, node in enumerate(chain.nodes) if node in may and node in self.asked]
        if not usable:
            return
        for r in range(len(chain.rows)):
            out, back, waited = self._seconds_away(record, chain, r, usable, counts)
            chain.seconds[r] += out + back + waited
            chain.copied.append((out, back))
            chain.given_up.append({chain.nodes[k]: name for k in usable})

    def _seconds_away(
        self, record: MemoryDecision, chain: Chain, r: int, usable: Sequence[int], counts: Mapping[int, int]
    ) -> tuple[float, float, float]:
        """Return the seconds of a step of copies out and in beside compute, and of what is waited for in any case."""
        pricer, out, back, waited = self.pricer, 0.0, 0.0, 0.0
        for k in usable:
            n_bytes = pricer.local_bytes(self.graph.nodes[chain.nodes[k]].out, chain.rows[r][k].outs[0])
            if record.copies is not None:
                assert pricer.host is not None
                there, here = record.copies(pricer.host, n_bytes)
                out, back = out + there, back + here
            else:
                waited += record.price(pricer.costs, pricer.device, n_bytes)
        times = counts[chain.nodes[0]] * self.microbatches
        return times * out, times * back, times * waited

    @property
    def _offered(self) -> list[MemoryDecision]:
        """The decisions about tensors that may be made: those with copies to the host only where that is allowed."""
        return [record for record in about_tensors() if record.copies is None or self.offloads]

    @cached_property
    def _may_give_up(self) -> dict[str, set[int]]:
        """By decision about tensors, the representatives of operators whose kept results it may be made for.

        A finished plan leaves out those of the operators that segments recompute, which only some of the blocks may do.
        """
        graph, rep = self.graph, self.fold.representative
        keeps = {
            rep[entry.since] for entry in self.whole.entries
            if entry.decision == KEEP.name and entry.keepers and entry.keepers[0].what != "inside"
        }  # fmt: skip
        may: dict[str, set[int]] = {}
        for record in about_tensors():
            kept = [Ref(i) for i, _ in graph.of_kind("op") if rep[i] in keeps]
            cannot = {rep[ref.node] for ref in kept if not (may_wait(graph, ref, {}) and record.may(graph, ref))}
            some = {rep[ref.node] for ref in kept if may_wait(graph, ref, self.segment_of)}
            may[record.name] = some - cannot
        return may

    def regather(self, chain: Chain, chains: Sequence[Chain], chain_of: Mapping[int, int]) -> None:
        """Add rows in which copies that operators of a chain keep are regathered: all that can be of a row.

        The price of the second gather is in the flow of the tensor. Rows in which an operator is recomputed have none:
        the gathers before it belong to its segment.
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
                    place, out = makers.nodes.index(maker), position_of(graph.nodes[maker], ref.out)
                    reads[i, position] = k, [row[place].outs[out] for row in makers.rows]
                elif graph.nodes[ref.node].kind == "input":
                    reads[i, position] = k, self.arrivals(graph.nodes[ref.node])
        cut = {
            key: [any(state[a].is_shard for state in states) for a in range(len(mesh))]
            for key, (_, states) in reads.items()
        }
        gathering = []
        for r, row in enumerate(chain.rows):
            shares = {}
            for key, (k, _) in reads.items():
                state = row[k].ins[key[1]]
                share = 1.0
                for a, (_, size) in enumerate(mesh):
                    share /= size if cut[key][a] and state[a].is_replicated else 1
                if share < 1.0:
                    shares[key] = share
            if shares and not (chain.recomputed and chain.recomputed[r]):
                gathering.append((r, shares))
        if not gathering:
            return
        chain.regathered = [{} for _ in chain.rows] + [shares for _, shares in gathering]
        for r, _ in gathering:
            chain.repeat(r)

    @cached_property
    def _gatherable(self) -> set[tuple[int, int]]:
        """Kept inputs that may be regathered, by representative of the operator and position."""
        graph, rep = self.graph, self.fold.representative
        return {
            (rep[keeper.node], keeper.number)
            for entry in self.whole.entries if entry.decision == KEEP.name and entry.segment is None
            for keeper in entry.keepers if keeper.what == "in"
            and can_regather(graph, graph.nodes[keeper.node].refs[keeper.number], self.segment_of)
        }  # fmt: skip

    @cached_property
    def _most_repeated(self) -> int:
        """Number of the most frequent blocks; more than any where none repeat."""
        return max((repeats for _, _, repeats in self.fold.blocks), default=2)

    @cached_property
    def _in_largest_block(self) -> set[int]:
        """Representatives of the operators of the block that makes most."""
        block_of = self.recomputable.block_of
        size: Counter[int] = Counter()
        for i, n_bytes in self._made.items():
            if i in block_of:
                size[block_of[i]] += n_bytes
        largest = max(size, key=lambda block: size[block], default=-1)
        return {self.fold.representative[i] for i, block in block_of.items() if block == largest}

    @cached_property
    def _made(self) -> Counter[int]:
        """Bytes of global tensors that an operator makes and someone keeps."""
        bytes_made: Counter[int] = Counter()
        for entry in self.whole.entries:
            if entry.keepers and entry.decision == KEEP.name:
                bytes_made[entry.since] += entry.n_bytes
        return bytes_made
