"""Searched schedules: never behind the textbook at the same memory, within the limit, exact where that can be
checked."""

from __future__ import annotations

import itertools
import random

import pytest

from cost_models.schedules import (
    Action,
    Deadlock,
    Edge,
    Schedule,
    build,
    peak_bytes,
    search,
    simulate,
    times,
    v_placement,
)
from cost_models.schedules.branch_and_bound import lower_bound_seconds, solve
from cost_models.schedules.listing import SLACK, OrderProblem, list_schedule, policies


def uneven(rng: random.Random, n: int, fused: bool = False):
    def some(low: float, high: float) -> list[float]:
        return [round(rng.uniform(low, high), 2) for _ in range(n)]

    forward, halves = some(0.5, 1.5), (some(0.5, 1.5), some(0.3, 1.2))
    full = [0.8 * (i + w) for i, w in zip(*halves)] if fused else None
    return times(n, forward, *halves, full, transfer_seconds=round(rng.uniform(0, 0.4), 2))


def test_never_behind_1f1b_at_its_memory():
    for seed, (n, m) in enumerate([(2, 4), (3, 5), (4, 8), (4, 16), (8, 16)]):
        t = uneven(random.Random(seed), n, fused=bool(seed % 2))
        for limit in (list(range(n, 0, -1)), n):  # 1F1B's own on every rank, and its peak on all
            plain = simulate(build("1f1b", n, n, m), t)
            found = search(t, m, limit_live=limit, swaps=20)
            assert found.timeline.makespan_seconds <= plain.makespan_seconds
            assert found.timeline.makespan_seconds >= found.lower_bound_seconds / SLACK
            room = limit if isinstance(limit, list) else [limit] * n
            assert all(a <= b for a, b in zip(found.timeline.live_per_rank, room))
            found.schedule.validate()


def test_better_than_1f1b_and_zb_h1_when_times_are_uneven():
    t = times(8, 1.0, 1.2, 0.5, transfer_seconds=0.1)
    for m, limit in ((8, 8), (16, 16)):
        at = {name: simulate(build(name, 8, 8, m), t).makespan_seconds for name in ("1f1b", "zb-h1")}
        assert at["zb-h1"] < at["1f1b"]
        found = search(t, m, limit_live=limit)
        assert found.timeline.makespan_seconds < 0.98 * at["zb-h1"]
    scarce = search(t, 16, limit_live=8)
    assert scarce.timeline.makespan_seconds > found.timeline.makespan_seconds


def test_approaches_zero_bubble_with_memory():
    """ZB-H2 of arXiv:2401.10241 keeps 2 p - 1 microbatches and has no bubble in a rank's own span."""
    for n, m in ((4, 8), (8, 16)):
        found = search(times(n), m, limit_live=2 * n - 1, objective="span")
        assert found.timeline.span_bubble_fraction < 1e-9 and found.proven
        scarce = search(times(n), m, limit_live=n, objective="span")
        assert scarce.timeline.span_bubble_fraction > 0.02
    uneven_times = times(8, 1.0, 1.1, 0.6, transfer_seconds=0.1)
    fractions = [
        search(uneven_times, 32, limit_live=k, objective="span").timeline.span_bubble_fraction for k in (8, 16, 32)
    ]
    assert fractions[0] > fractions[1] > fractions[2] and fractions[2] < 0.01
    # With a common end, the first forwards of the last rank cannot be filled: that bound is reached too.
    found = search(times(8), 32)
    assert found.proven and found.timeline.makespan_seconds == 32 * 3 + 7


def test_never_behind_zb_v():
    for seed, (p, m) in enumerate([(2, 4), (4, 8), (4, 12)]):
        t = uneven(random.Random(seed), 2 * p)
        zbv = simulate(build("zb-v", 2 * p, p, m), t)
        found = search(t, m, v_placement(2 * p, p), limit_live=2 * p, swaps=10)
        assert found.timeline.makespan_seconds <= zbv.makespan_seconds
        assert max(found.timeline.live_per_rank) <= 2 * p


def test_bytes_limit_counts_static_and_waiting_bytes():
    t = times(3, 1, 1, 1, activation_bytes=[4, 3, 2], weight_grad_bytes=[6, 1, 2], static_bytes=[10, 20, 30])
    for limit in (34, 36, 40, [14, 23, 32], [16, 24, 32]):
        found = search(t, 6, limit_bytes=limit)
        room = [limit] * 3 if isinstance(limit, int) else limit
        assert all(a <= b for a, b in zip(found.timeline.peak_bytes, room))
        found.schedule.validate()
    with pytest.raises(
        ValueError, match=r"rank 1: one microbatch on stages \[1\] needs 23, 20 of it static, and .* 22"
    ):
        search(t, 6, limit_bytes=[14, 22, 32])
    with pytest.raises(ValueError, match="give one of them"):
        search(t, 6, limit_bytes=1, limit_live=1)


