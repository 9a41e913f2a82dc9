"""The number of microbatches as a choice: graphs of every size from two captures, the best number, the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import command
from torch import nn
from zoo import ZOO

import autopar
from autopar import planfile as files
from autopar.capture import capture
from autopar.capture.microbatches import NotLinear, first_part, numbers_of_parts, resized, rows_of
from autopar.errors import AutoparError, CaptureError, InfeasibleError
from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
from autopar.words.graph import Graph
from hardware_profiles import load_cluster

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)

def make():
    torch.manual_seed(0)
    return Model(), (torch.randn(12, 16), torch.randn(12, 16))
"""


class Wide(nn.Module):
    """Layers of some weight, so that stages are worth their transfers."""

    def __init__(self, hidden: int = 2048, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b h] -> []
        return self.layers(x).square().mean()


class Normed(nn.Module):
    """Two layers, between which something is taken of the whole batch."""

    def __init__(self, kind: str | None = "norm") -> None:
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(512, 2048), nn.Linear(2048, 512)
        if kind == "norm":
            self.norm = nn.BatchNorm1d(2048)
        elif kind == "buffer":
            self.register_buffer("mean", torch.zeros(2048))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b h] -> []
        x = self.first(x)
        if self.kind == "norm":
            x = self.norm(x)
        elif self.kind == "buffer":
            self.mean.lerp_(x.detach().mean(0), 0.1)
            x = x - self.mean
        return self.last(x).square().mean()


def wide(rows: int) -> Graph:
    with torch.device("meta"):
        return capture(Wide(), (torch.zeros(rows, 2048),)).graph


