"""Clusters of a few words, tori and pairs, and what is said of a device that nobody knows."""

from __future__ import annotations

import json

import networkx as nx
import pytest
from typer.testing import CliRunner

from autopar.cli import app
from cost_models import mesh_axes
from hardware_profiles import ProfileError, build_cluster, cluster_from, list_clusters, load_cluster, load_device

WORDS = [  # of published tables: device, devices, per node, inside, between -> name
    (("A100-SXM-80GB", 64, 8, "NVLink3 300GB/s/dir", "4x HDR IB, 800Gb/s per node"),
     "64xA100-SXM-80GB/8/nvlink3/4x200gbps"),
    (("A100-SXM-40GB", 128, 8, "NVLink3 300GB/s/dir", "RoCE 1600Gb/s per node"),
     "128xA100-SXM-40GB/8/nvlink3/8x200gbps"),
    (("T4-16GB", 16, 4, "PCIe Gen3", "50Gb/s Ethernet (4x AWS g4dn.12xlarge)"),
     "16xT4/4/pcie3/1x50gbps-ethernet"),
    (("H100-SXM-80GB", 64, 8, "NVLink4 450GB/s/dir", "EFA (AWS p5)"), "64xH100-SXM-80GB/8/nvlink4/efa"),
    (("h100-sxm-80gb", 96, 8, "", "800Gb/s per node"), "96xH100-SXM-80GB/8/nvlink4/8x100gbps"),
    (("GB200", 256, 4, "NVLink5 NVL72 900GB/s/dir", ""), "256xGB200/64/nvlink5/ib-ndr"),
    (("GB300", 144, None, "", "ib-xdr"), "144xGB300/72/nvlink5/ib-xdr"),
    (("V100-SXM3-32GB", 32, 16, "NVSwitch NVLink2 150GB/s/dir", "ib-edr"),
     "32xV100-SXM3-32GB/16/nvlink2-switch/ib-edr"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "name"), WORDS)
def test_words_of_published_tables_become_a_cluster(words: tuple, name: str) -> None:
    gpu, n, per_node, inside, between = words
    cluster = cluster_from(gpu, n, per_node, inside=inside, between=between)
    assert cluster.name == name and cluster.n_devices == n
    assert load_cluster(name) is cluster
    assert cluster.n_devices // cluster.n_nodes == int(name.split("/")[1])


def test_the_rate_of_a_machine_is_that_of_its_adapters() -> None:
    ethernet = load_cluster("16xT4/4/pcie3/1x50gbps-ethernet")
    links = {link.name: link for _, _, link in ethernet.graph.edges(data="link")}
    assert links["1x50gbps-ethernet"].bandwidth_bytes_per_second == 6.25e9
    four = load_cluster("64xA100-SXM-80GB/8/nvlink3/4x200gbps")
    ways_out = [b for _, b in four.graph.out_edges() if b == "fabric"]
    assert len(ways_out) == 4 * 8  # four adapters in each of eight machines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("H100-SXM-80GB", 12, 8), "12 devices do not fill machines of 8"),
        (("H100-SXM-80GB", 0), "0 devices, give 1 to"),
        (("B100", 8), "none has a name like it: describe it"),
        (("H100", 8), "did you mean one of H100-NVL-94GB, H100-PCIe-80GB"),
        (("H100-SXM-80GB", 16, 8, "NVLink9"), "names no link inside a machine"),
        (("H100-SXM-80GB", 16, 8, "", "carrier pigeons"), "names no network"),
    ],
)
def test_what_makes_no_sense_is_said(arguments: tuple, message: str) -> None:
    gpu, n, per_node, inside, between = (*arguments, *(None, "", "")[len(arguments) - 2 :])
    with pytest.raises(ProfileError, match=message):
        cluster_from(gpu, n, per_node, inside=inside, between=between)


def test_an_unknown_device_asks_for_its_data_sheet() -> None:
    with pytest.raises(ProfileError, match=r"memory_bytes_per_second = 3\.35e12"):
        load_device("B100")
    with pytest.raises(ProfileError, match="did you mean 'RTX-4090'"):
        load_device("RTX4090")


def test_every_cluster_loads_alone_and_in_twos() -> None:
    for name in list_clusters():
        cluster = load_cluster(name)
        assert cluster.n_devices >= 1
        if name != "local":
            assert load_cluster(f"{name}-x2").n_nodes == 2 * cluster.n_nodes, name


