"""PipeDream and 2BW: training executed action by action, with stashed versions, equals the papers' delayed updates."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cost_models.schedules import (
    ASYNCHRONOUS_KINDS,
    SCHEDULES,
    build,
    live_per_stage,
    simulate,
    times,
    usual,
    weight_versions,
)
from cost_models.schedules.asynchronous import (
    ASYNCHRONOUS,
    AsynchronousSchedule,
    pipedream,
    pipedream_2bw,
    steady,
    stream,
    updates_of_step,
)

RATE = 0.05


def data(n_stages: int, m: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """First weights of linear stages, and inputs and targets of each microbatch."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(3, 3)) / 2 + np.eye(3) for _ in range(n_stages)]
    return weights, rng.normal(size=(m, 3)), rng.normal(size=(m, 3))


def gradients(weights: list[np.ndarray], x: np.ndarray, target: np.ndarray) -> list[np.ndarray]:
    """Of 0.5 |W_{S-1} .. W_0 x - target|^2 for every stage."""
    seen = [x]
    for w in weights:
        seen.append(w @ seen[-1])
    g, out = seen[-1] - target, []
    for w, a in zip(reversed(weights), reversed(seen[:-1])):
        out.append(np.outer(g, a))
        g = w.T @ g
    return out[::-1]


def execute(case: AsynchronousSchedule) -> list[np.ndarray]:
    """The last weights, by running each action when the simulator says, each stage with what it has itself.

    A stage keeps as many versions as `versions_held` says and forgets the others; `versions` says which one to take.
    """
    schedule = case.schedule
    n, m = schedule.n_stages, schedule.n_microbatches
    first, inputs, targets = data(n, m)
    kept = [{0: w} for w in first]
    newest, summed = [0] * n, [np.zeros((3, 3)) for _ in range(n)]
    versions, held = case.versions(), case.versions_held()
    in_flight: list[set[int]] = [set() for _ in range(n)]
    activations: dict[tuple[int, int], np.ndarray] = {(0, k): inputs[k] for k in range(m)}
    arriving: dict[tuple[int, int], np.ndarray] = {}
    timeline = simulate(schedule, times(n, 1.0, 1.3, 0.4))
    order = sorted(
        (start, rank, action)
        for rank, row in enumerate(schedule.rows)
        for start, action in zip(timeline.starts[rank], row)
    )
    for _, _, action in order:
        s, kind, k = action
        w = kept[s][versions[s, k]]  # a KeyError if it was forgotten, or is not made yet
        if kind == "F":
            in_flight[s].add(k)
            out = w @ activations[s, k]
            if s + 1 < n:
                activations[s + 1, k] = out
            else:
                arriving[s, k] = out - targets[k]
            continue
        in_flight[s].remove(k)
        g = arriving.pop((s, k))
        summed[s] += np.outer(g, activations.pop((s, k)))
        if s:
            arriving[s - 1, k] = w.T @ g
        if case.updates(action):
            latest = kept[s][newest[s]]
            newest[s] += 1
            used = {versions[s, j] for j in in_flight[s]} | {newest[s] - 1 if case.delay else newest[s]}
            kept[s] = {v: x for v, x in kept[s].items() if v in used}
            kept[s][newest[s]] = latest - RATE * summed[s] / case.n_accumulate
            summed[s] = np.zeros((3, 3))
            assert len(kept[s]) <= held[s], (action, sorted(kept[s]))
    return [kept[s][newest[s]] for s in range(n)]


def test_pipedream_is_the_papers_delayed_update():
    for n, m in ((1, 4), (2, 5), (3, 12), (3, 2), (4, 9)):
        first, inputs, targets = data(n, m)
        history = [first]
        for t in range(m):
            # w_s(t - S + 1 + s): the last stage is up to date.
            seen = [history[max(0, t - (n - 1 - s))][s] for s in range(n)]
            grads = gradients(seen, inputs[t], targets[t])
            history.append([w - RATE * g for w, g in zip(history[-1], grads)])
        got = execute(pipedream(n, m))
        for a, b in zip(got, history[-1]):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
        if n > 1 and m > n:  # and is not what one device would give
            plain = first
            for t in range(m):
                plain = [w - RATE * g for w, g in zip(plain, gradients(plain, inputs[t], targets[t]))]
            assert not np.allclose(got[0], plain[0], rtol=1e-6)


