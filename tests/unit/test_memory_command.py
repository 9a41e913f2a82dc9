"""``autopar memory``: categories add up to the plan's memory, the snapshot is one that torch's own viewer reads."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch.cuda._memory_viz as memory_viz
from command_line import command, plan_all

from autopar.cli.common import opened
from autopar.planner.intra_op.memory.contents import CATEGORIES, GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS
from autopar.plans.prices import bytes_together
from autopar.report.memory_contents import memory_of_devices
from autopar.report.memory_snapshot import snapshot

KINDS = {
    "mesh": ("-c", "local-x4", "--mesh", "data=2,tensor=2", "--pin", "layers.*.up:tensor=n"),
    "mixed": ("-c", "dgx-h100", "--mesh", "data=4", "--precision", "bf16-mixed"),
    "piped": ("-c", "local-x4", "--stages", 2, "--microbatches", 4, "--schedule", "1f1b"),
    "halves": ("-c", "local-x4", "--stages", 2, "--microbatches", 4, "--schedule", "zb-v"),
    "again": ("-c", "local-x4", "--stages", 2, "--microbatches", 4, "--schedule", "1f1b", "--recompute", "layers.*"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a plan of each kind."""
    return plan_all(tmp_path_factory.mktemp("plans"), KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_categories_add_up_to_the_memory_of_the_plan(folder: Path, kind: str) -> None:
    captured, asked = opened(folder / f"{kind}.json", trust=True)
    devices = memory_of_devices(captured.graph, asked.plan, asked.cluster)
    assert max(device.n_bytes for device in devices) == asked.plan.memory_bytes
    for device, stages in zip(devices, asked.plan.schedule.stages_of_rank, strict=True):
        prices = [asked.plan.stages[s].price for s in stages]
        assert device.n_bytes == bytes_together(prices)
        assert device.categories.keys() == CATEGORIES.keys()
        stored = device.categories[PARAMETERS] + device.categories[MASTERS]
        assert stored == sum(price.parameter_bytes for price in prices)
        assert device.categories[OPTIMIZER] == sum(price.optimizer_bytes for price in prices)
        assert device.categories[GRADIENTS] <= sum(price.gradient_bytes for price in prices)
        assert (device.categories[MASTERS] > 0) == (kind == "mixed")


def test_the_command_says_the_moment_the_categories_and_the_largest(folder: Path) -> None:
    code, text, err = command("memory", folder / "piped.json", "--trust", "--top", 3)
    assert code == 0, err
    assert "Memory peaks in the backward of" in text and "in flight, on group" in text
    assert "parameters" in text and "a plan may fill" in text
    code, text, err = command("memory", folder / "piped.json", "--trust", "--json", "--top", 3)
    said = json.loads(text)
    assert len(said["groups"]) == 2 and len(said["tensors"]) == 3
    assert all(sum(group["categories"].values()) == group["bytes"] for group in said["groups"])
    code, _, err = command("memory", folder / "piped.json", "--trust", "--group", 2)
    assert code == 2 and "the plan has 2 groups of devices, which count from 0" in err


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_one_of_torch(folder: Path, kind: str) -> None:
    """Every block is freed after it is taken, none lies in another, and torch's own functions read all of it."""
    path = folder / f"{kind}.pickle"
    code, text, err = command("memory", folder / f"{kind}.json", "--trust", "--snapshot", path)
    assert code == 0, err
    assert "a whole step" in text
    data = pickle.loads(path.read_bytes())
    assert "entries" in memory_viz.trace(data)
    assert "total_allocated" in memory_viz.segsum(data)
    assert "<script" in memory_viz.trace_plot(data) and "<script" in memory_viz.segment_plot(data)
    live: dict[int, int] = {}
    for event in data["device_traces"][0]:
        if event["action"] == "alloc":
            assert event["addr"] not in live
            live[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
    at = 0
    for address, size in sorted(live.items()):
        assert address >= at
        at = address + size
    again = command("memory", folder / f"{kind}.json", "--trust", "--snapshot", path)
    assert again[0] == 0, again[2]  # a snapshot may be written over
    code, _, err = command("memory", folder / f"{kind}.json", "--trust", "--snapshot", folder / "net.py")
    assert code == 2 and "is not a snapshot of memory" in err


@pytest.mark.parametrize("kind", ["mesh", "mixed", "piped", "again"])
def test_the_snapshot_is_as_full_as_the_plan_says(folder: Path, kind: str) -> None:
    """But for what waits between stages, which no snapshot shows."""
    captured, asked = opened(folder / f"{kind}.json", trust=True)
    for device in memory_of_devices(captured.graph, asked.plan, asked.cluster):
        _, most, _ = snapshot(asked.plan, device)
        stage_edge = device.contents[0].fullest.stage_edge_bytes
        assert device.n_bytes - stage_edge <= most <= device.n_bytes * 1.02
