"""The fastest order of all, for small cases: branch and bound over what has been computed.

Microbatches are alike, so the k-th forward of a stage may be taken to be of microbatch k, and the k-th backward and
weight gradient likewise: if a schedule has another order, renaming them slot by slot gives one that is no slower and
holds as much (the k-th slot begins after k arrivals in any case). A state is then how many forwards, backwards and
weight gradients each stage has done, and when: rank and link free, and the arrivals that nobody has used. Of two
states with the same counts, one that is nowhere later makes the other superfluous. A row's order fixes what the rank
holds, so memory is a matter of counts.

    lower bound of a state = max over ranks of  free + work that is left + the shortest way from its last backward to
    the end
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .actions import Action, Schedule
from .listing import SLACK, OrderProblem

MAX_NODES = 100_000
"""States that a solve may visit, by default: some seconds."""


@dataclass(frozen=True)
class ProvenOrder:
    """A `schedule` faster than the known one, or None; `proven` when the search was complete."""

    schedule: Schedule | None
    proven: bool
    nodes: int


class _Node(NamedTuple):
    forwards: tuple[int, ...]  # per stage, done
    backwards: tuple[int, ...]
    owed: tuple[tuple[int, ...], ...]  # per stage, microbatches that wait for their weight gradient
    held: tuple[float, ...]  # per rank
    free: tuple[float, ...]  # per rank
    arrived: tuple[tuple[float, ...], ...]  # per queue (`_Case.queues`), those not used yet
    link_free: tuple[float, ...]


class _Case:
    """A problem, indexed for the search.

    A queue holds the results of one action for another: the outputs and gradients of an edge, and a stage's own forward
    for its backward.
    """

    def __init__(self, problem: OrderProblem):
        t, n = problem.times, problem.n_stages
        self.problem, self.t, self.n, self.m = problem, t, n, problem.n_microbatches
        self.rank_of = {s: r for r, stages in enumerate(problem.stages_of_rank) for s in stages}
        self.links = sorted({p for e in t.edges for a, b in [(self.rank_of[e.source], self.rank_of[e.target])]
                             if a != b for p in ((a, b), (b, a))})  # fmt: skip
        link_at = {pair: i for i, pair in enumerate(self.links)}
        self.queues: list[tuple[int, str]] = []  # (stage, phase) that takes from it
        # Per (stage, phase): queues it takes from, and (queue, link or None, seconds) it puts into.
        self.takes: dict[tuple[int, str], list[int]] = {(s, p): [] for s in range(n) for p in "FB"}
        self.puts: dict[tuple[int, str], list[tuple[int, int | None, float]]] = {
            (s, p): [] for s in range(n) for p in "FB"
        }

        def queue(source: tuple[int, str], target: tuple[int, str], seconds: float) -> None:
            a, b = self.rank_of[source[0]], self.rank_of[target[0]]
            self.takes[target].append(len(self.queues))
            self.puts[source].append((len(self.queues), link_at[a, b] if a != b else None, seconds))
            self.queues.append(target)

        # The same order as in `simulate`: it decides who goes first on a link.
        for e in t.edges:
            queue((e.source, "F"), (e.target, "F"), e.forward_seconds)
            queue((e.target, "B"), (e.source, "B"), e.backward_seconds)
        for s in range(n):
            queue((s, "F"), (s, "B"), 0.0)
        self.back = [backward_seconds(problem, s) for s in range(n)]
        self.tail = self.tails()

    def tails(self) -> list[float]:
        """Return, per stage, the least time from the end of a backward's *first half* to the end of everything.

        These are the gradients on their way to the first stages; the stage's own weight gradients are part of its
        rank's work.
        """
        t = self.t
        out = [0.0] * self.n
        for s in range(self.n):
            for e in t.edges:
                if e.target == s:
                    wire = e.backward_seconds if self.rank_of[e.source] != self.rank_of[s] else 0.0
                    rest = max(self.back[e.source], min(t.input_seconds[e.source], self.back[e.source]) + out[e.source])
                    out[s] = max(out[s], wire + rest)
        return out

    def heads(self) -> list[float]:
        """Return, per stage, the earliest start of a forward."""
        out = [0.0] * self.n
        for s in range(self.n):
            for e in self.t.edges:
                if e.target == s:
                    wire = e.forward_seconds if self.rank_of[e.source] != self.rank_of[s] else 0.0
                    out[s] = max(out[s], out[e.source] + self.t.forward_seconds[e.source] + wire)
        return out

    def work_left(self, node: _Node, rank: int) -> float:
        total = 0.0
        for s in self.problem.stages_of_rank[rank]:
            total += (self.m - node.forwards[s]) * self.t.forward_seconds[s]
            total += (self.m - node.backwards[s]) * self.back[s] + len(node.owed[s]) * self.t.weight_seconds[s]
        return total

    def bound(self, node: _Node) -> float:
        """Return a lower bound of the end of every completion of `node`."""
        least = 0.0
        for rank, stages in enumerate(self.problem.stages_of_rank):
            begin = node.free[rank]
            left = self.work_left(node, rank)
            least = max(least, begin + left)
            for s in stages:  # the first half of the last backward of s comes after its forwards and backwards
                if node.backwards[s] < self.m:
                    chain = (self.m - node.forwards[s]) * self.t.forward_seconds[s]
                    first = min(self.t.input_seconds[s], self.back[s])
                    chain += (self.m - node.backwards[s]) * first
                    least = max(least, begin + chain + self.tail[s])
        return least

    def moves(self, node: _Node) -> Iterator[tuple[Action, float, _Node]]:
        """Yield (action, start, next node) of everything that may come next, on any rank."""
        t = self.t
        for s in range(self.n):
            rank = self.rank_of[s]
            room = self.problem.room_bytes[rank] * SLACK
            if node.owed[s]:
                freed = node.held[rank] - t.weight_grad_bytes[s]
                start, k = node.free[rank], node.owed[s][0]
                owed = _with(node.owed, s, node.owed[s][1:])
                free = _with(node.free, rank, start + t.weight_seconds[s])
                yield Action(s, "W", k), start, node._replace(held=_with(node.held, rank, freed), owed=owed, free=free)
            if node.backwards[s] < self.m and all(node.arrived[q] for q in self.takes[s, "B"]):
                k = node.backwards[s]
                freed = node.held[rank] - t.activation_bytes[s]
                done = _with(node.backwards, s, k + 1)
                if freed + t.weight_grad_bytes[s] <= room:
                    waiting = _with(node.held, rank, freed + t.weight_grad_bytes[s])
                    owed = _with(node.owed, s, node.owed[s] + (k,))
                    after = node._replace(held=waiting, owed=owed, backwards=done)
                    yield (Action(s, "I", k), *self.run(after, s, "B", t.input_seconds[s]))
                if self.problem.fused(s) or t.weight_grad_bytes[s] > t.activation_bytes[s]:
                    after = node._replace(held=_with(node.held, rank, freed), backwards=done)
                    yield (Action(s, "B", k), *self.run(after, s, "B", t.backward_seconds[s]))
            if node.forwards[s] < self.m and all(node.arrived[q] for q in self.takes[s, "F"]):
                k = node.forwards[s]
                bytes_after = node.held[rank] + t.activation_bytes[s]
                if bytes_after <= room:
                    after = node._replace(
                        held=_with(node.held, rank, bytes_after), forwards=_with(node.forwards, s, k + 1)
                    )
                    yield (Action(s, "F", k), *self.run(after, s, "F", t.forward_seconds[s]))

    def run(self, node: _Node, stage: int, phase: str, seconds: float) -> tuple[float, _Node]:
        rank = self.rank_of[stage]
        arrived, links = list(node.arrived), list(node.link_free)
        start = node.free[rank]
        for q in self.takes[stage, phase]:
            start = max(start, arrived[q][0])
            arrived[q] = arrived[q][1:]
        end = start + seconds
        for q, link, wire in self.puts[stage, phase]:
            when = end
            if link is not None:
                when = links[link] = max(end, links[link]) + wire
            arrived[q] += (when,)
        free = _with(node.free, rank, end)
        return start, node._replace(free=free, arrived=tuple(arrived), link_free=tuple(links))

    def root(self) -> _Node:
        n, n_ranks = self.n, len(self.problem.stages_of_rank)
        return _Node((0,) * n, (0,) * n, ((),) * n, (0.0,) * n_ranks, (0.0,) * n_ranks,
                     ((),) * len(self.queues), (0.0,) * len(self.links))  # fmt: skip


def _with(values: tuple, at: int, value: object) -> tuple:
    return values[:at] + (value,) + values[at + 1 :]


def backward_seconds(problem: OrderProblem, stage: int) -> float:
    """Return the least seconds of both halves of a backward."""
    t = problem.times
    return min(t.backward_seconds[stage], t.input_seconds[stage] + t.weight_seconds[stage])


def work_seconds(problem: OrderProblem, stage: int) -> float:
    """Return the least seconds of all microbatches on a stage."""
    return problem.n_microbatches * (problem.times.forward_seconds[stage] + backward_seconds(problem, stage))


def lower_bound_seconds(problem: OrderProblem) -> float:
    """Return a lower bound of every schedule.

    It is each rank's own work after its first input can arrive, and one microbatch's whole way.
    """
    case = _Case(problem)
    heads = case.heads()
    empty = case.root()
    first = [min((heads[s] for s in stages), default=0.0) for stages in problem.stages_of_rank]
    least = case.bound(empty._replace(free=tuple(first)))
    for s in range(case.n):  # the last stages: forward, first half of the backward, and back
        way = heads[s] + case.t.forward_seconds[s] + min(case.t.input_seconds[s], case.back[s]) + case.tail[s]
        least = max(least, way)
    return least


def solve(problem: OrderProblem, best_seconds: float = math.inf, max_nodes: int = MAX_NODES) -> ProvenOrder:
    """Return a schedule faster than `best_seconds`, if there is one; complete within `max_nodes` visited states.

    Exact for up to about 3 stages x 4 microbatches in seconds; the states grow with (microbatches^2 / 2)^stages.
    """
    case = _Case(problem)
    seen: dict[tuple, list[tuple[float, ...]]] = {}
    best, best_path = best_seconds, None
    floor = lower_bound_seconds(problem)
    nodes = 0
    path: list[tuple[float, int, Action]] = []
    total = {"F": case.n * case.m}
    # Depth first with an explicit stack; each entry is the moves that are left to try at that depth, best first.
    stack: list[Iterator[tuple[Action, float, _Node]]] = [iter(_sorted(case, case.root()))]
    while stack:
        move = next(stack[-1], None)
        if move is None:
            stack.pop()
            if path:
                path.pop()
            continue
        action, start, node = move
        # Worth the float tolerance: equal makespans must not be explored again for the last bit of a sum.
        if case.bound(node) >= best / SLACK or best <= floor * SLACK or _dominated(seen, node):
            continue
        nodes += 1
        if nodes > max_nodes:
            break
        path.append((start, case.rank_of[action.stage], action))
        if sum(node.backwards) == total["F"] and not any(node.owed):
            best = max(node.free)
            best_path = list(path)
            path.pop()
            continue
        stack.append(iter(_sorted(case, node)))
    schedule = None
    if best_path is not None:
        rows: list[list[Action]] = [[] for _ in problem.stages_of_rank]
        for _, rank, action in best_path:
            rows[rank].append(action)
        schedule = problem.schedule("exact", rows)
    return ProvenOrder(schedule, nodes <= max_nodes, nodes)


def _sorted(case: _Case, node: _Node) -> list[tuple[Action, float, _Node]]:
    """Sort moves: earliest start first; of those, backward before forward before weight gradient."""
    rank = {"I": 0, "B": 0, "F": 1, "W": 2}
    return sorted(case.moves(node), key=lambda move: (move[1], rank[move[0].kind], move[0]))


def _dominated(seen: dict[tuple, list[tuple[float, ...]]], node: _Node) -> bool:
    """Return True if a state with the same counts was nowhere later; remember `node` if not."""
    key = (node.forwards, node.backwards, tuple(len(o) for o in node.owed))
    now = (*node.free, *node.link_free, *(when for queue in node.arrived for when in queue))
    earlier = seen.setdefault(key, [])
    if any(all(a <= b for a, b in zip(old, now)) for old in earlier):
        return True
    earlier[:] = [old for old in earlier if not all(a <= b for a, b in zip(now, old))]
    earlier.append(now)
    return False
