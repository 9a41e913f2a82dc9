"""Which cluster the ranks are, from what each says of its GPU and its machine; nobody needs a GPU for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from unit.test_product_names import KNOWN, MIB

from autopar.errors import MeshError
from autopar.parallelizing import all_ranks
from autopar.plans.clusters import get_cluster
from autopar.plans.detection import RankRecord, check_nodes, cluster_of_ranks, dumps, hosts_of, loads
from autopar.runtime.ranks.launch import run_local
from autopar.runtime.ranks.store_meeting import from_all
from hardware_profiles import load_cluster
from hardware_profiles.errors import ProfileError

MEMORY = {name: mib * MIB for name, mib, _ in KNOWN}
H100, A100, H200, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA L4"


def on(host: str, product: str, n: int, local: int | None = None) -> list[RankRecord]:
    """The ranks of one machine."""
    return [RankRecord(host, product, MEMORY.get(product, 80e9), local)] * n


def machines(product: str, count: int, each: int) -> list[RankRecord]:
    return [record for k in range(count) for record in on(f"node{k}", product, each, each)]


@pytest.mark.parametrize(
    ("records", "cluster", "nodes"),
    [
        (machines(H100, 1, 8), "dgx-h100", [8]),
        (machines(H100, 1, 2), "dgx-h100", [8]),
        (machines(H100, 8, 8), "dgx-h100-x8", [8] * 8),
        (machines(H100, 2, 4), "dgx-h100-4of8-x2", [4, 4]),
        (machines(H100, 4, 1), "dgx-h100-1of8-x4", [1] * 4),
        ([*machines(H100, 2, 8), *on("last", H100, 4)], "dgx-h100-x2+dgx-h100-4of8", [8, 8, 4]),
        ([*machines(H100, 2, 8), *on("old", A100, 8)], "dgx-h100-x2+dgx-a100", [8, 8, 8]),
        ([*on("a", H200, 8), *on("b", H100, 8), *on("c", H200, 8)], "dgx-h200+dgx-h100+dgx-h200", [8, 8, 8]),
        (machines(L4, 1, 4), "pcie-l4", None),
        (machines("NVIDIA GB200", 18, 4), "nvl72-gb200", [72]),
        (machines("NVIDIA GB200", 36, 4), "nvl72-gb200-x2", [72, 72]),
        (on("localhost", H100, 16, local=8), "dgx-h100-x2", [8, 8]),
    ],
)
def test_the_cluster_of_some_ranks(records: list[RankRecord], cluster: str, nodes: list[int] | None) -> None:
    assert cluster_of_ranks(records) == cluster
    loaded = load_cluster(cluster)
    assert loaded.n_devices >= len(records) and loaded.name == cluster
    if nodes is not None:
        assert [loaded.node_of.count(node) for node in range(loaded.n_nodes)] == nodes
        if sum(nodes) == len(records) and "GB200" not in records[0].product:
            assert [list(block) for block in hosts_of(records)] == [
                [rank for rank, of in enumerate(loaded.node_of) if of == node] for node in range(loaded.n_nodes)
            ]


def test_mixed_devices_are_each_at_their_ranks() -> None:
    cluster = load_cluster("dgx-h100-4of8+dgx-a100-x2")
    assert [d.name for d in cluster.devices] == ["H100-SXM-80GB"] * 4 + ["A100-SXM-80GB"] * 16


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([*on("a", H100, 1), *on("b", H100, 1)] * 4, "ranks 0, 2, 4, 6 of the mesh are on machine 'a' and others are "),
        ([*on("a", H100, 2, 4), *on("b", H100, 4, 4), *on("a", H100, 2, 4)], "ranks 0-1, 6-7 of the mesh are on"),
        (on("a", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 2), "is a slice (MIG) of a GPU"),
        (on("a", "NVIDIA H200 NVL", 2), "it is not H200-SXM-141GB"),
        (on("a", "NVIDIA A30", 2), "no built-in cluster is of A30; pass cluster= with a name (alps-gh200, aws-g4dn, "),
        ([*on("a", H100, 4), *on("a", A100, 4)], "machine 'a' has GPUs of several kinds, H100-SXM-80GB (rank 3) and"),
        (on("a", H100, 16), "16 ranks with H100-SXM-80GB are on one machine, and those of cluster 'dgx-h100' have 8"),
        ([*on("a", H100, 7), RankRecord("a", H100, 40e9)], "has 40 GB of memory, the profile H100-SXM-80GB 80 GB"),
    ],
)
def test_what_is_no_cluster_is_refused(records: list[RankRecord], said: str) -> None:
    with pytest.raises(MeshError) as raised:
        cluster_of_ranks(records)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("cluster", "records", "said"),
    [
        ("dgx-h100", machines(H100, 2, 4), "ranks 3 and 4 are on machines 'node0' and 'node1', and on one of cluster"),
        ("dgx-h100-4of8-x2", on("a", H100, 8), "ranks 0-7 are on one machine, and on 2 of cluster"),
        ("dgx-h100-4of8-x2", machines(H100, 2, 4), ""),
        ("dgx-h100-x2", machines(H100, 2, 8), ""),
        ("nvl72-gb200", machines("NVIDIA GB200", 18, 4), ""),
    ],
)
def test_a_cluster_that_was_named_is_compared(cluster: str, records: list[RankRecord], said: str) -> None:
    other = check_nodes(load_cluster(cluster), cluster, records)
    assert said in other and bool(said) == bool(other)


def test_names_that_describe_no_machines() -> None:
    for name in ("dgx-h100-9of8", "dgx-h100-4of16", "local-2of4", "dgx-h100+nothing", "pcie-l4+", "+"):
        with pytest.raises(ProfileError):
            load_cluster(name)


@pytest.fixture
def world_of_eight() -> Any:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    torch.distributed.destroy_process_group()


def test_a_mesh_of_two_machines_is_not_one(world_of_eight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are taken in the mesh's order: a transposed mesh of two machines is refused."""
    told = machines(H100, 2, 4)
    monkeypatch.setattr(all_ranks, "from_all", lambda group, text: [dumps(record) for record in told])
    monkeypatch.setattr(all_ranks, "record_here", lambda: told[0])
    model = torch.nn.Linear(2, 2)

    def found(order: torch.Tensor) -> str:
        mesh = DeviceMesh("cpu", order, mesh_dim_names=("data", "tensor"))
        mesh._device_type = "cuda"
        records = all_ranks.records_of(torch.distributed.group.WORLD, model, mesh)
        return all_ranks.hardware_of("cpu", mesh, None, records)[2]

    assert found(torch.arange(8).view(2, 4)) == "dgx-h100-4of8-x2"
    with pytest.raises(MeshError, match="number the ranks machine by machine"):
        found(torch.arange(8).view(2, 4).t().contiguous())


def test_nothing_is_gathered_on_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Callable[..., Any] = pytest.fail
    monkeypatch.setattr(all_ranks, "from_all", nothing)
    assert all_ranks.records_of(None, torch.nn.Linear(2, 2), 4) == []


def gathered() -> list[RankRecord]:
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    return [loads(text) for text in from_all(group, dumps(RankRecord(f"host{rank}", H100, 8e10 + rank, 1)))]


def test_all_ranks_hear_all() -> None:
    wanted = [RankRecord(f"host{rank}", H100, 8e10 + rank, 1) for rank in range(2)]
    assert run_local(gathered, 2, timeout=60) == [wanted] * 2


def test_a_described_cluster_is_found_again_by_its_name() -> None:
    name = "dgx-h100-x2+dgx-a100"
    assert get_cluster(name) is get_cluster(name)
