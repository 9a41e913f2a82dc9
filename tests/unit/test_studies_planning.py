"""The small cases of the studies of ``examples/studies`` that price and plan, and their plots."""

from __future__ import annotations

import sys
import xml.dom.minidom
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from autopar.plans.clusters import get_cluster
from hardware_profiles import load_device

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "studies"
NAMES = ("sparse_attention", "parallel_streams", "alternating_lengths")


@pytest.fixture(scope="module")
def studies() -> Iterator[dict[str, ModuleType]]:
    """The scripts, imported from their folder."""
    sys.path.insert(0, str(FOLDER))
    try:
        import alternating_lengths
        import parallel_streams
        import plotting
        import sparse_attention

        yield {
            "sparse_attention": sparse_attention, "parallel_streams": parallel_streams,
            "alternating_lengths": alternating_lengths, "plotting": plotting,
        }  # fmt: skip
    finally:
        sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("name", NAMES)
def test_a_study_is_one_script_with_a_page_and_a_plot(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 250
    page = (ROOT / "docs" / "studies" / f"{name}.md").read_text()
    assert f"python examples/studies/{name}.py" in page and f"({name}.svg)" in page
    plot = ROOT / "docs" / "studies" / f"{name}.svg"
    assert plot.stat().st_size < 60_000
    assert xml.dom.minidom.parse(str(plot)).getElementsByTagName("polyline")


# --- plots -----------------------------------------------------------------------------------------------------------


def test_a_point_without_a_value_interrupts_its_line(studies: dict[str, ModuleType], tmp_path: Path) -> None:
    plotting = studies["plotting"]
    path = tmp_path / "plot.svg"
    line = plotting.Line("a < b", [(1, 1.0), (2, 2.0), (4, None), (8, 4.0), (16, 3.0)])
    plotting.write(path, [plotting.Panel("t", "x", "y", [line], log_x=True, log_y=True)])
    document = xml.dom.minidom.parse(str(path))
    points = [e.getAttribute("points").split() for e in document.getElementsByTagName("polyline")]
    assert [len(each) for each in points] == [2, 2, 2]  # two pieces, and the legend's
    assert [e.firstChild.data for e in document.getElementsByTagName("text")][-1] == "a < b"
    places = [tuple(map(float, point.split(","))) for piece in points[:2] for point in piece]
    assert places[1][0] - places[0][0] == pytest.approx(places[3][0] - places[2][0], abs=0.2)  # powers of two
    assert places[1][1] < places[0][1], "a larger value is higher up"


def test_numbers_are_short(studies: dict[str, ModuleType]) -> None:
    show = studies["plotting"].show
    assert [show(v) for v in (0.25, 64, 512, 16384, 1.5e6, 2e9)] == ["0.25", "64", "512", "16.4k", "1.5M", "2G"]


# --- sparse attention ------------------------------------------------------------------------------------------------


@pytest.fixture
def sparse(studies: dict[str, ModuleType]) -> Any:
    return studies["sparse_attention"]


@pytest.fixture
def setting(sparse: Any) -> Any:
    return sparse.Setting(sparse.LLAMA, load_device("H100-SXM-80GB"), 64e9, 32)


def test_at_the_break_even_both_take_the_same_time(sparse: Any, setting: Any) -> None:
    rate = sparse.break_even_hits(setting, 32768)
    assert 0 < rate < 1
    assert sparse.sparse_seconds(setting, 32768, rate) == pytest.approx(sparse.full_seconds(setting, 32768), rel=1e-3)


def test_longer_contexts_and_faster_links_need_fewer_hits(sparse: Any, setting: Any) -> None:
    rates = [sparse.break_even_hits(setting, n) for n in (16384, 32768, 65536)]
    assert rates == sorted(rates, reverse=True)
    assert sparse.break_even_hits(replace(setting, link=450e9), 32768) < rates[1]
    assert sparse.break_even_hits(replace(setting, block=1), 2048) is None, "the index is the cache"


def test_copies_need_coarse_blocks(sparse: Any, setting: Any) -> None:
    fused = sparse.break_even_blocks(setting, 131072, 0.95)
    copies = sparse.break_even_blocks(replace(setting, fused=False), 131072, 0.95)
    assert copies[0] > fused[0] and copies[1] <= fused[1]
    for block, wanted in ((copies[0] // 2, False), (copies[0], True), (copies[1], True), (copies[1] * 2, False)):
        at = replace(setting, fused=False, block=block)
        assert (sparse.sparse_seconds(at, 131072, 0.95) <= sparse.full_seconds(at, 131072)) == wanted


def test_what_does_not_fit_has_no_throughput(sparse: Any, setting: Any) -> None:
    fits = int(sparse.memory_left(setting) // (131072 * setting.model.token_bytes))
    assert sparse.throughput(setting, 131072, fits, "full") > 0
    assert sparse.throughput(setting, 131072, fits + 1, "full") is None
    assert sparse.throughput(setting, 131072, fits + 1, "host") > 0


def test_large_batches_thrash(sparse: Any, setting: Any) -> None:
    rates = {b: sparse.throughput(setting, 131072, b, "host") for b in (1, 8, 32, 256)}
    assert rates[1] < rates[8] < rates[32] > rates[256]
    assert sparse.hits_at(setting, 131072, 32) == sparse.BEST_HITS > sparse.hits_at(setting, 131072, 256)


def test_the_account_of_sparse_serve(sparse: Any) -> None:
    found = sparse.compared(load_device("A100-SXM-40GB"), 32e9)
    assert found["LWM-7B over full"] == pytest.approx(2.93, rel=0.3)
    assert found["loads"] == pytest.approx(21.36, rel=0.3)
    assert found["6 to 12, one kernel"] < 1 < found["2 to 6, one kernel"]


# --- parallel streams ------------------------------------------------------------------------------------------------


@pytest.fixture
def streams(studies: dict[str, ModuleType]) -> Any:
    return studies["parallel_streams"]


def test_streams_share_parameters_and_all_learn(streams: Any) -> None:
    torch.manual_seed(0)
    shape = streams.Shape(dim=256, kv_heads=1, inner=128, layers=2, words=32, streams=3)
    model = streams.Streams(shape)
    loss = model(torch.arange(24).reshape(2, 12) % 32, torch.arange(24).reshape(2, 12).roll(-1) % 32)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert matrices == pytest.approx(shape.stored, rel=0.01)
    assert sum(p.numel() for p in model.blocks.parameters() if p.dim() > 1) == shape.parameters


def test_streams_of_one_input_are_aggregated(streams: Any) -> None:
    torch.manual_seed(0)
    shape = streams.Shape(dim=256, kv_heads=1, inner=128, layers=1, words=32, streams=2)
    model = streams.Streams(shape).double()
    x = torch.randint(0, 32, (1, 8))
    with torch.no_grad():
        whole = model(x, x)
        model.learned.copy_(model.learned[:1].expand_as(model.learned).clone())
        alike = model(x, x)  # streams alike: any weights give the same
        model.weigh.bias.copy_(torch.tensor([3.0, -3.0]))
        assert torch.allclose(model(x, x), alike) and not torch.allclose(whole, alike)


def test_a_wider_shape_has_so_many_times_the_parameters(streams: Any) -> None:
    base = streams.Shape()
    for factor in (1.27, 1.81):
        assert base.wider(factor).parameters == pytest.approx(factor * base.parameters, rel=0.01)
    assert base.parameters == pytest.approx(1.85e9, rel=0.01)


def test_streams_cost_more_in_training(streams: Any) -> None:
    shape = streams.Shape(dim=512, kv_heads=2, inner=1024, layers=2, words=1024)
    clusters = {1: "dgx-h100@0", 2: "dgx-h100@0-1"}
    one, four = (streams.trained(replace(shape, streams=p), clusters, 16, 512) for p in (1, 4))
    for n in clusters:
        assert 2 < four[n].seconds / one[n].seconds < 4.5
        assert four[n].memory_bytes > one[n].memory_bytes
        assert 0 < one[n].forward_seconds < one[n].seconds / 2
    assert one[2].seconds < one[1].seconds


def test_streams_decode_faster_for_few_requests_alone(streams: Any) -> None:
    base = streams.Shape()
    eight, wide = replace(base, streams=8), base.wider(1.81)
    most = streams.decoding_break_even(eight, wide, 512)
    assert 1 < most < 512
    assert streams.decoding(eight, most, 512)[0] <= streams.decoding(wide, most, 512)[0]
    assert streams.decoding(eight, most + 1, 512)[0] > streams.decoding(wide, most + 1, 512)[0]
    assert streams.decoding(eight, 1, 512)[1] < streams.decoding(wide, 1, 512)[1]


def test_more_tokens_for_more_parameters(streams: Any) -> None:
    assert streams.more_tokens(2e9, 1.0) == pytest.approx(1.0)
    assert 1 < streams.more_tokens(2e9, 1.2) < streams.more_tokens(2e9, 1.5)
    assert streams.more_tokens(2e8, 1e3) is None, "tokens cannot replace so many parameters"


# --- lengths that alternate ------------------------------------------------------------------------------------------

TINY = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048}  # fmt: skip


@pytest.fixture(scope="module")
def alternating(studies: dict[str, ModuleType]) -> tuple[Any, Any]:
    """The script, and its small case: 64 and 2,048 tokens on the eight devices of a machine."""
    module = studies["alternating_lengths"]
    lengths = module.Lengths.of(TINY, (64, 2048), 8192)
    return module, module.Study.of(lengths, get_cluster("dgx-h100"), [(1, 1), (1, 2), (2, 1), (2, 4), (1, 8)])


def test_freer_ways_are_never_slower(alternating: tuple[Any, Any]) -> None:
    _, study = alternating
    for share in (0.1, 0.5, 0.9):
        ways = study.ways(share)
        assert ways["fixed"].seconds >= ways["buckets"].seconds >= ways["re-planned"].seconds


def test_layouts_that_cannot_be_are_left_out(alternating: tuple[Any, Any]) -> None:
    _, study = alternating
    assert (1, 1) in study.priced[64] and (1, 1) not in study.priced[2048], "four long rows, eight ranks of data"


def test_buckets_move_nothing_and_other_layouts_do(alternating: tuple[Any, Any]) -> None:
    _, study = alternating
    assert study.move((1, 1), (1, 8)).n_bytes == 0
    there = study.move((1, 1), (2, 4))
    assert there.n_bytes > 0 and there.seconds > 0


def test_the_best_pair_counts_its_moves(alternating: tuple[Any, Any]) -> None:
    _, study = alternating
    every = [
        study.mean(a, b, 0.5) + (0 if a[0] == b[0] else study.move(a, b).seconds)
        for a in study.priced[64] for b in study.priced[2048]
    ]  # fmt: skip
    assert study.replanned(0.5).seconds == pytest.approx(min(every))
    assert study.replanned(0.5, turn=1000).seconds <= study.replanned(0.5).seconds
