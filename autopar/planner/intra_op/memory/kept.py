"""Bytes that autograd keeps of a microbatch, by strategies of the integer program.

The ledger of the global tensors (:mod:`.ledger`) says which pieces of memory are kept, and by whom. An entry takes the
share of its bytes that a strategy leaves of the tensor by which an operator keeps it. Memory that several operators
keep, or that an operator may recompute, is a variable of the program (:class:`.integer_program.SharedBytes`); the rest
is added to the strategies of the one operator that keeps it.

What a segment takes from outside counts in the layout in which it is made there; of what it keeps while recomputed
the segment that keeps most counts (by global tensors). Copies in other layouts than the first, and another segment that
turns out to be the larger one, are not seen here but in the price of the finished plan. A recomputable operator
needs what it reads only if it does, or if it keeps it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.building.integer_program import Item, SharedBytes
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.memory.ledger import GIVEN, Entry, Keeper, Ledger
from autopar.planner.intra_op.memory.recomputable import Recomputable
from autopar.rules.notation import Rule
from autopar.rules.saved_tensors import saved_of
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph

OUT = -1
"""Position that stands for an operator's own output among the tensors that it keeps."""

Times = Callable[[Entry], float]
"""How often an entry is counted: once for every microbatch whose memory is there."""


def share_of(graph: Graph, pricer: Pricer, i: int, position: int, strategy: Strategy) -> float:
    """Return the share of a tensor on one rank: of what operator ``i`` reads at a position, or makes (:data:`OUT`)."""
    node = graph.nodes[i]
    if position == OUT and not node.out.shape and node.refs:
        position = 0  # of a sum of everything: what it keeps is cut as its input is
    spec = node.out if position == OUT else graph.spec(node.refs[position])
    state = strategy.outs[0] if position == OUT else strategy.ins[position]
    return pricer.local_bytes(spec, state) / max(1, spec.n_bytes)


@dataclass(frozen=True)
class StrategyRows:
    """The strategies of the program's items, by operator.

    Attributes:
        item_of: item numbers of operators, parameters and inputs.
        row_of: for an operator, the rows of its item and its place within each.
        recomputed_of: by item, for each row the operators that are recomputed.
        regathered_of: by item, for each row the inputs that are regathered, with the part that is kept of them.
        given_up_of: by item, for each row the operators whose results are given up, with the decision about them.
    """

    graph: Graph
    pricer: Pricer
    item_of: Mapping[int, int]
    row_of: Mapping[int, tuple[list[tuple[Strategy, ...]], int]]
    recomputed_of: Mapping[int, Sequence[frozenset[int]]]
    regathered_of: Mapping[int, Sequence[Mapping[tuple[int, int], float]]]
    given_up_of: Mapping[int, Sequence[Mapping[int, str]]]

    def shares(self, i: int, position: int) -> list[float]:
        """Return the share of a tensor on one rank, by row."""
        rows, k = self.row_of[i]
        return [share_of(self.graph, self.pricer, i, position, row[k]) for row in rows]

    def given_up(self, i: int) -> list[bool]:
        """Return by row whether an operator's result is given up by a decision about tensors; empty if it never is."""
        return [i in nodes for nodes in self.given_up_of.get(self.item_of[i], ())]

    def is_recomputed(self, i: int) -> Sequence[bool]:
        """Return by row whether an operator is recomputed; empty if it never is."""
        return [i in nodes for nodes in self.recomputed_of.get(self.item_of[i], ())]


@dataclass(frozen=True)
class _Term:
    """Bytes that count if any of the users picks one of its rows: a variable of the program, or of one item."""

    n_bytes: float
    users: tuple[tuple[int, tuple[int, ...]], ...]
    recomputed: tuple[int, tuple[int, ...]] | None
    entries: Sequence[Entry]

    @property
    def is_shared(self) -> bool:
        return len(self.users) > 1 or (self.recomputed is not None and self.users[0][0] != self.recomputed[0])