def test_2bw_is_delayed_by_one_batch():
    for n, m, batch in ((3, 12, 3), (3, 12, 4), (2, 8, 2), (4, 8, None), (1, 3, 1)):
        case = pipedream_2bw(n, m, batch)
        size = case.n_accumulate
        first, inputs, targets = data(n, m)
        history = [first]
        for t in range(m // size):
            seen = history[max(0, t - 1)]
            mean = [np.zeros((3, 3)) for _ in range(n)]
            for k in range(t * size, (t + 1) * size):
                mean = [a + g / size for a, g in zip(mean, gradients(seen, inputs[k], targets[k]))]
            history.append([w - RATE * g for w, g in zip(history[-1], mean)])
        for a, b in zip(execute(case), history[-1]):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_versions_that_microbatches_see():
    versions = pipedream(4, 10).versions()
    assert [versions[0, k] for k in range(6)] == [0, 0, 0, 0, 1, 2]
    assert [versions[3, k] for k in range(6)] == [0, 1, 2, 3, 4, 5]
    versions = pipedream_2bw(2, 8, 2).versions()
    assert [versions[0, k] for k in range(8)] == [versions[1, k] for k in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]


def test_memory_account():
    for n in (1, 2, 3, 4, 8):
        assert pipedream(n, 4 * n).versions_held() == tuple(range(n, 0, -1))
        assert pipedream_2bw(n, 4 * n).versions_held() == (2,) * n
    assert pipedream(4, 2).versions_held()[0] < 4  # a short stream needs fewer
    t = times(3, activation_bytes=10.0, static_bytes=[100.0, 100.0, 100.0])
    weights = (7.0, 7.0, 5.0)
    assert pipedream(3, 9).peak_bytes(t, weights) == (100 + 30 + 14, 100 + 20 + 7, 100 + 10)
    assert pipedream_2bw(3, 9).peak_bytes(t, weights) == (100 + 30 + 7, 100 + 20 + 7, 100 + 10 + 5)
    with pytest.raises(ValueError, match="2 stages for 3"):
        pipedream(3, 9).peak_bytes(t, (1.0, 1.0))


def test_never_drains():
    """The point of it: one bubble for the whole stream."""
    t = times(4)
    assert simulate(pipedream(4, 64).schedule, t).makespan_seconds == (64 + 3) * 3


def test_a_full_pipeline_has_no_bubble():
    t = times(4, forward_seconds=[1, 2, 1, 1])
    for name in ASYNCHRONOUS_KINDS:
        schedule = build(name, 4, 4, 6)
        step = steady(schedule, t, [0.0] * 4)
        assert step.makespan_seconds == 6 * 4  # of the slowest stage
        assert step.idle_seconds == (6, 0, 6, 6)
        for rank, row in enumerate(step.schedule.flat_rows):
            for kind in "FB":
                assert sorted(a.microbatch for a in row if a.kind == kind) == list(range(6)), (name, rank)
        assert simulate(build("1f1b", 4, 4, 6), t).makespan_seconds == 31  # with its bubble
        with_updates = steady(schedule, t, [0.0, 3.0, 0.0, 0.0])
        assert with_updates.makespan_seconds == pytest.approx(6 * 4 + 3)
    slow = steady(build("pipedream", 3, 3, 3), times(3, transfer_seconds=5.0))  # too few in flight to hide that
    assert slow.makespan_seconds > 3 * 3 and 0 < slow.bubble_fraction < 1


def test_a_stream_follows_from_its_first_step():
    for name, make in ASYNCHRONOUS.items():
        first = build(name, 3, 3, 6)
        steps = stream(first, 4)
        assert steps.schedule.rows == make(3, 24).schedule.rows
        assert updates_of_step(first) == 6 // steps.n_accumulate
        with pytest.raises(ValueError, match="has other rows than those of its first step"):
            stream(dataclasses.replace(build("gpipe", 3, 3, 6), name=name), 2)


def test_records_say_what_the_stream_keeps():
    for name in ASYNCHRONOUS_KINDS:
        for n in (2, 3, 5):
            first = build(name, n, n, 2 * n)
            assert weight_versions(first) == stream(first, 4).versions_held()
            assert live_per_stage(first) == live_per_stage(stream(first, 4).schedule)
            kind = ASYNCHRONOUS_KINDS[name]
            assert [kind.in_flight(i, n, 2 * n, 1) for i in range(n)] == list(live_per_stage(first))
    assert weight_versions(build("1f1b", 3, 3, 6)) == (1, 1, 1)


def test_refused_counts():
    with pytest.raises(ValueError, match=r"accumulates 3 microbatches over 4 stages.*at least 4"):
        pipedream_2bw(4, 12, 3)
    with pytest.raises(ValueError, match="10 microbatches in batches of 4"):
        pipedream_2bw(4, 10)


def test_apart_from_the_others():
    assert not set(ASYNCHRONOUS) & set(SCHEDULES) and set(ASYNCHRONOUS) == set(ASYNCHRONOUS_KINDS)
    assert not set(ASYNCHRONOUS) & set(usual())
    for name, make in ASYNCHRONOUS.items():
        assert make(2, 4).schedule.validate().name == name
