"""Overlaps of collectives and computation as terms of the integer program: what is hidden depends on both sides.

Collectives of parameters overlap with all computation of their pass (:func:`parameter_overlaps`), those of operators
with some others (:func:`overlaps`). Where such operators are cut so that they communicate, need collectives before them
or are recomputed at another time, the plan hides less than these terms (:mod:`.hidden_seconds`), so the bound remains
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.building.integer_program import HiddenSeconds
from autopar.planner.intra_op.building.price import Pricer
from autopar.rules.lowering_helpers.overlapped_steps import any_in_parts, halves, independent_of
from autopar.rules.notation import Rule
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph
from cost_models.parameter_overlap import SLOWDOWN, Computing, ParameterSeconds

Rows = Mapping[int, tuple[Sequence[tuple[Strategy, ...]], int]]
"""By operator, the rows of its item and its place in each."""


def overlaps(
    graph: Graph, rules: Sequence[Rule | None], fold: Fold, pricer: Pricer, microbatches: int,
    item_of: Mapping[int, int], row_of: Rows,
) -> tuple[HiddenSeconds, ...]:  # fmt: skip
    """Return the overlaps of a problem, with the seconds of all blocks of a class.

    ``item_of`` is the item of each decided operator, ``row_of`` the rows of its item (strategies by operator) and its
    place in them.
    """
    result: list[HiddenSeconds] = []
    for i, rule in enumerate(rules):
        if rule is None or i not in row_of or not any_in_parts([rule]):
            continue
        times = fold.counts[i] * microbatches
        rows, place = row_of[i]
        waits = [pricer.waits(graph, graph.nodes[i], rule, row[place]) for row in rows]
        groups = zip(("first", "last"), halves(rules, independent_of(graph, rules, i)), strict=True)
        for when, others in groups:
            for backward in (False, True):
                wait = item_of[i], tuple([times * wait[when][backward] for wait in waits])
                computed: dict[int, list[float]] = {}
                for k in others:
                    _add(computed, graph, rules, fold.representative[k], backward, times, pricer, item_of, row_of)
                beside = tuple([(item, tuple(seconds)) for item, seconds in computed.items()])
                if any(wait[1]) and any(map(any, computed.values())):
                    result.append(HiddenSeconds(((wait,), beside)))
    return tuple(result)


def parameter_overlaps(
    graph: Graph, rules: Sequence[Rule | None], fold: Fold, pricer: Pricer, microbatches: int,
    parameters: Sequence[tuple[int, Sequence[ParameterSeconds]]], item_of: Mapping[int, int],
    row_of: Rows,
) -> tuple[HiddenSeconds, ...]:  # fmt: skip
    """Return the overlaps of collectives of parameters with computation (:mod:`cost_models.parameter_overlap`).

    ``parameters`` are items with the seconds that may be hidden, by strategy, of all of a class.
    """
    most = ParameterSeconds()
    for _, of_item in parameters:
        most = most.plus(ParameterSeconds(*map(max, zip(*of_item, strict=True))))
    if not any(most):
        return ()
    sides: dict[bool, dict[int, list[float]]] = {False: {}, True: {}}
    counts = fold.counts
    for k in row_of:
        for backward, side in sides.items():
            _add(side, graph, rules, k, backward, counts[k], pricer, item_of, row_of)
    result = []
    for number, (backward, times, seconds) in enumerate(most.passes(microbatches)):
        share = Computing(1.0, 1.0).side(backward, pricer.shares)
        if not times * seconds * share:
            continue
        lost = times * (1 - SLOWDOWN)
        moved = [(i, tuple([lost * p.passes(microbatches)[number][2] for p in of_item])) for i, of_item in parameters]
        computed = sides[backward].items()
        result.append(
            HiddenSeconds((
                tuple([of_item for of_item in moved if any(of_item[1])]),
                tuple([(i, tuple([lost * share * s for s in of_item])) for i, of_item in computed if any(of_item)]),
            ))
        )  # fmt: skip
    return tuple(result)


def copy_overlaps(
    graph: Graph, rules: Sequence[Rule | None], fold: Fold, pricer: Pricer, microbatches: int,
    copied: Mapping[int, Sequence[tuple[float, float]]], item_of: Mapping[int, int], row_of: Rows,
    recomputed_of: Mapping[int, Sequence[frozenset[int]]],
) -> tuple[HiddenSeconds, ...]:  # fmt: skip
    """Return the overlaps of copies to the memory of the host, and back, with all that their pass computes.

    One for each direction, which together say that the copies of a pass take what they exceed its computation by: less
    than a plan waits (:func:`cost_models.host_link.copy_waits`), in which copies have an order.

    Args:
        copied: by item, the seconds of a step of copies out and in, by row.
        recomputed_of: by item, the operators that run once more in the backward, by row.
    """
    result = []
    for backward in (False, True) if copied else ():
        side: dict[int, list[float]] = {}
        for k in row_of:
            _add(side, graph, rules, k, backward, fold.counts[k] * microbatches, pricer, item_of, row_of)
        for item, rows in recomputed_of.items() if backward else ():
            _add_recomputed(side[item], graph, rules, rows, fold.counts, microbatches, pricer, row_of)
        moved = tuple([(item, tuple([spent[backward] for spent in rows])) for item, rows in copied.items()])
        computed = tuple([(item, tuple(spent)) for item, spent in side.items() if any(spent)])
        result.append(HiddenSeconds((moved, computed)))
    return tuple(result)


def _add_recomputed(
    side: list[float], graph: Graph, rules: Sequence[Rule | None], rows: Sequence[frozenset[int]],
    counts: Mapping[int, int], microbatches: int, pricer: Pricer, row_of: Rows,
) -> None:  # fmt: skip
    """Add the second forward of what is recomputed to the seconds of an item, by strategy."""
    for number, again in enumerate(rows):
        for k in again:
            rule, (strategies, place) = rules[k], row_of[k]
            assert rule is not None
            spent = pricer.compute(graph, graph.nodes[k], rule, strategies[number][place])
            side[number] += counts[k] * microbatches * spent.forward


def _add(
    computed: dict[int, list[float]], graph: Graph, rules: Sequence[Rule | None], k: int, backward: bool, times: int,
    pricer: Pricer, item_of: Mapping[int, int], row_of: Rows,
) -> None:  # fmt: skip
    """Add what an operator computes to the seconds of its item, by strategy."""
    rule = rules[k]
    if rule is None or k not in row_of:
        return
    rows, place = row_of[k]
    of_item = computed.setdefault(item_of[k], [0.0] * len(rows))
    for number, row in enumerate(rows):
        spent = pricer.compute(graph, graph.nodes[k], rule, row[place])
        of_item[number] += times * (spent.total - spent.forward if backward else spent.forward)
