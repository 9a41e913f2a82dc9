"""The ledger of memory: what one rank holds from a forward to its backward, since when, until when, and why.

A piece of memory is one :class:`Entry`, however many operators keep it, or views of it. What makes the ledger of a
graph is :func:`.walked_ledger.ledger`.

The integer program asks for the ledger of the global tensors and scales its entries to the layouts of every strategy; a
finished plan's price, its recomputed segments and the reports take it with the decided strategies. Parameters, buffers
and the batch are there anyway and are no entries; tensors that arrive from earlier stages are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.planner.intra_op.building.hidden_seconds import hidden
from autopar.planner.intra_op.building.price import Pricer
from autopar.planner.intra_op.memory.recompute import Segment
from autopar.plans.memory_decisions import DECISIONS, KEEP, RECOMPUTE, TENSORS, Memory  # fmt: skip
from autopar.plans.plan import segment_numbers
from autopar.rules.lowering_helpers.overlapped_steps import ReshardPaths
from autopar.rules.notation import Rule
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph, Ref
from autopar.words.placements import State
from cost_models.host_link import UNUSED, HostLinkUse, Moved, link_use

GIVEN = "given"
"""The decision of an entry that is the batch or a buffer, which are there anyway."""


class Keeper(NamedTuple):
    """Who keeps: operator ``node`` an input (``number`` is its position), an output, or memory ``inside`` it."""

    node: int
    what: str
    number: int = 0


@dataclass(frozen=True)
class Entry:
    """One piece of memory that outlives the forward.

    Attributes:
        n_bytes: bytes on one rank, of one microbatch.
        since: number of the node that makes it.
        keepers: all that keep it; nobody, of memory that is only asked for with all the rest.
        readers: operators and positions that read it, kept or not, and the graph's end; only if that is asked for.
        segment: number of the recomputed segment in whose second run it lives; None from forward to backward.
        decision: ``keep`` (as it is), ``recompute`` (lives from the second run on, in a segment or for its readers
            outside), ``gather again`` (a copy that is freed after the forward: the piece that it is gathered from is an
            entry of its own), ``given`` (the batch or a buffer, which is there anyway), or one about tensors
            (:mod:`autopar.plans.memory_decisions`: there until its last reader, and from the backward of that on).
    """

    n_bytes: int
    since: int
    keepers: tuple[Keeper, ...]
    segment: int | None = None
    decision: str = KEEP.name
    readers: tuple[tuple[int, int], ...] = ()


class Away(NamedTuple):
    """Memory that is given up by a decision with copies beside compute, in the order in which it leaves.

    Attributes:
        decision: its name.
        n_bytes: bytes on one rank, of one microbatch.
        last: number of the operator at, or before, its last reader in the forward.
        asked: number of the operator whose backward is the first that asks for it.
    """

    decision: str
    n_bytes: int
    last: int
    asked: int


@dataclass(frozen=True)
class Ledger:
    """All entries of one microbatch, and its recomputed segments.

    Attributes:
        steps_again: the reshard steps that gather copies a second time: those that an operator's backward asks for.
        memory: the decisions as a plan has them, without results of segments that nobody keeps.
        lives: for each segment, the operators between which the backward has its entries: the one whose backward first
            asks for them, and the segment's first.
        away: what leaves the device and comes back, beside compute.
    """

    entries: tuple[Entry, ...]
    segments: tuple[Segment, ...]
    steps_again: tuple[tuple[Ref, State, State], ...] = ()
    memory: Memory = field(default_factory=dict)
    lives: tuple[tuple[int, int], ...] = ()
    away: tuple[Away, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """Bytes that every microbatch in flight adds."""
        return sum(e.n_bytes for e in self.entries if e.decision == KEEP.name)

    def segment_bytes(self) -> dict[int, int]:
        """Return the bytes that each segment keeps while it is recomputed, besides its inputs."""
        by_segment: dict[int, int] = {}
        for e in self.entries:
            if e.segment is not None:
                by_segment[e.segment] = by_segment.get(e.segment, 0) + e.n_bytes
        return by_segment

    @property
    def again_bytes(self) -> int:
        """The most bytes that recomputed segments, and those whose results they read, keep at once."""
        bytes_of = self.segment_bytes()
        return max(
            (sum(n for s, n in bytes_of.items() if self.lives[s][0] >= begin >= self.lives[s][1])
             for begin in {self.lives[s][0] for s in bytes_of}), default=0,
        )  # fmt: skip


def recompute_seconds(
    graph: Graph, rules: Sequence[Rule | None], pricer: Pricer, chosen: Mapping[int, Strategy],
    reshard_paths: ReshardPaths, holds: Ledger,
) -> tuple[float, float]:  # fmt: skip
    """Return the compute and collective seconds a microbatch of recomputed segments and regathered copies."""
    compute = moved = 0.0
    memo: dict[object, tuple[float, float]] = {}
    segment_of = segment_numbers(graph, holds.memory.get(RECOMPUTE.name, ()))
    others = hidden(graph, rules, pricer, chosen, reshard_paths, segment_of) if segment_of else {}
    for segment in holds.segments:
        if not segment.active:
            continue
        moved -= sum(others[i].forward for i in segment.ops if i in others)
        for i in segment.ops:
            rule = rules[i]
            assert rule is not None
            key = id(rule), chosen[i].names, pricer.of_kernel(graph, graph.nodes[i])
            if key not in memo:
                memo[key] = pricer.forward(graph, graph.nodes[i], rule, chosen[i])
            compute += memo[key][0]
            moved += memo[key][1]
        for ref, src, dst in segment.steps:
            moved += pricer.step_parts(graph.spec(ref), False, src, dst)[0]
    for ref, src, dst in holds.steps_again:
        moved += pricer.step_parts(graph.spec(ref), False, src, dst)[0]
    return compute, moved + sum(waiting_seconds(graph, rules, pricer, chosen, holds).values())


def waiting_seconds(
    graph: Graph, rules: Sequence[Rule | None], pricer: Pricer, chosen: Mapping[int, Strategy], holds: Ledger
) -> dict[str, float]:
    """Return by decision the seconds that a microbatch waits for what leaves and comes back."""
    seconds: dict[str, float] = {}
    for entry in holds.entries:
        record = DECISIONS.get(entry.decision)
        if record is not None and record.of == TENSORS:
            more = record.price(pricer.costs, pricer.device, entry.n_bytes)
            seconds[record.name] = seconds.get(record.name, 0.0) + more
    if holds.away:
        seconds[holds.away[0].decision] = sum(use_of_link(graph, rules, pricer, chosen, holds).waits)
    return seconds


def use_of_link(
    graph: Graph, rules: Sequence[Rule | None], pricer: Pricer, chosen: Mapping[int, Strategy], holds: Ledger
) -> HostLinkUse:
    """Return what the copies beside compute of a microbatch do on the link to the host, and how long it waits for them.

    They have what operators compute to hide behind, those of segments that are recomputed once more in the backward;
    not collectives, which may need the same links.
    """
    if not holds.away:
        return UNUSED
    record = DECISIONS[holds.away[0].decision]
    assert record.copies is not None and pricer.host is not None
    place: dict[int, int] = {}
    forward: list[float] = []
    backward: list[float] = []
    again = {i for segment in holds.segments if segment.active for i in segment.ops}
    memo: dict[object, tuple[float, float]] = {}
    for i, node in graph.of_kind("op"):
        rule = rules[i]
        assert rule is not None
        wanted = tuple([graph.nodes[ref.node].needs_grad for ref in node.refs])
        key = id(rule), chosen[i].names, node.needs_grad, wanted, pricer.of_kernel(graph, node)
        if key not in memo:
            spent = pricer.compute(graph, node, rule, chosen[i])
            memo[key] = spent.forward, spent.total - spent.forward
        place[i] = len(forward)
        forward.append(memo[key][0])
        backward.append(memo[key][1] + (memo[key][0] if i in again else 0.0))
    moved = [
        Moved(*record.copies(pricer.host, away.n_bytes), place[away.last], place[away.asked]) for away in holds.away
    ]
    return link_use(pricer.host, moved, forward, backward, record.ahead)
