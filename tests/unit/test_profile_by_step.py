"""Profiles that a step corrects, that were interrupted, that do not fit into memory; two of them side by side."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from unit.test_profile import DOCUMENT, graph_of

from autopar.profiling import document as documents
from autopar.profiling import measure
from autopar.profiling.by_kind import kind_of
from autopar.profiling.clock import Clock
from autopar.profiling.ops import passes_of
from autopar.profiling.update import FARTHEST, ratios, updated
from autopar.report.profile_differences import profile_differences
from hardware_profiles import load_cluster

RELU, LINEAR = DOCUMENT["ops"]


def test_a_step_corrects_the_kinds_that_it_measured() -> None:
    predicted = {"matmul": 2.0, "pointwise": 1.0, "norm": 0.01, "collective": 1.0}
    measured = {"matmul": 3.0, "pointwise": 0.5, "norm": 9.0, "collective": 4.0, "copy": 7.0}
    assert ratios(predicted, measured) == {"matmul": 1.5, "pointwise": 0.5, "collective": 4.0}
    new = updated(DOCUMENT, predicted, measured)
    assert new["ops"][LINEAR]["forward_seconds"] == 1.5 and new["ops"][LINEAR]["weight_seconds"] == 1.5
    assert new["ops"][RELU]["backward_seconds"] == 0.125
    assert new["corrections"]["matmul"]["forward"] == pytest.approx([1.5e-3, 3.0])
    # the other kinds by what all operators that were measured became: 3 s of matmul, 0.375 s of pointwise
    assert new["corrections"]["other"]["backward"][0] == pytest.approx(4e-3 * (4.5 + 0.1875) / 3.375)
    assert new["transfers"]["send_recv"] == [[1024, 1.0], [2048, 2.0]]
    assert DOCUMENT["ops"][LINEAR]["forward_seconds"] == 1.0, "what is corrected is a copy"


def test_a_ratio_that_cannot_be_is_kept_within_bounds() -> None:
    assert ratios({"matmul": 1.0}, {"matmul": 1e3}) == {"matmul": FARTHEST}
    assert ratios({"matmul": 1.0}, {"matmul": 0.0}) == {}


def test_a_corrected_profile_is_read_again(tmp_path: Path) -> None:
    new = updated(updated(DOCUMENT, {"matmul": 1.0}, {"matmul": 1.1}), {"matmul": 1.1}, {"matmul": 1.0})
    (tmp_path / "profile.json").write_text(documents.dumps(new))
    cluster = load_cluster(tmp_path / "profile.json")
    assert cluster.measured is not None and len(cluster.measured.provenance["updated"]) == 2


def test_kinds_by_name() -> None:
    for name, kind in (
        ("aten.linear.default", "matmul"), ("aten::addmm", "matmul"), ("gloo:all_reduce", "collective"),
        ("aten::native_layer_norm_backward", "norm"), ("aten::add_", "pointwise"), ("aten::_fused_adamw_", "optimizer"),
    ):  # fmt: skip
        assert kind_of(name) == kind


def test_two_profiles_side_by_side(tmp_path: Path) -> None:
    other = copy.deepcopy(DOCUMENT)
    other["ops"][LINEAR]["forward_seconds"] = 4.0
    other["ops"]["aten.exp.default(float32[4])"] = other["ops"][RELU]
    for name, document in (("a", DOCUMENT), ("b", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    rows, notes = profile_differences(*(load_cluster(tmp_path / f"{name}.json") for name in "ab"))
    assert ("matmul, 1 ops", 3.0, 6.0) in rows and ("pointwise, 1 ops", 0.375, 0.375) in rows
    assert rows[2] == (LINEAR, 3.0, 6.0) and any("1 ops are in b alone" in note for note in notes)


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sequence_that_does_not_fit_is_measured_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = passes_of(graph_of(), load_cluster("local-x1"), (), 100, 1e9)
    whole, sizes = measure._round, []

    def little_memory(lives: Any, *rest: Any, **more: Any) -> None:
        sizes.append(len(lives))
        if len(lives) > 2 or any("layer_norm" in live.op.key for live in lives):
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2 GiB")
        whole(lives, *rest, **more)

    monkeypatch.setattr(measure, "_round", little_memory)
    failed: dict[str, str] = {}
    taken, _ = measure.measure_pass(passes.passes[0], 0.5, failed, Clock(torch.device("cpu")))
    assert sizes[0] == len(passes.passes[0]) > 2
    assert [key for key in failed if "layer_norm" in key] == list(failed), "only what does not fit alone is left out"
    assert taken and not taken.keys() & failed.keys() and all(len(row.forward) >= 2 for row in taken.values())


def test_what_was_interrupted_goes_on(tmp_path: Path, one_rank: None) -> None:
    passes = passes_of(graph_of(), load_cluster("local-x1"), (), 100, 1e9)
    first = documents.Resumed(tmp_path / "partial", 0, passes)
    assert first.before(0) == []
    row = measure.Taken([1.0, 2.0], [3.0], [], [4.0])
    first.note(0, [(False, 0.25, {"op": row})])
    again = documents.Resumed(tmp_path / "partial", 0, passes)
    assert again.before(0) == [(False, 0.25, {"op": row})] and again.before(1) == []
    fewer = passes_of(graph_of(), load_cluster("local-x1"), (), 2, 1e9)
    assert documents.Resumed(tmp_path / "partial", 0, fewer).before(0) == [], "another model's rounds are not taken"
    (tmp_path / "partial.0").write_text('{"of": "')
    assert documents.Resumed(tmp_path / "partial", 0, passes).before(0) == []
