"""``benchmarks/accuracy.py``: rows of published runs, their prices, and the errors."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

ROW = {
    "id": "a-1", "source": "vTrain single-node ground truth", "model": "GPT h256 L2", "n_layers": "2", "hidden": "256",
    "ffn_hidden": "1024", "heads": "4", "kv_heads": "4", "head_dim": "64", "vocab": "1024", "seq_len": "128",
    "gpu": "A100-SXM-80GB", "n_gpus": "4", "gpus_per_node": "8", "intra_node_link": "NVLink3 300GB/s/dir",
    "precision": "FP16 mixed", "tp": "2", "pp": "1", "vp": "1", "cp": "1", "ep": "1", "dp": "2", "zero_stage": "0",
    "sp": "no", "micro_batch": "2", "global_batch": "8", "recompute": "full", "step_time_s": "0.01", "notes": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def published() -> Iterator[ModuleType]:
    """The package benchmarks/published, and accuracy.py and fit_software.py beside it."""
    sys.path.insert(0, str(FOLDER))
    try:
        import accuracy
        import fit_software  # noqa: F401
        import published.pricing  # noqa: F401

        yield accuracy
    finally:
        sys.path.remove(str(FOLDER))


def run(published: ModuleType, **cells: str) -> Any:
    from published.rows import run_of

    return run_of({**ROW, **cells})


def table(path: Path, *rows: dict[str, str]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_is_read(published: ModuleType) -> None:
    from published.built_models import attention_of
    from published.pricing import layout_of, policies_of

    one = run(published)
    assert one.software == "megatron-deepspeed-2022" and one.seconds == 0.01 and one.shape.ffn == 1024
    assert layout_of(one) == "tp=2,dp=2,mbs=2,zero=0,recompute=full"
    assert policies_of(one) == ("params=float16,reduce=float16",) and attention_of(one) == "eager"
    assert run(published, source="Nanotron ultrascale playbook", zero_stage="1").software == "nanotron"
    assert run(published, source="Nanotron ultrascale playbook").software == "nanotron-ddp"
    unknown = run(published, source="somebody's trainer", gpu="H100", step_time_s="", tokens_per_s_per_gpu="64")
    assert unknown.software == "autopar" and unknown.seconds == pytest.approx(8 * 128 / (64 * 4))


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"micro_batch": ""}, "micro_batch"), ({"dp": "3"}, "are 6 GPUs, the row has 4"), ({"hidden": ""}, "hidden"),
        ({"step_time_s": ""}, "neither seconds nor memory"), ({"global_batch": "6"}, "does not divide"),
        ({"model": "Gemma 4 26B"}, "gemma"), ({"task": "lora"}, "lora"),
        ({"offload": "all eligible activations to CPU"}, "offload"), ({"tp": "two"}, "tp is no number"),
    ],
)  # fmt: skip
def test_a_row_without_what_a_price_needs_is_refused(published: ModuleType, cells: dict[str, str], why: str) -> None:
    from published.rows import UnpricedError

    with pytest.raises(UnpricedError, match=why):
        run(published, **cells)


def test_clusters_are_those_of_the_row(published: ModuleType) -> None:
    from published.built_clusters import cluster_of, device_of
    from published.rows import UnpricedError

    assert device_of("A100-PCIE-80GB") == "A100-PCIe-80GB" and device_of("T4-16GB") == "T4"
    assert device_of("NVIDIA H100 SXM 80GB") == "H100-SXM-80GB"
    with pytest.raises(UnpricedError, match="unknown GPU"):
        device_of("Gaudi 9")
    two = cluster_of(run(published, n_gpus="16", dp="8", global_batch="16", inter_node_link="800Gb/s per node"))
    assert (two.n_devices, two.n_nodes, two.software.name) == (16, 2, "megatron-deepspeed-2022")
    links = {link.bandwidth_bytes_per_second for _, _, link in two.graph.edges(data="link")}
    assert links == {300e9, 12.5e9}  # NVLink, and an eighth of 100 GB/s
    rack = cluster_of(run(published, gpu="GB200", n_gpus="64", dp="32", global_batch="64", gpus_per_node="4",
                          intra_node_link="NVLink5 NVL72 900GB/s/dir"))  # fmt: skip
    assert rack.n_nodes == 1  # one NVLink domain over 16 machines


def test_a_memory_row_of_a_run_in_another_table_is_one_row_with_it(published: ModuleType, tmp_path: Path) -> None:
    from published.rows import read, run_of

    memory = {"source": "x", "model": "GPT", "quantity": "peak memory", "gib": "7.5", "notes": "published.csv id a-1"}
    files = [table(tmp_path / "a.csv", ROW), table(tmp_path / "b.csv", memory)]
    (row,) = read(files)
    assert run_of(row).gib == 7.5
    assert len(read(files[1:])) == 1


def test_rows_that_say_the_same_and_measured_otherwise_are_not_compared(published: ModuleType) -> None:
    from published.rows import alike_but_apart

    runs = [run(published, id="a", step_time_s="1"), run(published, id="b", step_time_s="1.3"),
            run(published, id="c", micro_batch="1")]  # fmt: skip
    assert set(alike_but_apart(runs)) == {"a", "b"}
    assert alike_but_apart([runs[0], replace(runs[1], seconds=1.1)]) == {}


def test_ranks_and_medians(published: ModuleType) -> None:
    from published.errors import rank_correlation, weighted_median

    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9486832980505138)  # scipy.stats.spearmanr
    assert weighted_median([(1.0, 1.0), (2.0, 1.0), (9.0, 5.0)]) == 9.0


def test_one_factor_is_found_from_one_half_of_the_models(published: ModuleType) -> None:
    from fit_software import factors_of, fits, halves, written
    from published.pricing import Priced

    rows = [
        Priced(run(published, id=f"{i:02}", model=f"GPT {i % 4}", step_time_s=f"{1.25 * (i + 1)}"), seconds=i + 1.0)
        for i in range(20)
    ]
    first, second = halves(rows)
    assert {p.run.model for p in first} == {"GPT 0", "GPT 2"} and {p.run.model for p in second} == {"GPT 1", "GPT 3"}
    (fit,) = fits(rows)
    assert fit.factor == 1.25 and fit.second == pytest.approx(0) and fit.rows == (10, 10)
    name = "megatron-deepspeed-2022"
    text = f'[{name}]\nfused = true\n[{name}.sources]\nfused = "seen"\n\n[autopar]\nfused = false\n'
    once = written(text, [fit])
    assert f"[{name}]\nfactor = 1.25\n" in once and once.count("factor =") == 2
    assert written(once, [fit]) == once
    odd = [replace(p, seconds=p.seconds / 4) if i % 5 == 0 else p for i, p in enumerate(rows)]
    assert fits(odd)[0].factor == 1.25  # rows that are far off for a reason of their own do not move it
    assert factors_of([replace(fit, software="nanotron")])["nanotron-ddp"] == 1.25


def test_nothing_is_fitted_to_rows_that_are_held_out(published: ModuleType) -> None:
    from fit_software import HELD_OUT, fits
    from published.pricing import Priced

    source = min(HELD_OUT)
    rows = [Priced(run(published, id=f"{i}", source=source, step_time_s="2"), seconds=1.0) for i in range(8)]
    assert {p.run.software for p in rows} == {"deepspeed"} and fits(rows) == []


def test_rows_beside_the_code_are_of_the_trainers_that_they_say(published: ModuleType) -> None:
    from published.pricing import layout_of, policies_of
    from published.rows import read, run_of

    runs = [run_of(row) for row in read([FOLDER / "published_data" / "zero3.csv"])]
    assert {(p.id.rsplit("-", 1)[0], p.software) for p in runs} == {
        ("deepcompile-eager", "deepspeed-eager"), ("deepcompile-fsdp", "accelerate"),
        ("deepcompile-compiled", "deepspeed"), ("granite", "accelerate"), ("granite", "deepspeed-eager"),
    }  # fmt: skip
    assert {policies_of(p)[0] for p in runs} == {"params=bfloat16,reduce=bfloat16"}
    assert all("zero=3" in layout_of(p) and "recompute=full" in layout_of(p) for p in runs)


def test_the_price_is_that_of_the_public_api(published: ModuleType) -> None:
    import torch
    from published.built_clusters import cluster_of
    from published.built_models import model_of
    from published.pricing import Graphs, layout_of, policies_of, price

    import autopar

    one = run(published, global_batch="4")
    found = price(one, Graphs())
    assert found.why == "" and found.seconds is not None
    model = model_of(one)
    ids = torch.zeros(4, 128, dtype=torch.long, device="meta")
    layouts = autopar.layouts(model, {"input_ids": ids, "labels": ids}, precision=policies_of(one)[0])
    same = layouts.price(cluster_of(one), layout_of(one))
    assert (same.seconds, same.memory_bytes / 2**30) == (found.seconds, found.gib)


def test_rows_that_cannot_be_priced_are_counted(
    published: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROW, {**ROW, "id": "a-2", "gpu": "Gaudi 9"}, {**ROW, "id": "a-3", "model": "Gemma 3"},
            {**ROW, "id": "a-4", "tp": "8", "dp": "1", "n_gpus": "8", "heads": "6", "hidden": "258"}]  # fmt: skip
    kept = tmp_path / "rows.json"
    published.main([str(table(tmp_path / "a.csv", *rows)), "--json", str(kept), "--cache", str(tmp_path / "graphs")])
    text = capsys.readouterr().out
    assert "unknown GPU Gaudi 9" in text and "'gemma'" in text and "a-4" not in text
    assert [p["why"] == "" for p in json.loads(kept.read_text())].count(True) == 1
    page = tmp_path / "page.md"
    published.main(["--from", str(kept), "--page", str(page), "--errors", str(tmp_path / "errors.toml")])
    assert "vTrain single-node" in page.read_text() and "<svg" in page.with_suffix(".svg").read_text()
    assert len((tmp_path / "page_rows.csv").read_text().splitlines()) == 2
