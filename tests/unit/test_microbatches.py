"""The number of microbatches as a choice: graphs of every size from two captures, the best number, the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from unit.test_cli_pipeline import autopar as command
from zoo import ZOO

import autopar
from autopar import planfile as files
from autopar.capture import capture
from autopar.capture.microbatches import NotLinear, first_part, numbers_of_parts, resized, rows_of
from autopar.errors import AutoparError, CaptureError
from autopar.graph import Graph
from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
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
    case = ZOO["resnet"]()
    found = autopar.plan(
        case.model, "local-x2", case.kwargs or case.args, stages=2, microbatches=[1, 2], schedule="1f1b"
    )
    assert any("batch statistics are those of a microbatch" in note for note in found.notes)


def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    plan, model = tmp_path / "plan.json", f"{tmp_path / 'model.py'}:make"
    common = ("plan", model, "-c", "local-x2", "--stages", 2, "-o", plan)
    code, out, err = command(*common, "--microbatches", "3,6")
    assert code == 0, err
    parts = json.loads(plan.read_text())["model"]["parts"]
    assert parts in (3, 6) and f"{parts} microbatches" in out
    code, out, _ = command("show", plan, "--json")
    assert code == 0 and json.loads(out)["microbatches"] == parts
    code, out, _ = command("verify", model, "--plan", plan, "--json")
    assert code == 0 and json.loads(out)[0]["worst"] < 1e-9
    for text, said in (("5,6", "12 rows cannot be cut into 5"), ("x", "give a number, several"), ("0,2", "1 or more")):
        code, _, err = command(*common, "--microbatches", text)
        assert code != 0 and said in " ".join(err.split()), err
    raw = json.loads(plan.read_text())
    for value, said in ((0, "parts"), ("3", "parts")):
        raw["model"]["parts"] = value
        with pytest.raises(AutoparError, match=said):
            files.parse(json.dumps(raw), "plan.json")
