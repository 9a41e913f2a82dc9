"""The device of this rank: chosen before anything is put there, one for each rank, the same for model and batch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError, first_few
from autopar.runtime.ranks.store_meeting import from_all
from autopar.torch_private import pytree

META = torch.device("meta")


def choose_device(model: torch.nn.Module | None = None) -> None:
    """Set CUDA's current device to this rank's own.

    That is the model's device; else the one of the rank's number, unless the process uses one already.

    Raises:
        MeshError: there are more ranks on this machine than GPUs that they see.
    """
    if not torch.cuda.is_available():
        return
    of_model = {t.device.index for t in model.parameters() if t.device.type == "cuda"} if model is not None else set()
    if len(of_model) == 1:  # several are refused by check_one_device, on all ranks
        (index,) = of_model
        if index is not None and index != torch.cuda.current_device():
            torch.cuda.set_device(index)
        return
    if torch.cuda.is_initialized():
        return
    visible, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 1 < visible < ranks:
        raise MeshError(
            f"{ranks} ranks are on this machine, and they see {visible} GPUs (CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): start one rank for each, with torchrun "
            f"--nproc-per-node {visible}"
        )
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % visible)  # each may see only one, its own


def check_one_device(model: torch.nn.Module, example: Mapping[str, Any]) -> None:
    """Refuse a model whose parameters are on several devices, and an example batch that is not where the model is.

    Args:
        example: by argument, nested tensors. What is on the meta device has no values, and may be anywhere, and so may
            numbers of the host.

    Raises:
        MeshError: with a name of each device.
    """
    where: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        if param.device.type != "meta":
            where.setdefault(param.device, name)
    if len(where) > 1:
        shown = ", ".join(f"'{name}' on {device}" for device, name in where.items())
        raise MeshError(
            f"the model's parameters are on {len(where)} devices: {shown}. Each rank has one: move the whole model to "
            "the rank's own, with model.to(), or leave it on the CPU or on meta"
        )
    if not where:
        return
    (home,) = where
    wrong = [
        f"{argument}{pytree.keystr(path)} on {leaf.device}"
        for argument, value in example.items()
        for path, leaf in pytree.tree_flatten_with_path(value)[0]
        if isinstance(leaf, torch.Tensor) and leaf.device not in (home, META) and not is_host_number(leaf)
    ]
    if wrong:
        raise MeshError(
            f"the model is on {home}, and not all of the example batch is there: {first_few(wrong)}. Move it with "
            f".to('{home}')"
        )


def check_own_gpus(group: dist.ProcessGroup | None, device_type: str) -> None:
    """Refuse two ranks on one GPU, which NCCL would refuse with less detail, or wait for; a collective call.

    Raises:
        MeshError: with two ranks and what they share.
    """
    if device_type != "cuda" or dist.get_world_size(group) == 1:
        return
    check_different(dict(zip(dist.get_process_group_ranks(group), from_all(group, gpu_here()), strict=True)))


def gpu_here() -> str:
    """Return a unique name of the current GPU, and its machine."""
    index = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return f"{uuid or index}|cuda:{index} of machine '{socket.gethostname()}'"


def check_different(gpus: Mapping[int, str]) -> None:
    """Refuse ranks with the same one.

    Args:
        gpus: by rank what :func:`gpu_here` gives.

    Raises:
        MeshError: with the first two.
    """
    first: dict[str, int] = {}
    for rank, gpu in gpus.items():
        before = first.setdefault(gpu, rank)
        if before != rank:
            raise MeshError(
                f"ranks {before} and {rank} are both on {gpu.partition('|')[2]}, and NCCL has one rank on each GPU: "
                "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything is put on a GPU, or put the "
                "model on the rank's own, model.to(f'cuda:{local_rank}')"
            )


def same_device(a: torch.device, b: torch.device) -> bool:
    """Check whether two names mean one device; one without a number means the process's own of its kind."""
    if a.type != b.type or a.type == "cpu":
        return a.type == b.type
    current = torch.accelerator.current_device_index() if None in (a.index, b.index) else 0
    return (current if a.index is None else a.index) == (current if b.index is None else b.index)


def is_host_number(x: torch.Tensor) -> bool:
    """Check whether a tensor has no dims and is on the CPU: torch's operators mix such with tensors of any device."""
    return x.dim() == 0 and x.device.type == "cpu"


def device_of(device_mesh: DeviceMesh) -> str:
    """Return this rank's device, as torch spells it."""
    kind = device_mesh.device_type
    return kind if kind == "cpu" else f"{kind}:{torch.accelerator.current_device_index()}"
