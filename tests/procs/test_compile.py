"""Compiled programs have the same losses, outputs, gradients and buffers as those that are not, and collectives in one
order on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from procs.compiled import (
    AS_INDUCTOR,
    CUTS,
    compiled_in_vain,
    differences,
    gathers,
    in_another_order,
    in_stages,
    of_all,
)
from procs.compiled_features import features
from procs.compiled_graphs import compiled_on_ranks
from procs.compiled_models import AGAIN, compiled_models
from procs.compiled_models import CUTS as OF_MODELS
from procs.in_turn import marked

from autopar.errors import RunError
from autopar.runtime.ranks.launch import run_local

PARTS = [1, 0, 1, 1, 1, 0]
"""Steps that are built: for the first step, another one, one with other rows, with a frozen parameter, in eval mode."""


def on_two_ranks(cuts: list[str], backend: str, seconds: float = 500, steps_alone: bool = False) -> None:
    """In one start of the ranks: they take longer to start than the compiler takes."""
    check(run_local(of_all, 2, cuts, backend, steps_alone, timeout=seconds), steps_alone)


def check(ranks: list[Any], steps_alone: bool = False) -> None:
    for of_cuts in ranks:
        for worst, parts in of_cuts:
            assert worst < 1e-12 and parts == (PARTS[:2] if steps_alone else PARTS)


def test_two_ranks():
    on_two_ranks(["tensor", "zero again"], "eager")


def test_small_parameters_are_gathered_together():
    """Seven, once for the forward and once for the backward."""
    assert run_local(gathers, 2, timeout=100) == [2, 2]


@pytest.mark.slow
def test_inductors_graphs_on_two_ranks():
    """Five rows on two ranks: graphs differ, and their collectives come in one order."""
    on_two_ranks(["zero again"], AS_INDUCTOR)


def test_another_order_is_refused():
    """Before it runs."""
    for seconds, said in run_local(in_another_order, 2, True, timeout=100):
        assert "the compiled graphs of ranks 0 and 1 differ in the order of their collectives: at place" in said, said
        assert "Run the program without compile()" in said and seconds < 60


@pytest.mark.slow
def test_they_would_fail_or_wait_for_each_other():
    """What is refused does happen."""
    with pytest.raises(RunError, match=r"rank \d of 2 failed|did not finish within"):
        run_local(in_another_order, 2, False, timeout=120)


def test_a_rank_that_cannot_compile():
    """Nobody waits for it."""
    for rank, (seconds, said) in enumerate(run_local(compiled_in_vain, 2, timeout=300)):
        assert "no compiler on this machine" in said and seconds < 30, (rank, seconds, said)
        assert rank or "rank 1 failed in the forward of call 1" in said


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", AS_INDUCTOR])
def test_other_cuts(backend: str):
    on_two_ranks(
        ["again", "zero", "data", "swapped", "uneven", "zero again" if backend == "aot_eager" else "tensor"], backend
    )


@pytest.mark.slow  # gcc compiles each kernel: minutes, where the machine has other work
@pytest.mark.parametrize("cut", CUTS)
def test_kernels_of_inductor_on_two_ranks(cut: str):
    """Of one shape: that graphs of others, frozen parameters and eval mode are right is shown without kernels."""
    on_two_ranks([cut], "inductor", 1500, steps_alone=True)


@pytest.mark.slow
def test_one_device():
    worst, parts = differences(None, "inductor")
    assert worst < 1e-12 and parts == PARTS


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_features(backend: str):
    for results in run_local(features, 2, backend, timeout=600):
        assert all(worst < 1e-12 for worst in results.values()), results


@pytest.mark.parametrize("backend", marked(["eager", "aot_eager", "inductor"], ["aot_eager", "inductor"]))
def test_stages_of_a_pipeline(backend: str):
    for worst, n_built in run_local(in_stages, 2, "zb-h1", backend, timeout=1500):
        assert worst < 1e-12 and n_built >= 2  # training and eval mode


@pytest.mark.slow
@pytest.mark.parametrize("name", AGAIN)
@pytest.mark.parametrize("cut", OF_MODELS)
def test_models_are_one_graph_of_inductors(name: str, cut: str):
    """The whole program of a model, or of a stage, with other rows too."""
    for found in run_local(compiled_models, 2, [name], cut, timeout=900):
        assert found[name] < 1e-4


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_collectives_of_graphs(backend: str):
    """They come in the order of the graph, on all ranks, with what is to overlap between them and the waits."""
    for rank, programs in enumerate(run_local(compiled_on_ranks, 2, backend, timeout=500)):
        for equal, of_graph, of_code in programs:
            assert equal, rank
            assert backend != "inductor" or of_code == of_graph, (rank, of_code, of_graph)
