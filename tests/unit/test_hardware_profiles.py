"""Profiles load strictly, report every failure at once, and say what they describe."""

from __future__ import annotations

import ast
import copy
import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import hardware_profiles
from hardware_profiles import (
    ProfileError,
    abstract_cluster,
    budget_of,
    build_cluster,
    list_clusters,
    list_devices,
    load_cluster,
    load_device,
)

PACKAGE = Path(hardware_profiles.__file__).parent

MIXED = """
[[node]]
name = "fast"
count = 2
device = "H100-SXM-80GB"
n_devices = 8
[[node.level]]
link = "nvlink4"
[node.uplink]
link = "ib-ndr"

[[node]]
name = "old"
devices = ["A100-SXM-80GB", "A100-SXM-80GB", "my-gpu"]
[[node.level]]
link = "nvlink3"
[node.uplink]
link = "slow-up"
down = "ib-hdr"
devices = 3

[links.slow-up]
bandwidth_bytes_per_second = 6e9
latency_seconds = 5e-6
curve = "infiniband"

[devices.my-gpu]
memory_bytes = 40e9
memory_bytes_per_second = 1.5e12
launch_seconds = 4e-6
peak_flops = { float32 = 19e12, bfloat16 = 300e12 }
efficiency = "ampere"
"""


def mixed() -> dict:
    return tomllib.loads(MIXED)


@pytest.mark.parametrize("name", list_clusters())
def test_built_in_cluster_loads(name):
    cluster = load_cluster(name)
    assert cluster.n_devices >= 2
    assert name in cluster.describe()
    assert load_cluster(name) is cluster  # the same object, so that it can key caches


@pytest.mark.parametrize("name", ["dgx-v100", "dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_dgx_suffix_multiplies_nodes(name):
    assert load_cluster(name).n_devices == 8
    four = load_cluster(f"{name}-x4")
    assert (four.n_devices, four.n_nodes) == (32, 4)
    assert four.node_of[7] == 0 and four.node_of[8] == 1


def test_local_suffix_multiplies_processes_that_share_the_cores():
    assert [load_cluster(f"local-x{n}").n_devices for n in (1, 2, 4)] == [1, 2, 4]
    two, four = load_cluster("local").device(0), load_cluster("local-x4").device(0)
    assert four.peak_flops["float32"] == pytest.approx(two.peak_flops["float32"] / 2)
    assert not load_cluster("local").overlap


def test_every_device_names_the_source_of_every_number():
    assert len(list_devices()) >= 23
    for name in list_devices():
        device = load_device(name)
        assert {"memory_bytes", "memory_bytes_per_second", "launch_seconds"} <= device.sources.keys(), name
        if name != "cpu-core":  # one source for all of its rates
            assert {f"peak_flops.{dtype}" for dtype in device.peak_flops} <= device.sources.keys(), name
        assert all(device.sources.values()), name


def test_h100_numbers():
    device = load_device("H100-SXM-80GB")
    assert device.peak_flops["bfloat16"] == 989e12
    assert device.peak_flops["float32"] == 67e12 < device.peak_flops["tf32"]
    assert device.memory_bytes == 80e9


def test_mixed_cluster_file(tmp_path):
    (tmp_path / "mixed.toml").write_text(MIXED)
    (tmp_path / "mixed.json").write_text(json.dumps(mixed()))
    for file in ("mixed.toml", "mixed.json"):
        cluster = load_cluster(tmp_path / file)
        assert cluster.name == "mixed"
        assert (cluster.n_devices, cluster.n_nodes) == (19, 3)
        assert cluster.device(18).name == "my-gpu"
        up, down = cluster.graph.edges["old2/nic0", "fabric"], cluster.graph.edges["fabric", "old2/nic0"]
        assert up["link"].bandwidth_bytes_per_second == 6e9
        assert down["link"].bandwidth_bytes_per_second == 25e9


def test_all_failures_are_listed_at_once():
    document = mixed()
    document["node"][0]["device"] = "H100-SXM-80G"
    document["node"][0]["n_device"] = 8
    document["node"][1]["level"][0]["link"] = "nvlink33"
    document["node"][1]["uplink"]["devices"] = "three"
    del document["links"]["slow-up"]["latency_seconds"]
    document["devices"]["my-gpu"]["memory_bytes"] = -1
    document["devices"]["my-gpu"]["peak_flops"]["float32"] = "19e12"
    document["devices"]["my-gpu"]["efficiency"] = "amper"
    with pytest.raises(ProfileError) as caught:
        build_cluster(document, "mixed.toml")
    text = str(caught.value)
    for expected in (
        "mixed.toml: 8 problems",
        "node[0].device: got unknown device 'H100-SXM-80G': did you mean 'H100-SXM-80GB'?",
        "node[0].n_device: is an unknown key: did you mean 'n_devices'?",
        "node[1].level[0].link: got unknown link 'nvlink33': did you mean 'nvlink3'?",
        "node[1].uplink.devices: got str 'three', expected a whole number >= 1",
        "links.slow-up.latency_seconds: is missing, add a number",
        "devices.my-gpu.memory_bytes: got -1, expected a number > 0",
        "devices.my-gpu.peak_flops.float32: got str '19e12', expected a number",
        "devices.my-gpu.efficiency: got unknown family 'amper': did you mean 'ampere'?",
    ):
        assert expected in text
    assert isinstance(caught.value, ValueError) and len(caught.value.failures) == 8


def _set(document: dict, path: str, value: object) -> None:
    *parents, last = path.split(".")
    for key in parents:
        document = document[int(key) if key.isdigit() else key]  # type: ignore[index]
    document[last] = value


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("nodes", 3, "nodes: is an unknown key"),
        ("node", 3, "node: got int 3, expected a list of tables"),
        ("node.0.count", 0, "node[0].count: got int 0, expected a whole number >= 1"),
        ("node.0.count", True, "node[0].count: got bool True"),
        ("node.0.device", None, "node[0].device: got unknown device 'None'"),
        ("node.1.devices", [], "node[1].devices: got [], expected a list of device names"),
        ("node.0.uplink", "ib-ndr", "node[0].uplink: got str 'ib-ndr', expected a table"),
        ("links.slow-up.bandwidth_bytes_per_second", 0, "got 0, expected a number > 0"),
        ("links.slow-up.bandwidth_bytes_per_second", float("nan"), "got nan, expected a number > 0"),
        ("links.slow-up.curve", "ib", "unknown curve 'ib'"),
        ("devices.my-gpu.peak_flops", {}, "devices.my-gpu.peak_flops: is empty"),
        ("overlap", "no", "overlap: got str 'no', expected true or false"),
    ],
)
def test_one_failure(path, value, expected):
    document = copy.deepcopy(mixed())
    _set(document, path, value)
    if path == "node.0.device":
        document["node"][0]["device"] = "None"
    with pytest.raises(ProfileError) as caught:
        build_cluster(document, "mixed.toml")
    assert expected in str(caught.value)


