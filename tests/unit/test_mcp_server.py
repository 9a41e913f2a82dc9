"""The server of the Model Context Protocol: its limits, and every tool called by mcp's own client over stdio."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import plan_all
from unit.test_cli import MODEL

from autopar.cli.schemas.loading import load_answer
from autopar.mcp_server.limits import LimitError, ServerLimits, limits_of

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
}  # fmt: skip
MODEL_WORDS = {"model": "hf:config.json", "batch": 8, "seq": 16, "cluster": "local-x2"}


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def limits(tmp_path: Path) -> ServerLimits:
    for name in ("work", "mine", "secret"):
        (tmp_path / name).mkdir()
    (tmp_path / "work" / "config.json").write_text("{}")
    (tmp_path / "mine" / "net.py").write_text("")
    (tmp_path / "secret" / "net.py").write_text("")
    (tmp_path / "work" / "out").symlink_to(tmp_path / "secret")
    return limits_of(tmp_path / "work", [tmp_path / "mine"])


def test_files_are_below_the_folder(limits: ServerLimits, tmp_path: Path) -> None:
    inside = str(tmp_path / "work" / "config.json")
    assert limits.readable("config.json") == limits.readable(inside) == inside
    assert limits.writable("a/../b.json") == str(tmp_path / "work" / "b.json")
    for name in ("../secret/net.py", "out/plan.json", str(tmp_path / "secret"), "/etc/passwd", "a\0b", "../work2/a"):
        for of in (limits.readable, limits.writable, lambda name: limits.model(f"hf:{name}")):
            with pytest.raises(LimitError, match=r"folders of this|is no path"):
                of(name)
    assert limits.readable("../mine/net.py") and limits.cluster("../mine/c.toml")
    with pytest.raises(LimitError, match="is written and is not below"):
        limits.writable("../mine/net.py")


def test_python_files_are_of_trusted_folders(limits: ServerLimits, tmp_path: Path) -> None:
    trusted = str(tmp_path / "mine" / "net.py")
    assert limits.model("../mine/net.py:make") == f"{trusted}:make"
    around = f"{trusted}/../../secret/net.py:make"
    for spec in ("net.py:make", "../secret/net.py:make", "out/net.py:make", "net.py", around):
        with pytest.raises(LimitError, match="would run its code"):
            limits.model(spec)
    plans = {"../mine/net.py:make": True, "../secret/net.py:make": False, "hf:config.json": False, "net.py:make": False}
    for spec, is_trusted in plans.items():
        (tmp_path / "work" / "plan.json").write_text(json.dumps({"autopar_plan": 2, "model": {"spec": spec}}))
        assert limits.trusts_plan(str(tmp_path / "work" / "plan.json")) is is_trusted
    for text in ("{", "[]", '{"model": 3}', '{"model": {"spec": 3}}'):
        (tmp_path / "work" / "plan.json").write_text(text)
        assert not limits.trusts_plan(str(tmp_path / "work" / "plan.json"))


def test_clusters_are_names_or_files_below_the_folder(limits: ServerLimits, tmp_path: Path) -> None:
    assert limits.cluster("dgx-h100-x8 as megatron-2023") == "dgx-h100-x8 as megatron-2023"
    assert limits.cluster("mine.toml@0-3 as nemo") == f"{tmp_path / 'work' / 'mine.toml'}@0-3 as nemo"
    assert limits.cluster("64xH100-SXM-80GB@0-3") == "64xH100-SXM-80GB@0-3"
    for name in ("../c.toml", "/etc/passwd", "out/c.json"):
        with pytest.raises(LimitError):
            limits.cluster(name)


def test_values_are_never_options() -> None:
    pytest.importorskip("anyio")
    from autopar.mcp_server.commands import environment, option_words

    words = option_words({"like": ["--json", "a"], "batch": 3, "trust": True, "seq": None, "x": False, "top": 0})
    assert words == ["--like=--json", "--like=a", "--batch=3", "--trust", "--top=0"]
    absolute = environment({"PYTHONPATH": os.pathsep.join(["", "here", "/there"]), "A": "b"})
    assert absolute == {"PYTHONPATH": os.pathsep.join([str(Path.cwd() / "here"), "/there"]), "A": "b"}


# --- the server ------------------------------------------------------------------------------------------------------


def test_without_the_extra_the_server_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.cli.common import UsageError
    from autopar.mcp_server.serving import server_of

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"autopar\[mcp\]"):
        server_of(tmp_path, [], 10.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, an untrusted model and its plan; beside it a trusted one with a model."""
    pytest.importorskip("mcp")
    folder = plan_all(tmp_path_factory.mktemp("mcp"), {"untrusted": ("-c", "local-x2", "-m", "tensor=2")})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "trusted").mkdir()
    (folder / "trusted" / "net.py").write_text(MODEL)
    (folder / "torch.py").write_text("raise SystemExit('a module of the folder was imported')")
    return folder


