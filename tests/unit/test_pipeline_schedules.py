"""Schedules as data: text and back, what `validate` refuses, and orders equal to torch.distributed.pipelining's."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

from autopar.planner.inter_op.candidates import PipelineOptions
from cost_models.schedules import (
    SCHEDULES,
    Action,
    Overlap,
    Schedule,
    allows,
    build,
    forward_only,
    loop_placement,
    parse,
    simulate,
    times,
    usual,
    v_placement,
)

ALLOWED = [
    ("gpipe", 3, 3, 5), ("1f1b", 4, 4, 2), ("interleaved-1f1b", 6, 3, 6), ("zb-h1", 4, 4, 7), ("zb-h1", 8, 4, 8),
    ("zb-v", 6, 3, 2), ("zb-v", 8, 4, 11), ("dualpipe-v", 8, 4, 9),
]  # fmt: skip


def torch_order(name: str, n_stages: int, n_ranks: int, n_microbatches: int) -> list[list[str]]:
    """The computations of torch's lists, in torch's own text; its constructors would want a process group."""
    cls = {
        "gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B, "interleaved-1f1b": theirs.ScheduleInterleaved1F1B,
        "zb-h1": theirs.ScheduleInterleavedZeroBubble, "zb-v": theirs.ScheduleZBVZeroBubble,
        "dualpipe-v": theirs.ScheduleDualPipeV,
    }[name]  # fmt: skip
    it = cls.__new__(cls)
    it._n_microbatches = n_microbatches
    it._num_stages = it.num_stages = n_stages
    it.pp_group_size = n_ranks
    it.n_local_stages = n_stages // n_ranks
    it.number_of_rounds = max(1, n_microbatches // n_ranks)
    it.microbatches_per_round = n_microbatches // it.number_of_rounds
    if name in ("gpipe", "1f1b"):
        order = it._get_pipeline_order()
    else:
        order = {rank: it._calculate_single_rank_operations(rank) for rank in range(n_ranks)}
    return [[str(a) for a in order[rank] if a is not None and a.is_compute_op] for rank in range(n_ranks)]


def our_order(schedule: Schedule) -> list[list[str]]:
    return [[str(step) for step in row] for row in schedule.rows]


class Recorder:
    """A stage that writes down what torch's schedule asks of it."""

    has_backward, is_last = True, False

    def __init__(self, stage_index: int):
        self.stage_index = stage_index
        self.log: list[str] = []

    def forward_one_chunk(self, microbatch, *args, **kwargs) -> None:
        self.log.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, *args, **kwargs) -> None:
        self.log.append(f"{self.stage_index}B{microbatch}")

    def no_transfers(self, microbatch) -> list:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers

    def perform_reduce_grad(self, *args) -> None:
        pass


