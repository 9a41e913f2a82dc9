"""The same numbers as one device, with real processes: losses, gradients, weights after two AdamW steps."""

from __future__ import annotations

from typing import Any

import pytest
from procs.cases import Config, compare, eval_modes, recomputed_in_another_thread

from autopar.runtime.ranks.launch import run_local
from autopar.words.meshes import Mesh

MODELS = ("mlp", "gpt2", "llama", "resnet", "bert")
ONE, TWO, FOUR, GRID = Mesh.of(data=1), Mesh.of(data=2), Mesh.of(data=4), Mesh.of(data=2, tensor=2)
CUT = {"*:linear*": {"data": "b"}}
TOLERANCE = 1e-9


def check(n: int, configs: list[Config]) -> None:
    ranks = run_local(compare, n, configs, timeout=600)
    for results in ranks[1:]:
        for config, a, b in zip(configs, ranks[0], results, strict=True):
            assert a == b, f"{config}: ranks disagree, {a} and {b}"
    problems = []
    for config, found in zip(configs, ranks[0], strict=True):
        worst = max(found["loss"], found["gradient"][0], found["weight"][0], found["clip"])
        if not worst <= TOLERANCE:
            problems.append(f"{config}: {found}")
    assert not problems, "\n".join(problems)


def of(name: str, mesh: Any, **more: Any) -> Config:
    return Config(name, mesh, double=True, **more)


def test_one_rank_equals_eager() -> None:
    check(1, [of(name, ONE, eager=True) for name in ("mlp", "gpt2", "resnet")])


@pytest.mark.slow
def test_eval_mode() -> None:
    """Dropout off, running statistics instead of the batch's; then training again."""
    for worst in run_local(eval_modes, 2, ["gpt2", "resnet", "mlp"], timeout=300):
        assert max(worst) < 1e-9, worst


def test_two_ranks() -> None:
    zero = {"params": {"*": "S0"}, "constraints": CUT}
    check(2, [
        *(of(name, TWO) for name in ("mlp", "gpt2")),  # all of them, and more plans, in the sweeps
        *(of(name, TWO, seed=s) for name, s in (("resnet", 3),)),
        of("mlp", TWO, options={"constraints": CUT}),  # data parallel
        of("mlp", TWO, options=zero, microbatches=2, clip=0.1),  # ZeRO-1
        of("mlp", TWO, options=zero, lifetime="use", microbatches=4, clip=0.1),  # ZeRO-3
        of("mlp", TWO, options=zero, foreach=True),
        of("mlp", TWO, options={"constraints": {"*:linear*": {"data": "n"}}}, microbatches=2, clip=0.1),
        of("gpt2", TWO, options={"params": {"*": "S0"}}, lifetime="use", clip=0.1),
    ])  # fmt: skip


@pytest.mark.slow
def test_two_ranks_that_recompute() -> None:
    blocks = {"recompute": ["*.h.*"]}
    check(2, [
        of("gpt2", TWO, options={**blocks, "params": {"*": "S0"}, "constraints": CUT}, lifetime="use", clip=0.1),
        of("gpt2", TWO, options={**blocks, "params": {"*": "S0"}}, lifetime="use", microbatches=2),
        of("resnet", TWO, options={"recompute": ["*layer?"]}, seed=3, lifetime="use"),
    ])  # fmt: skip


@pytest.mark.parametrize("frozen, seed", [("nothing", 3), ("*.ln_*", 2)])
def test_recomputing_gathers_again(frozen: str, seed: int) -> None:
    for found in run_local(recomputed_in_another_thread, 2, "gpt2", "*.h.*", frozen, seed, timeout=300):
        forward, backward = found["gathers"]
        assert len(forward) > 3 and set(forward) == {1} and set(backward) <= {0, 1} and sum(backward) >= 2, found
        assert found["live"] == [0, 0]
        assert found["gradient"][0] < TOLERANCE, found


@pytest.mark.slow
def test_four_ranks() -> None:
    check(4, [
        of("mlp", GRID, options={"constraints": {"*:linear*": {"data": "b", "tensor": "n"}}}, clip=0.1),
        of("mlp", GRID, options={"params": {"*": "S0,S0"}, "constraints": {"*:linear*": {"data": "b", "tensor": "b"}}},
           lifetime="use", clip=0.1, foreach=True),
        of("gpt2", GRID, seed=6, lifetime="use", clip=0.1),
    ])  # fmt: skip


@pytest.mark.slow
def test_more_that_recompute() -> None:
    check(2, [
        of("gpt2", TWO, options={"recompute": ["*.h.*"]}, seed=3),
        of("t5", TWO, options={"recompute": ["*.block.*"]}, seed=2, lifetime="use"),
    ])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_four_ranks_wide(name: str) -> None:
    check(4, [
        of(name, FOUR), of(name, GRID),
        *(of(name, mesh, seed=s, lifetime=life, clip=0.1)
          for s, (mesh, life) in enumerate([(GRID, ""), (GRID, "use"), (FOUR, ""), (FOUR, "use")] * 3)),
    ])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_wide(name: str) -> None:
    check(2, [
        of(name, TWO), *(of(name, TWO, seed=s, lifetime="use" if s % 3 == 2 else "", clip=0.1) for s in range(12))
    ])  # fmt: skip