async def asked(folder: Path, calls: list[tuple[str, dict[str, Any]]], *words: str) -> tuple[list[str], list[Any]]:
    """The names of the tools, and the results of calls, of a server that mcp's client starts."""
    from mcp import Client, StdioServerParameters

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ("-P", "-m", "autopar.mcp_server", "--folder", str(folder), *words)
    server = StdioServerParameters(command=sys.executable, args=list(words), env=environment)
    async with Client(server, read_timeout_seconds=240) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        return names, [await client.call_tool(name, arguments) for name, arguments in calls]


def calls(folder: Path, wanted: list[tuple[str, dict[str, Any]]], *words: str) -> tuple[list[str], list[Any]]:
    import anyio

    return anyio.run(asked, folder, wanted, *words)


@pytest.mark.slow
def test_every_tool(folder: Path) -> None:
    names, (planned, fitting, not_fitting, explained, listed, exported) = calls(folder, [
        ("plan", {**MODEL_WORDS, "output": "made.json", "like": ["tp=2,mbs=8"], "top": 2}),
        ("fits", {**MODEL_WORDS, "layout": "dp=2,mbs=1"}),
        ("fits", {**MODEL_WORDS, "layout": "dp=2,mbs=1", "memory_limit": "1MiB"}),
        ("explain", {"plan": "made.json", "op": "model.layers.0.mlp.up_proj"}),
        ("clusters", {"names": ["dgx-h100-x8"]}),
        ("export", {"plan": "made.json", "trainer": "fsdp2", "output": "run"}),
    ])  # fmt: skip
    assert {"plan", "fits", "explain", "clusters"} <= set(names)
    answer = planned.structured_content
    assert not planned.is_error and answer["plan"] == str(folder / "made.json") and (folder / "made.json").is_file()
    assert answer["seconds"] > 0 and any(row["layout"] == "tp=2,mbs=8" for row in answer["alternatives"])
    assert "plan" not in answer["layouts"][0] and len(json.dumps(answer)) < 20_000, "an agent reads all of it"
    assert load_answer(fitting.structured_content).fits and not load_answer(not_fitting.structured_content).fits
    assert load_answer(not_fitting.structured_content).refused.limit_bytes == 2**20
    assert load_answer(explained.structured_content).ops[0].strategies
    assert load_answer(listed.structured_content).clusters[0].devices == 64
    if "export" in names:
        assert load_answer(exported.structured_content).target == "fsdp2" and (folder / "run" / "train.py").is_file()
    else:
        assert exported.is_error


@pytest.mark.slow
def test_what_a_client_may_not_do(folder: Path) -> None:
    """Nor is a module of the folder imported by a command that works there."""
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("fits", {**MODEL_WORDS, "model": "net.py:make", "layout": "dp=2"}, "would run its code"),
        ("fits", {**MODEL_WORDS, "model": "hf:../x.json", "layout": "dp=2"}, "folders of this server"),
        ("plan", {**MODEL_WORDS, "output": "../p.json"}, "is written and is not below"),
        ("plan", {**MODEL_WORDS, "output": "config.json"}, "exists and is not a plan"),
        ("explain", {"plan": "untrusted.json", "op": "first"}, "would run its code"),
        ("fits", {**MODEL_WORDS, "layout": "--trust"}, "is no word of a layout"),
        ("fits", {**MODEL_WORDS, "cluster": "--help", "layout": "dp=2"}, "unknown cluster '--help'"),
        ("fits", {**MODEL_WORDS, "layout": "dp=3"}, "3"),
    ]
    _, results = calls(folder, [case[:2] for case in cases])
    for (name, arguments, said), result in zip(cases, results, strict=True):
        assert result.is_error, (name, arguments)
        assert said in result.content[0].text, (arguments, result.content[0].text)


@pytest.mark.slow
def test_a_trusted_folder_and_a_time_out(folder: Path) -> None:
    """A search that takes too long answers with its best plan so far, or says that it was ended."""
    trusted = ("--trust", str(folder / "trusted"))
    names, (fitting,) = calls(
        folder, [("fits", {"model": "trusted/net.py:make", "cluster": "local-x2", "layout": "dp=2,m=1"})], *trusted
    )
    assert "plan" in names and load_answer(fitting.structured_content).fits
    _, (ended,) = calls(folder, [("fits", {**MODEL_WORDS, "layout": "dp=2,mbs=1"})], "--seconds", "1")
    assert ended.is_error and ("Terminated" in ended.content[0].text or "exit code" in ended.content[0].text)