def of_rows(name: str, rows: int) -> Graph:
    """A model of the zoo with its batch repeated to so many rows."""
    case = ZOO[name]()
    have = rows_of((case.args, case.kwargs))

    def grown(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == have:
            return x.repeat(-(-rows // have), *[1] * (x.dim() - 1))[:rows]
        return x

    args, kwargs = torch.utils._pytree.tree_map(grown, (case.args, case.kwargs))
    return capture(case.model, args, kwargs).graph


QUICK, SLOW = ("llama", "resnet", "unet", "mlp_mixer"), ("gpt2", "bert_masked", "t5", "vit")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_graph_of_another_size_is_the_captured_one(name: str) -> None:
    two, four, eight = (of_rows(name, rows) for rows in (2, 4, 8))
    assert resized(eight, four, 8, 4, 2) == two
    assert resized(four, two, 4, 2, 8).fingerprint == eight.fingerprint


def test_graphs_that_differ_in_more_are_refused() -> None:
    with pytest.raises(NotLinear):
        resized(of_rows("gpt2", 4), of_rows("llama", 2), 4, 2, 1)
    a, b = of_rows("mlp", 6), of_rows("mlp", 4)
    with pytest.raises(NotLinear):
        resized(a, replace(b, loss=None), 6, 4, 2)


def test_parts_of_a_batch() -> None:
    x, mask = torch.arange(12).reshape(6, 2), torch.ones(3, 3)
    (part,), kwargs = first_part(((x,), {"mask": mask, "n": 3}), 3)
    assert part.tolist() == [[0, 1], [2, 3]] and kwargs["mask"] is mask and kwargs["n"] == 3
    with pytest.raises(CaptureError, match="6 rows cannot be cut into 4 microbatches"):
        first_part(((x,), {}), 4)
    with pytest.raises(CaptureError, match="no example input has a dim"):
        first_part(((torch.tensor(1.0),), {}), 2)
    assert numbers_of_parts(12) == [1, 2, 4, 12] and numbers_of_parts(7) == [1, 7] and numbers_of_parts(1) == [1]


def test_the_best_number_is_found() -> None:
    """As good as planning every number by itself."""
    cluster = load_cluster("local-x4")
    graphs = {m: wide(64 // m) for m in (1, 2, 4, 8, 16)}
    asked = PipelineOptions(1, groups=4, schedules=("1f1b", "gpipe"))
    alone = {m: plan_pipeline(g, cluster, 4, replace(asked, microbatches=m)).plan.seconds for m, g in graphs.items()}
    found = plan_pipeline(graphs, cluster, 4, asked).plan
    assert found.seconds == pytest.approx(min(alone.values()), rel=1e-9)
    assert alone[found.microbatches] == found.seconds and 1 < found.microbatches
    assert found.fingerprint == graphs[found.microbatches].fingerprint


def test_of_a_model() -> None:
    with torch.device("meta"):
        model, batch = Wide(), torch.zeros(64, 2048)
    found = autopar.plan(model, "local-x4", batch, stages=4, microbatches="auto")
    assert found.microbatches in (1, 2, 4, 8, 16, 32, 64) and found.pins.microbatches is None
    rows = 64 // found.microbatches
    assert found.fingerprint == wide(rows).fingerprint
    pair = autopar.plan(model, "local-x4", batch, stages=4, microbatches=[2, 4])
    assert pair.microbatches in (2, 4)
    assert autopar.plan(model, "local-x4", batch, stages=4, microbatches=4).fingerprint == wide(16).fingerprint
    with pytest.raises(AutoparError, match="64 rows cannot be cut into 3"):
        autopar.plan(model, "local-x4", batch, stages=2, microbatches=[3, 4])
    for wrong in ("many", [], [0], 1.5):
        with pytest.raises(AutoparError, match="give a whole number of 1 or more"):
            autopar.plan(model, "local-x4", batch, stages=2, microbatches=wrong)


def test_batch_statistics_are_named() -> None:
    """A number is the user's: what it does to the statistics is in the notes."""
    for number in (2, [2, 4]):
        found = autopar.plan(Normed(), "local-x2", torch.zeros(8, 512), stages=2, microbatches=number, schedule="1f1b")
        assert any("batch norms ('norm') take statistics of the batch: each of the" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["norm", "buffer"])
def test_a_batch_that_is_one_thing_is_not_cut_by_itself(kind: str) -> None:
    """The planner cuts what is the same in parts (the first line says so), and no other."""
    batch = torch.zeros(1024, 512)
    asked = {"stages": 2, "schedule": "1f1b", "recompute": "none"}
    assert autopar.plan(Normed(None), "local-x2", batch, **asked).microbatches > 1
    found = autopar.plan(Normed(kind), "local-x2", batch, **asked)
    assert found.microbatches == 1 and any(note.startswith("one microbatch, because") for note in found.notes)
    assert autopar.parallelize(Normed(kind), 1, torch.randn(8, 512), microbatches="auto").plan.microbatches == 1
    with pytest.raises(InfeasibleError, match=r"for the whole batch at once, because .* give a number"):
        autopar.plan(Normed(kind), "local-x2", batch, memory_limit=10e6, **asked)


def test_a_batch_that_is_one_thing_on_the_command_line(tmp_path: Path) -> None:
    text = MODEL.replace("(nn.Linear(16, 16) for _ in range(6))", "[nn.Linear(16, 16), nn.BatchNorm1d(16)]")
    (tmp_path / "model.py").write_text(text)
    model = f"{tmp_path / 'model.py'}:make"
    code, out, err = command("plan", model, "-c", "local-x2", "--stages", 2, "--json")
    assert code == 0, err
    assert "parts" not in json.loads(out)["model"] and "one microbatch, because batch norms ('layers.1')" in out


def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    plan, model = tmp_path / "plan.json", f"{tmp_path / 'model.py'}:make"
    common = ("plan", model, "-c", "local-x2", "--stages", 2, "-o", plan)
    code, out, err = command(*common, "--microbatches", "3,6")
    assert code == 0, err
    parts = json.loads(plan.read_text())["model"]["parts"]
    assert parts in (3, 6) and f"{parts} microbatches" in out
    code, out, _ = command("show", plan, "--json", "--trust")
    assert code == 0 and json.loads(out)["microbatches"] == parts
    code, out, _ = command("verify", model, "--plan", plan, "--json")
    assert code == 0 and json.loads(out)["plans"][0]["worst"] < 1e-9
    for text, said in (("5,6", "12 rows cannot be cut into 5"), ("x", "give a number, several"), ("0,2", "1 or more")):
        code, _, err = command(*common, "--microbatches", text)
        assert code != 0 and said in " ".join(err.split()), err
    raw = json.loads(plan.read_text())
    for value, said in ((0, "parts"), ("3", "parts")):
        raw["model"]["parts"] = value
        with pytest.raises(AutoparError, match=said):
            files.parse(json.dumps(raw), "plan.json")
