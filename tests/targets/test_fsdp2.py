"""Folders of plain torch: they say what the plan says, train as one device does, and refuse what would be wrong."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from autopar.capture import capture
from autopar.errors import PlanError
from autopar.frontends.models import load_model
from autopar.planner.layouts.layout_words import parse_layout
from autopar.planner.layouts.pricing import PricedLayouts
from autopar.planner.layouts.stage_starts import blocks_of, lists_of_blocks
from autopar.plans.clusters import get_cluster
from autopar.targets import target_named
from autopar.targets.target import ConfigError, Export, ModelFacts, Source
from autopar.targets.trainers.fsdp2.tensor_trial import difference
from autopar.words.precision import parse_precision

HERE = Path(__file__).resolve().parent
RUN = HERE / "own_code" / "fsdp2" / "run_folder.py"
TARGET = target_named("fsdp2")
ROWS = 8
LAYOUTS = {
    2: ("dp=2", "dp=2,zero=1,m=4", "dp=2,fsdp,m=2,recompute=full", "tp=2", "tp=2,sp,m=2", "pp=2,m=4",
        "pp=2,m=4,schedule=gpipe,recompute=every:2", "pp=2,vp=2,m=4", "dp=2,fsdp,m=1,recompute=selective:attention"),
    4: ("dp=4,fsdp=2,m=2", "dp=2,tp=2,zero=1,m=2", "dp=2,tp=2,sp,fsdp,m=2", "pp=2,dp=2,fsdp,m=4,recompute=full:1",
        "pp=2,tp=2,sp,m=4", "pp=2,dp=2,zero=1,m=4", "pp=4,m=2"),
}  # fmt: skip


@cache
def layouts_of(spec: str, batch: int | None, seq: int | None) -> tuple[PricedLayouts, object]:
    loaded = load_model(spec, batch, seq)
    policy = parse_precision("32-true")
    captured = capture(loaded.model, loaded.args, loaded.kwargs, precision=policy)
    return PricedLayouts(loaded.model, captured, (loaded.args, loaded.kwargs)), loaded


def export_of(make: str, words: str, n: int, batch: int | None = None, seq: int | None = None) -> Export:
    spec = make if make.startswith("hf:") else f"{HERE / 'small_gpt.py'}:{make}"
    layouts, loaded = layouts_of(spec, batch, seq)
    priced = layouts.price(f"local-x{n}", words)
    graph = layouts.captured.graph
    config = loaded.model.config.to_dict() if hasattr(loaded.model, "config") else {}
    facts = ModelFacts(
        config.get("model_type", ""), config, len(blocks_of(graph)), tuple(lists_of_blocks(graph)),
        sum(p.numel() for p in loaded.model.parameters()),
    )  # fmt: skip
    return Export(
        priced, loaded, layouts.captured, facts, get_cluster(f"local-x{n}"), f"local-x{n}", batch or ROWS, seq,
        parse_precision("32-true"), "adamw",
    )  # fmt: skip


def written(export: Export, folder: Path) -> Path:
    assert TARGET.refuses(export.layout, export.model) == ""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in TARGET.write(export).files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def losses(folder: Path, n: int, dtype: str = "float64", python: str = sys.executable) -> list[float]:
    """The losses of four steps on so many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", str(n), "--master-addr", "127.0.0.1",
             "--master-port", str(port)] if n > 1 else []  # fmt: skip
    full = ["--float64"] if dtype == "float64" else []
    words = ["--steps", "4", "--device", "cpu", "--dtype", dtype, "--losses", "losses.json"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [python, *ranks, str(RUN), ".", f"counts{n}.json", *full, "--", *words], cwd=folder, capture_output=True,
        text=True, timeout=300, env={**env, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return json.loads((folder / "losses.json").read_text())


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    for n, words in [(n, words) for n, several in LAYOUTS.items() for words in several]:
        export = export_of("make", words, n)
        files = TARGET.write(export).files
        source = Source(tmp_path / "parallelize.py", files["parallelize.py"])
        assert TARGET.reads is not None and TARGET.reads(source)
        assert TARGET.read is not None
        config = TARGET.read(source)
        assert (config.batch, config.devices) == (ROWS, n)
        again = parse_layout(",".join(word + (f"={value}" if value else "") for word, value in config.words.items()))
        for name in (
            "sizes",
            "groups",
            "chunks",
            "schedule",
            "recompute",
            "zero",
            "shards",
            "sequence_parallel",
            "mesh",
        ):
            assert getattr(again, name) == getattr(export.layout, name), (words, name)
        assert again.microbatches_of(ROWS) == export.microbatches


def test_files_import_nothing_of_autopar(tmp_path: Path) -> None:
    files = TARGET.write(export_of("make_tied", "pp=2,tp=2,sp,m=4", 4)).files
    assert {"train.py", "parallelize.py", "pipeline.py", "tensor_parallel.py", "small_gpt.py"} == set(files)
    for text in files.values():
        for node in ast.walk(ast.parse(text)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] in ("autopar", "cost_models", "hardware_profiles") for name in names)


@pytest.mark.parametrize(("make", "words", "message"), [
    ("make_whole_heads", "tp=2", "its numbers are those of the whole tensor"),
    ("make_skipping", "pp=2,m=4", "reads a tensor [2, 16, 32] of an earlier stage"),
    ("make", "pp=2,vp=3,m=4", "which is in no block of its own"),
    ("make_spread", "dp=2,m=1", "puts rows of the batch together"),
    ("make_averaging", "dp=2,m=1", "buffer 'mean' is written with values of the rows"),
])  # fmt: skip
def test_code_that_would_be_wrong_is_refused(make: str, words: str, message: str) -> None:
    with pytest.raises(PlanError, match="fsdp2: ") as raised:
        TARGET.write(export_of(make, words, 2))
    assert message in str(raised.value)


def test_words_that_torch_has_no_code_for_are_refused() -> None:
    model = ModelFacts("llama", {}, 4, ("layers",), 1)
    for words in ("dp=2,cp=2", "pp=2,schedule=zb-h1,m=4"):
        assert TARGET.refuses(parse_layout(words), model), words
    assert "8 experts" in TARGET.refuses(parse_layout("tp=2"), ModelFacts("mixtral", {}, 4, ("layers",), 1, experts=8))


@pytest.mark.parametrize(("old", "new", "message"), [
    ("'shard': 2", "'shards': 2", "MESH['shards']: is no key of it"),
    ("'zero': 3", "'zero': 4", "FULLY_SHARD['zero']: is 4"),
    ("MESH: dict[str, int] = {", "MESHES = 1\nMESH: dict[str, int] = {", "MESHES: is no table"),
    ("CHECKPOINT: list[str] = []", "CHECKPOINT: list[str] = list()", "CHECKPOINT: is computed"),
])  # fmt: skip
def test_tables_that_mean_nothing_are_one_error(old: str, new: str, message: str) -> None:
    text = TARGET.write(export_of("make", "dp=2,fsdp,m=1", 2)).files["parallelize.py"]
    assert old in text and TARGET.read is not None
    with pytest.raises(ConfigError) as raised:
        TARGET.read(Source(Path("parallelize.py"), text.replace(old, new)))
    assert message in str(raised.value)


def test_a_reshape_of_shards_must_cut_the_same_dim() -> None:
    whole = [("view", [(2, 16, 32)], [(2, 16, 4, 8)], "q")]
    assert difference(whole, [("view", [(2, 16, 16)], [(2, 16, 2, 8)], "q")], 2) == ""
    assert "'q'" in difference(whole, [("view", [(2, 16, 16)], [(2, 16, 4, 4)], "q")], 2)
    assert "'q'" in difference(whole, [("view", [(2, 16, 16)], [(2, 8, 4, 8)], "q")], 2)


def test_two_ranks_train_as_one_device(tmp_path: Path) -> None:
    """In stages; by data, the means below. Each rank is an interpreter."""
    folder = written(export_of("make_tied", "pp=2,m=4", 2), tmp_path)
    alone, ours = losses(folder, 1), losses(folder, 2)
    assert max(abs(a - b) for a, b in zip(alone, ours, strict=True)) < 1e-10


def test_means_are_over_the_labels_of_the_whole_batch(tmp_path: Path) -> None:
    alone = losses(written(export_of("make_ignoring", "tp=2", 2), tmp_path / "a"), 1)
    ours = losses(written(export_of("make_ignoring", "dp=2,fsdp,m=4", 2), tmp_path / "b"), 2)
    assert max(abs(a - b) for a, b in zip(alone, ours, strict=True)) < 1e-10


@pytest.mark.slow
def test_weights_that_ranks_draw_differently_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="draws other numbers in every process"):
        losses(written(export_of("make_other_weights", "dp=2,m=1", 2), tmp_path), 2)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "words"), [(n, words) for n, several in LAYOUTS.items() for words in several])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_layout_trains_as_one_device(tmp_path: Path, n: int, words: str, dtype: str) -> None:
    folder = written(export_of("make", words, n), tmp_path)
    alone, ours = losses(folder, 1, dtype), losses(folder, n, dtype)
    assert max(abs(a - b) for a, b in zip(alone, ours, strict=True)) < {"float64": 1e-10, "float32": 1e-6}[dtype]


