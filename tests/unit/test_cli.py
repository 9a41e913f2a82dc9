"""The command line: every command runs on a small model, prints JSON that parses, and tables that hold the numbers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from json_answers import held_to_its_schema

from autopar.cli import main

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.gate, self.mix = nn.Linear(hidden, 4 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x):
        y = self.norm(x)
        return x + self.mix(self.down(F.relu(self.up(y)) * self.gate(y)))


class Net(nn.Module):
    def __init__(self, hidden=16, layers=3):
        super().__init__()
        self.first = nn.Linear(hidden, hidden)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(layers))

    def forward(self, x, y):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def make():
    torch.manual_seed(0)
    return Net(), (torch.randn(8, 16), torch.randn(8, 16))


def dropout():
    net = Net(layers=1)
    net.layers[0].mix = nn.Sequential(net.layers[0].mix, nn.Dropout(0.3))
    return net, (torch.randn(8, 16), torch.randn(8, 16))


def half():
    # another batch in every process
    return Net(layers=1).bfloat16(), (torch.randn(8, 16).bfloat16(), torch.randn(8, 16).bfloat16())


class Magnifying(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 1)

    def forward(self, x):
        return (1e12 * self.inner(x)).sin().mean()


def magnifying():
    torch.manual_seed(0)
    return Magnifying().double(), (torch.randn(8, 16).double(),)


def meta():
    with torch.device("meta"):
        return Net(layers=1), (torch.zeros(8, 16), torch.zeros(8, 16))
"""
MESH = ("--cluster", "local-x4", "--mesh", "data=2,tensor=2")


def autopar(*words: str, code: int = 0) -> str:
    """What a command prints on standard output."""
    stdout = io.StringIO()
    with mock.patch.object(sys, "argv", ["autopar", *words]), pytest.raises(SystemExit) as end:
        with contextlib.redirect_stdout(stdout):
            main()
    assert (end.value.code or 0) == code
    held_to_its_schema(words, stdout.getvalue())
    return stdout.getvalue()


