"""Steps on an accelerator: the host waits for nothing, everything is there, and the numbers are those of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import NAME
from emulated_nccl import BACKEND
from procs import cases, pipelines
from procs.on_device import ANY, Config, all_trained, faults, gathers_in_a_step, notices, profiled, reduced_in, used
from procs.pipelines import ONE
from zoo import ZOO

from autopar.capture import capture
from autopar.runtime.ranks.launch import run_local
from autopar.words.meshes import Mesh

DROPS = {"dropout": 0.1}
PARTS = 16
"""In which all models are tried."""
COMPARED = 3
"""The first calls are compared between the ranks at once, so that the host waits."""


def check(n: int, configs: Sequence[Config]) -> None:
    ranks: list[Any] = run_local(all_trained, n, configs, timeout=600)
    for rows in ranks:
        for config, (worst, seen) in zip(configs, rows, strict=True):
            assert worst <= 1e-4, (config, worst)  # float32, and attention by other kernels
            assert any("is waited for" in line for line in seen[0]), "nothing is noticed at all"
            assert seen[COMPARED:] == [[]] * (len(seen) - COMPARED), (config, seen[COMPARED])


def test_no_step_waits() -> None:
    check(2, [
        cases.Config("gpt2", Mesh.of(tensor=2), zoo=DROPS, clip=1.0),
        pipelines.Config("gpt2", "1f1b", (ONE, ONE), 2, seed=1, zoo=DROPS, clip=1.0),
    ])  # fmt: skip


@pytest.mark.parametrize("lifetime", ["step", "use"])
def test_parameters_on_the_host(lifetime: str) -> None:
    """Values and gradients cross where they must, and nowhere else; the host waits for gradients alone."""
    configs = [
        cases.Config("gpt2", Mesh.of(data=2), clip=1.0), cases.Config("mlp", Mesh.of(data=2), microbatches=2),
        pipelines.Config("gpt2", "1f1b", (ONE, ONE), 2, seed=1, clip=1.0),
    ]  # fmt: skip
    for rows in run_local(all_trained, 2, configs, lifetime, timeout=600):
        for config, (worst, seen) in zip(configs, rows, strict=True):
            assert worst <= 1e-4, (config, worst)
            lines = [line for step in seen[COMPARED:] for line in step]
            others = [line for line in lines if "reads from" in line or "is waited for" in line]
            assert others and all("host_memory." in line or "_scaled" in line for line in others), (config, others[:4])


@pytest.mark.slow
def test_what_a_profile_is_made_of_is_measured_there() -> None:
    """By its events, with messages between its ranks; on clusters that have more devices than measure."""
    case = ZOO["mlp"]()
    graph = capture(case.model, case.args, case.kwargs).graph
    for rank in run_local(profiled, 2, graph, "dgx-h100", timeout=600):
        assert not rank["failed"]
        assert rank["ops"] and all(row[0] > 0 for row in rank["ops"].values())
        around = rank["around"]
        assert set(around["transfers"]) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"}
        assert all(seconds >= 0 for rows in around["transfers"].values() for _, seconds in rows)
        assert {"adamw", "sgd"} <= set(around["optimizers"]) and len(around["spans"]) == 4


def test_the_emulated_backend_forgives_nothing() -> None:
    (said,) = run_local(notices, 1)
    assert said == {
        "on the CPU": "RefusedTensor", "by the CPU's backend": "nothing", "read early": "nan", "read late": "8.0",
        "input written": "TooEarly", "output written": "TooEarly", "freed": "TooEarly", "forgotten before": "0",
        "forgotten": "1",
    }  # fmt: skip


def test_what_no_operator_reads_is_not_gathered() -> None:
    """A gather that was begun ahead of a use that never comes would be waited for by nobody."""
    assert run_local(gathers_in_a_step, 2) == [(4, [])] * 2  # of two parameters, forward and backward


def check_used(name: str, backend: str, folder: Path, zoo: dict[str, Any]) -> None:
    configs = [
        cases.Config(name, Mesh.of(data=2), zoo=zoo), pipelines.Config(name, "1f1b", (ONE, ONE), 2, seed=1, zoo=zoo),
    ]  # fmt: skip
    assert run_local(used, 2, configs, backend, str(folder)) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("backend", [f"cpu:gloo,{NAME}:{BACKEND}", f"{NAME}:{BACKEND}"])
@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "resnet", "t5"])
def test_all_that_ranks_of_a_model_send_is_on_the_device(name: str, backend: str, tmp_path: Path) -> None:
    check_used(name, backend, tmp_path, DROPS if name in ("gpt2", "t5") else {})


def test_gradients_are_added_up_in_the_dtype_that_is_asked_for() -> None:
    (own, coarse, _), (wide, fine, dtypes) = (run_local(reduced_in, 3, d)[0] for d in (None, torch.float32))
    assert own == {torch.bfloat16} and wide == {torch.float32} and dtypes == {torch.bfloat16}
    assert fine <= coarse and fine < 2.0**-8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "resnet", "t5"])
def test_no_step_of_a_model_waits(name: str) -> None:
    zoo = DROPS if name == "t5" else {}
    check(2, [
        cases.Config(name, Mesh.of(tensor=2), zoo=zoo, clip=1.0),
        cases.Config(name, Mesh.of(data=2), zoo=zoo, microbatches=2),
        cases.Config(name, Mesh.of(data=2), zoo=zoo, lifetime="use"),
        pipelines.Config(name, "1f1b", (ONE, ONE), 2, seed=1, zoo=zoo, clip=1.0),
        pipelines.Config(name, "zb-h1", (ONE, ONE), 2, seed=1, zoo=zoo),
    ])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_step_of_any_model_waits(part: int) -> None:
    """Of all families that are captured, under random plans, and of the zoo's in stages, too."""
    configs: list[Config] = []
    for name in sorted(ANY)[part::PARTS]:
        configs.append(cases.Config(name, Mesh.of(tensor=2), seed=1))
        if name in ZOO:
            configs.append(pipelines.Config(name, "1f1b", (ONE, ONE), 2, seed=1))
    assert run_local(faults, 2, configs, COMPARED, timeout=3000) == [{}, {}]


@pytest.mark.slow
def test_no_step_of_uneven_pieces_waits() -> None:
    check(3, [cases.Config("gpt2", Mesh.of(tensor=3), zoo=DROPS, seed=seed) for seed in range(4)])
