"""No pinned layout, made by hand or at random, takes less than the plan of the default search."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from meta_models import gpt2_in_parts

from autopar.planner.inter_op.candidates import PipelineOptions
from autopar.planner.inter_op.stage_search import plan_pipeline
from autopar.words.graph import Graph
from hardware_profiles import load_cluster

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
ROWS, SEQUENCE, DEVICES = 8, 256, 4
CLUSTER = "dgx-h100"


def benchmark(name: str) -> Any:
    """A module of benchmarks/."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@cache
def graphs() -> dict[int, Graph]:
    """A GPT-2 of two blocks, by number of microbatches."""
    return gpt2_in_parts(ROWS, SEQUENCE, torch.bfloat16, vocab_size=8192, n_embd=1024, n_layer=2, n_head=16)


def search_and_prices(count: int) -> tuple[float, Any]:
    """Seconds of the search's plan on the first devices of the cluster, and what became of so many layouts."""
    portfolio, cluster = benchmark("portfolio"), load_cluster(CLUSTER)
    seconds = plan_pipeline(graphs(), cluster, DEVICES, PipelineOptions(1)).plan.seconds
    words = portfolio.portfolio(count, DEVICES, ROWS)
    return seconds, portfolio.price(words, graphs().__getitem__, cluster, ROWS, seconds, n_devices=DEVICES)


@pytest.mark.slow
def test_no_layout_of_two_hundred_beats_the_search() -> None:
    seconds, prices = search_and_prices(200)
    assert len(prices.seconds) > 100 and seconds <= 1.01 * prices.best[1]


def test_the_layouts_are_different_and_as_many_as_asked_for() -> None:
    portfolio = benchmark("portfolio")
    words = portfolio.portfolio(200, 8, 64)
    assert len(set(words)) == len(words) == 200
    assert "dp=8,m=1" in words and any("pp=8" in w and "vp=" in w for w in words)
