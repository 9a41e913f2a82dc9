"""List scheduling: simulate the pipeline and let each idle rank pick, by a policy, a ready action that fits.

The picks that matter: how many microbatches a stage may run ahead, which goes first of a forward and a backward that
are both ready, and when weight gradients fill a gap. `POLICIES` are combinations; `search` tries them all. The ideas
are those of the greedy scheduler in "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241, section 3.1), on any stages
and edges.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from itertools import product
from typing import Literal

from .actions import Action, Schedule
from .times import Times

SLACK = 1 + 1e-9  # limits are sums of floats
ROUNDING = 1e-9  # what a product may be above a whole number by rounding
ROUNDING_SECONDS = 1e-15  # what a sum of two halves may be above the whole by rounding
AHEAD = (1.0, 1.5, 2.0, math.inf)  # in multiples of the forwards that 1F1B keeps
PATIENCE = (0.0, 0.5, 1.0)  # in weight gradients


@dataclass(frozen=True)
class OrderProblem:
    """The input of a search: `room_bytes[r]` is the memory of rank r for activations, without static bytes."""

    times: Times
    n_microbatches: int
    stages_of_rank: tuple[tuple[int, ...], ...]
    room_bytes: tuple[float, ...]

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return self.times.n_stages

    def schedule(self, name: str, rows: list[list[Action]]) -> Schedule:
        """Return the schedule of the rows."""
        return Schedule(
            name, self.n_stages, self.n_microbatches, self.stages_of_rank, tuple(tuple(row) for row in rows)
        )

    def fused(self, stage: int) -> bool:
        """Return True if the full backward is faster than its halves."""
        t = self.times
        return t.backward_seconds[stage] < t.input_seconds[stage] + t.weight_seconds[stage] - ROUNDING_SECONDS

    def reserve(self, stage: int) -> float:
        """Return the bytes that a forward of `stage` leaves free: one microbatch on each later stage of its rank.

        So the oldest microbatch always fits where it goes next, and memory cannot deadlock the pipeline.
        """
        rank = next(r for r, stages in enumerate(self.stages_of_rank) if stage in stages)
        return sum(self.times.activation_bytes[s] for s in self.stages_of_rank[rank] if s > stage)


@dataclass(frozen=True)
class Policy:
    """The choices of an idle rank.

    `ahead`: stage s of S runs at most ceil(ahead x (S - s)) forwards that have no backward yet (1: as 1F1B). `first`:
    of a ready forward and backward. `weights`: "fill" gaps, "eager" right after the input gradient, or "full" backwards
    only. `patience`: a gap is left empty when something is known to arrive within this share of the weight gradient's
    seconds. `deep`: of several ready stages the later first, else the earlier.
    """

    ahead: float
    first: Literal["backward", "forward", "alternate"]
    weights: Literal["fill", "eager", "full"] = "fill"
    patience: float = 0.0
    deep: bool = True

    def __str__(self) -> str:
        stages = "deep" if self.deep else "shallow"
        return f"ahead {self.ahead:g}, {self.first} first, weights {self.weights} {self.patience:g}, {stages}"


def policies(several_stages: bool) -> list[Policy]:
    """Return all policies worth trying."""
    out = []
    firsts: tuple[Literal["backward", "forward", "alternate"], ...] = ("backward", "forward", "alternate")
    for deep, ahead, first in product((True, False) if several_stages else (True,), AHEAD, firsts):
        out += [Policy(ahead, first, "fill", patience, deep) for patience in PATIENCE]
        out += [Policy(ahead, first, "eager", 0.0, deep), Policy(ahead, first, "full", 0.0, deep)]
    return out


def list_schedule(problem: OrderProblem, policy: Policy) -> Schedule:
    """Return the schedule of `policy`; within `room_bytes`, complete and free of deadlock by construction."""
    return _Run(problem, policy).rows(f"searched ({policy})")


class _Run:
    def __init__(self, problem: OrderProblem, policy: Policy):
        self.problem, self.policy, self.times = problem, policy, problem.times
        t, n, m = problem.times, problem.n_stages, problem.n_microbatches
        n_ranks = len(problem.stages_of_rank)
        self.rank_of = {s: r for r, stages in enumerate(problem.stages_of_rank) for s in stages}
        self.into = [[e for e in t.edges if e.target == s] for s in range(n)]
        self.out_of = [[e for e in t.edges if e.source == s] for s in range(n)]
        # Arrival of what the k-th forward or backward of a stage needs: inputs still missing, and the latest so far.
        self.missing_f = [[len(self.into[s])] * m for s in range(n)]
        self.missing_b = [[len(self.out_of[s]) + 1] * m for s in range(n)]
        self.ready_f = [[0.0] * m for _ in range(n)]
        self.ready_b = [[0.0] * m for _ in range(n)]
        self.done_f, self.done_b = [0] * n, [0] * n
        self.cap = [
            m if math.isinf(policy.ahead) else max(1, math.ceil(policy.ahead * (n - s) - ROUNDING)) for s in range(n)
        ]
        self.reserve = [problem.reserve(s) for s in range(n)]
        self.owed: list[deque[Action]] = [deque() for _ in range(n_ranks)]
        self.held = [0.0] * n_ranks
        self.free = [0.0] * n_ranks
        self.last = [""] * n_ranks
        self.link_free: dict[tuple[int, int], float] = {}
        self.out: list[list[Action]] = [[] for _ in range(n_ranks)]
        self.heap = [(0.0, rank) for rank in range(n_ranks)]

    def rows(self, name: str) -> Schedule:
        while self.heap:
            now, rank = heapq.heappop(self.heap)
            if now < self.free[rank]:
                continue  # it started something meanwhile, and looks again when that ends
            action, wake = self.pick(rank, now)
            if action is not None:
                self.start(rank, action, now)
            elif wake < math.inf:
                heapq.heappush(self.heap, (wake, rank))
        schedule = self.problem.schedule(name, self.out)
        assert sum(len(row) for row in self.out) >= 2 * self.problem.n_stages * self.problem.n_microbatches, name
        return schedule

    def pick(self, rank: int, now: float) -> tuple[Action | None, float]:
        """Return the action to start now, or the time to look again."""
        policy, m = self.policy, self.problem.n_microbatches
        stages = self.problem.stages_of_rank[rank]
        ready: dict[str, list[int]] = {"F": [], "B": []}
        arrival = math.inf
        for s in stages:
            k = self.done_f[s]
            if k < m and not self.missing_f[s][k] and k - self.done_b[s] < self.cap[s] and self.fits(rank, s):
                if self.ready_f[s][k] <= now:
                    ready["F"].append(s)
                arrival = min(arrival, max(self.ready_f[s][k], now))
            k = self.done_b[s]
            if k < m and not self.missing_b[s][k]:
                if self.ready_b[s][k] <= now:
                    ready["B"].append(s)
                arrival = min(arrival, max(self.ready_b[s][k], now))
        if ready["F"] or ready["B"]:
            forward_first = policy.first == "forward" or (policy.first == "alternate" and self.last[rank] == "B")
            phase = next(p for p in ("FB" if forward_first else "BF") if ready[p])
            stage = max(ready[phase]) if policy.deep else min(ready[phase])
            if phase == "F":
                return Action(stage, "F", self.done_f[stage]), math.inf
            return self.backward(rank, stage), math.inf
        owed = self.owed[rank]
        if owed and not (arrival - now < policy.patience * self.times.weight_seconds[owed[0].stage]):
            return owed[0], math.inf
        return None, arrival

    def fits(self, rank: int, stage: int) -> bool:
        needed = self.held[rank] + self.times.activation_bytes[stage] + self.reserve[stage]
        return needed <= self.problem.room_bytes[rank] * SLACK

    def backward(self, rank: int, stage: int) -> Action:
        """Return the backward to run: in halves, unless policy or memory forbids.

        What waits for the weights may be more than it replaces.
        """
        after = self.held[rank] - self.times.activation_bytes[stage] + self.times.weight_grad_bytes[stage]
        split = self.policy.weights != "full" and after <= self.problem.room_bytes[rank] * SLACK
        return Action(stage, "I" if split else "B", self.done_b[stage])

    def start(self, rank: int, action: Action, now: float) -> None:
        t, (stage, kind, k) = self.times, action
        end = self.free[rank] = now + t.seconds(stage, kind)
        self.out[rank].append(action)
        if kind == "F":
            self.last[rank] = "F"
            self.held[rank] += t.activation_bytes[stage]
            self.done_f[stage] += 1
            self.arrive(self.missing_b, self.ready_b, stage, k, end)
            for edge in self.out_of[stage]:
                when = self.send(rank, edge.target, end, edge.forward_seconds)
                self.arrive(self.missing_f, self.ready_f, edge.target, k, when)
        elif kind == "W":
            self.owed[rank].popleft()
            self.held[rank] -= t.weight_grad_bytes[stage]
        else:
            self.last[rank] = "B"
            self.held[rank] -= t.activation_bytes[stage]
            self.done_b[stage] += 1
            for edge in self.into[stage]:
                when = self.send(rank, edge.source, end, edge.backward_seconds)
                self.arrive(self.missing_b, self.ready_b, edge.source, k, when)
            if kind == "I":
                self.held[rank] += t.weight_grad_bytes[stage]
                self.owed[rank].append(Action(stage, "W", k))
                if self.policy.weights == "eager":
                    self.start(rank, self.owed[rank][0], end)
                    return
        heapq.heappush(self.heap, (self.free[rank], rank))

    def send(self, rank: int, stage: int, end: float, seconds: float) -> float:
        receiver = self.rank_of[stage]
        if receiver == rank:
            return end
        start = max(end, self.link_free.get((rank, receiver), 0.0))
        self.link_free[rank, receiver] = start + seconds
        return start + seconds

    def arrive(self, missing: list[list[int]], ready: list[list[float]], stage: int, k: int, when: float) -> None:
        missing[stage][k] -= 1
        ready[stage][k] = max(ready[stage][k], when)
        if not missing[stage][k]:
            rank = self.rank_of[stage]
            heapq.heappush(self.heap, (max(ready[stage][k], self.free[rank]), rank))