FAMILIES = {
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32,
            "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "resnet": {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "embedding_size": 16,
               "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "layer_type": "basic", "image_size": 64,
               "num_labels": 8},
    **json.loads((HERE / "own_code" / "models.json").read_text()),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "n", "words"), [
    ("llama_4_blocks", 2, "dp=2,fsdp,m=4"), ("llama_4_blocks", 2, "tp=2,sp,m=2"),
    ("llama_4_blocks", 2, "pp=2,vp=2,m=4"),
    ("gpt2_tiny", 2, "dp=2,zero=1,m=4,recompute=full"), ("gpt2_tiny", 2, "pp=2,m=4"), ("vit", 4, "dp=4,fsdp=2,m=2"),
    ("vit", 2, "tp=2"), ("vit", 2, "pp=2,m=4"), ("resnet", 2, "dp=2,m=2"), ("resnet", 2, "pp=2,m=2"),
    ("t5_tiny", 2, "pp=2,m=4"), ("t5_tiny", 2, "dp=2,fsdp,m=2"), ("mixtral_4_blocks", 2, "dp=2,fsdp,m=2"),
    ("mixtral_4_blocks", 2, "pp=2,m=2"),
])  # fmt: skip
def test_every_family_trains_as_one_device(tmp_path: Path, family: str, n: int, words: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(FAMILIES[family]))
    seq = None if family in ("vit", "resnet") else 32
    folder = written(export_of(f"hf:{file}", words, n, ROWS, seq), tmp_path / "out")
    alone, ours = losses(folder, 1), losses(folder, n)
    assert max(abs(a - b) for a, b in zip(alone, ours, strict=True)) < 1e-10
