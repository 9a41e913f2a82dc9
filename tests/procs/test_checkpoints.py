"""Checkpoints of a run: on the same mesh to the bit, on another one, in one process; whole when ranks are killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from procs import checkpoints
from procs.in_turn import marked, selected, several
from torch import nn

import autopar
from autopar.runtime.ranks.launch import run_local


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


RESUMED = {
    f"{how}, {'waited for' if wait else 'not waited for'}": (how, wait)
    for how in checkpoints.HOW
    for wait in (True, False)
}
SLOW = {*RESUMED} - {"zero, not waited for", "tensor, waited for", "pipeline, waited for"}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    calls: dict[str, tuple[Any, ...]] = {
        case: ("resumed", how, str(folder), wait) for case, (how, wait) in RESUMED.items()
    }
    calls = selected(request, calls, SLOW)
    calls["saved"] = ("saved", "zero", str(folder / "elsewhere"))
    for how in ("batch", "tensor", "pipeline"):
        calls[f"loaded {how}"] = ("loaded", how, str(folder / "elsewhere"))
    calls["refused"] = ("refused", str(folder / "refused"))
    calls["kept"] = ("kept", str(folder / "kept"))
    for how in ("zero", "pipeline"):
        calls[f"failing {how}"] = ("failing", how, str(folder / f"failing {how}"))
    calls["others"] = ("of_other_models", str(folder / "others"))
    calls["torch"] = ("saved_by_torch", str(folder))
    calls["unwaited"] = ("unwaited", str(folder / "unwaited"))
    return run_local(several, 2, "checkpoints", calls)


@pytest.mark.parametrize("case", marked(RESUMED, SLOW))
def test_a_resumed_run_is_the_same_to_the_bit(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        went_on, resumed, worst = rank[case]
        assert went_on == resumed and worst == 0.0


@pytest.mark.parametrize("how", ["batch", "tensor", "pipeline"])
def test_a_save_loads_under_another_plan(found: list[dict[str, Any]], how: str) -> None:
    for rank in found:
        (state, losses), (saved, wanted) = rank[f"loaded {how}"], rank["saved"]
        assert state.keys() == saved.keys()
        assert all(torch.equal(state[name], value) for name, value in saved.items())
        if how != "pipeline":  # whose batch norm sees microbatches
            assert all(abs(x / y - 1) < 1e-12 for x, y in zip(losses, wanted, strict=True))


def test_a_save_loads_into_the_plain_model(found: list[dict[str, Any]], folder: Path) -> None:
    run = checkpoints.Run("plain", str(folder / "elsewhere"), seed=1)
    assert run.checkpoint.load() == 3
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, found[0]["saved"][0][name]), name
    assert run.scheduler.last_epoch == 3
    state = run.optimizer.state[run.model.up.weight]
    assert state["step"] == 3 and state["exp_avg"].abs().sum() > 0
    run.step()


def test_a_save_of_one_process_loads_on_two(tmp_path: Path) -> None:
    run = checkpoints.Run("plain", str(tmp_path))
    for _ in range(3):
        run.step()
    run.checkpoint.save(3)
    for state, _ in run_local(checkpoints.loaded, 2, "zero", str(tmp_path)):
        assert all(torch.equal(state[name], value) for name, value in run.model.state_dict().items())


def test_what_is_refused(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(found):
        step, model, kind, others, plain, room = one["refused"]
        assert "has no save of step 7; it has 1" in step
        assert "it is of another model: 2 of 2 tensors are not among its" in model and "0.weight" in model
        assert "count is of type int, which has no state_dict()" in kind
        assert "it has no more; it has data, scheduler" in others or "it has no more; it has scheduler, data" in others
        assert "2 ranks run, and the model is a plain Sequential" in plain
        assert "No space left on device" in room and ("on rank 1: " in room) == (rank == 0)


def test_the_newest_saves_are_kept(found: list[dict[str, Any]], folder: Path) -> None:
    assert all(rank["kept"] == [3, 4] for rank in found)
    assert sorted(p.name for p in (folder / "kept").iterdir()) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("how", ["zero", "pipeline"])
def test_what_fails_on_one_rank_is_one_error_on_all(found: list[dict[str, Any]], how: str) -> None:
    for rank, one in enumerate(found):
        wrote, wrote_meanwhile, *loads, taken = one[f"failing {how}"]
        for text in (wrote, wrote_meanwhile):
            assert "could not be saved to" in text and "No space left on device" in text and "step-00000002" in text
            assert ("on rank 1: " in text) == (rank == 0)
        for text, name in zip(loads, ("rank-00001.pt", "__1_0.distcp", ".metadata"), strict=True):
            assert name in text and "copy it again" in text, text
        assert "No space left on device" in taken and ("on rank 1: " in taken) == (rank == 0)


def test_a_save_of_another_model_is_one_error_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for one in found:
        for case, text in one["others"].items():
            assert "it is of another model: " in text, case
            if " 3 8" in case:
                assert "2 of its 8 tensors are not in this model: layers.3." in text
            if " 5 8" in case and case.startswith("mesh"):
                assert "2 of 10 tensors are not among its 8: layers.4." in text
            if " 16" in case:
                assert "of shape (8, 8) in the save, and of shape (16, 16) here" in text


def test_torch_save_of_a_state_dict_is_plain_or_refused(found: list[dict[str, Any]]) -> None:
    for one in found:
        texts = one["torch"]
        assert {text for case, text in texts.items() if case.startswith("whole")} == {"no error", ""}
        for case in ("pieces", "pieces, inside", "pieces, on the CPU", "pieces, parameters"):
            assert "in pieces on 2 ranks" in texts[case] and "autopar.save(state, path) on every rank" in texts[case]
        for case in ("stages", "stages, inside", "stages, on the CPU"):
            assert "of one stage of a pipeline" in texts[case] and "Call autopar.full_state_dict(pm)" in texts[case]
        assert "loads on this rank of as many alone" in texts["pieces, optimizer"]


def test_the_last_save_is_written_though_nobody_waits(found: list[dict[str, Any]], folder: Path) -> None:
    run = checkpoints.Run("plain", str(folder / "unwaited"), seed=1)
    assert run.checkpoint.load() == 1 and run.data.position == 1


def _rank(rank: int, port: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    checkpoints.saving_on(folder)


def killed_after(seconds: float, folder: Path) -> int:
    """Two ranks that save without end are killed so long after their first save; which save loads then."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, port, str(folder)), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        end = time.monotonic() + 120
        while not list(folder.glob("step-*")) and time.monotonic() < end and all(p.is_alive() for p in ranks):
            time.sleep(0.005)
        time.sleep(seconds)
    finally:
        for process in ranks:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(20)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = autopar.Checkpoint(folder, model, optimizer)
    step = checkpoint.load()
    assert step is not None and step == checkpoint.steps()[-1]
    for p in model.parameters():
        assert (p == step).all() and (optimizer.state[p]["exp_avg"] == step).all()
    return step


def test_ranks_that_are_killed_while_they_save_leave_a_whole_save(tmp_path: Path) -> None:
    assert killed_after(0.3, tmp_path) >= 1


@pytest.mark.slow
def test_ranks_that_are_killed_at_random_moments_leave_a_whole_save(tmp_path: Path) -> None:
    times = random.Random(0)
    steps = [killed_after(times.uniform(0.0, 1.0), tmp_path / str(i)) for i in range(20)]
    assert len(set(steps)) > 1
