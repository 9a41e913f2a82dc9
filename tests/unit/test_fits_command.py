"""``autopar fits``: yes or no, by how much, how sure, and what would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autopar.cli import app, fits
from hardware_profiles.published_errors import ErrorBand

NET = '''
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def make():
    return Net(), (torch.zeros(4096, 64),)
'''


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["fits", "net.py:make", "-c", "local-x4", *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def test_yes_and_no() -> None:
    code, text = run("--like", "dp=4,m=1")
    assert code == 0 and text.startswith("yes: dp=4,m=1 needs ") and " left; a step takes " in text
    code, text = run("--like", "dp=4,mbs=1024", "--memory-limit", "8MiB")
    assert code == 1 and text.startswith("no: dp=4,mbs=1024 needs ") and "too much" in text
    assert "fits: dp=4,mbs=512" in text or "fits: dp=4,mbs=1024,recompute=full" in text
    assert text.count("offload: device cpu-core has no memory of a host") == 1
    code, text = run("--like", "dp=4,mbs=1024", "--memory-limit", "1KiB")
    assert code == 1 and "none of the layouts near it fits" in text


def test_the_memory_of_the_host() -> None:
    """A layout is priced with a part of it there; without a wish more and more of it is tried until it fits."""
    like = ("-c", "dgx-h100", "--like", "dp=8,mbs=512")
    small, none = (*like, "--memory-limit", "4900KiB"), (*like, "--memory-limit", "1200KiB")
    code, text = run(*small)
    assert code == 1 and "  fits: dp=8,mbs=512 --offload activations: " in text
    code, text = run(*small, "--offload", "activations")
    assert code == 0 and "  on the host: activations, " in text
    least = {}
    for offload in ("none", "activations", "optimizer=0.5", "optimizer", "auto"):
        code, text = run(*none, "--offload", offload, "--json")
        facts = json.loads(text)
        assert code == 1 and bool(facts.get("on_host")) == (offload != "none")
        assert not any("--offload" in other["layout"] for other in facts["alternatives"])
        least[offload] = facts["memory_bytes"]
    assert least["none"] > least["optimizer=0.5"] > least["optimizer"] > least["auto"] < least["activations"]
    code, text = run(*none)
    assert code == 1 and f"--offload auto: refused: {least['auto'] / 2**20:.1f} of 1.2 MiB" in text


def test_as_json() -> None:
    code, text = run("--like", "dp=4,mbs=1024", "--memory-limit", "8MiB", "--json")
    facts: dict[str, Any] = json.loads(text)
    assert code == 1 and not facts["fits"] and facts["over_bytes"] == facts["memory_bytes"] - facts["limit_bytes"] > 0
    assert facts["limit_bytes"] == 2**23 and facts["seconds"] > 0
    assert all(other["memory_bytes"] <= 2**23 for other in facts["would_do"]) and facts["would_do"]


def test_smaller_layouts() -> None:
    assert fits.smaller("dp=8,mbs=4") == [
        "dp=8,mbs=2", "dp=8,mbs=4,zero=1", "dp=8,mbs=4,recompute=full", "dp=8,mbs=4,zero=3",
        "dp=8,mbs=2,zero=1", "dp=8,mbs=2,zero=1,recompute=full", "dp=8,mbs=2,zero=3,recompute=full",
    ]  # fmt: skip
    assert fits.smaller("tp=4,sp,recompute=full") == []
    assert fits.smaller("tp=4,recompute=full") == ["tp=4,recompute=full,sp"]


def test_how_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    band = ErrorBand("autopar", "any", memory_rows=40, memory_median=0.03, memory_90=0.2)
    found = type("Found", (), {"memory_bytes": 90.0, "limit_bytes": 100.0})()
    assert fits.certainty(found, band) == (
        "of 40 published runs of autopar, nine of ten were within 20%: too close to the limit to be certain"
    )
    found.memory_bytes = 50.0
    assert fits.certainty(found, band).endswith("within 20%: far enough from the limit")
    assert "not known" in fits.certainty(found, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dp=4,recompute=selective:nothing", "no block has a module 'nothing'"),
        ("dp=4,recompute=selective:up+dwn", "did you mean 'down'?"),
        ("dp=4,recompute=every:5", "none of the model's 4 blocks"),
        ("dp=4,recompute=full:5", "a stage has 4 blocks at most"),
        ("dp=4,etp=1", "etp=1 needs routed experts"),
        ("dp=2,pp=2,schedule=interleaved-1f1b:2,vp=4", "puts 2 stages on each of several groups, beside vp=4"),
        ("dp=2,pp=2,schedule=1f1b,vp=2", "pp=2 with vp=2"),
        ("dp=4,schedule=zb-v", "pp=1 with vp=1"),
        ("dp=4,precision=banana", "--like dp=4,precision=banana: precision is 'banana'"),
        ("dp=4,precision=bf16-true", "--precision says bf16-mixed, --like bf16-true"),
    ],
)
def test_words_without_effect_are_refused(words: str, message: str) -> None:
    flags = ("-c", "local-x4", "--precision", "bf16-mixed", "--like", words)
    done = CliRunner().invoke(app, ["fits", "net.py:make", *flags])
    assert message in str(done.exception), done.exception


ONE_WEIGHT = '''
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (y.view(*x.shape[:2], 4, 16).transpose(1, 2) for y in self.qkv(x).split(64, 2))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def make():
    return Net(), (torch.zeros(8, 16, 64),)
'''


def test_a_plan_that_the_model_cannot_run_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(ONE_WEIGHT)
    words = ("plan", "net.py:make", "-c", "local-x2", "--like", "tp=2,m=1", "-o", "best.json")
    done = CliRunner().invoke(app, [*words, "--like-output", "ours.json"])
    assert "ours.json would be a plan that this model cannot run" in str(done.exception), done.exception
    assert not (tmp_path / "best.json").exists() and not (tmp_path / "ours.json").exists()
    code, text = run("--like", "tp=4,m=1", "--json")
    assert code == 0 and not json.loads(text)["runs"]


def test_a_narrow_precision_without_narrow_products_is_refused() -> None:
    done = CliRunner().invoke(app, ["fits", "net.py:make", "-c", "local-x4", "--like", "dp=4,precision=fp8-mixed"])
    assert "no product of the model would be in fp8" in str(done.exception), done.exception


def test_more_microbatches_are_smaller_ones() -> None:
    assert fits.smaller("dp=4 ,m=2, zero=3,recompute=full") == ["dp=4,m=4,zero=3,recompute=full"]
