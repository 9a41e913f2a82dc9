"""``autopar plan --precision auto``: the fastest of several policies, as :func:`autopar.plan` chooses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import command

MODEL = '''
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.float().square().mean()


def make(width=8192):
    with torch.device("meta"):
        return Net(width), (torch.empty(16384, width),)


def small():
    return make(1024)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies")
    (path / "net.py").write_text(MODEL)
    return path


def planned(folder: Path, of: str, precision: str, *more: object) -> tuple[int, str, str]:
    words = "plan", f"{folder / 'net.py'}:{of}", "-c", "dgx-h100@0", "--mesh", "data=1", "--precision", precision
    return command(*words, *more)


@pytest.mark.parametrize(
    ("of", "precision", "best"),
    [("make", "auto", "fp8-mixed"), ("small", "auto", "bf16-mixed"),
     ("make", "bf16-mixed or fp8-row-mixed", "fp8-row-mixed")],
)  # fmt: skip
def test_the_fastest_of_the_policies_that_are_allowed(folder: Path, of: str, precision: str, best: str) -> None:
    file = folder / "plan.json"
    code, said, err = planned(folder, of, precision, "-o", file)
    assert code == 0, err
    note = f"precision {best}, the fastest that fits of those that were allowed: bf16-mixed"
    assert note in " ".join(said.split())
    assert note in " ".join(command("show", file, "--trust")[1].split())
    assert note in " ".join(command("explain", file, "layers.0", "--trust")[1].split())
    (explained,) = json.loads(command("explain", file, "layers.0", "--trust", "--json")[1])["notes"]
    assert note in explained
    assert f'"precision": "{best}"' in file.read_text()


def test_policies_that_cannot_be_chosen_among(folder: Path) -> None:
    code, _, err = planned(folder, "make", "bf16-mixed or fp9")
    assert code == 2 and "precision is 'fp9'" in err
    words = "-c", "dgx-h100", "--precision", "auto"
    model = f"{folder / 'net.py'}:make"
    code, _, err = command("plan", model, *words, "--for", "megatron")
    assert code == 2 and "--precision auto is a choice, which --for megatron does not make" in err
    code, _, err = command("fits", model, *words, "--like", "dp=8")
    assert code == 2 and "precision is 'auto', a choice, which plan and parallelize make" in err
