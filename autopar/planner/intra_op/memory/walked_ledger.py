"""The ledger that follows from a walk: which memory is kept, by whom, by which decision, and when segments live."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autopar.planner.intra_op.memory.fused_chains import SCALE_SHARE, FusedChains
from autopar.planner.intra_op.memory.ledger import GIVEN, Away, Entry, Keeper, Ledger
from autopar.planner.intra_op.memory.memory_walk import Walk
from autopar.plans.memory_decisions import KEEP, RECOMPUTE, RECOMPUTE_RESULT, REGATHER, Memory, in_order
from autopar.plans.plan import reshard_key
from autopar.rules.kernels import CPU, Kernels
from autopar.rules.notation import Rule
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph, Ref
from autopar.words.meshes import Mesh
from autopar.words.placements import State


def ledger_of(walk: Walk) -> Ledger:
    """Walk through all operators and return the ledger that follows."""
    walk.go()
    outputs = {*(out for out in walk.graph.outputs if isinstance(out, Ref)), *walk.graph.updates.values()}
    for (ref, _), (memory, _) in walk.lies.items() if walk.given_up or walk.waiting else ():
        if ref in outputs:  # a view of it outlives the forward
            walk.given_up.pop(memory, None)
            walk.waiting.pop(memory, None)
    if walk.chains is not None:
        of_outputs = [memory for (ref, _), (memory, _) in walk.lies.items() if ref in outputs]
        taken = [memory for _, memory, _ in walk.taken]
        pieces = (*walk.piece_of, *walk.piece_of.values())
        for memory in (*of_outputs, *pieces, *walk.given_up, *walk.waiting, *taken):
            walk.chains.written(memory)
        _unfuse(walk, walk.chains)
    keepers = {key: list(kept) for key, kept in walk.keepers.items()}
    for copy, piece in walk.piece_of.items():
        kept = keepers.get((copy, None), [])
        if not walk.memories[piece].given:
            keepers.setdefault((piece, None), []).extend(kept or [Keeper(walk.memories[copy].since, "out")])
    _activate_segments(walk, keepers)
    if walk.every:
        for (ref, _), (memory, _) in walk.lies.items():
            if ref in outputs:
                walk.reads.setdefault(memory, []).append((len(walk.graph.nodes), 0))
        for memory, is_there in enumerate(walk.memories):
            if not is_there.given:
                keepers.setdefault((memory, None), [])
    entries = _entries(walk, keepers)
    wanted = {memory: ref for memory, ref in walk.given_up.items() if (memory, None) in keepers}
    regathered = {
        (ref, a, b): None for (ref, state), (_, steps) in walk.copies_again.items()
        if walk.lies[ref, state][0] in walk.readers for a, b in steps
    }  # fmt: skip
    walk.away = _away(walk, {memory for memory, _ in keepers})
    remade = tuple(sorted(reshard_key(walk.graph, ref) for ref in wanted.values()))
    decided: dict[str, tuple[Any, ...]] = {**walk.decided, RECOMPUTE_RESULT.name: remade}
    for record in set(walk.waits.values()):
        refs = [ref for memory, (ref, by) in walk.waiting.items() if by is record and (memory, None) in keepers]
        decided[record.name] = tuple(sorted(reshard_key(walk.graph, ref) for ref in refs))
    away = tuple(_left(walk, memory) for memory in walk.away)
    return Ledger(tuple(entries), walk.segments, tuple(regathered), in_order(decided), _lives(walk, wanted), away)


def _unfuse(walk: Walk, chains: FusedChains) -> None:
    """Replace what keeps memory inside of fused chains, from the last one to the first.

    The operator that makes it keeps what it reads instead, unless that is more than the memory itself, which is
    written then: scales of rows do not count.
    """
    chains.close()
    kept = {memory for memory, _ in walk.keepers}
    for memory in sorted(chains.inside, reverse=True):
        maker, segment = chains.inside[memory], walk.memories[memory].segment
        key = memory, segment if segment >= 0 else None
        if key in walk.keepers:
            more = sum(walk.memories[source].n_bytes for source in _follows_from(walk, memory) - kept)
            if more > (1 + SCALE_SHARE) * walk.memories[memory].n_bytes:
                chains.written(memory)
                continue
            del walk.keepers[key]
            for position, (source, _) in enumerate(walk.places[maker]):
                keeper = Keeper(maker, "in", position)
                if keeper not in walk.keepers.get((source, key[1]), ()):
                    walk.keep(source, keeper, segment)
                kept.add(source)
        walk.memories[memory] = walk.memories[memory]._replace(n_bytes=0)


def _follows_from(walk: Walk, memory: int) -> set[int]:
    """Return the memory outside of fused chains from which some inside of one is computed."""
    assert walk.chains is not None
    sources, new = set[int](), [memory]
    while new:
        for source, _ in walk.places[walk.chains.inside[new.pop()]]:
            if source not in walk.chains.inside:
                sources |= set() if walk.memories[source].given else {source}
            elif source not in sources:
                new.append(source)
    return sources


def _activate_segments(walk: Walk, keepers: dict[tuple[int, int | None], list[Keeper]]) -> None:
    """Find the segments that are recomputed, and let them keep what they take from outside."""
    made_in_segment: dict[int, list[int]] = {}
    for memory in walk.given_up:
        made_in_segment.setdefault(walk.memories[memory].segment, []).append(memory)
    taken_by: dict[int, list[tuple[int, Keeper]]] = {}
    for number, memory, keeper in walk.taken:
        taken_by.setdefault(number, []).append((memory, keeper))
    for number in range(len(walk.segments) - 1, -1, -1):  # a segment asks for what earlier ones make
        segment = walk.segments[number]
        segment.active |= any((memory, None) in keepers for memory in made_in_segment.get(number, ()))
        for memory, keeper in taken_by.get(number, ()) if segment.active else ():
            keepers.setdefault((memory, None), []).append(keeper)


def _entries(walk: Walk, keepers: Mapping[tuple[int, int | None], list[Keeper]]) -> list[Entry]:
    """Return an entry for memory with its keepers, with the decision about it."""
    entries = []
    for (memory, of_segment), kept in keepers.items():
        n_bytes, since, given, made_in = walk.memories[memory]
        decision = RECOMPUTE.name if of_segment is not None else GIVEN if given else KEEP.name
        decision = REGATHER.name if memory in walk.piece_of else decision
        if of_segment is None and memory in walk.given_up:
            decision, of_segment = RECOMPUTE.name, made_in
        if memory in walk.waiting:
            decision = walk.waiting[memory][1].name
        readers = tuple(walk.reads.get(memory, ()))
        entries.append(Entry(n_bytes, since, tuple(kept), of_segment, decision, readers))
        walk.entries_of.setdefault(memory, []).append(entries[-1])
    return entries


def _lives(walk: Walk, given_up: Collection[int]) -> tuple[tuple[int, int], ...]:
    """Return :attr:`Ledger.lives`, where this memory of segments is given up."""
    copies_of: dict[int, list[int]] = {}
    for copy, piece in walk.piece_of.items():
        copies_of.setdefault(piece, []).append(copy)
    takers: dict[int, set[int]] = {}
    for number, memory, _ in walk.taken if given_up else ():
        if walk.segments[number].active:
            takers.setdefault(memory, set()).add(number)
    begin = [segment.asks for segment in walk.segments]
    for memory in sorted(given_up, key=lambda m: -walk.memories[m].segment):  # of later segments first
        request = [begin[number] for number in takers.get(memory, ())]
        for lies in (memory, *copies_of.get(memory, ())):
            request += [i for i in walk.readers.get(lies, ()) if i not in walk.segment_of]
        number = walk.memories[memory].segment
        begin[number] = max([begin[number], *request])
    last = [segment.ops[-1] if segment.ops else -1 for segment in walk.segments]
    return tuple(
        (b if b >= 0 else end, s.ops[0] if s.ops else -1)
        for b, end, s in zip(begin, last, walk.segments, strict=True)
    )


def _away(walk: Walk, kept: Collection[int]) -> list[int]:
    """Return the memory that leaves by a decision with copies beside compute, in the order in which it does."""
    leaving = [memory for memory, (_, record) in walk.waiting.items() if record.ahead and memory in kept]
    return sorted(leaving, key=lambda memory: (walk.read_at[memory], walk.memories[memory].since))


def _left(walk: Walk, memory: int) -> Away:
    """Return when memory leaves, and when the backward asks for it."""
    at = walk.read_at[memory]
    last = next(what for what in reversed(walk.order[: at + 1]) if isinstance(what, int))
    return Away(walk.waiting[memory][1].name, walk.memories[memory].n_bytes, last, walk.first_asked(memory))


def ledger(
    graph: Graph, rules: Sequence[Rule | None], mesh: Mesh, chosen: Mapping[int, Strategy] | None,
    reshard_paths: Mapping[str, Sequence[tuple[State, State]]], memory: Memory, every: bool = False,
    kernels: Kernels = CPU,
) -> Ledger:  # fmt: skip
    """Return the ledger of a graph whose operators are cut as ``chosen``; of global tensors if that is None.

    ``memory`` are the decisions about memory; with ``every`` there are entries of memory that nobody keeps, too.
    """
    mesh = mesh if chosen is not None else Mesh()
    return ledger_of(Walk(graph, rules, mesh, chosen, reshard_paths, memory, every, kernels))