def torch_steps(name: str, n_stages: int, n_microbatches: int) -> list[list[str]]:
    """What torch's schedules of one stage a rank do, by letting them do it."""
    rows = []
    for s in range(n_stages):
        cls = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}[name]
        it = cls.__new__(cls)
        it._n_microbatches, it._num_stages, it._stage = n_microbatches, n_stages, Recorder(s)
        it._internal_losses, it._loss_fn, it.scale_grads, it._stage_initialized = [], None, True, True
        it._has_backward = True
        it._initialize_stage = lambda *args: None
        it._step_microbatches([()] * n_microbatches, [{}] * n_microbatches)
        rows.append(it._stage.log)
    return rows


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_a_rank_as_torch(name):
    for n in (1, 2, 3, 4, 7, 8, 16):
        for m in (1, 2, 3, 4, 5, 8, 16, 17, 33):
            ours = our_order(build(name, n, n, m))
            assert ours == torch_steps(name, n, m)
            wanted = torch_order(name, n, n, m)
            if name == "gpipe":
                assert ours == wanted
            elif m >= n:  # the list of the last rank begins with microbatch 1 (see builders)
                assert ours[:-1] == wanted[:-1]


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-h1"])
def test_rounds_as_torch(name):
    compared = 0
    for n_ranks in (1, 2, 3, 4, 8):
        for n_local in (1, 2, 3, 4):
            for m in (1, 2, 3, 4, 6, 8, 9, 10, 16, 24):
                if m % max(1, m // n_ranks) == 0:
                    n = n_ranks * n_local
                    assert our_order(build(name, n, n_ranks, m)) == torch_order(name, n, n_ranks, m)
                    compared += 1
    assert compared > 120


@pytest.mark.parametrize("name", ["zb-v", "dualpipe-v"])
def test_v_as_torch(name):
    for n_ranks in (1, 2, 3, 4, 5, 8):
        for m in (1, 2, 3, 4, 5, 7, 8, 10, 15, 16, 17, 40):
            if name == "zb-v" or m >= 2 * n_ranks:
                schedule = build(name, 2 * n_ranks, n_ranks, m)
                assert our_order(schedule) == torch_order(name, 2 * n_ranks, n_ranks, m)
                held = generate_rank_to_stage_mapping(n_ranks, 2 * n_ranks, style="v")
                assert [list(s) for s in schedule.stages_of_rank] == [held[r] for r in range(n_ranks)]


def test_torch_parses_our_text():
    for name, n, p, m in ALLOWED:
        for row in build(name, n, p, m).rows:
            for step in row:
                assert str(theirs._Action.from_str(str(step))) == str(step)


def test_every_schedule_is_valid_and_runs():
    for name in SCHEDULES:
        built = 0
        for n_ranks in range(1, 7):
            for n_local in (1, 2, 3):
                for m in range(1, 14):
                    try:
                        schedule = build(name, n_ranks * n_local, n_ranks, m)
                    except ValueError:
                        continue
                    simulate(schedule.validate(), times(schedule.n_stages, 1.0, 1.3, 0.6, transfer_seconds=0.2))
                    built += 1
        assert built >= 40, (name, built)


def test_zb_h1_takes_any_number_of_microbatches():
    for m in (5, 7, 11):
        build("zb-h1", 4, 4, m).validate()


def test_forward_only():
    for placement in (None, loop_placement(8, 4), v_placement(8, 4), ((0, 7), (1, 2, 3), (4, 5, 6))):
        schedule = forward_only(8, 5, placement)
        timeline = simulate(schedule, times(8))
        assert sum(len(row) for row in schedule.rows) == 8 * 5
        assert max(timeline.peak_bytes) == 0
    assert simulate(forward_only(4, 6), times(4)).makespan_seconds == 4 - 1 + 6


def test_placements():
    assert loop_placement(6, 3) == ((0, 3), (1, 4), (2, 5))
    assert v_placement(6, 3) == ((0, 5), (1, 4), (2, 3))
    assert v_placement(9, 3) == ((0, 5, 6), (1, 4, 7), (2, 3, 8))
    with pytest.raises(ValueError, match="7 stages on 3 ranks"):
        v_placement(7, 3)


def test_text_and_back():
    for name, n, p, m in ALLOWED:
        schedule = build(name, n, p, m)
        assert parse(schedule.text()) == schedule
    schedule = forward_only(4, 3, v_placement(4, 2))
    assert parse("# a comment\n\n" + schedule.text()) == schedule
    assert build("1f1b", 2, 2, 2).text() == (
        "schedule 1f1b stages 2 microbatches 2\nrank 0 holds 0: 0F0 0F1 0B0 0B1\nrank 1 holds 1: 1F0 1B0 1F1 1B1\n"
    )
    assert str(Overlap(Action(0, "F", 4), Action(7, "B", 1))) == "(0F4;7B1)OVERLAP_F_B"


GOOD = "schedule x stages 2 microbatches 1\nrank 0 holds 0: 0F0 0B0\nrank 1 holds 1: 1F0 1I0 1W0\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1W0", "1X0", r"line 3, rank 1, action 2: '1X0' is no action"),
        ("1W0", "1W", r"line 3, rank 1, action 2: '1W' is no action"),
        ("1W0", "1W0,", r"'1W0,' is no action"),
        ("stages 2", "stages two", r"line 1: .* should read 'schedule NAME"),
        ("rank 1 holds", "rank 2 holds", r"line 3: rank 2 where rank 1 is expected"),
        ("rank 1 holds 1:", "rank 1:", r"line 3: .* should read 'rank R holds"),
        ("1W0", "", r"stage 1, microbatch 0: 1F0 1I0, but needs 1F0 1B0 or 1F0 1I0 1W0"),
        ("1W0", "1W0 1W0", r"stage 1, microbatch 0: 1F0 1I0 1W0 1W0, but"),
        ("0F0 0B0", "0B0 0F0", r"stage 0, microbatch 0: 0B0 0F0, but .* in this order"),
        ("1F0 1I0", "1I0 1F0", r"stage 1, microbatch 0"),
        ("0B0", "1B0", r"rank 0, action 1: 1B0 is of a stage that this rank does not hold"),
        ("0B0", "0B1", r"0B1 is of a microbatch that does not exist: there are 1"),
        ("rank 1 holds 1:", "rank 1 holds 0 1:", r"stage 0 is on ranks \[0, 1\]"),
        ("rank 1 holds 1:", "rank 1 holds:", r"stage 1 is on no rank"),
        ("rank 1 holds 1:", "rank 1 holds 1 2:", r"stage 2 on rank 1 does not exist"),
        ("0F0 0B0", "(0F0;0B0)OVERLAP_F_B", r"overlaps a backward with its own forward"),
        ("1I0 1W0", "1I0 (1W0;1F0)OVERLAP_F_B", r"must pair a forward with a backward"),
    ],
)
def test_parse_is_strict(old, new, message):
    assert parse(GOOD).n_ranks == 2
    assert old in GOOD
    with pytest.raises(ValueError, match=message):
        parse(GOOD.replace(old, new))


