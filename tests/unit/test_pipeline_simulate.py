"""The simulator against closed forms, an independent solution of the same equations, and deadlocks."""

from __future__ import annotations

import dataclasses
import random

import pytest

from cost_models.schedules import (
    Action,
    Deadlock,
    Edge,
    Overlap,
    Schedule,
    build,
    forward_only,
    grid,
    live_at_peak,
    live_per_rank,
    live_per_stage,
    peak_bytes,
    simulate,
    times,
    v_placement,
)

STAGES = (2, 3, 4, 5, 7, 8, 12, 16, 24, 31, 33, 48, 64)
MICROBATCHES = (1, 2, 3, 5, 8, 16, 31, 32, 64, 128)


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * max(1.0, abs(a), abs(b))


def check_closed_forms(stages, microbatches, names=("gpipe", "1f1b")):
    f, b = 1.0, 2.5
    for n in stages:
        for m in microbatches:
            for name in names:
                schedule = build(name, n, n, m)
                timeline = simulate(schedule, times(n, f, 1.5, 1.0))
                assert close(timeline.makespan_seconds, (n - 1 + m) * (f + b)), (name, n, m)
                assert close(timeline.bubble_fraction, (n - 1) / (m + n - 1)), (name, n, m)
                assert close(timeline.idle_seconds[n // 2], (n - 1) * (f + b)), (name, n, m)
                expected = [m] * n if name == "gpipe" else [min(m, n - i) for i in range(n)]
                assert list(live_per_stage(schedule)) == list(live_per_rank(schedule)) == expected


def test_gpipe_and_1f1b():
    check_closed_forms(STAGES, MICROBATCHES)


@pytest.mark.slow
def test_1f1b_for_all_stages():
    check_closed_forms(range(2, 65), [*range(1, 9), 13, 27, 32, 63, 128], ("1f1b",))


def test_interleaved():
    """Megatron (arXiv:2104.04473, section 2.2): bubble over ideal time (p - 1) / (v m)."""
    for p in (2, 3, 4, 8, 16):
        for v in (2, 3, 4):
            for m in (p, 2 * p, 8 * p):
                timeline = simulate(build("interleaved-1f1b", p * v, p, m), times(p * v, 1.0, 1.0, 1.0))
                assert close(timeline.makespan_seconds, 3 * (v * m + p - 1)), (p, v, m)
                assert close(timeline.bubble_fraction, (p - 1) / (v * m + p - 1))


def test_zb_h1():
    """arXiv:2401.10241, table 2: bubble (p - 1)(F + I - W), activations of p microbatches on every rank."""
    for p in (2, 3, 4, 5, 8, 16, 32, 64):
        for m in (p, p + 1, 2 * p, 3 * p + 1):
            schedule = build("zb-h1", p, p, m)
            for f, i, w in ((1.0, 1.0, 1.0), (2.0, 2.0, 1.5)):
                timeline = simulate(schedule, times(p, f, i, w))
                assert close(timeline.makespan_seconds, m * (f + i + w) + (p - 1) * (f + i - w)), (p, m)
            assert live_per_rank(schedule) == (p,) * p


def test_zb_v():
    """The same, section 6: no bubble within a rank's own span, the memory of 1F1B (2p half stages)."""
    for p in (2, 3, 4, 8, 16):
        for m in (2 * p, 3 * p, 5 * p):
            schedule = build("zb-v", 2 * p, p, m)
            timeline = simulate(schedule, times(2 * p))
            assert close(timeline.makespan_seconds, 6 * m + p - 1), (p, m)
            assert close(timeline.span_bubble_fraction, 0.0)
            assert max(live_per_rank(schedule)) <= 2 * p


def random_times(rng: random.Random, n: int) -> object:
    def some(low: int, high: int) -> list[float]:
        return [float(rng.randint(low, high)) for _ in range(n)]

    pairs = {(s, s + 1) for s in range(n - 1)}
    pairs |= {tuple(sorted(rng.sample(range(n), 2))) for _ in range(2)}
    edges = [Edge(a, b, float(rng.randint(0, 4)), float(rng.randint(0, 4))) for a, b in sorted(pairs)]
    return times(n, some(1, 5), some(1, 5), some(1, 5), some(2, 9), edges=edges)


def relaxed(schedule: Schedule, t) -> tuple[dict[Action, float], float]:
    """Starts by relaxing the equations until nothing changes: another algorithm, slow and obvious."""
    rank_of = {s: r for r, stages in enumerate(schedule.stages_of_rank) for s in stages}
    begin = {a: 0.0 for row in schedule.flat_rows for a in row}

    def end(a: Action) -> float:
        table = {"F": t.forward_seconds, "B": t.backward_seconds, "I": t.input_seconds, "W": t.weight_seconds}
        return begin[a] + table[a.kind][a.stage]

    while True:
        arrives: dict[tuple[int, int, str, int], float] = {}
        for rank, row in enumerate(schedule.flat_rows):
            link: dict[int, float] = {}
            for a in row:
                for e in t.edges:
                    goes = (e.source == a.stage and a.kind == "F") or (e.target == a.stage and a.kind in "BI")
                    if goes:
                        to, seconds = (e.target, e.forward_seconds) if a.kind == "F" else (e.source, e.backward_seconds)
                        when = end(a)
                        if rank_of[to] != rank:
                            when = link[rank_of[to]] = max(when, link.get(rank_of[to], 0.0)) + seconds
                        arrives[a.stage, to, "F" if a.kind == "F" else "B", a.microbatch] = when
        changed = False
        for row in schedule.flat_rows:
            before = 0.0
            for a in row:
                start = before
                for (_, to, phase, k), when in arrives.items():
                    if to == a.stage and k == a.microbatch and (phase == a.kind or (phase == "B" and a.kind == "I")):
                        start = max(start, when)
                if start != begin[a]:
                    begin[a], changed = start, True
                before = end(a)
        if not changed:
            return begin, max(end(a) for a in begin)


@pytest.mark.parametrize("seed", range(8))
def test_times_satisfy_the_equations(seed):
    rng = random.Random(seed)
    for name, n, p, m in (("1f1b", 4, 4, 3), ("zb-h1", 3, 3, 4), ("zb-v", 6, 3, 3), ("interleaved-1f1b", 4, 2, 4)):
        schedule = build(name, n, p, m)
        t = random_times(rng, n)
        timeline = simulate(schedule, t)
        begin, makespan = relaxed(schedule, t)
        got = {a: s for row, starts in zip(schedule.rows, timeline.starts) for a, s in zip(row, starts)}
        assert got == begin
        assert timeline.makespan_seconds == makespan


def test_link_carries_one_transfer_at_a_time():
    schedule = build("gpipe", 2, 2, 3)
    timeline = simulate(schedule, times(2, 1.0, 1.0, 1.0, transfer_seconds=4.0))
    forwards = [t for t in timeline.transfers if t.kind == "F"]
    assert [(t.start_seconds, t.end_seconds) for t in forwards] == [(1.0, 5.0), (5.0, 9.0), (9.0, 13.0)]
    assert timeline.starts[1][:3] == (5.0, 9.0, 13.0)
    # Both directions at once: they are different links.
    backwards = [t for t in timeline.transfers if t.kind == "B"]
    assert backwards[0].start_seconds == 16.0


def test_same_rank_is_free():
    t = times(4, transfer_seconds=5.0)
    timeline = simulate(build("zb-v", 4, 2, 2), t)
    assert {(x.source, x.target) for x in timeline.transfers} == {(0, 1), (1, 0), (2, 3), (3, 2)}


def test_skip_edge_holds_the_later_stage_back():
    chain = [Edge(s, s + 1) for s in range(3)]
    plain = simulate(build("1f1b", 4, 4, 2), times(4, edges=chain))
    skip = simulate(build("1f1b", 4, 4, 2), times(4, edges=[*chain, Edge(0, 3, 10.0, 20.0)]))
    assert plain.starts[3][0] == 3.0
    assert skip.starts[3][0] == 11.0
    # The gradient over the skip comes back 20 s after the last stage's backward.
    assert skip.starts[0][schedule_place(skip, "0B0")] >= skip.ends[3][schedule_place(skip, "3B0")] + 20


def schedule_place(timeline, text: str) -> int:
    rank = int(text[0])
    return [str(s) for s in timeline.schedule.rows[rank]].index(text)


def test_memory_follows_the_order():
    t = times(2, activation_bytes=[10, 7], weight_grad_bytes=[4, 7], static_bytes=[100, 200])
    rows = (
        (
            Action(0, "F", 0),
            Action(0, "F", 1),
            Action(0, "I", 0),
            Action(0, "I", 1),
            Action(0, "W", 0),
            Action(0, "W", 1),
        ),
        (Action(1, "F", 0), Action(1, "B", 0), Action(1, "F", 1), Action(1, "B", 1)),
    )
    schedule = Schedule("x", 2, 2, ((0,), (1,)), rows).validate()
    assert peak_bytes(schedule, t) == (120, 207)
    early = dataclasses.replace(
        schedule,
        rows=((*rows[0][:1], Action(0, "I", 0), *rows[0][1:2], Action(0, "I", 1), *rows[0][4:]), rows[1]),
    )
    assert peak_bytes(early.validate(), t) == (114, 207)
    assert live_per_rank(early) == (2, 1)


def test_overlapped_pair():
    rows = ((Action(0, "F", 0), Overlap(Action(0, "F", 1), Action(0, "B", 0)), Action(0, "B", 1)),)
    schedule = Schedule("x", 1, 2, ((0,),), rows).validate()
    for overlap, wanted in ((0.0, 2 + 4 + 2 * 3.0 - 6 + 4), (1.0, 10.0 - 2.0), (0.5, 10.0 - 1.0)):
        timeline = simulate(schedule, times(1, 2.0, 1.0, 2.0, overlap=overlap))
        assert timeline.makespan_seconds == wanted
        assert timeline.bubble_fraction == 0.0
        assert [len(row) for row in timeline.starts] == [3]
    both = build("dualpipe-v", 8, 4, 12)
    apart, hidden = (simulate(both, times(8, overlap=x)).makespan_seconds for x in (0.0, 1.0))
    assert hidden < apart


def test_deadlock_names_the_ring():
    schedule = build("1f1b", 2, 2, 3)
    rows = [list(row) for row in schedule.rows]
    # Rank 0 wants the gradient of microbatch 1 before it forwards it.
    rows[0] = [Action(0, kind, k) for kind, k in (("F", 0), ("B", 0), ("B", 1), ("F", 1), ("F", 2), ("B", 2))]
    rows[1] = [Action(1, kind, k) for kind, k in (("F", 0), ("B", 0), ("F", 2), ("B", 2), ("F", 1), ("B", 1))]
    with pytest.raises(Deadlock) as caught:
        simulate(dataclasses.replace(schedule, rows=tuple(tuple(r) for r in rows)), times(2))
    text = str(caught.value)
    assert "rank 0 waits at action 2, 0B1, for 0F1 (action 3 of rank 0, itself, later in its row)" in text
    assert "rank 0 0F0" in text and "0B0" in text
    # Of two ranks: each waits for the other.
    rows[0] = [Action(0, kind, k) for kind, k in (("F", 0), ("F", 1), ("B", 1), ("F", 2), ("B", 0), ("B", 2))]
    with pytest.raises(Deadlock, match="ranks 0 -> 1 -> 0 wait for each other") as caught:
        simulate(dataclasses.replace(schedule, rows=tuple(tuple(r) for r in rows)), times(2))
    assert "rank 0 waits at action 2, 0B1, for 1B1 (action 5 of rank 1)" in str(caught.value)
    assert "rank 1 waits at action 2, 1F2, for 0F2 (action 3 of rank 0)" in str(caught.value)
    assert [len(row) for row in caught.value.timeline.starts] == [2, 2]


def test_deadlock_leaves_out_who_only_suffers():
    schedule = build("1f1b", 3, 3, 3)
    orders = ("F0 F1 F2 B0 B1 B2", "F0 F1 B1 F2 B0 B2", "F0 B0 F2 B2 F1 B1")
    rows = tuple(tuple(Action(s, a[0], int(a[1])) for a in order.split()) for s, order in enumerate(orders))
    with pytest.raises(Deadlock, match="ranks 1 -> 2 -> 1 wait for each other") as caught:
        simulate(dataclasses.replace(schedule, rows=rows).validate(), times(3))
    assert "so rank 0 cannot go on either" in str(caught.value)


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_what_nobody_computes(overlap):
    schedule = build("dualpipe-v", 4, 2, 4)
    rows = list(schedule.rows)
    rows[0] = tuple(step for step in rows[0] if str(step) != "0F1")
    with pytest.raises(Deadlock, match=r"for 0F1, which no rank computes"):
        simulate(dataclasses.replace(schedule, rows=tuple(rows)), times(4, overlap=overlap))


def test_grid():
    assert grid(build("1f1b", 2, 2, 2)) == (
        "rank 0 0F0 0F1 ........0B0---- ....0B1----\nrank 1 ....1F0 1B0---- 1F1 1B1---- ........\n"
    )
    wide = grid(simulate(build("zb-v", 8, 4, 8), times(8)), width=60)
    assert all(len(line) <= 60 + len("rank 0 ") for line in wide.splitlines())
    assert "." in grid(forward_only(4, 2, v_placement(4, 2)))


def test_wrong_times():
    with pytest.raises(ValueError, match=r"(?s)forward_seconds: 2 numbers for 3.*edge 2 -> 1.*overlap is 2"):
        times(3, [1, 2], edges=[Edge(2, 1)], overlap=2)
    with pytest.raises(ValueError, match="times of 3 stages for '1f1b' of 4"):
        simulate(build("1f1b", 4, 4, 4), times(3))
    with pytest.raises(ValueError, match="edge 0 -> 1 is given 2 times"):
        times(2, edges=[Edge(0, 1), Edge(0, 1)])


def test_stages_of_a_rank_are_counted_when_it_is_fullest() -> None:
    """Added up they are what the rank keeps at its peak; each stage's own largest numbers would be up to half more."""
    for name, n, v, m in (("interleaved-1f1b", 4, 3, 16), ("zb-h1", 4, 2, 8), ("zb-v", 4, 2, 16), ("1f1b", 4, 1, 8)):
        schedule = build(name, n * v, n, m)
        kept = [3.0 + s % 5 for s in range(n * v)]
        live = live_at_peak(schedule, kept)
        peaks = peak_bytes(schedule, times(n * v, activation_bytes=kept))
        for stages, peak in zip(schedule.stages_of_rank, peaks, strict=True):
            assert peak <= sum(kept[s] * live[s] for s in stages) <= peak + sum(kept[s] for s in stages)
        assert all(a <= b for a, b in zip(live, live_per_stage(schedule), strict=True))
        assert (sum(live) < sum(live_per_stage(schedule))) == (v > 1)
