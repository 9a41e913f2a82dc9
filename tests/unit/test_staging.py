"""Staging against closed forms, the simulator's counts, and clusters that are no powers of two."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracles.pipedream import parse_profile, partition, stage_seconds

from cost_models.schedules import SCHEDULES, build, simulate, times
from cost_models.staging import NothingFits, Pool, StageCost, StagingProblem, Submesh, stage
from cost_models.staging.submeshes import alpa_sizes, any_sizes, place, pools_of, submeshes
from hardware_profiles import load_cluster

VGG16 = Path(__file__).parents[1] / "data" / "pipedream_vgg16_profile.txt"


def chain(n_blocks: int, pools: tuple[Pool, ...], speed: dict[str, float] | None = None, **options) -> StagingProblem:  # type: ignore[no-untyped-def]
    """Alike blocks of 1 + 2 seconds on one device, which split perfectly; 1 byte static and 1 kept a block."""

    def cost(first: int, last: int, s: Submesh) -> StageCost:
        n = last - first + 1
        each = n / s.n_devices / (speed or {}).get(s.device_type, 1.0)
        kept = n / s.n_devices
        return StageCost(each, 2 * each, 0.0, kept, kept, 0.0, each)

    options = {"submeshes": submeshes(pools), "classes": ["layer"] * n_blocks} | options
    return StagingProblem(n_blocks, pools, cost=cost, **options)


def pool(*node_sizes: int, memory: float = 1e9, kind: str = "gpu") -> Pool:
    return Pool(kind, node_sizes, memory)


@pytest.mark.parametrize("m", [1, 4, 32])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_alpas_recurrence_for_even_stages(n: int, m: int) -> None:
    """n stages of t seconds take (n + m - 1) t, whatever their number of blocks."""
    problem = chain(8, (pool(8),), submeshes=(Submesh("gpu", 8 // n),), all_devices=True)
    best = stage(problem, m)[0]
    t = 3.0 * 8 / n / (8 // n)
    assert len(best.stages) == n and best.seconds == pytest.approx((n + m - 1) * t)
    if m > 1:  # with one microbatch any cut is as good
        assert [s.choice.last - s.choice.first + 1 for s in best.stages] == [8 // n] * n


DEGREES = [(name, v) for name, kind in SCHEDULES.items() for v in range(1, 9) if kind.allows_degree(v)]


@pytest.mark.parametrize(("schedule", "degree"), DEGREES)
def test_estimate_is_the_simulation_for_even_stages(schedule: str, degree: int) -> None:
    fill = SCHEDULES[schedule].at(degree)
    for n, m in [(2, 8), (3, 6), (4, 8), (4, 16)]:
        parts = n * fill.chunks
        timeline = simulate(build(schedule, parts, n, m), times(parts, 1.0, 1.0, 1.0))
        one_stage = 3.0 * fill.chunks
        estimate = fill.bubble * n * one_stage + (m - fill.bubble) * one_stage
        assert estimate == pytest.approx(timeline.makespan_seconds)
        in_flight = [fill.in_flight(i, n, m) for i in range(n)]
        assert in_flight == pytest.approx([live / fill.chunks for live in timeline.live_per_rank])


def test_thirty_layers_on_four_stages_and_seven_devices() -> None:
    best = stage(chain(30, (pool(4),), submeshes=(Submesh("gpu", 1),), all_devices=True), 16)[0]
    assert sorted(s.choice.last - s.choice.first + 1 for s in best.stages) == [7, 7, 8, 8]
    assert best.seconds == pytest.approx(90 + 15 * 24)
    seven = chain(30, (pool(7),), submeshes=submeshes((pool(7),), rule=any_sizes), max_stages=3, all_devices=True)
    found = {len(c.stages): c for c in stage(seven, 16, n_candidates=3)}
    assert set(found) == {1, 2, 3}
    for c in found.values():
        assert sum(s.choice.submesh.n_devices for s in c.stages) == 7
        assert [s.choice.first for s in c.stages[1:]] == [s.choice.last + 1 for s in c.stages[:-1]]
        assert c.stages[0].choice.first == 0 and c.stages[-1].choice.last == 29


def test_faster_devices_get_more_blocks() -> None:
    pools = (pool(2, kind="fast"), pool(2, kind="slow"))
    places = (Submesh("fast", 1), Submesh("slow", 1))
    best = stage(chain(12, pools, {"fast": 2.0}, submeshes=places, all_devices=True), 64)[0]
    blocks = {k: [s.choice.last - s.choice.first + 1 for s in best.stages if s.choice.submesh.device_type == k]
              for k in ("fast", "slow")}  # fmt: skip
    assert blocks == {"fast": [4, 4], "slow": [2, 2]}
    assert best.seconds == pytest.approx(4 * 6 + 63 * 6)


def test_memory_counts_what_is_in_flight() -> None:
    """Eight blocks of 1 + 1 byte a microbatch on four devices: stage i of 4 keeps 4 - i microbatches of 2 blocks."""
    places = (Submesh("gpu", 1),)
    roomy = chain(8, (pool(4, memory=10),), submeshes=places, all_devices=True, recompute="never")
    best = stage(roomy, 8)[0]
    assert [s.needed_bytes for s in best.stages] == [10, 8, 6, 4]
    tight = chain(8, (pool(4, memory=9),), submeshes=places, all_devices=True, recompute="never")
    blocks = [s.choice.last - s.choice.first + 1 for s in stage(tight, 8)[0].stages]
    assert blocks[0] == 1 and sorted(blocks) == [1, 2, 2, 3]
    assert stage(tight, 8)[0].seconds == pytest.approx(24 + 7 * 9)
    again = stage(chain(8, (pool(4, memory=9),), submeshes=places, all_devices=True, recompute="blocks"), 8)[0]
    assert [s.choice.n_recomputed for s in again.stages] == [1, 0, 0, 0]
    assert again.seconds == pytest.approx(25 + 7 * 7)
    with pytest.raises(NothingFits, match="memory: the nearest attempt"):
        stage(roomy, 8, "gpipe")


def test_once_a_step_work_hides_behind_the_backwards_of_earlier_stages() -> None:
    def cost(first: int, last: int, s: Submesh) -> StageCost:
        return StageCost(1.0, 2.0, step_seconds=3.0 if last == 1 else 0.5)

    problem = StagingProblem(2, (pool(2),), (Submesh("gpu", 1),), cost, lambda *_: 0.25, all_devices=True)
    best = stage(problem, 4)[0]
    # 2 (1 + 2) + 2 / 4 in the pipeline, 3 more rounds; the last stage's 3 s end 3 - 2 - 1 / 4 after the first's.
    assert best.seconds == pytest.approx(6.5 + 3 * 3 + 0.75)


def test_alexnets_two_columns() -> None:
    """A block that is cheap to cut behind, and one that is not: the cut goes where little crosses."""
    stage_edge = {1: 5.0, 2: 0.1, 3: 5.0}
    problem = chain(4, (pool(2),), classes=None, submeshes=(Submesh("gpu", 1),), all_devices=True)
    moved = StagingProblem(
        4, problem.pools, problem.submeshes, problem.cost, lambda cut, a, b: stage_edge[cut], all_devices=True
    )
    best = stage(moved, 2)[0]
    assert [(s.choice.first, s.choice.last) for s in best.stages] == [(0, 1), (2, 3)]
    assert best.seconds == pytest.approx(12 + 0.2 + 6)


def test_nothing_fits_says_which_limit_and_by_how_much() -> None:
    with pytest.raises(NothingFits) as error:
        stage(chain(4, (pool(2, memory=3),), recompute="never"), 4)
    # One stage needs (4 + 4) / 2 bytes; two stages of two blocks on a device each 2 + 2 * 2.
    assert error.value.excess_bytes == pytest.approx(1.0)
    assert "4e-09 GB on each device of blocks 0-3" in str(error.value) and "or allow recomputing" in str(error.value)

    def no_head(first: int, last: int, s: Submesh) -> StageCost | None:
        return None if last == 3 else StageCost(1.0, 1.0)

    with pytest.raises(NothingFits, match="no submesh can run blocks 3 "):
        stage(StagingProblem(4, (pool(2),), (Submesh("gpu", 1),), no_head), 4)
    with pytest.raises(NothingFits, match="use all of 7 gpu"):
        stage(chain(4, (pool(7),), submeshes=(Submesh("gpu", 2),), all_devices=True), 4)
    with pytest.raises(NothingFits, match="dualpipe-v does not allow 1 microbatches"):
        stage(chain(4, (pool(2),)), 1, "dualpipe-v")


def test_wrong_problems_are_refused_all_at_once() -> None:
    with pytest.raises(ValueError, match=r"0 blocks.*recompute is 'some'.*of no pool.*does not fit 2 devices"):
        chain(0, (pool(2),), submeshes=(Submesh("tpu", 1), Submesh("gpu", 3)), recompute="some")
    with pytest.raises(ValueError, match="unknown schedule 'fifo'"):
        stage(chain(2, (pool(2),)), 1, "fifo")
    with pytest.raises(ValueError, match="all must be at least 1"):
        stage(chain(2, (pool(2),)), 0)


@pytest.mark.slow
def test_large_clusters_are_proved_optimal_in_seconds() -> None:
    pools = (pool(*[8] * 2048, memory=1.0),)
    best = stage(chain(126, pools, submeshes=submeshes(pools, rule=alpa_sizes), recompute="blocks"), 64)[0]
    assert best.lower_bound_seconds == best.seconds and sum(s.choice.submesh.n_devices for s in best.stages) <= 16384


def test_sizes_and_places() -> None:
    assert alpa_sizes(pool(8, 8)) == (1, 2, 4, 8, 16)
    assert alpa_sizes(pool(8, 7)) == (1, 2, 4, 7, 8, 15)
    assert alpa_sizes(pool(6)) == (1, 2, 4, 6)
    assert alpa_sizes(pool(*[8] * 24)) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192)
    assert [s.n_devices for s in submeshes((pool(7),))] == list(range(1, 8))
    nodes = (pool(8, 8),)
    assert place(nodes, [Submesh("gpu", 4), Submesh("gpu", 8), Submesh("gpu", 4)]) == [
        (8, 9, 10, 11), tuple(range(8)), (12, 13, 14, 15),
    ]  # fmt: skip
    assert place(nodes, [Submesh("gpu", 6), Submesh("gpu", 6), Submesh("gpu", 4)]) is None
    assert place((pool(8, 7),), [Submesh("gpu", 15)]) == [tuple(range(15))]
    (own,) = pools_of(load_cluster("dgx-h100"), 0.5)
    assert own.node_sizes == (8,) and own.memory_bytes == load_cluster("dgx-h100").devices[0].memory_bytes / 2


@pytest.mark.parametrize(
    ("n", "stages", "over_one", "over_data_parallel"),
    [(4, [(0, 15, 3), (15, 40, 1)], 3.95, 1.23), (8, [(0, 22, 7), (22, 40, 1)], 7.48, 1.20)],
)
def test_pipedreams_vgg16(n: int, stages: list, over_one: float, over_data_parallel: float) -> None:
    profile = parse_profile(VGG16.read_text(encoding="utf-8"))
    found = partition(profile, n, 1e10)
    assert [(s.first, s.end, s.replicas) for s in found.stages] == stages
    assert round(found.one_device_seconds / found.seconds, 2) == over_one
    assert round(found.data_parallel_seconds / found.seconds, 2) == over_data_parallel
    assert partition(profile, n, 1e10, count_transfers=True).stages == found.stages
    for s in found.stages:
        assert s.seconds == stage_seconds(profile, s.first, s.end, s.replicas, 1e10)


def test_pipedream_on_branches_and_bad_profiles() -> None:
    line = "node{} -- ReLU -- forward_compute_time=1, backward_compute_time=2, activation_size=8, parameter_size=0"
    nodes = "\n".join(line.format(i) for i in (4, 2, 3, 1))
    diamond = parse_profile(nodes + "\n\tnode1 -- node2\n\tnode1 -- node3\n\tnode2 -- node4\n\tnode3 -- node4")
    assert [n.name for n in diamond.nodes] == ["node1", "node2", "node3", "node4"]
    assert diamond.cuts() == (0, 1, 4) and diamond.stage_edge_bytes(2) == 16
    assert partition(diamond, 2, 1e9).seconds == pytest.approx(0.006)
    with pytest.raises(ValueError, match="line 1 is neither"):
        parse_profile("node1 -- ReLU -- nothing")
    with pytest.raises(ValueError, match="a cycle through node1, node2"):
        parse_profile("\n".join([line.format(1), line.format(2), "\tnode1 -- node2", "\tnode2 -- node1"]))
    with pytest.raises(ValueError, match="the profile lacks: node9"):
        parse_profile(line.format(1) + "\n\tnode1 -- node9")
