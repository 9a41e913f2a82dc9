"""Which GPU a rank takes, and what is said where there is none for it; torch.cuda is imagined."""

from __future__ import annotations

import sys
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

import autopar
from autopar.cli.common import UsageError, where_to_run
from autopar.errors import MeshError, RunError
from autopar.parallelizing.all_ranks import device_type_of, tell_of_idle_gpus
from autopar.runtime.batches.batch import Batch
from autopar.runtime.ranks import streams
from autopar.runtime.ranks.devices import check_different, check_one_device, choose_device, gpu_here
from autopar.runtime.ranks.groups import backend_for
from autopar.runtime.ranks.launch import _context
from autopar.runtime.ranks.streams import StepStream


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


def on_gpus(*numbers: int) -> torch.nn.Module:
    """A model with a parameter on each of these GPUs, which nobody has."""
    with FakeTensorMode():
        return torch.nn.ParameterList(torch.empty(2, 2, device=f"cuda:{number}") for number in numbers)


def test_the_gpu_of_the_model_is_the_current_one(gpus: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script puts the model on ``cuda:2`` and says nothing else: ranks would all be on the first GPU."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    choose_device(on_gpus(2))
    gpus.assert_called_once_with(2)
    choose_device(on_gpus(0))
    choose_device(on_gpus(0, 1))
    gpus.assert_called_once()


def test_a_model_on_several_devices_is_refused() -> None:
    said = r"parameters are on 2 devices: '0' on cuda:0, '1' on cuda:1. Each rank has one: move the whole"
    with pytest.raises(MeshError, match=said):
        check_one_device(on_gpus(0, 1), {})


def test_an_example_that_is_not_where_the_model_is() -> None:
    """On another GPU, or on the CPU; without values it may be anywhere."""
    with FakeTensorMode():
        there, other = torch.ones(2, device="cuda:1"), torch.ones(2, device="cuda:0")
    fine = {"example_inputs": (there, torch.ones(2, device="meta"), 3, torch.tensor(0.5)), "targets": ()}
    check_one_device(on_gpus(1), fine)
    said = r"on cuda:1, .*: example_inputs\[0\] on cuda:0, targets\['y'\] on cpu. Move it with .to\('cuda:1'\)"
    with pytest.raises(MeshError, match=said):
        check_one_device(on_gpus(1), {"example_inputs": (other,), "targets": {"y": torch.ones(2)}})


def test_parallelize_says_where_the_example_should_be() -> None:
    with FakeTensorMode():
        x = torch.ones(2, 2, device="cuda:1")
    with pytest.raises(MeshError, match=r"the model is on cpu, .*: example_inputs on cuda:1. Move it with .to"):
        autopar.parallelize(torch.nn.Linear(2, 2), 1, x)


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_a_batch_on_another_device_is_refused(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """In a call, after ``parallelize``: a loader has put it on the first GPU."""
    pm: Any = autopar.parallelize(torch.nn.Linear(2, 2), 1, torch.ones(2, 2))
    pm._autopar.batch.device = torch.device("cuda", 1)
    assert isinstance(pm._autopar.batch, Batch)
    with FakeTensorMode():
        x = torch.ones(2, 2, device=device)
    with pytest.raises(RunError, match=rf"input args\[0\] is on {device}, the mesh is on cuda:1; move it with .to"):
        pm._autopar.batch.tensors((x,), {})


def test_a_number_of_the_host_is_moved() -> None:
    """A tensor without dims may be on the CPU in eager mode: ``pm(x, torch.tensor(0.5))``."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * scale

    pm: Any = autopar.parallelize(Scaled(), 1, (torch.ones(2, 2), torch.tensor(0.5)))
    pm._autopar.batch.device = torch.device("cuda", 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = torch.ones(2, 2, device="cuda:1"), torch.tensor(0.25)
        found = pm._autopar.batch.tensors(given, {})
    assert {str(x.device) for x in found.values()} == {"cuda:1"}


def test_two_ranks_on_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of several machines may have GPUs of one number, not of one name."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    known = mock.Mock(uuid="a1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: known)
    first = gpu_here()
    known.uuid = "b2"
    check_different({0: first, 1: gpu_here()})
    with pytest.raises(MeshError, match=r"ranks 0 and 2 are both on cuda:0 of machine '.*', and NCCL has one rank on"):
        check_different({0: first, 1: gpu_here(), 2: first})


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
        ("auto", 8, "cpu", "8 processes on the CPU; 4 GPUs are too few"),
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


def test_ranks_on_gpus_are_not_forked() -> None:
    """From a process that may have begun CUDA's driver: no child of it could use a GPU."""
    assert _context(None, "cpu:gloo,cuda:nccl").get_start_method() == "spawn"
    if sys.platform.startswith("linux"):
        assert _context(None, "gloo").get_start_method() == "forkserver"


class Stream:
    """One of an accelerator: what was asked of it."""

    def __init__(self, name: str) -> None:
        self.name, self.waited_for = name, list[Any]()

    def wait_stream(self, stream: Any) -> None:
        self.waited_for.append(stream)

    def __repr__(self) -> str:
        return self.name


class Streams:
    """An accelerator's, on a processor: which one is current, and which tensors were recorded as which one's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = Stream("first")
        self.recorded: list[tuple[int, Any]] = []
        monkeypatch.setattr(streams, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, s: self.recorded.append((x.data_ptr(), s)))


def mixed() -> tuple[Any, Any]:
    """A module whose parameters are cast, so that hooks of the backward add up their gradients; and a batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    x = torch.randn(6, 4)
    loss_fn = torch.nn.functional.mse_loss
    return autopar.parallelize(model, 1, x, loss_fn=loss_fn, targets=x, precision="bf16-mixed"), (x, x)


def test_a_step_runs_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    pm, batch = mixed()
    on = Streams(monkeypatch)
    first, second = on.current, Stream("second")
    pm.train_step(*batch)
    assert not first.waited_for and not on.recorded
    on.current = second
    pm.train_step(*batch)
    assert second.waited_for == [first]
    pieces = [p.to_local() if isinstance(p, DTensor) else p for p in pm.parameters()]
    kept = {x.data_ptr() for x in (*pieces, *pm.buffers())}
    assert kept <= {where for where, _ in on.recorded} and {s for _, s in on.recorded} == {second}
    pm.train_step(*batch)
    assert second.waited_for == [first]


def test_a_hook_of_the_backward_on_another_stream_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pm, batch = mixed()
    on = Streams(monkeypatch)
    loss = pm(*batch)
    on.current = Stream("second")
    with pytest.raises(RunError, match="the gradient of a parameter comes on the stream second, and the step runs on"):
        loss.backward()


def test_microbatches_of_a_step_run_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    on, of_step = Streams(monkeypatch), StepStream(torch.device("cuda", 0))
    of_step.begin(same_step=False)
    on.current = Stream("second")
    with pytest.raises(RunError, match="of one step run on two CUDA streams, first and second"):
        of_step.begin(same_step=True)
    assert not on.current.waited_for
    monkeypatch.undo()
    assert streams.current_stream(torch.device("cpu")) is None
