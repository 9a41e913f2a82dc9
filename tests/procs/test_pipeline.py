"""Pipelines on real processes give the numbers of one device: losses, gradients, weights after two AdamW steps."""

from __future__ import annotations

from typing import Any

from procs.pipelines import ONE, Config, compare

from autopar.runtime.launch import run_local

TWO = (ONE, ONE)


def check(n: int, configs: list[Config]) -> None:
    ranks: list[Any] = run_local(compare, n, configs, timeout=600)
    problems = []
    for i, config in enumerate(configs):
        for rank, found in enumerate(ranks):
            row = found[i]
            worst = max(row["loss"], row["gradient"][0], row["clip"], row.get("weight", (0.0,))[0])
            if not worst <= 1e-9:
                problems.append(f"{config} rank {rank}: {row}")
    assert not problems, "\n".join(problems)


def test_two_ranks() -> None:
    check(2, [
        Config("mlp", "1f1b", TWO, 4, clip=0.1),
    ])  # fmt: skip