def test_failures_that_need_the_whole_file():
    document = mixed()
    del document["node"][0]["uplink"]
    with pytest.raises(ProfileError, match=r"node\[0\].uplink: is missing, the cluster has several nodes"):
        build_cluster(document, "mixed.toml")
    with pytest.raises(ProfileError, match="not every device reaches every other one"):
        build_cluster({"node": [{"device": "L4", "n_devices": 2}]}, "two.toml")
    with pytest.raises(ProfileError, match="node: is missing"):
        build_cluster({}, "empty.toml")


def test_unknown_names_and_unreadable_files(tmp_path):
    with pytest.raises(ProfileError, match="unknown cluster 'dgx-h10O': did you mean 'dgx-h100'"):
        load_cluster("dgx-h10O")
    with pytest.raises(ProfileError, match="unknown cluster 'dgx-h100-x0'"):
        load_cluster("dgx-h100-x0")
    with pytest.raises(ProfileError, match="'H100': did you mean one of H100-NVL-94GB, H100-PCIe-80GB, H100-SXM-80GB"):
        load_device("H100")
    with pytest.raises(ProfileError, match="cannot be read"):
        load_cluster(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("node = [")
    with pytest.raises(ProfileError, match="no valid TOML"):
        load_cluster(tmp_path / "broken.toml")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ProfileError, match="the top level must be a table"):
        load_cluster(tmp_path / "list.json")


def test_abstract_failures():
    with pytest.raises(ProfileError) as caught:
        abstract_cluster({"x": 2, "y": 2}, alpha=[0.0], beta=[1.0, -1.0], constants={"allreduce": 1.0})
    assert len(caught.value.failures) == 3
    cluster = build_cluster({"abstract": {"shape": {"x": 4}, "alpha": [1], "beta": [2]}}, "t.toml")
    assert cluster.n_devices == 4 and cluster.abstract[0].beta == 2.0
    assert cluster.device(0).memory_bytes >= 1e18


def test_the_readme_examples_load():
    blocks = (PACKAGE / "README.md").read_text(encoding="utf-8").split("```toml")[1:]
    clusters = [build_cluster(tomllib.loads(block.split("```")[0]), "README.md") for block in blocks]
    assert [cluster.n_devices for cluster in clusters] == [20, 4]


def test_rank_out_of_range():
    with pytest.raises(ValueError, match="no rank 8, it has ranks 0 to 7"):
        load_cluster("dgx-h100").device(8)


@pytest.mark.parametrize("package", ["hardware_profiles", "cost_models"])
def test_floors(package):
    """hardware_profiles imports nothing of the project, cost_models only that; neither imports torch."""
    allowed = {"networkx", "numpy", "hardware_profiles", package} | set(sys.stdlib_module_names)
    if package == "hardware_profiles":
        allowed -= {"cost_models"}
    for path in (PACKAGE.parent / package).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert {name.split(".")[0] for name in names} <= allowed, path.name


def test_a_plan_may_fill_what_the_driver_gives_less_what_others_take() -> None:
    cluster = load_cluster("dgx-h100")
    own = budget_of(cluster, cluster.device(0))
    assert own.is_known and own.usable_bytes == 79.1 * 2**30
    assert 74 * 2**30 < own.limit_bytes == pytest.approx((own.usable_bytes - own.reserved_bytes) / (1 + own.margin))
    trainer = replace(cluster.software, reserved_bytes=2 * 2**30, fragmentation=0.05)
    other = budget_of(replace(cluster, software=trainer), cluster.device(0))
    assert other.limit_bytes == pytest.approx((79.1 - 2) / 1.05 * 2**30)
    with pytest.raises(ProfileError, match=r"reserves 90.00 GiB of a device, and H100-SXM-80GB has 79.10 GiB"):
        budget_of(replace(cluster, software=replace(trainer, reserved_bytes=90 * 2**30)), cluster.device(0))


def test_a_device_that_is_not_known_may_be_filled_by_a_share() -> None:
    cluster = load_cluster("local")
    budget = budget_of(cluster, cluster.device(0))
    assert not budget.is_known and budget.limit_bytes == 0.9 * cluster.device(0).memory_bytes