def answer(*words: str) -> dict[str, Any]:
    """What a command prints with ``--json``."""
    answered: dict[str, Any] = json.loads(autopar(*words, "--json"))
    return answered


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with net.py, plan.json and cut.json (the same with every ``up`` cut by columns)."""
    path = tmp_path_factory.mktemp("cli")
    with contextlib.chdir(path):
        Path("net.py").write_text(MODEL)
        autopar("plan", "net.py:make", *MESH, "-o", "plan.json")
        autopar("plan", "net.py:make", *MESH, "--pin", "layers.*.up:tensor=n", "-o", "cut.json")
    return path


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_plan_writes_the_same_bytes_again() -> None:
    text = autopar("plan", "net.py:make", *MESH, "--json")
    assert text == Path("plan.json").read_text()
    assert json.loads(text)["model"] == {"spec": "net.py:make"}


def test_plan_chooses_a_mesh() -> None:
    """Without flags everything is searched: nothing that flags pin is faster."""
    document = json.loads(autopar("plan", "net.py:make", "-c", "local", "--json"))

    def seconds(plan: dict[str, Any]) -> float:
        return plan["seconds"]

    best = seconds(document)
    for mesh in ("data=2", "tensor=2"):
        pinned = json.loads(autopar("plan", "net.py:make", "-c", "local", "--mesh", mesh, "--json"))
        assert best <= 1.001 * seconds(pinned)
    text = autopar("plan", "net.py:make", "-c", "local", "--top", "2", "--like", "dp=2,m=1", "-o", "searched.json")
    assert "of peak" in text and "times the best" in text and "searched.json has the best plan, not this" in text
    autopar(
        "plan", "net.py:make", "-c", "local", "--like", "pp=2,m=2", "-o", "searched.json", "--like-output", "ours.json"
    )
    assert len(json.loads(Path("ours.json").read_text())["stages"]) == 2
    assert "certified" in autopar("check", "--trust", "ours.json").lower()
    autopar("plan", "net.py:make", "-c", "local", "--like-output", "ours.json", code=2)
    same = ("-o", "ours.json", "--like-output", "./ours.json")
    autopar("plan", "net.py:make", "-c", "local", "--like", "pp=2,m=2", *same, code=2)
    autopar("plan", "net.py:make", "-c", "local", "--mesh", "data=2", "--top", "2", code=2)


def test_plan_obeys_pins() -> None:
    ops = json.loads(Path("cut.json").read_text())["stages"][0]["ops"]
    assert ops["layers.*.up:linear"]["tensor"] == "n"


def test_show() -> None:
    text = autopar("show", "--trust", "plan.json")
    for part in ("up:linear", "parameters", "activations", "gap 0.00%"):
        assert part in text
    assert re.search(r"layers \d to 2 \(x \d\)", text), "equal layers share a table"


def test_show_sums_up() -> None:
    """Seconds of the rows are those of the price."""
    shown = json.loads(autopar("show", "--trust", "cut.json", "--json", "--all"))
    rows = sum(
        b["count"] * sum(o["compute_seconds"] + o["collective_seconds"] for o in b["ops"]) for b in shown["blocks"]
    )
    assert rows == pytest.approx(shown["seconds"]["compute"] + shown["seconds"]["activation collectives"])
    parameters = sum(p["seconds"] for p in shown["parameters"])
    assert parameters == pytest.approx(shown["seconds"]["parameter collectives"])
    assert sum(p["stored_bytes"] for p in shown["parameters"]) == shown["bytes"]["parameters"]


def test_recompute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows and the second forwards add up to the price; the file has the segments and the wish."""
    file = str(tmp_path / "again.json")
    autopar("plan", "net.py:make", *MESH, "--pin", "layers.*.up:tensor=n", "--recompute", "layers.*", "-o", file)
    document = json.loads(Path(file).read_text())
    segments = [[f"layers.{i}.norm:layer_norm", f"layers.{i}.mix:linear"] for i in range(3)]
    assert document["stages"][0]["memory"]["recompute"] == segments
    assert document["pins"]["recompute"] == ["layers.*"]
    text = autopar("show", "--trust", file)
    assert "recomputed in the backward" in text and "layers.*: recompute" in text
    shown = json.loads(autopar("show", "--trust", file, "--json", "--all"))
    rows = sum(
        b["count"] * sum(o["compute_seconds"] + o["collective_seconds"] for o in b["ops"]) for b in shown["blocks"]
    )
    priced = shown["seconds"]["compute"] + shown["seconds"]["activation collectives"]
    assert shown["recompute"]["seconds"] > 0.01 * rows
    assert rows + shown["recompute"]["seconds"] == pytest.approx(priced)
    assert "recompute" in autopar("diff", "--trust", "cut.json", file)
    autopar("plan", "net.py:make", *MESH, "--recompute", "blocks.*", code=2)
    assert "recompute 'blocks.*' matches no module; modules are first, layers" in capsys.readouterr().err
    autopar("plan", "net.py:make", "-c", "local-x2", "--stages", "2", "--recompute", "blocks.*", code=2)
    assert "recompute 'blocks.*' matches no module; modules are first, layers" in capsys.readouterr().err


def test_show_code_is_python() -> None:
    text = autopar("show", "--trust", "cut.json", "--code")
    compile(text, "program.py", "exec")
    assert "collectives." in text
    assert "layers_0_up_weight,  # float32[32 16]" in text


def test_show_without_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy("cut.json", tmp_path / "alone.json")
    text = autopar("show", "--trust", str(tmp_path / "alone.json"))
    assert "layers.*.up:linear" in text
    assert "net.py does not exist" in capsys.readouterr().err
    assert json.loads(autopar("show", str(tmp_path / "alone.json"), "--json"))["warning"]
    autopar("show", str(tmp_path / "alone.json"), "--model", "net.py:make")


def test_explain() -> None:
    found = json.loads(autopar("explain", "--trust", "plan.json", "layers.1.up", "--instead", "tensor=n", "--json"))
    rows = found["ops"][0]["strategies"]
    assert sum(r["chosen"] for r in rows) == 1
    assert [r["seconds"] for r in rows if r["seconds"] is not None] == sorted(
        r["seconds"] for r in rows if r["seconds"] is not None
    )
    pinned = json.loads(Path("cut.json").read_text())["stages"][0]["price"]
    assert found["instead"]["ops"] == 3  # the op and its copies
    assert found["instead"]["stages"][0]["price"] == {**pinned, "again_bytes": 0, "buffer_bytes": 0, "version_bytes": 0}
    assert found["instead"]["seconds"] >= found["instead"]["plan_seconds"]
    assert "chosen" in autopar("explain", "--trust", "plan.json", "layers.*.up")


