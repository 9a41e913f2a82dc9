"""The band of errors that a prediction is shown with."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import ClusterError
from autopar.plans.clusters import as_trainer
from hardware_profiles import ProfileError, error_band, load_cluster, published_errors


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = tmp_path / "errors.toml"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(published_errors, "_FILE", path)
    published_errors.error_bands.cache_clear()


@pytest.fixture(autouse=True)
def forgotten() -> object:
    yield
    published_errors.error_bands.cache_clear()


BANDS = """
[nanotron."H100-SXM-80GB"]
rows = 20
seconds_median = 0.07
seconds_90 = 0.2
[nanotron.any]
memory_rows = 9
memory_median = 0.03
memory_90 = 0.1
"""


def test_the_nearest_band_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, monkeypatch, BANDS)
    near = error_band(load_cluster("dgx-h100 as nanotron"))
    assert near is not None and near.rows == 20 and near.seconds_90 == 0.2 and near.memory_median is None
    other = error_band(load_cluster("dgx-a100 as nanotron"))
    assert other is not None and other.device == "any" and other.memory_90 == 0.1
    assert error_band(load_cluster("dgx-h100")) is None


def test_a_field_that_is_unknown_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, monkeypatch, BANDS + "seconds_best = 0.01\n")
    with pytest.raises(ProfileError, match="seconds_best"):
        error_band(load_cluster("dgx-h100 as nanotron"))


def test_the_table_of_this_project_can_be_read() -> None:
    for (software, device), band in published_errors.error_bands().items():
        assert (band.software, band.device) == (software, device)
        assert band.rows + band.memory_rows >= 5
        for value in (band.seconds_median, band.seconds_90, band.memory_median, band.memory_90):
            assert value is None or value >= 0


def test_a_cluster_as_a_trainer_uses_it() -> None:
    assert as_trainer("dgx-h100-x2", "nemo") == "dgx-h100-x2 as nemo" == as_trainer("dgx-h100-x2 as nemo", "nemo")
    assert load_cluster(as_trainer("dgx-h100", "megatron-2023")).software.name == "megatron-2023"
    with pytest.raises(ClusterError, match="is for nemo, and --as says nanotron"):
        as_trainer("dgx-h100 as nemo", "nanotron")
    with pytest.raises(ClusterError, match="unknown software 'megatron'"):
        as_trainer("dgx-h100", "megatron")
