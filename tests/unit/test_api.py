"""The Python calls without processes: what they take, and what they say of what they cannot take."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import planfile
from autopar.lower.emit import lower

CLUSTER = """
name = "two-cards"
[[node]]
device = "H100-SXM-80GB"
n_devices = 2
[[node.level]]
link = "nvlink4"
"""


class MLP(nn.Module):
    """Two layers and a loss; ``scale`` is by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.down(F.relu(self.up(x)))
        return F.mse_loss(x if scale is None else x * scale, y)


BATCH = (torch.zeros(8, 16), torch.zeros(8, 16))


def test_recompute_is_asked_for_by_module() -> None:
    plan = autopar.plan(MLP(), "local-x2", BATCH, mesh="data=2", recompute=["up"])
    assert [first for first, _ in plan.recompute] == ["linear"] and plan.pins.recompute == ("up",)
    with pytest.raises(autopar.AutoparError, match="recompute is 'up'; give a list"):
        autopar.plan(MLP(), "local-x2", BATCH, mesh="data=2", recompute="up")


@pytest.mark.parametrize("name", ["laptop", "absent.toml", "broken.toml"])
def test_cluster_errors_are_autopar_errors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text("name = ")
    with pytest.raises(autopar.AutoparError, match=name.removesuffix(".toml")):
        autopar.plan(MLP(), name, BATCH)
    with pytest.raises(autopar.AutoparError, match=name.removesuffix(".toml")):
        autopar.parallelize(MLP(), 1, BATCH, cluster=name)


def test_plan_finds_its_cluster_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan remembers the file, not only the name in it; saved, it names the file by its path from there."""
    monkeypatch.chdir(tmp_path)
    Path("hardware").mkdir()
    Path("plans").mkdir()
    Path("hardware/two.toml").write_text(CLUSTER)
    captured = autopar.capture(MLP(), BATCH)
    found = autopar.plan(MLP(), "hardware/two.toml", BATCH, mesh="data=2", captured=captured)
    planfile.save("plans/plan.json", found, captured.graph)
    text = Path("plans/plan.json").read_text()
    assert json.loads(text)["cluster"] == "../hardware/two.toml"
    Path("plans/plan.json").write_text(text.replace('"optimizer": "adamw"', '"optimizer": "sgd"'))  # priced anew
    monkeypatch.chdir("/")
    assert planfile.load(tmp_path / "plans/plan.json", captured.graph).solution is None


def test_code_is_python_that_names_its_functions() -> None:
    """No line assigns a name that a later line calls as a function."""
    captured = autopar.capture(MLP(), BATCH)
    found = autopar.plan(MLP(), "local-x2", BATCH, mesh="data=2", constraints={"up": {"data": "b"}}, captured=captured)
    tree = ast.parse(lower(captured.graph, found).code)
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert "shard" in stored and not stored & called


def test_positional_and_keyword_inputs_together() -> None:
    scale = torch.full((8, 16), 2.0)
    pm = autopar.parallelize(MLP(), 1, BATCH, example_kwargs={"scale": scale})
    assert pm(*BATCH, scale=scale).item() != pm(*BATCH, scale=2 * scale).item()
    found = autopar.plan(MLP(), "local-x2", BATCH, example_kwargs={"scale": scale}, mesh="data=2")
    assert found.fingerprint == pm.plan.fingerprint
    with pytest.raises(autopar.AutoparError, match="2 keyword arguments, and example_kwargs has 1 more"):
        autopar.capture(MLP(), {"x": BATCH[0], "y": BATCH[1]}, example_kwargs={"scale": scale})
    with pytest.raises(autopar.CaptureError, match="pass args as the example inputs, and example_kwargs=kwargs"):
        autopar.capture(MLP(), (BATCH, {"scale": scale}))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mesh": 4}, "mesh is 4; give axes and their sizes"),
        ({"constraints": {"up": "n"}}, r"constraints\['up'\] is 'n'; give it like \{'layers"),
        ({"constraints": ["up"]}, r"constraints is \['up'\]; give a dict such as"),
        ({"params": {"up.weight": None}}, r"params\['up.weight'\] is None; give it like"),
        ({"params": {"up.weight": "S0 zig"}}, "'zig' is no lifetime; write 'S0 step'"),
        ({"params": {"up.weight": "S0 or I"}}, "'or' is no lifetime"),
        ({"placements": {"x": ("S0",)}}, r"placements\['x'\] is \('S0',\); give it like"),
        ({"memory_limit": -3}, "memory_limit is -3; give more than 0 bytes"),
        ({"microbatches": 2.5}, "microbatches is 2.5; give a whole number"),
        ({"time_limit": 0}, "time_limit is 0 s; give more than 0"),
        ({"max_axes": 0, "mesh": None}, "max_axes is 0; give 1 or more"),
        ({"loss_fn": 3}, "loss_fn is 3; give a function"),
        ({"loss_fn": lambda out, target: out @ target, "targets": BATCH[:1]}, "cannot capture MLP with its loss_fn"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes(wrong: dict[str, Any], said: str) -> None:
    """Every mistake in the arguments is an AutoparError that names the argument and what it holds."""
    with pytest.raises(autopar.AutoparError, match=said):
        autopar.plan(MLP(), "local-x2", BATCH, **{"mesh": "data=2", **wrong})
