"""Which GPU a rank takes, and what is said where there is none for it; torch.cuda is imagined."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from autopar.cli.common import UsageError, where_to_run
from autopar.errors import MeshError, RunError
from autopar.runtime.agree import choose_device
from autopar.runtime.groups import backend_for
from autopar.runtime.stage import one_stream
from autopar.spreading import device_type_of, tell_of_idle_gpus


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Four GPUs that nothing has been done with."""
    chosen = mock.Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return chosen


@pytest.mark.parametrize(("visible", "local", "chosen"), [(4, "3", 3), (1, "3", 0), (8, None, 0)])
def test_a_rank_takes_its_own(
    gpus: mock.Mock, monkeypatch: pytest.MonkeyPatch, visible: int, local: str | None, chosen: int
) -> None:
    """Also where each rank is shown one GPU only."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    choose_device()
    gpus.assert_called_once_with(chosen)


def test_a_device_in_use_is_kept(gpus: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    choose_device()
    gpus.assert_not_called()


def test_more_ranks_than_gpus_are_refused(gpus: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    said = "8 ranks are on this machine, and they see 4 GPUs .CUDA_VISIBLE_DEVICES is 0,1,2,3.: .* --nproc-per-node 4"
    with pytest.raises(MeshError, match=said):
        choose_device()


def test_a_meta_model_goes_where_ranks_can_talk(gpus: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert device_type_of(model) == "cuda" and backend_for("cuda") == "nccl" and backend_for("cpu") == "gloo"
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    assert device_type_of(model) == "cpu"


def test_a_world_without_a_backend_for_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(MeshError, match="the process group is for cuda and the model is on cpu: move the model there"):
        backend_for("cpu")


def test_a_model_on_the_cpu_of_a_machine_with_gpus_is_told_about(gpus: mock.Mock) -> None:
    with pytest.warns(UserWarning, match="trains there, on a machine with 4 GPUs: call model.cuda"):
        tell_of_idle_gpus("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_of_idle_gpus("cuda")


@pytest.mark.parametrize(
    ("asked", "processes", "device", "said"),
    [
        ("auto", 4, "cuda", "4 of 4 GPUs (NVIDIA L4)"),
        ("auto", 8, "cpu", "8 processes on the CPU; 4 GPUs are here, too few"),
        ("cpu", 2, "cpu", "2 processes on the CPU"),
        ("cuda", 1, "cuda", "1 of 4 GPUs (NVIDIA L4)"),
    ],
)
def test_commands_run_on_gpus_where_there_are_enough(
    gpus: mock.Mock, monkeypatch: pytest.MonkeyPatch, asked: str, processes: int, device: str, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA L4")
    assert where_to_run(asked, processes) == (device, said)


def test_commands_say_what_is_missing(gpus: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="8 processes are to run on this machine, and torch finds 4 GPUs"):
        where_to_run("cuda", 8)
    with pytest.raises(UsageError, match="--device is tpu; it is cpu, cuda or auto"):
        where_to_run("tpu", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="torch finds no GPU"):
        where_to_run("cuda", 1)
    assert where_to_run("auto", 3) == ("cpu", "3 processes on the CPU")


def test_microbatches_of_a_step_run_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    now, before = mock.Mock(name="now"), mock.Mock(name="before")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    gpu = torch.device("cuda", 0)
    assert one_stream(gpu, None, False) is one_stream(gpu, now, True) is now
    now.wait_stream.assert_not_called()
    with pytest.raises(RunError, match="of one step run on two CUDA streams"):
        one_stream(gpu, before, True)
    now.wait_stream.assert_not_called()
    assert one_stream(gpu, before, False) is now
    now.wait_stream.assert_called_once_with(before)
    assert one_stream(torch.device("cpu"), before, True) is None
