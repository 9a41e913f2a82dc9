"""Overlaps of collectives and computation as terms of the integer program: what is hidden depends on both sides.

Collectives of parameters and copies to the host overlap with all computation of their pass (:func:`pass_overlaps`),
those of operators with some others (:func:`overlaps`). Where such operators are cut so that they communicate, need
collectives before them or are recomputed at another time, the plan hides less than these terms
(:mod:`.hidden_seconds`), so the bound remains one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.building.integer_program import HiddenSeconds
from autopar.planner.intra_op.building.parameter_sharding import ParamCost
from autopar.planner.intra_op.building.price import Pricer
from autopar.rules.lowering_helpers.overlapped_steps import any_in_parts, halves, independent_of
from autopar.rules.notation import Rule
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph
from cost_models.parameter_overlap import NO_COPIES, NONE, SLOWDOWN, Computing, HostSeconds, ParameterSeconds

Rows = Mapping[int, tuple[Sequence[tuple[Strategy, ...]], int]]
"""By operator, the rows of its item and its place in each."""
Side = Mapping[int, Sequence[float]]
"""By item, seconds of a pass by strategy."""


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


class MayHide(NamedTuple):
    """Seconds of a parameter's collectives that may be hidden, and the part of them that is copied over the link."""

    seconds: ParameterSeconds
    copies: HostSeconds

    @staticmethod
    def of_class(costs: Sequence[ParamCost], times: int) -> list[MayHide]:
        """Return those of ``times`` parameters of a class, by choice."""
        return [MayHide(NONE.plus(c.may_hide, times), NO_COPIES.plus(c.copies, times)) for c in costs]


def pass_overlaps(
    graph: Graph, rules: Sequence[Rule | None], fold: Fold, pricer: Pricer, microbatches: int,
    parameters: Sequence[tuple[int, Sequence[MayHide]]], copied: Mapping[int, Sequence[tuple[float, float]]],
    item_of: Mapping[int, int], row_of: Rows, recomputed_of: Mapping[int, Sequence[frozenset[int]]],
) -> tuple[HiddenSeconds, ...]:  # fmt: skip
    """Return the overlaps of collectives of parameters, and of copies, with all that their pass computes.

    Of collectives :mod:`cost_models.parameter_overlap` has the rule. Copies of activations take what they exceed the
    computation of their pass by: less than a plan waits (:func:`cost_models.host_link.copy_waits`), in which copies
    have an order. In passes with both, :func:`_on_one_link` has what hides.

    Args:
        parameters: items with the seconds that may be hidden, by strategy, of all of a class.
        copied: by item, the seconds of a step of copies of activations out and in, by row.
        recomputed_of: by item, the operators that run once more in the backward, by row.
    """
    most = on_link = NONE
    for _, of_item in parameters:
        most = most.plus(ParameterSeconds(*map(max, zip(*[row.seconds for row in of_item], strict=True))))
        on_link = on_link.plus(ParameterSeconds(*map(max, zip(*[row.copies.both for row in of_item], strict=True))))
    result = []
    for backward in (False, True) if any(most) or copied else ():
        own: dict[int, list[float]] = {}
        for k in row_of:
            _add(own, graph, rules, k, backward, fold.counts[k], pricer, item_of, row_of)
        all_own = {item: list(spent) for item, spent in own.items()}
        for item, rows in recomputed_of.items() if backward and copied else ():
            _add_recomputed(all_own[item], graph, rules, rows, fold.counts, pricer, row_of)
        away = {item: [row[backward] / microbatches for row in rows] for item, rows in copied.items()}
        share, without = Computing(1.0, 1.0).side(backward, pricer.shares), microbatches
        for number, (of_backward, times, seconds) in enumerate(most.passes(microbatches)):
            if of_backward != backward or not times * seconds * share:
                continue
            lost = times * (1 - SLOWDOWN)
            moved = {i: [row.seconds.passes(1)[number][2] for row in of_item] for i, of_item in parameters}
            if not (copied and on_link.passes(1)[number][2]):
                result.append(HiddenSeconds((_side((lost, moved)), _side((lost * share, own)))))
                continue
            coming, going = (
                {i: [row.copies[way].passes(1)[number][2] for row in of_item] for i, of_item in parameters}
                for way in (0, 1)
            )  # fmt: skip
            gain = pricer.known_host.both_gain
            result.append(_on_one_link(times, share, moved, own, away, all_own, coming, going, backward, gain))
            without -= times
        if copied and without:
            result.append(HiddenSeconds((_side((without, away)), _side((without, all_own)))))
    return tuple(result)


def _on_one_link(
    times: int, share: float, moved: Side, own: Side, away: Side, all_own: Side, coming: Side, going: Side,
    backward: bool, gain: float,
) -> HiddenSeconds:  # fmt: skip
    """Return the overlap of passes in which activations and parameters are copied over one link.

    With ``A`` seconds of copies of activations in a pass, ``W`` of them waited for, ``C`` of computation, and ``M`` of
    collectives and copies of parameters, ``P`` of them copies, hidden are ``A - W <= min(A, C)`` and ``h`` times the
    least of ``M``, of the computation that collectives overlap, and of ``M - P + C - (A - W) + gain min(out, in)``
    (:meth:`cost_models.host_link.HostLinkUse.room`), with ``h`` for what is not lost. The sides are all sums of two of
    these bounds, and of the last one ``h (M - P + C + gain way) + (1 - h) (A - W)``, for each way.
    """
    h = 1 - SLOWDOWN
    sides = [
        _side((times, first), (times * h * part, second))
        for first in (away, all_own) for part, second in ((1.0, moved), (share, own))
    ]  # fmt: skip
    for way in (False, True):  # out, in
        both = [(times * h * gain, coming if way else going)]
        both += [(times * h * gain, away)] if way == backward else []
        left = [(times * h, moved), (-times * h, coming), (-times * h, going), (times * h, all_own)]
        sides += [_side(*left, *both, (times * SLOWDOWN, hidden)) for hidden in (away, all_own)]
    return HiddenSeconds(tuple(sides))


def _side(*parts: tuple[float, Side]) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Return a side: the sum of so many times the seconds of items, by strategy, without items that have none."""
    total: dict[int, list[float]] = {}
    for times, seconds in parts:
        for item, rows in seconds.items():
            before = total.get(item, [0.0] * len(rows))
            total[item] = [a + times * b for a, b in zip(before, rows, strict=True)]
    return tuple((item, tuple(rows)) for item, rows in total.items() if any(rows))


def _add_recomputed(
    side: list[float], graph: Graph, rules: Sequence[Rule | None], rows: Sequence[frozenset[int]],
    counts: Mapping[int, int], pricer: Pricer, row_of: Rows,
) -> None:  # fmt: skip
    """Add the second forward of what is recomputed to the seconds of an item, by strategy."""
    for number, again in enumerate(rows):
        for k in again:
            rule, (strategies, place) = rules[k], row_of[k]
            assert rule is not None
            spent = pricer.compute(graph, graph.nodes[k], rule, strategies[number][place])
            side[number] += counts[k] * spent.forward


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