@pytest.mark.parametrize("placement", [None, v_placement(6, 3), ((0, 3), (1, 4), (2, 5)), ((0, 1, 5), (2,), (3, 4))])
def test_every_policy_makes_a_valid_schedule_within_its_memory(placement):
    """However scarce: one microbatch on each stage is enough."""
    edges = [Edge(s, s + 1, 0.1, 0.2) for s in range(5)] + [Edge(0, 4, 0.5, 0.3)]
    t = times(6, [1, 2, 1, 1, 3, 1], [1, 1, 2, 1, 1, 1], 0.7, edges=edges)
    placement = placement or tuple((s,) for s in range(6))
    for extra in (0, 1, 3, 100):
        room = tuple(float(len(stages) + extra) for stages in placement)
        problem = OrderProblem(t, 5, placement, room)
        for policy in policies(True):
            schedule = list_schedule(problem, policy).validate()
            simulate(schedule, t)
            assert all(a <= b for a, b in zip(peak_bytes(schedule, t), room)), policy


def test_full_backwards_where_waiting_for_weights_takes_too_much():
    t = times(3, activation_bytes=2.0, weight_grad_bytes=5.0)
    for room in (4.0, 7.0):
        problem = OrderProblem(t, 4, ((0,), (1,), (2,)), (room,) * 3)
        for policy in policies(False):
            schedule = list_schedule(problem, policy).validate()
            assert max(peak_bytes(schedule, t)) <= room
            split = any(a.kind == "I" for _, a in schedule.actions())
            assert split == (room == 7.0 and policy.weights != "full")


def all_rows(stage: int, m: int, fused: bool) -> list[tuple[Action, ...]]:
    """Every order of one stage's actions in which each microbatch has its forward first."""
    ways = ["FIW", "FB"] if fused else ["FIW"]
    out = []
    for kinds in itertools.product(ways, repeat=m):
        tokens = [k for k, way in enumerate(kinds) for _ in way]
        for order in sorted(set(itertools.permutations(tokens))):
            left = [list(way) for way in kinds]
            out.append(tuple(Action(stage, left[k].pop(0), k) for k in order))
    return out


def brute_force(t, m: int, room: tuple[float, ...], fused: bool) -> float:
    """The least makespan of all orders, microbatches in any order."""
    n = t.n_stages
    choices = []
    for s in range(n):
        fitting = []
        for row in all_rows(s, m, fused):
            alone = Schedule("x", n, m, ((s,),), (row,))
            if peak_bytes(alone, t)[0] <= room[s]:
                fitting.append(row)
        choices.append(fitting)
    best = float("inf")
    placement = tuple((s,) for s in range(n))
    for rows in itertools.product(*choices):
        try:
            best = min(best, simulate(Schedule("x", n, m, placement, rows), t).makespan_seconds)
        except Deadlock:
            continue
    return best


@pytest.mark.parametrize(
    ("seed", "n", "fused", "room"),
    [
        (0, 2, True, 2.0),
        (1, 2, True, 1.0),
        (2, 2, False, 2.0),
        (3, 2, True, 2.0),
        (4, 3, False, 2.0),
        (5, 3, False, 1.0),
    ],
)
def test_exact_equals_brute_force(seed, n, fused, room):
    t = uneven(random.Random(seed), n, fused)
    problem = OrderProblem(t, 2, tuple((s,) for s in range(n)), (room,) * n)
    best = brute_force(t, 2, problem.room_bytes, fused)
    solution = solve(problem)
    assert solution.proven and solution.schedule is not None
    found = simulate(solution.schedule.validate(), t)
    assert abs(found.makespan_seconds - best) < 1e-9
    assert max(found.peak_bytes) <= room
    assert lower_bound_seconds(problem) <= best + 1e-9
    assert solve(problem, best).schedule is None  # nothing is quicker than the best


def test_exact_is_at_most_the_list_schedule_and_sometimes_less():
    less = 0
    for seed in range(6):
        t = uneven(random.Random(100 + seed), 3, fused=seed % 2 == 0)
        listed = search(t, 3, limit_live=[3, 2, 2], swaps=0)
        exact = search(t, 3, limit_live=[3, 2, 2], swaps=0, exact_nodes=20_000)
        assert exact.proven
        assert exact.timeline.makespan_seconds <= listed.timeline.makespan_seconds
        assert exact.timeline.makespan_seconds >= listed.lower_bound_seconds / SLACK
        less += exact.timeline.makespan_seconds < listed.timeline.makespan_seconds * (1 - 1e-9)
    assert less


def test_exact_gives_up_where_told():
    t = uneven(random.Random(1), 4)
    problem = OrderProblem(t, 6, ((0,), (1,), (2,), (3,)), (4.0, 3.0, 2.0, 2.0))
    solution = solve(problem, max_nodes=50)
    assert not solution.proven and solution.nodes == 51


def test_swaps_pay():
    """Improvement never loses, and finds something on some of these."""
    gained = 0
    for seed in range(8):
        t = uneven(random.Random(seed), 5)
        plain, swapped = (search(t, 7, limit_live=4, swaps=k).timeline.makespan_seconds for k in (0, 60))
        assert swapped <= plain
        gained += swapped < plain * (1 - 1e-9)
    assert gained


def test_deterministic():
    t = uneven(random.Random(5), 4)
    assert search(t, 8, limit_live=4).schedule == search(t, 8, limit_live=4).schedule