def test_a_plan_remembers_what_was_asked() -> None:
    """Pins and limit stand in the plan, are shown, and hold when explain solves again."""
    pins = ("--pin", "layers.*.down:tensor=k", "--pin-param", "first.weight=S0, I use")
    plan_options = (*pins, "--memory-limit", "96KiB")
    places = ("--pin-input", "x=S0,R", "--pin-output", "0=I,I")
    autopar("plan", "net.py:make", *MESH, *plan_options, *places, "-o", "asked.json")
    document = json.loads(Path("asked.json").read_text())
    assert document["pins"] == {
        "ops": {"layers.*.down": {"tensor": "k"}}, "params": {"first.weight": "S0,I use"}, "inputs": {"x": "S0,R"},
        "outputs": {"0": "I,I"}, "memory_limit_bytes": 98304, "mesh": "data=2,tensor=2",
    }  # fmt: skip
    assert document["stages"][0]["params"]["first.weight"]["stored"] == "S0,I"
    text = " ".join(autopar("show", "--trust", "asked.json").split())
    assert "requested: mesh data=2 x tensor=2; layers.*.down: tensor=k; first.weight: S0,I use; " in text
    assert "input x: S0,R; output 0: I,I;" in text
    assert "at most 96.00 KiB per device" in text

    again = instead("layers.1.down", "tensor=k")  # granted before
    assert again["seconds"] == pytest.approx(again["plan_seconds"])
    assert again["memory_bytes"] <= 98304
    assert instead("first", "data=b", "--memory-limit", "1GiB")["seconds"] <= again["seconds"]


def instead(op: str, option: str, *more: str) -> dict[str, Any]:
    return json.loads(autopar("explain", "--trust", "asked.json", op, "--instead", option, "--json", *more))["instead"]


@pytest.mark.slow
def test_a_wish_overrides_a_pin_and_not_the_limit() -> None:
    plan_options = ("--pin", "layers.*.down:tensor=k", "--memory-limit", "64KiB")
    autopar("plan", "net.py:make", *MESH, *plan_options, "-o", "asked.json")
    assert instead("layers.1.down", "tensor=n")["memory_bytes"] <= 65536


def test_check_counts_the_peak() -> None:
    facts = json.loads(autopar("check", "--trust", "plan.json", "--json"))
    assert facts["certified"] and facts["peak_bytes"] > facts["stages"][0]["kept_bytes"]
    assert "peak memory: " in autopar("check", "--trust", "plan.json")


