"""``autopar clusters new`` and what is answered to unknown products."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
from command_line import command

from autopar.plans.clusters import get_cluster
from hardware_profiles import ProfileError, build_cluster, list_clusters, load_cluster, load_device
from hardware_profiles.describing import NewDevice, described_cluster, toml_of
from hardware_profiles.model import Cluster
from hardware_profiles.strict import parse_toml

NEW = ("--memory", "400GB", "--memory-bandwidth", "16000", "--tflops", "bfloat16=5000,float32=100",
       "--like", "blackwell")  # fmt: skip


def edges(cluster: Cluster) -> list[tuple[str, ...]]:
    return sorted(
        (str(a), str(b), f"{link.bandwidth_bytes_per_second}", f"{link.latency_seconds}", link.curve)
        for a, b, link in cluster.graph.edges(data="link")
    )


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("--gpu A100-SXM-40GB --nodes 4 --network 200Gb/s", "32xA100-SXM-40GB/8/nvlink3/1x200gbps"),
        ("--gpu A100-SXM-40GB --nodes 4 --network HDR --adapters 8", "32xA100-SXM-40GB/8/nvlink3/8x200gbps"),
        ("--gpu L4 --per-node 4", "4xL4/4"),
        ("--gpu A100-PCIe-80GB --nodes 2 --network 100Gb/s --adapters 2", "16xA100-PCIe-80GB/8//2x100gbps"),
        ("--gpu MI300X --nodes 2 --network 400Gb/s --adapters 8", "16xMI300X/8/xgmi3/8x400gbps"),
        ("--gpu TPU-v5e --per-node 16", "16xTPU-v5e/16"),
        ("--gpu T4 --per-node 1 --nodes 3 --network '50Gb/s Ethernet'", "3xT4/1//1x50gbps-ethernet"),
    ],
)
def test_the_file_is_the_cluster_of_the_same_words(words: str, same: str, tmp_path: Path) -> None:
    import shlex

    code, text, err = command("clusters", "new", *shlex.split(words), "-o", tmp_path / "my.toml")
    assert code == 0, err
    mine, named = load_cluster(tmp_path / "my.toml"), load_cluster(same)
    assert edges(mine) == edges(named) and mine.node_of == named.node_of
    assert [d.name for d in mine.devices] == [d.name for d in named.devices]
    assert mine.name == "my" and f"--cluster {tmp_path / 'my.toml'}" in text
    again, _, err = command("clusters", "new", *shlex.split(words), "-o", tmp_path / "my.toml")
    assert again == 0, err


def test_which_network_is_said(tmp_path: Path) -> None:
    words = ("clusters", "new", "--gpu", "A100-SXM-40GB", "--nodes", "4", "--network", "200Gb/s")
    words = (*words, "-o", tmp_path / "a.toml")
    text = command(*words)[1]
    assert "one 200 Gb/s adapter for its 8 devices; for 8 in a machine: --adapters 8" in text
    assert "one 200 Gb/s adapter for each device" in command(*words, "--adapters", "8")[1]


def test_a_new_device(tmp_path: Path) -> None:
    words = ("--nodes", "2", "--network", "800Gb/s", "--adapters", "8", "--inside", "1800GB/s")
    code, _, err = command("clusters", "new", "--gpu", "B400", *NEW, *words, "-o", tmp_path / "b.toml")
    assert code == 0, err
    found = get_cluster(tmp_path / "b.toml")
    device = found.devices[0]
    assert (device.name, device.memory_bytes, device.memory_bytes_per_second) == ("B400", 400e9, 16e12)
    assert device.peak_flops == {"bfloat16": 5e15, "float32": 1e14} and found.n_devices == 16
    rates = {link.name: link.bandwidth_bytes_per_second for _, _, link in found.graph.edges(data="link")}
    assert rates == {"inside": 1.8e12, "8x800gbps": 1e11}
    facts = json.loads(command("clusters", "new", "--gpu", "B400", *NEW, "--json")[1])
    assert facts["document"]["devices"]["B400"]["efficiency"] == "blackwell" and facts["devices"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--gpu is missing"),
        (("--gpu", "B400"), "give --memory, --memory-bandwidth, --tflops, --like"),
        (("--gpu", "A100"), "did you mean one of A100-PCIe-40GB"),
        (("--gpu", "L4", *NEW), "describe a new device, and 'L4' is a known one"),
        (("--gpu", "L4", "--nodes", "2"), "--network is missing"),
        (("--gpu", "L4", "--network", "200Gb/s"), "--network and --adapters are for several machines"),
        (("--gpu", "L4", "--nodes", "2", "--network", "pigeons"), "has no rate"),
        (("--gpu", "L4", "--nodes", "2", "--network", "HDR", "--adapters", "9"), "9 adapters for 8 devices"),
        (("--gpu", "L4", "--inside", "nvlink9"), "names no link inside a machine"),
        (("--gpu", "L4", "-o", "my.json"), "cluster files end in .toml"),
        (("--gpu", "N 1", *NEW), "use letters, digits"),
        (("--gpu", "N1", *NEW[:-1], "blackwel"), "did you mean one of blackwell"),
        (("--gpu", "N1", *NEW[:4], "--tflops", "bf16", *NEW[6:]), "write FORMAT=NUMBER"),
    ],
)
def test_what_is_missing_or_wrong_is_one_error(words: tuple[str, ...], message: str) -> None:
    with mock.patch.object(sys, "stdin", io.StringIO()):
        code, _, err = command("clusters", "new", *words)
    assert code == 2 and message in " ".join(err.split())


def test_a_terminal_is_asked(tmp_path: Path) -> None:
    """Every answer comes from standard input, in the order of the questions; an empty line takes the default."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    from autopar.cli import new_cluster

    answers = iter(["N1", "80GB", "2000", "bfloat16=500,float32=50", "ada", "4", "2", "pcie4", "100Gb/s", "1"])
    asked: list[str] = []

    def prompt(text: str, **_: object) -> str:
        asked.append(text)
        return next(answers)

    with mock.patch.object(new_cluster, "typer", mock.Mock(wraps=new_cluster.typer, prompt=prompt)):
        with mock.patch.object(new_cluster, "asks_here", lambda: True):
            code, _, err = command("clusters", "new", "-o", tmp_path / "n.toml")
    assert code == 0 and next(answers, None) is None, err
    found = load_cluster(tmp_path / "n.toml")
    assert (found.n_devices, found.n_nodes, found.devices[0].name) == (8, 2, "N1")
    assert asked[0].startswith("device") and "memory" in asked[1]