class KeptBytes:
    """Bytes that are kept, by strategy.

    Args:
        whole: the ledger of global tensors.
        segment_of: numbers of the segments that were asked to be recomputed, by operator.
        in_flight: microbatches whose activations are kept at once.
        recomputable: the operators that may be recomputed, if that is to be chosen.
    """

    def __init__(
        self, rows: StrategyRows, rules: Sequence[Rule | None], fold: Fold, whole: Ledger,
        segment_of: Mapping[int, int], in_flight: int, recomputable: Recomputable | None,
    ) -> None:  # fmt: skip
        self.rows, self.rules, self.fold, self.whole = rows, rules, fold, whole
        self.segment_of, self.in_flight, self.recomputable = segment_of, in_flight, recomputable
        bytes_of = whole.segment_bytes()
        self.largest_segment = max(bytes_of, key=lambda segment: bytes_of[segment], default=None)
        self.inside: dict[int, list[Entry]] = {}  # what operators keep that is neither input nor output
        self.sliced: list[tuple[int, int, Entry]] = []  # what is kept of the batch: operator, position
        self.terms: list[_Term] = []
        self._collect()

    def usual(self, entry: Entry) -> float:
        """Return how often the price of a plan counts an entry."""
        return self.in_flight if entry.segment is None else 1

    def shared(self, times: Times | None = None) -> tuple[SharedBytes, ...]:
        """Return the variables of the program."""
        times = times or self.usual
        return tuple(
            SharedBytes(float(sum(map(times, t.entries)) * t.n_bytes), t.users, recomputed=t.recomputed)
            for t in self.terms if t.is_shared
        )  # fmt: skip

    def added_to(self, items: Sequence[Item], times: Times | None = None) -> list[Item]:
        """Return the items with the bytes that they alone keep."""
        times = times or self.usual
        more = [[0.0] * len(item.n_bytes) for item in items]
        for term in self.terms:
            if not term.is_shared:
                ((item, picks),) = term.users
                count = sum(map(times, term.entries))
                for r in picks:
                    more[item][r] += count * term.n_bytes
        for i, position, entry in self.sliced:  # the batch is there, but slices of it are copies
            whole_bytes = entry.n_bytes * times(replace(entry, segment=None))
            for r, share in enumerate(self.rows.shares(i, position)):
                more[self.rows.item_of[i]][r] += (share < 1) * share * whole_bytes
        for i in self.rows.row_of:
            is_recomputed = self.rows.is_recomputed(i)
            for r, n_bytes in enumerate(self.inside_of(i, times)):
                more[self.rows.item_of[i]][r] += 0.0 if is_recomputed and is_recomputed[r] else n_bytes
        return [
            replace(item, n_bytes=tuple(a + b for a, b in zip(item.n_bytes, added, strict=True)))
            for item, added in zip(items, more, strict=True)
        ]

    def _collect(self) -> None:
        rep, row_of = self.fold.representative, self.rows.row_of
        able = self.recomputable.able if self.recomputable is not None else frozenset()
        gives_up = self.recomputable.gives_up if self.recomputable is not None else frozenset()
        gives_up |= {node for rows in self.rows.given_up_of.values() for nodes in rows for node in nodes}
        classes: dict[tuple[tuple[tuple[int, int, bool], ...], int, int], list[Entry]] = {}
        for entry in self.whole.entries:
            if entry.segment is not None and entry.segment != self.largest_segment:
                continue
            users = {self._user(entry, keeper) for keeper in entry.keepers}
            kept = {(rep[i], position) for i, position in users if rep[i] in row_of}
            if entry.decision == GIVEN:
                self.sliced += [(i, position, entry) for i, position in sorted(kept)]
                continue
            if kept and entry.keepers[0].what == "inside":
                ((node, _),) = kept
                self.inside.setdefault(node, []).append(entry)
                continue
            request = {(rep[i], position) for i, position in entry.readers if i < len(rep) and rep[i] in able} - kept
            decided = tuple(sorted({(*user, True) for user in kept} | {(*user, False) for user in request}))
            if decided:
                maker = rep[entry.since] if rep[entry.since] in gives_up else -1
                classes.setdefault((decided, entry.n_bytes, maker), []).append(entry)
        for (users_of, n_bytes, maker), entries in classes.items():
            self._add_terms(users_of, n_bytes, maker, entries)

    def _add_terms(
        self, users_of: Sequence[tuple[int, int, bool]], n_bytes: int, maker: int, entries: Sequence[Entry]
    ) -> None:
        """Add the terms of memory of one class: one for each number of bytes that a strategy leaves of it.

        ``users_of`` are operator, position, and whether it keeps the memory or only reads it when recomputed; ``maker``
        is the operator that may recompute it or whose result may be given up (-1: none).
        """
        item_of, recomputed_of, regathered_of = self.rows.item_of, self.rows.recomputed_of, self.rows.regathered_of
        made_by = item_of.get(maker, -1)
        remade: dict[int, set[int]] = {}  # bytes -> rows in which the maker makes them again; not copies of them
        given_up_of = self.rows.given_up_of
        shares = self.rows.shares(maker, OUT) if made_by in recomputed_of or made_by in given_up_of else []
        for rows_of_maker in (recomputed_of.get(made_by, ()), given_up_of.get(made_by, ())):
            for r, nodes in enumerate(rows_of_maker):
                if maker in nodes:
                    remade.setdefault(round(n_bytes * shares[r]), set()).add(r)
        layouts: dict[int, dict[int, set[int]]] = {}  # bytes -> item -> rows
        least = self._least_made(entries) if recomputed_of else n_bytes  # asked of what is recomputed alone
        for i, position, keeps in users_of:
            is_recomputed, gathers = recomputed_of.get(item_of[i], ()), regathered_of.get(item_of[i])
            for r, share in enumerate(self.rows.shares(i, position)):
                piece = gathers[r].get((i, position), 1.0) if gathers is not None else 1.0
                n = round(n_bytes * share * piece)
                if is_recomputed and i in is_recomputed[r]:  # a copy that is gathered for it is recomputed with it
                    n = min(n, least)
                if (keeps or i in is_recomputed[r]) and not (item_of[i] == made_by and r in remade.get(n, ())):
                    layouts.setdefault(n, {}).setdefault(item_of[i], set()).add(r)
        for n, users_in in layouts.items():
            pairs = tuple((item, tuple(sorted(rows_of))) for item, rows_of in sorted(users_in.items()))
            recomputed_rows = tuple(sorted(remade.get(n, ())))
            self.terms.append(_Term(n, pairs, (made_by, recomputed_rows) if recomputed_rows else None, entries))

    def _least_made(self, entries: Sequence[Entry]) -> int:
        """Return the fewest bytes that the memory of `entries` may have on a rank; all of it if no item decides."""
        makers = {self.fold.representative[entry.since] for entry in entries} & self.rows.row_of.keys()
        shares = [share for maker in makers for share in self.rows.shares(maker, OUT)]
        return round(entries[0].n_bytes * min(shares)) if shares else entries[0].n_bytes

    def inside_of(self, i: int, times: Times) -> list[float]:
        """Return by row what the operators of a class keep besides inputs and output, from when they are recomputed on.

        A distributed lowering keeps what it likes, so it is asked, once for every set of factors that are cut inside
        it; otherwise a strategy leaves a share of what is kept of the whole.
        """
        graph, rule, node = self.rows.graph, self.rules[i], self.rows.graph.nodes[i]
        assert rule is not None
        inside_of = frozenset(factor for lowering in rule.lowerings for factor in lowering.factors)
        asks = node.needs_grad and not rule.random and bool(inside_of)
        if i not in self.inside and not asks:
            return []
        of_whole = sum(times(entry) * entry.n_bytes for entry in self.inside.get(i, ()))
        asked_times = self._times_of_class(i, times) if asks else 0.0
        rows, k = self.rows.row_of[i]
        request: dict[frozenset[str], float] = {}
        kept = []
        for row, share in zip(rows, self.rows.shares(i, OUT), strict=True):
            strategy = row[k]
            across = inside_of.intersection(
                name for name, (_, size) in zip(strategy.names, self.rows.pricer.mesh, strict=True) if size > 1
            )
            if asks and across and asked_times and share:
                if across not in request:
                    saved = saved_of(graph, i, rule, strategy, self.rows.pricer.mesh, self.rows.pricer.kernels.gpu)
                    request[across] = asked_times * saved.inside_bytes / share
                kept.append(share * request[across])
            else:
                kept.append(share * of_whole)
        return kept

    def _times_of_class(self, i: int, times: Times) -> float:
        """Return :data:`Times` of what operators of a class keep inside, though nothing of the global tensors."""
        return sum(
            times(Entry(0, node, (Keeper(node, "inside"),))) for node in self._of_class[i]
            if node not in self.segment_of
        )  # fmt: skip

    @cached_property
    def _of_class(self) -> Mapping[int, list[int]]:
        nodes: dict[int, list[int]] = {}
        for i, r in enumerate(self.fold.representative):
            nodes.setdefault(r, []).append(i)
        return nodes

    def _user(self, entry: Entry, keeper: Keeper) -> tuple[int, int]:
        """Return the operator and the position (:data:`OUT`: its output) by whose layout an entry is counted."""
        node = self.rows.graph.nodes[keeper.node]
        if keeper.what != "in":
            return keeper.node, OUT
        ref = node.refs[keeper.number]
        of_segment = keeper.node in self.segment_of and entry.segment is None
        if of_segment and self.rows.graph.nodes[ref.node].kind == "op" and ref.out == 0:
            return ref.node, OUT
        return keeper.node, keeper.number