def test_parse_refuses_nothing_and_no_rows():
    for text, message in (("", "empty"), ("schedule x stages 1 microbatches 1", "no rows")):
        with pytest.raises(ValueError, match=message):
            parse(text)


def test_forward_only_refuses_backwards():
    with pytest.raises(ValueError, match="stage 0, microbatch 0: 0F0 0B0, but needs 0F0"):
        parse(GOOD.replace("microbatches 1", "microbatches 1 forward-only"))


def test_validate_lists_everything():
    schedule = build("1f1b", 4, 4, 8)
    dropped = dataclasses.replace(schedule, rows=tuple(row[:-2] for row in schedule.rows))
    with pytest.raises(ValueError) as caught:
        dropped.validate()
    assert all(f"stage {s}, microbatch 7" in str(caught.value) for s in range(4))


@pytest.mark.parametrize(
    ("name", "counts", "message"),
    [
        ("1f1b", (8, 4, 4), "8 stages on 4 ranks.*interleaved-1f1b"),
        ("gpipe", (2, 4, 4), "2 stages on 4 ranks"),
        ("interleaved-1f1b", (7, 4, 8), "7 stages on 4 ranks"),
        ("interleaved-1f1b", (8, 4, 9), "9 microbatches on 4 ranks in 2 rounds.*use 8 or 12"),
        ("zb-v", (4, 4, 8), "4 stages on 4 ranks: use 8"),
        ("dualpipe-v", (8, 4, 7), "7 for 8 stages"),
        ("zb-h1", (4, 4, 0), "0 microbatches"),
        ("alphabetical", (4, 4, 4), "known: gpipe, 1f1b"),
    ],
)
def test_counts_that_do_not_go(name, counts, message):
    with pytest.raises(ValueError, match=message):
        build(name, *counts)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_what_is_allowed_can_be_built(name):
    seen = set()
    for counts in itertools.product(range(10), range(6), range(13)):
        try:
            build(name, *counts)
            built = True
        except ValueError:
            built = False
        assert allows(name, *counts) == built, counts
        seen.add(built)
    assert seen == {True, False}


def test_a_usual_schedule_that_is_registered_later_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "mine", dataclasses.replace(SCHEDULES["1f1b"], name="mine"))
    assert "mine" in usual() and "mine" in PipelineOptions(1).schedules