def test_an_answer_that_is_no_number_of_machines_is_refused() -> None:
    from autopar.cli import new_cluster

    answers = iter(["L4", "0"])
    prompts = mock.Mock(wraps=new_cluster.typer, prompt=lambda *_, **__: next(answers))
    with mock.patch.object(new_cluster, "typer", prompts):
        with mock.patch.object(new_cluster, "asks_here", lambda: True):
            code, _, err = command("clusters", "new")
    assert code == 2 and "devices of a machine is 0; give a number from 1 to 65,536" in err


def test_documents_are_toml() -> None:
    new = NewDevice("my-1", 80e9, 2e12, {"float32": 3e13}, "ada")
    document = described_cluster("mine", new, 4, 2, "300GB/s", "4x100gbps")
    assert parse_toml(toml_of(document)) == document
    assert build_cluster(document, "mine.toml").n_devices == 8


def test_other_products_are_no_mistakes_of_typing() -> None:
    for name in ("dgx-b400", "dgx-h300", "dgx-a200"):
        with pytest.raises(ProfileError, match="autopar clusters new") as error:
            load_cluster(name)
        assert "did you mean" not in str(error.value) and "memory_bytes_per_second" in str(error.value)
    for name, meant in (("dgx-h10", "dgx-h100"), ("dgx-h10O", "dgx-h100")):
        with pytest.raises(ProfileError, match=f"did you mean '{meant}'.*autopar clusters new"):
            load_cluster(name)
    with pytest.raises(ProfileError, match="autopar clusters new"):
        load_device("B400")
    assert "dgx-a100-40gb" in list_clusters() and load_cluster("dgx-a100-40gb-x4").n_devices == 32


def test_clusters_are_listed_without_a_command() -> None:
    assert "dgx-h100" in command("clusters")[1]
    assert command("clusters", "dgx-h100", "dgx-a100")[1].count("devices in 1 node") == 2
    assert json.loads(command("clusters", "--json")[1]) == json.loads(command("clusters", "list", "--json")[1])
    assert "Example" in command("clusters", "--help")[1] and "Example" in command("clusters", "new", "--help")[1]