def test_a_torus_has_its_neighbours() -> None:
    torus = load_cluster("tpu-v5p-64")
    for rank in range(64):
        peers = [peer for peer in torus.graph.succ[rank] if isinstance(peer, int)]
        assert len(peers) == 6
    assert nx.shortest_path_length(torus.graph, 0, 63) == 3  # one step of each of three rings: all close
    line = build_cluster(
        {"node": [{"device": "TPU-v5e", "n_devices": 2, "torus": {"shape": [2, 1], "link": "ici-v5e"}}]}, "two.toml"
    )
    assert line.graph.number_of_edges() == 2
    with pytest.raises(ProfileError, match="expected sizes that make 8 devices"):
        build_cluster(
            {"node": [{"device": "TPU-v5e", "n_devices": 8, "torus": {"shape": [3, 3], "link": "ici-v5e"}}]}, "x.toml"
        )


def test_an_axis_of_a_torus_uses_both_directions_of_its_ring() -> None:
    torus = load_cluster("tpu-v5p-64")
    last = mesh_axes(torus, {"a": 16, "b": 4})["b"]
    seconds, gathered = last.seconds("all_gather", 1e9), 1e9
    both = 2 * 90e9 * 0.9
    assert seconds == pytest.approx(gathered * 3 / 4 / both, rel=0.01)


def test_bridges_between_pairs_do_not_carry_what_crosses_the_machine() -> None:
    """A ring of eight cards of which pairs have bridges is as slow as its PCIe."""
    bridged, plain = load_cluster("pcie-a100"), load_cluster("8xA100-PCIe-80GB/8/pcie4")
    pair = mesh_axes(bridged, {"x": 4, "y": 2})["y"].seconds("all_reduce", 1e9)
    assert pair < 0.2 * mesh_axes(plain, {"x": 4, "y": 2})["y"].seconds("all_reduce", 1e9)
    whole = mesh_axes(bridged, {"x": 8})["x"].seconds("all_reduce", 1e9)
    assert whole == pytest.approx(mesh_axes(plain, {"x": 8})["x"].seconds("all_reduce", 1e9), rel=0.3)


def test_a_pair_of_a_full_mesh_has_one_of_its_links() -> None:
    """Two of eight MI300X share one of seven links; all eight use all of them."""
    mesh = load_cluster("mi300x-8")
    two = mesh_axes(mesh, {"x": 4, "y": 2})["y"].terms["all_gather"][1]
    eight = mesh_axes(mesh, {"x": 8})["x"].terms["all_gather"][1]
    assert two * 2 == pytest.approx(7 * eight * 8 / 7, rel=1e-6)


def test_devices_are_listed_with_links_power_and_whose_curves_they_have() -> None:
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(app, ["devices", "--json"]).output)["devices"]}
    assert rows["GB200"]["domain"] == 72 and rows["GB200"]["link"] == "nvlink5"
    assert rows["H100-SXM-96GB-HBM2e-500W"]["power_watts"] == 500
    assert rows["MI300X"]["usable_bytes"] == pytest.approx(192 * 2**30, rel=0.01)
    assert rows["A10G"]["link"] is None
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["devices"]).output
    assert "nvlink5 x 72" in shown and "hopper" in shown


def test_composed_machines_of_several_kinds_on_one_fabric() -> None:
    mixed = load_cluster("8xT4/4/pcie3/1x50gbps-ethernet+8xV100-SXM2-16GB/8/nvlink2-switch/1x10gbps-ethernet+dgx-h100")
    assert [len({r for r in range(24) if mixed.node_of[r] == n}) for n in range(4)] == [4, 4, 8, 8]
    assert {d.name for d in mixed.devices} == {"T4", "V100-SXM2-16GB", "H100-SXM-80GB"}
    assert mesh_axes(mixed, {"x": 24})["x"].seconds("all_reduce", 1e8) > 0.1  # 10 Gb/s carry it


def test_a_network_inside_a_machine_is_refused() -> None:
    with pytest.raises(ProfileError, match="'ib-ndr' names no link inside a machine"):
        load_cluster("64xH100-SXM-80GB/8/ib-ndr/nvlink4")