def test_a_certificate_of_more_than_the_memory_limit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan may say a little less than there is: then the certificate does not hold."""
    from autopar import certificate

    autopar("plan", "net.py:make", *MESH, "--memory-limit", "96KiB", "-o", "tight.json")
    assert json.loads(autopar("check", "--trust", "tight.json", "--json"))["certified"]
    monkeypatch.setattr(certificate, "peak_of", lambda plan, graph: certificate.Peak(98993, "forward: aten.mm"))
    said = autopar("check", "--trust", "tight.json", code=1)
    assert "96.67 KiB at once (forward: aten.mm), 0.7% more than the memory limit that was asked for, 96.00 KiB" in said
    assert "memory limit of 97619 bytes or less" in said


def test_diff() -> None:
    assert "the same" in autopar("diff", "--trust", "plan.json", "plan.json")
    rows = {r["what"]: r for r in answer("diff", "--trust", "plan.json", "cut.json")["differences"]}
    assert rows["op layers.*.up:linear"]["b"].endswith("tensor=n")
    assert "price.seconds" in rows


def test_diff_of_plans_for_different_models(tmp_path: Path) -> None:
    """A line says so, and a part that one file has alone is a few words, not all that is in it."""
    path = tmp_path / "other.json"
    autopar("plan", "net.py:make", "-c", "local-x2", "--stages", "2", "--microbatches", "2", "-o", str(path))
    other = json.loads(path.read_text(encoding="utf-8"))
    other["fingerprint"], other["model"] = "0" * 16, {"spec": "other.py:make"}
    path.write_text(json.dumps(other), encoding="utf-8")
    said = autopar("diff", "--trust", "plan.json", str(path))
    assert "the plans are for different models; their files are compared entry by entry" in said
    assert " entries: " in said and "{" not in said


def test_inspect() -> None:
    found = json.loads(autopar("inspect", "net.py:make", "--json"))
    assert found["blocks"][0]["repeats"] == 3
    assert found["parameters"]["count"] == 32
    assert "aten.linear.default" in autopar("inspect", "net.py:make")
    assert "return %mse_loss" in autopar("inspect", "net.py:make", "--graph")


def test_inspect_compares_with_eager_mode() -> None:
    found = json.loads(autopar("inspect", "net.py:make", "--verify", "--json"))["compared with eager mode"]
    assert [row["batch"] for row in found] == ["example batch", "another batch"]
    assert all(row["loss"] < 1e-6 and row["gradients"] < 1e-6 and not row["not compared"] for row in found)
    assert "the model in eager mode, another batch: loss" in autopar("inspect", "net.py:make", "--verify")


def test_verify() -> None:
    rows = answer("verify", "net.py:make", "--mesh", "tensor=2", "--random-plans", "1")["plans"]
    assert [r["name"] for r in rows] == ["one device / eager", "plan", "random 0"]
    assert all(r["ok"] for r in rows)


def test_verify_a_model_in_bfloat16() -> None:
    rows = answer("verify", "net.py:half", "--mesh", "data=2,tensor=2", "--random-plans", "3")["plans"]
    assert [r["limit"] for r in rows] == [5e-2, 1e-9, 1e-9, 1e-9, 1e-9]
    assert all(r["ok"] for r in rows)


def test_verify_says_that_a_model_magnifies_rounding() -> None:
    said = autopar("verify", "net.py:magnifying", "--mesh", "data=2", "--random-plans", "4")
    assert "rounding" in said and "more than" not in said and "when the last digits of its numbers change" in said


def test_a_model_without_values_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    autopar("plan", "net.py:meta", *MESH, "-o", "meta.json")
    for words in (("run", "meta.json"), ("verify", "net.py:meta", "--mesh", "data=2")):
        autopar(*words, code=2)
        assert "'first.weight' of net.py:meta is on the meta device and has no value" in capsys.readouterr().err


def test_a_plan_that_this_machine_cannot_hold_is_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    autopar("plan", "net.py:make", "--cluster", "local-x2", "--mesh", "tensor=2", "-o", "held.json")
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 16, "SC_PHYS_PAGES": 64}.get(name, 1))
    autopar("run", "held.json", code=2)
    said = capsys.readouterr().err
    assert "the plan is for 2 devices, which need" in said and "1.00 KiB" in said


def test_verify_several_plans_with_processes() -> None:
    """Each plan spreads the model anew."""
    rows = answer("verify", "net.py:make", "--mesh", "tensor=2", "--processes", "--random-plans", "1")["plans"]
    assert [r["name"].split(",")[0] for r in rows] == ["plan", "random 0"] and all(r["ok"] for r in rows)


@pytest.mark.slow
def test_run_and_verify_with_processes() -> None:
    autopar("plan", "net.py:make", "--cluster", "local-x2", "--mesh", "tensor=2", "-o", "two.json")
    result = json.loads(autopar("run", "two.json", "--steps", "3", "--json"))
    assert result["losses"] == sorted(result["losses"], reverse=True)
    assert result["predicted_seconds"] > 0
    rows = answer("verify", "net.py:make", "--mesh", "tensor=2", "--processes")["plans"]
    assert rows[0]["ok"]
    words = ("--plan", "two.json", "--random-plans", "2", "--seed", "3")
    rows = answer("verify", "net.py:make", "--mesh", "tensor=2", "--processes", *words)["plans"]
    assert [r["name"].split(",")[0] for r in rows] == ["plan", "random 3", "random 4"]
    assert all(r["ok"] for r in rows)
    rows = answer("verify", "net.py:half", "--mesh", "tensor=2", "--processes")["plans"]
    assert rows[0]["ok"]
    rows = answer("verify", "net.py:dropout", "--mesh", "data=2", "--processes")["plans"]
    assert rows[0]["ok"]


def test_losses_that_microbatches_change_are_noted() -> None:
    Path("contrast.py").write_text(
        "import torch\nimport torch.nn.functional as F\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        z = super().forward(x)\n"
        "        return F.cross_entropy(z @ z.t(), torch.arange(len(z)))\n"
        "def make():\n    torch.manual_seed(0)\n    return Net(6, 4), (torch.randn(8, 6),)\n"
    )
    plan = ["plan", "contrast.py:make", "--cluster", "local-x1", "--stages", "1"]
    said = "it is no mean over rows"
    told = autopar(*plan, "--microbatches", "2", "-o", "contrast.json")
    assert said in " ".join(told.split())
    assert said in " ".join(autopar("show", "--trust", "contrast.json").split())
    result = json.loads(autopar("run", "contrast.json", "--steps", "1", "--json"))
    assert any(said in note for note in result["notes"])
    assert said not in " ".join(autopar(*plan, "--microbatches", "1").split())


def test_devices_and_clusters() -> None:
    assert "H100-SXM-80GB" in {d["name"] for d in answer("devices")["devices"]}
    assert "dgx-h100" in {c["name"] for c in answer("clusters")["clusters"]}
    assert answer("clusters", "dgx-h100-x8")["clusters"][0]["devices"] == 64
    for command in ("devices", "clusters"):
        assert "H100" in autopar(command)


def test_hugging_face_config() -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 64,
              "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128, "num_hidden_layers": 1,
              "max_position_embeddings": 128}  # fmt: skip
    Path("config.json").write_text(json.dumps(config))
    found = json.loads(autopar("inspect", "hf:config.json", "--batch", "4", "--seq", "32", "--json"))
    assert found["inputs"] == {"input_ids": "int64[4 32]", "labels": "int64[4 32]"}
    text = autopar("plan", "hf:config.json", "--batch", "4", "--seq", "32", "-c", "dgx-h100", "-m", "data=2", "--json")
    assert json.loads(text)["model"] == {"spec": "hf:config.json", "batch": 4, "seq": 32}
    Path("config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))  # is trained on float32 masters
    plan = ["plan", "hf:config.json", "--batch", "4", "--seq", "32", "-c", "dgx-h100", "-m", "data=2"]
    mixed = autopar(*plan, "-o", "mixed.json")
    low = json.loads(autopar(*plan, "--precision", "bf16-true", "--json"))
    made = json.loads(Path("mixed.json").read_text())
    assert "note: precision bf16-mixed, as the config is in bfloat16" in " ".join(mixed.split())
    assert made["pins"]["precision"] == "bf16-mixed" and low["pins"]["precision"] == "bf16-true"
    assert autopar("check", "--trust", "mixed.json")


def test_version() -> None:
    version = sys.modules["autopar"].__version__
    assert autopar("--version") == f"autopar {version}\n" and re.fullmatch(r"\d+\.\d+\.\d+", version)


def test_shells_complete_commands() -> None:
    words = {"_AUTOPAR_COMPLETE": "complete_bash", "COMP_WORDS": "autopar s", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['autopar']; from autopar.cli import start; start()"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **words}, capture_output=True, text=True)
    assert done.stdout.split() == ["show", "simulate"]
    assert "--install-completion" in autopar("--help")


def test_the_package_lists_what_is_public() -> None:
    package = sys.modules["autopar"]
    assert {name for name in dir(package) if not name.startswith("_")} == {
        *package.__all__, "elastic", "errors", "integrations", "planfile"
    }


def test_the_proof_is_said_in_words() -> None:
    """The words of a solution, each with its gap, and what a gap means where there is one."""
    from autopar.cli.common import show_solution
    from autopar.plans.plan import Solution

    assert show_solution(Solution("highs", "optimal", 1.0, 0.0)) == "highs: optimal, gap 0.00%"
    for status in ("within gap", "best found", "time limit"):
        text = show_solution(Solution("highs", status, 1.0, 0.0123))
        assert text == f"highs: {status}, gap 1.23%: no plan is faster by more than that"
    assert "gap 0.002%" in show_solution(Solution("highs", "within gap", 1.0, 2e-5))
    assert show_solution(Solution("highs", "optimal", 1.0, 0.0, True)).endswith("; more memory may allow a faster one")


def test_help_needs_no_torch() -> None:
    code = "import sys; from autopar.cli import app; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "command",
    ["plan", "show", "explain", "diff", "inspect", "verify", "run", "devices", "clusters", "launch", "reshard"],
)
def test_help_has_examples(command: str) -> None:
    text = autopar(command, "--help")
    assert "Example" in text
    assert "--json" in text
