"""Blocks that differ where the memory limit binds: some take the smaller of two choices, the others the faster.

One choice for all the blocks of a deep model is a coarse tool: 126 layers that keep a parameter whole may be just too
large, and cutting it in all of them wasteful. The relaxation of the integer program says which two choices to mix
(:meth:`.highs.HighsProgram.pairs`); here the boundary between blocks is found at which the mixture fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import ceil
from typing import Any

from autopar.planner.intra_op.building.decoder import Decided, Decoder
from autopar.planner.intra_op.building.fold import Fold
from autopar.planner.intra_op.building.integer_program import Choice
from autopar.planner.intra_op.solving import highs
from autopar.plans.plan import Solution, StagePlan
from autopar.words.graph import Graph, Ref


def mixture(
    graph: Graph, folding: Fold, program: highs.Program, decoder: Decoder, limit: float,
    realise: Callable[[Decided], StagePlan], seconds_of: Callable[[StagePlan], float], gap: float,
) -> StagePlan | None:  # fmt: skip
    """Return a mixture within the limit, its gap measured against the relaxation; None if there is none.

    ``seconds_of`` gives the seconds of a plan that the problem counts. With a mixture within ``gap``, no other order of
    the two choices is tried.
    """
    cuts = boundaries(graph, folding)
    if not cuts:
        return None
    best: StagePlan | None = None
    for faster, smaller in program.pairs():
        alike = _within(realise(decoder.decided(smaller.picked)), smaller.bound, seconds_of, gap)
        if alike.price.memory_bytes <= limit and alike.solution is not None and alike.solution.gap <= gap:
            return alike  # no block need differ
        if alike.price.memory_bytes > limit:
            continue  # nor does it where some blocks take the larger one
        plan = _between(graph, decoder, (faster, smaller), cuts, limit, realise, seconds_of, gap)
        if plan is not None and (best is None or plan.price.seconds < best.price.seconds):
            best = plan
        if best is not None and best.solution is not None and best.solution.gap <= gap:
            break
    return best


def _between(
    graph: Graph, decoder: Decoder, pair: tuple[Choice, Choice], cuts: Sequence[int], limit: float,
    realise: Callable[[Decided], StagePlan], seconds_of: Callable[[StagePlan], float], gap: float,
) -> StagePlan | None:  # fmt: skip
    """Return the best mixture of two choices; None if none fits."""
    faster, smaller = pair
    guess = _guess(faster, smaller, limit, len(cuts))
    best: StagePlan | None = None
    for first in (True, False):  # whether the smaller choice comes first

        @cache
        def plan_at(k: int, first: bool = first) -> StagePlan:
            cut = cuts[k] if first else ([0, *cuts[:-1]])[len(cuts) - 1 - k]
            before, after = (smaller, faster) if first else (faster, smaller)
            return realise(_mixed(graph, decoder, before, after, cut))

        def fits(k: int, plan_at: Callable[[int], StagePlan] = plan_at) -> bool:
            return plan_at(k).price.memory_bytes <= limit

        if fits(guess) and seconds_of(plan_at(guess)) * (1 - gap) <= smaller.bound:
            best = plan_at(guess)
            break
        k = _first(fits, len(cuts), guess)
        if k is not None and (best is None or plan_at(k).price.seconds < best.price.seconds):
            best = plan_at(k)
        if best is not None and seconds_of(best) * (1 - gap) <= smaller.bound:
            break
    return _within(best, smaller.bound, seconds_of, gap) if best is not None else None


def _within(plan: StagePlan, bound: float, seconds_of: Callable[[StagePlan], float], gap: float) -> StagePlan:
    """Return the plan with its distance to the bound."""
    seconds = seconds_of(plan)
    off = max(0.0, 1 - bound / seconds)
    return replace(plan, solution=Solution("highs", "within gap" if off <= gap else "best found", seconds, off, True))


def boundaries(graph: Graph, folding: Fold) -> list[int]:
    """Return the nodes at which repeated blocks begin and end, and the graph's end; none without repeats."""
    ops = [i for i, n in enumerate(graph.nodes) if n.kind == "op"]
    positions = {first + k * length for first, length, repeats in folding.blocks for k in range(repeats + 1)}
    return [*sorted(ops[p] for p in positions if p < len(ops)), len(graph.nodes)] if positions else []


def _guess(faster: Choice, smaller: Choice, limit: float, n: int) -> int:
    """Return the boundary at which bytes would reach the limit if they fell evenly from one to the next."""
    most, least = faster.stats["bytes"], smaller.stats["bytes"]
    share = (most - limit) / (most - least) if most > least else 1.0
    return min(n - 1, max(0, ceil(share * (n - 1))))


def _first(fits: Callable[[int], bool], n: int, guess: int) -> int | None:
    """Return the least ``k < n`` that fits, where all after one that fits fit too; None if none does."""
    low, high, step = -1, n, 1  # low does not fit, high does (or is the end)
    k = guess
    while high - low > 1:
        if fits(k):
            high, k = k, max(low + 1, k - step)
        else:
            low, k = k, min(high - 1, k + step)
        step = step * 2 if (low < 0 or high == n) else max(1, (high - low) // 2)
        if low >= 0 and high < n:
            k = (low + high) // 2
    return high if high < n else None


def _mixed(graph: Graph, decoder: Decoder, before: Choice, after: Choice, cut: int) -> Decided:
    """Return decisions with nodes before the cut as in one choice, the others as in the other.

    Parameters go with their readers.
    """
    first, second = decoder.decided(before.picked), decoder.decided(after.picked)

    def place(node: int) -> int:
        if graph.nodes[node].kind == "op":
            return node
        return min((c for c, _ in graph.consumers.get(Ref(node), ())), default=node)

    def made_by(key: str) -> int:
        return graph.index[key.partition("#")[0]]

    inputs = {n.target: i for i, n in graph.of_kind("input")}
    names = {n.target: n.name for _, n in graph.of_kind("buffer")}
    outputs: Sequence[Any] = graph.outputs

    def pick(a: dict[Any, Any], b: dict[Any, Any], node_of: Callable[[Any], int]) -> dict[Any, Any]:
        return {key: (a if place(node_of(key)) < cut else b)[key] for key in a}

    return Decided(
        {node: strategy if node < cut else second.ops[node] for node, strategy in first.ops.items()},
        pick(first.params, second.params, int), pick(first.outputs, second.outputs, lambda k: outputs[k].node),
        pick(first.inputs, second.inputs, lambda name: inputs[name]),
        frozenset(i for i in first.recomputed if i < cut) | frozenset(i for i in second.recomputed if i >= cut),
        {
            name: frozenset(key for key in first.tensors.get(name, ()) if made_by(key) < cut)
            | frozenset(key for key in second.tensors.get(name, ()) if made_by(key) >= cut)
            for name in {**first.tensors, **second.tensors}
        },
        pick(dict(first.buffers), dict(second.buffers), lambda name: graph.index[names[name]]),
    )  # fmt: skip
