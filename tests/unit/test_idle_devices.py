"""Devices of unequal speed: the planner leaves idle those that hold up the others, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import planfile
from autopar.capture import capture
from autopar.errors import InfeasibleError
from autopar.planner import planning
from autopar.plans.clusters import get_cluster, reference
from autopar.plans.request import PlanRequest
from hardware_profiles import ProfileError, load_cluster, split_subset, subset_suffix

NODE = """
[[node]]
device = "{}"
n_devices = {}
[[node.level]]
link = "pcie4-host"
[node.uplink]
link = "{}"
"""
FAST, SLOW, OLD = "H100-SXM-80GB", "L4", "A100-SXM-80GB"


class Net(nn.Module):
    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def cluster_file(folder: Path, *nodes: tuple[str, int], link: str = "ethernet-25") -> Path:
    path = folder / "mine.toml"
    path.write_text('description = "several kinds"\n' + "".join(NODE.format(*node, link) for node in nodes))
    return path


def planned(cluster: Path, width: int = 2048, rows: int = 4096, **asked: object) -> autopar.Plan:
    with torch.device("meta"):
        return autopar.plan(Net(width), cluster, torch.randn(rows, width), **asked)  # type: ignore[arg-type]


LEFT_IDLE = {
    "the second is slow": ([(FAST, 1), (SLOW, 1)], "@0", "device 1 (L4) is left idle"),
    "the first is slow": ([(SLOW, 1), (FAST, 1)], "@1", "device 0 (L4) is left idle"),
    "three speeds": ([(SLOW, 1), (FAST, 1), (OLD, 1)], "@1", "devices 0,2 (L4, A100-SXM-80GB) are left idle"),
}


@pytest.mark.parametrize("name", LEFT_IDLE)
def test_no_slower_than_the_fastest_device_alone(name: str, tmp_path: Path) -> None:
    nodes, suffix, note = LEFT_IDLE[name]
    alone = planned(cluster_file(tmp_path, (FAST, 1)), microbatches=1).seconds
    path = cluster_file(tmp_path, *nodes)
    plan = planned(path, microbatches=1)
    assert plan.seconds <= alone * 1.001 and plan.n_devices == 1
    assert plan.cluster == f"{path.as_posix()}{suffix}", "ranks are numbered on the devices that work"
    (said,) = [n for n in plan.notes if "idle" in n]
    assert said.startswith(note) and "run 1 rank there" in said and "ms" in said


def test_the_plan_is_found_again_beside_its_cluster(tmp_path: Path) -> None:
    path = cluster_file(tmp_path, (SLOW, 1), (FAST, 1))
    with torch.device("meta"):
        captured = capture(Net(64), (torch.randn(8, 64),))
        plan = autopar.plan(Net(64), path, torch.randn(8, 64), captured=captured, microbatches=1)
    (tmp_path / "plans").mkdir()
    planfile.save(tmp_path / "plans/plan.json", plan, captured.graph)
    document = planfile.open_(tmp_path / "plans/plan.json")
    assert document.raw["cluster"] == "../mine.toml@1"
    assert [device.name for device in document.cluster().devices] == [FAST]


def test_slower_devices_that_help_work(tmp_path: Path) -> None:
    """Two of a kind and one that is not much slower, on fast links, with much to do."""
    plan = planned(cluster_file(tmp_path, (FAST, 1), (OLD, 1), link="nvlink4"), rows=2**20, microbatches=4)
    assert plan.n_devices == 2 and not [note for note in plan.notes if "idle" in note]


def test_what_the_user_says_of_devices_stands(tmp_path: Path) -> None:
    path = cluster_file(tmp_path, (FAST, 1), (SLOW, 1))
    assert planned(path, mesh="data=2").n_devices == 2
    assert planned(path, stages=2, microbatches=2).n_devices == 2


def test_ranks_that_run_already_are_told(tmp_path: Path) -> None:
    cluster = load_cluster(cluster_file(tmp_path, (SLOW, 1), (FAST, 1)))
    with torch.device("meta"):
        model, batch = Net(), (torch.randn(4096, 2048),)
        captured = capture(model, batch)
    found = planning.find(model, captured, lambda: (batch, {}), cluster, 2, PlanRequest(), "mine", runs=True)
    assert found.plan.n_devices == 2
    (said,) = [note for note in found.plan.notes if "hold up" in note]
    assert "on device 1 (H100-SXM-80GB) alone; start ranks on these only" in said


def test_what_fits_the_larger_device_alone(tmp_path: Path) -> None:
    """No plan of two equal parts fits the small one: the large one works alone, and where both run it is said."""
    text = cluster_file(tmp_path, (FAST, 1), (SLOW, 1)).read_text()
    path = tmp_path / "small.toml"
    path.write_text(
        text.replace('"L4"', '"tiny"') + "[devices.tiny]\nmemory_bytes = 1e8\nmemory_bytes_per_second = 1e11\n"
        "launch_seconds = 1e-6\npeak_flops = { float32 = 1e12 }\n"
        + "".join(f"[devices.tiny.efficiency.{k}]\nfraction = 0.8\nhalf_work = 1e3\n"
                  for k in ("matmul", "conv", "attention", "pointwise"))
    )  # fmt: skip
    plan = planned(path, stages=1, microbatches=1)
    assert plan.n_devices == 1 and "on all 2 devices none fits" in plan.notes[-1]
    with torch.device("meta"):
        model, batch = Net(), (torch.randn(4096, 2048),)
        captured = capture(model, batch)
    with pytest.raises(InfeasibleError, match=r"on device 0 \(H100-SXM-80GB\) alone: start ranks on these only"):
        planning.find(model, captured, lambda: (batch, {}), load_cluster(path), 2, PlanRequest(), "small", runs=True)


def test_devices_of_equal_speed_are_searched_once() -> None:
    assert planning.faster_devices(load_cluster("dgx-h100-x2"), 16) == []
    mixed = load_cluster("dgx-h100-x2+dgx-a100")
    assert planning.faster_devices(mixed, 24) == [tuple(range(16)), tuple(range(8)), (0,)]


@pytest.mark.parametrize(
    ("name", "ranks"), [("a.toml@0", (0,)), ("dgx-h100@0-3,6", (0, 1, 2, 3, 6)), ("x@y/a.toml", ()), ("a.toml@", ())]
)
def test_names_of_some_devices(name: str, ranks: tuple[int, ...]) -> None:
    whole, found = split_subset(name)
    assert found == ranks and whole + (subset_suffix(ranks) if ranks else "") == name


def test_some_devices_of_a_cluster(tmp_path: Path) -> None:
    some = get_cluster("dgx-h100-x2@6-9")
    assert some.n_devices == 4 and some.node_of == (0, 0, 1, 1) and some.name == "dgx-h100-x2@6-9"
    assert reference("dgx-h100@0-3") == "dgx-h100@0-3"
    assert reference(tmp_path / "a.toml@1").endswith("/a.toml@1")
    with pytest.raises(ProfileError, match="no rank 8, the cluster has 0 to 7"):
        load_cluster("dgx-h100@0,8")
    with pytest.raises(ProfileError, match="each device once"):
        load_cluster("dgx-h100@0,0-1")
    with pytest.raises(ProfileError, match="99999999999 is larger than"):
        load_cluster("dgx-h100@0-99999999999")
