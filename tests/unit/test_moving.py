"""Weights from one layout to another: the messages rebuild every shard, no byte is sent for nothing, prices add up."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from command_line import command

from autopar.plans.moving import StoredParameter, moved_parts
from autopar.plans.moving_cost import BETWEEN, INSIDE, move
from autopar.plans.transfer import Side, box_at
from autopar.words.graph import Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.shards import Box
from cost_models import costs_of
from hardware_profiles import load_cluster

MESHES = ("data=2,tensor=4", "data=4,tensor=2", "a=2,b=2,c=2", "data=8", "data=3", "x=1")
SHAPES = ((6, 10), (7, 4), (16,), (5, 3, 8))


def sides(rng: random.Random, shape: tuple[int, ...], first: int) -> tuple[Side, ...]:
    """One to three stages that store a tensor, each on devices of its own."""
    found = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mesh = Mesh.parse(rng.choice(MESHES))
        kinds = ["I", *(f"S{d}" for d in range(len(shape)))]
        state = State.of(*(rng.choice(kinds) for _ in mesh))
        devices = list(range(first, first + mesh.n_devices))
        rng.shuffle(devices)
        found.append(Side(state, mesh, tuple(devices)))
        first += mesh.n_devices
    return tuple(found)


def cut_out(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + n) for start, n in box)


def simulated(shape: tuple[int, ...], old: tuple[Side, ...], new: tuple[Side, ...], node_of: list[int]) -> Counter[str]:
    """Move numbers by messages alone, and count them; every new shard must come out, and nothing twice."""
    whole = np.arange(1, np.prod(shape) + 1).reshape(shape)
    have = {device: np.zeros(shape, dtype=int) for side in (*old, *new) for device in side.devices}
    for side in old:
        for at, device in enumerate(side.devices):
            box = cut_out(box_at(shape, side, at))
            have[device][box] = whole[box]
    got = {device: np.zeros(shape, dtype=int) for device in have}
    counts: Counter[str] = Counter()
    for number, parts in itertools.groupby(sorted(moved_parts(shape, old, new, node_of), key=lambda p: p.round),
                                           key=lambda p: p.round):  # fmt: skip
        before = {device: np.where(got[device] > 0, got[device], have[device]) for device in have}
        for part in parts:
            box = cut_out(part.box)
            sent = (have if number == 0 else before)[part.source][box]
            assert (sent > 0).all(), "a rank sends what it has"
            assert not got[part.target][box].any(), "and nobody gets anything twice"
            got[part.target][box] = sent
            kind = "stays" if part.source == part.target else BETWEEN if node_of[part.source] != node_of[
                part.target] else INSIDE  # fmt: skip
            counts[kind] += sent.size
    wanted = {device: np.zeros(shape, dtype=int) for device in have}
    for side in new:
        for at, device in enumerate(side.devices):
            box = cut_out(box_at(shape, side, at))
            wanted[device][box] = whole[box]
    for device in have:
        assert (got[device] == wanted[device]).all(), f"rank {device} has its new shard, and nothing else"
    counts["lacked"] = sum(int(((wanted[d] > 0) & (have[d] == 0)).sum()) for d in have)
    entered = 0
    for node in set(node_of):
        here = [d for d in have if node_of[d] == node]
        if here:
            entered += int((np.any([wanted[d] > 0 for d in here], 0) & ~np.any([have[d] > 0 for d in here], 0)).sum())
    counts["entered"] = entered
    return counts


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_messages_rebuild_the_shards(first: int) -> None:
    """On the same devices, on others, and on some of both; in one stage or several, divisible or not."""
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        shape = rng.choice(SHAPES)
        old, new = sides(rng, shape, 0), sides(rng, shape, rng.choice((0, 3, 40)))
        node_of = [rank // 8 if seed % 2 else rank // rng.choice((1, 2, 4, 8, 64)) for rank in range(80)]
        counts = simulated(shape, old, new, node_of)
        moved = counts[BETWEEN] + counts[INSIDE]
        if len(old) > 1 or len(new) > 1:  # a rank may have a part in one stage that another stage's shards give it, too
            assert moved >= counts["lacked"]
        else:
            assert moved == counts["lacked"] and counts[BETWEEN] == counts["entered"], "a part enters a machine once"


@pytest.mark.parametrize(("old", "new"), [("S0", "I"), ("I", "I"), ("S1", "I"), ("S0", "S1")])
def test_a_part_enters_a_machine_once(old: str, new: str) -> None:
    """And all of its ranks take part of the way in."""
    before, after, node_of = side("data=8", old), side("data=8", new, 8), [rank // 8 for rank in range(16)]
    counts = simulated((16, 8), (before,), (after,), node_of)
    assert counts[BETWEEN] == counts["entered"] == 128
    entered = Counter[int]()
    for part in moved_parts((16, 8), (before,), (after,), node_of):
        entered[part.target] += part.n_elements * (part.round == 0)
    assert set(entered.values()) == {16}


def parameter(shape: tuple[int, ...], dtype: str, *layouts: Side, moments: int = 0) -> StoredParameter:
    return StoredParameter("w", Spec(shape, dtype), moments, layouts)


def side(mesh: str, state: str, first: int = 0) -> Side:
    axes = Mesh.parse(mesh)
    return Side(State.of(*state.split(",")), axes, tuple(range(first, first + axes.n_devices)))


def test_bytes_are_those_of_the_messages() -> None:
    """Of all parameters, in the narrower format, with optimizer state where that moves."""
    cluster = load_cluster("dgx-h100-x2")
    shape, old, new = (16, 32), side("data=16", "S0"), side("data=2,tensor=8", "I,S1")
    counts = simulated(shape, (old,), (new,), list(cluster.node_of))
    for dtypes, moments, item in ((("float32", "bfloat16"), 0, 2), (("bfloat16", "float32"), 0, 2),
                                  (("float32", "float32"), 8, 12)):  # fmt: skip
        before, after = (parameter(shape, dtype, each, moments=moments) for dtype, each in zip(dtypes, (old, new)))
        found = move({"w": before, "v": before}, {"w": after, "v": after}, cluster)
        assert found.by_link == {INSIDE: 2 * item * counts[INSIDE], BETWEEN: 2 * item * counts[BETWEEN]}
        assert found.n_bytes == sum(found.sent.values()) == sum(found.received.values()) == sum(found.by_link.values())
        assert found.stays_bytes == 2 * counts["stays"] * (after.spec.item_bytes + moments)
        assert found.old_bytes == 2 * 32 * (before.spec.item_bytes + moments)
        assert found.new_bytes == 2 * 64 * (after.spec.item_bytes + moments)


def test_one_message_takes_the_seconds_of_a_transfer() -> None:
    cluster = load_cluster("dgx-a100-40gb-x2")
    old = parameter((1 << 22,), "float32", side("x=1", "I"))
    for target in (3, 8, 13):
        new = parameter((1 << 22,), "float32", side("x=1", "I", target))
        found = move({"w": old}, {"w": new}, cluster)
        assert found.seconds == pytest.approx(costs_of(cluster).transfer(0, target, 1 << 24), rel=1e-9)
        assert found.seconds == found.one_by_one_seconds and found.crossing_bytes == 1 << 24
        assert found.peak_bytes == found.one_by_one_peak_bytes == 2 << 24


def test_devices_that_share_an_adapter_wait_for_each_other() -> None:
    shape = (8, 1 << 20)
    old, new = parameter(shape, "float32", side("data=8", "S0")), parameter(shape, "float32", side("data=8", "S0", 8))
    shared, own = (
        move({"w": old}, {"w": new}, load_cluster(f"16xA100-SXM-40GB/8/nvlink3/{adapters}x200gbps")).seconds
        for adapters in (1, 8)
    )
    assert 7 < shared / own < 8.1


def test_memory_of_parameters_one_by_one() -> None:
    """Replicated weights become shards: nothing is sent, each old copy is freed before the next shard is made."""
    cluster = load_cluster("dgx-h100")
    old, new = parameter((64, 8), "float32", side("data=8", "I")), parameter((64, 8), "float32", side("data=8", "S0"))
    found = move({"w": old, "v": old}, {"w": new, "v": new}, cluster)
    assert (found.n_bytes, found.old_bytes, found.new_bytes) == (0, 4096, 512)
    assert found.peak_bytes == 4096 + 512 and found.one_by_one_peak_bytes == 4096 + 256
    kept = move({"w": old, "v": old}, {"w": new, "v": new}, cluster, keeps_old=True)
    assert kept.one_by_one_peak_bytes == kept.peak_bytes == 4096 + 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from command_line import plan_all

    folder = tmp_path_factory.mktemp("plans")
    (folder / "other.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n"
        "    net = nn.Sequential(nn.Linear(16, 16), nn.Flatten(0))\n"
        "    class Mean(nn.Module):\n"
        "        def __init__(self):\n            super().__init__()\n            self.net = net\n"
        "        def forward(self, x):\n            return self.net(x).square().mean()\n"
        "    return Mean(), (torch.randn(8, 16),)\n"
    )
    plan_all(folder, {
        "one": ("--cluster", "dgx-h100", "--mesh", "data=2,tensor=4"),
        "two": ("--cluster", "dgx-h100", "--mesh", "data=4", "--stages", "2", "--microbatches", "2"),
        "here": ("--cluster", "local-x2", "--mesh", "data=2"),
        "far": ("--cluster", "dgx-a100", "--mesh", "data=8", "--optimizer", "sgd"),
    })  # fmt: skip
    words = ("-c", "dgx-h100", "-m", "data=8", "-o", folder / "other.json")
    assert command("plan", folder / "other.py:make", *words)[0] == 0
    return folder


def test_the_command(folder: Path) -> None:
    code, text, err = command("reshard", folder / "one.json", folder / "two.json", "--trust", "--json")
    assert code == 0, err
    found = json.loads(text)
    assert found["cluster"] == "dgx-h100" and found["crossing_bytes"] is None
    assert found["bytes"] == sum(found["sent"].values()) == sum(found["by_link"].values())
    code, text, err = command("reshard", folder / "one.json", folder / "far.json", "--trust", "--keep")
    assert code == 0 and "leave the first plan's devices" in text and "old shards kept" in text, err
    code, text, _ = command("reshard", folder / "two.json", folder / "two.json", "--trust")
    assert code == 0 and "nothing moves" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("one.json", "other.json"), "the plans are for different models"),
        (("one.json", "far.json", "--optimizer-state"), "optimizer is adamw, the second's sgd"),
        (("one.json", "two.json", "--optimizer-state", "--used"), "leave out one of"),
        (("one.json", "here.json"), "cannot be joined: 'dgx-h100+local-x2': only clusters of machines on one"),
    ],
)
def test_what_cannot_be_moved_is_refused(folder: Path, words: tuple[str, ...], message: str) -> None:
    code, _, err = command("reshard", *(folder / w if w.endswith(".json") else w for w in words), "--trust")
    assert code == 2 and message in " ".join(err.split())
