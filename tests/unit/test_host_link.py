"""Copies to and from the memory of the host: rates that machines share, and what compute hides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cost_models.host_link import HostCopies, devices_of_a_host, host_copies
from hardware_profiles import HostLink, ProfileError, load_cluster, load_device

LINK = HostLink("test", 10e9, 20e9, both_fraction=0.5, shared_by=2, latency_seconds=0.0, memory_bytes=100e9,
                memory_bytes_per_second=1e12, memory_devices=4)  # fmt: skip
CLUSTER = """
name = "mine"
[devices.mine]
memory_bytes = 1e9
memory_bytes_per_second = 1e11
peak_flops = { float32 = 1e12 }
launch_seconds = 1e-6
efficiency = "hopper"
[devices.mine.host]
to_host_bytes_per_second = 1e9
to_device_bytes_per_second = 2e9
memory_bytes = 1e10
memory_bytes_per_second = 1e11
[[node]]
device = "mine"
n_devices = 2
count = 2
[[node.level]]
link = "pcie4"
[node.uplink]
link = "ib-ndr"
devices = 1
"""


def copies_of(devices: int):
    return HostCopies(LINK, devices)


def test_devices_share_a_wire_and_a_memory():
    assert copies_of(1).to_host(10e9) == pytest.approx(1.0)
    assert copies_of(2).to_host(10e9) == copies_of(8).to_host(10e9) == pytest.approx(2.0)
    assert copies_of(1).memory_bytes == 100e9 and copies_of(8).memory_bytes == 25e9


def test_both_directions_slow_each_other_down():
    assert copies_of(1).both_fraction == 0.5 and copies_of(1).both_gain == 0.0
    slow_memory = HostCopies(replace(LINK, both_fraction=0.9, memory_bytes_per_second=1.5e10))
    assert slow_memory.both_fraction == pytest.approx(12 / 22) and slow_memory.both_gain == pytest.approx(2 - 22 / 12)


def test_built_in_gpus_have_a_host_and_processors_have_none():
    h200, gb200 = load_device("H200-SXM-141GB"), load_device("GB200")
    assert 40e9 < host_copies(h200).to_host_rate < 64e9 < host_copies(gb200).to_host_rate
    with pytest.raises(ProfileError, match="a process on a CPU lives in the host's memory already"):
        host_copies(load_device("cpu-core"))


def test_a_cluster_file_says_its_own(tmp_path: Path):
    (tmp_path / "mine.toml").write_text(CLUSTER)
    cluster = load_cluster(str(tmp_path / "mine.toml"))
    assert devices_of_a_host(cluster) == 2 and devices_of_a_host(cluster, [0, 2]) == 1
    assert host_copies(cluster.devices[0]).to_device(2e9) == pytest.approx(1.0 + 1e-5)
    (tmp_path / "mine.toml").write_text(CLUSTER.replace("to_host_bytes_per_second = 1e9", "to_host = 1e9"))
    with pytest.raises(ProfileError, match="to_host_bytes_per_second: is missing"):
        load_cluster(str(tmp_path / "mine.toml"))
