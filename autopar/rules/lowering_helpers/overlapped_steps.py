"""Operators that are computed while the collectives of another operator are pending."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from autopar.plans.plan import reshard_key
from autopar.rules.function import PREFIX
from autopar.rules.local_calls import collectives_inside, cuts_of
from autopar.rules.notation import Lowering, Rule
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph, Ref
from autopar.words.meshes import Mesh
from autopar.words.placements import State, Step

CONTRACTIONS = frozenset({"matmul", "conv", "attention"})
ReshardPaths = Mapping[str, Sequence[tuple[State, State]]]


class OverlappedStep(NamedTuple):
    """The operators that overlap the collectives of one operator, by numbers of nodes in execution order.

    Attributes:
        op: whose collectives they are.
        first: what runs beside the collectives with which it begins.
        last: beside those with which it ends.
        later: what stands in front of it in the graph, and runs behind it, because it reads one of ``first``.
    """

    op: int
    first: tuple[int, ...]
    last: tuple[int, ...]
    later: tuple[int, ...] = ()


def any_in_parts(rules: Iterable[Rule | None]) -> bool:
    """Check whether any operator can overlap others with its collectives."""
    return any(_may_be_in_parts(rule) for rule in rules)


def _may_be_in_parts(rule: Rule | None) -> bool:
    return rule is not None and any(lowering.in_parts is not None for lowering in rule.lowerings)


def lowering_in_parts(rule: Rule, strategy: Strategy, mesh: Mesh) -> Lowering | None:
    """Return the lowering of an operator under a strategy if others may overlap the collectives at its ends."""
    if not _may_be_in_parts(rule):
        return None
    pieces, axes = cuts_of(rule, strategy.options, mesh)
    lowering = rule.lowering(axes)
    if lowering is None or lowering.in_parts is None:
        return None
    inside = collectives_inside(rule, pieces, axes, False, mesh.size_of)
    return lowering if any(comm.when for comm, *_ in inside) else None


def beside(
    graph: Graph, rules: Sequence[Rule | None], mesh: Mesh, chosen: Mapping[int, Strategy], reshard_paths: ReshardPaths,
    segment_of: Mapping[int, int],
) -> list[OverlappedStep]:  # fmt: skip
    """Find the operators that overlap collectives in the program of a plan, in order of the operators with collectives.

    Args:
        chosen: strategies by node.
        reshard_paths: reshard steps by :func:`~autopar.plans.plan.reshard_key`.
        segment_of: the recomputed segment of each operator that is in one: what is in another runs at another time.
    """
    plans: list[OverlappedStep] = []
    taken = -1  # up to which node the order is changed already
    for i, rule in enumerate(rules):
        if rule is None or lowering_in_parts(rule, chosen[i], mesh) is None:
            continue
        free: list[int] = []
        for k in independent_of(graph, rules, i):
            rule_there = rules[k]
            assert rule_there is not None
            if segment_of.get(k) != segment_of.get(i):
                break
            if _communicates(graph, k, rule_there, mesh, chosen, reshard_paths, frozenset(free)):
                break
            free.append(k)
        first, last = halves(rules, free)
        before = set(first) | {k for k in last if k < i}
        later = _descendants(graph, before, i) - before
        if not (first or last) or min(i, *free) <= taken or any(segment_of.get(k) != segment_of.get(i) for k in later):
            continue
        plans.append(OverlappedStep(i, first, last, tuple(sorted(later))))
        taken = max(i, *free)
    return plans


def in_order(graph: Graph, plans: Iterable[OverlappedStep]) -> list[int]:
    """Order all operators of a graph, each before its readers, with overlapped ones next to their collectives.

    Of an operator with collectives, ``first`` comes before it and ``last`` after it.
    """
    order = [i for i, _ in graph.of_kind("op")]
    for overlap in plans:
        together = [*overlap.first, overlap.op, *overlap.last, *overlap.later]
        others = [i for i in order if i not in set(together)]
        ahead = sum(i < overlap.op for i in others)
        order = [*others[:ahead], *together, *others[ahead:]]
    return order


def independent_of(graph: Graph, rules: Sequence[Rule | None], i: int) -> list[int]:
    """Return the operators around operator ``i`` that need nothing of it, and of which it needs nothing."""
    by_operator = graph.derived.setdefault("independent operators", {})
    if i not in by_operator:
        by_operator[i] = _independent_of(graph, rules, i)
    return by_operator[i]  # type: ignore[no-any-return]


def _independent_of(graph: Graph, rules: Sequence[Rule | None], i: int) -> list[int]:
    source = _source(graph, i)
    if source is None:
        return []
    needed, of_it, free = _ancestors(graph, i, source), {i}, set[int]()
    for k in range(source + 1, len(graph.nodes)):
        node, rule = graph.nodes[k], rules[k]
        if rule is None or k == i:
            continue
        reads = {ref.node for ref in node.refs if graph.nodes[ref.node].kind == "op"}
        if reads & of_it:
            if rule.kind in CONTRACTIONS:
                break  # the next layer
            of_it.add(k)
            continue
        if k in needed or not any(r == source or r in needed or r in free for r in reads):
            continue
        if all(r <= source or r in needed or r in free for r in reads):
            free.add(k)
    return sorted(free)


def _source(graph: Graph, i: int) -> int | None:
    """Return the last operator from which all that operator ``i`` reads comes, apart from functions of parameters."""

    def reads(k: int) -> set[int]:
        nodes = (ref.node for ref in graph.nodes[k].refs)
        return {n for n in nodes if graph.nodes[n].kind == "op" and n in graph.from_inputs}

    waiting = [-k for k in reads(i)]
    heapify(waiting)
    while len(set(waiting)) > 1:
        latest = heappop(waiting)
        while waiting and waiting[0] == latest:
            heappop(waiting)
        for k in reads(-latest):
            heappush(waiting, -k)
    return -waiting[0] if waiting else None


def _ancestors(graph: Graph, i: int, source: int) -> set[int]:
    """Return the operators behind the source that operator ``i`` needs."""
    needed, todo = set[int](), [i]
    while todo:
        for ref in graph.nodes[todo.pop()].refs:
            if ref.node > source and graph.nodes[ref.node].kind == "op" and ref.node not in needed:
                needed.add(ref.node)
                todo.append(ref.node)
    return needed


def _descendants(graph: Graph, of: set[int], end: int) -> set[int]:
    """Return the operators in `of`, and those before node ``end`` that need one of them."""
    reached = set(of)
    for k in range(min(of, default=end), end):
        if any(ref.node in reached for ref in graph.nodes[k].refs):
            reached.add(k)
    return reached


def _communicates(
    graph: Graph, k: int, rule: Rule, mesh: Mesh, chosen: Mapping[int, Strategy], reshard_paths: ReshardPaths,
    free: frozenset[int],
) -> bool:  # fmt: skip
    """Check whether operator ``k`` makes collectives, or reads something of ``free`` through one.

    Such an operator waits for what is pending. Code of the user's may make any.
    """
    if graph.nodes[k].target.startswith(PREFIX):
        return True
    pieces, axes = cuts_of(rule, chosen[k].options, mesh)
    if any(True for _ in collectives_inside(rule, pieces, axes, True, mesh.size_of)):
        return True
    for ref, wanted in zip(graph.nodes[k].refs, chosen[k].ins, strict=True):
        if ref.node in free and _moved(graph, ref, wanted, mesh, reshard_paths):
            return True
    return False


def _moved(graph: Graph, ref: Ref, wanted: State, mesh: Mesh, reshard_paths: ReshardPaths) -> bool:
    """Check whether a tensor is brought to a state by a collective, or its gradient back."""
    before = {dst: src for src, dst in reshard_paths.get(reshard_key(graph, ref), ())}
    state = wanted
    while state in before:
        step = Step.between(before[state], state)
        if mesh.size(step.axis) > 1 and any(kind is not None for kind in step.collectives):
            return True
        state = before[state]
    return False


def halves(rules: Sequence[Rule | None], free: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split the operators into two parts with about as much to compute, as equal bytes travel in both directions.

    None if they contain no product: reordering would hide too little.
    """
    flops = []
    for k in free:
        rule = rules[k]
        assert rule is not None
        flops.append(rule.flops_at({}) if rule.kind in CONTRACTIONS else 0.0)
    done, half = 0.0, sum(flops) / 2
    if not half:
        return (), ()
    for n, more in enumerate(flops):
        if done + more / 2 > half:
            return tuple(free[:n]), tuple(free[n:])
        done += more
    return tuple(free), ()
