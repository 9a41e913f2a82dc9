"""Weights as folders of safetensors files, as Hugging Face publishes them: loaded and saved on all ranks together.

Each rank reads its own pieces of its own parameters, a few megabytes at a time; saving gathers one tensor at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.checkpoints.durable_files import SummedFile
from autopar.runtime.checkpoints.full_state_dict import by_source, misfit, specs_of
from autopar.runtime.checkpoints.safetensors_files import INDEX, NAMES, SINGLE, Writer
from autopar.runtime.checkpoints.safetensors_files import stored_tensors as tensors_in
from autopar.runtime.parameters.placed_alike import box_held
from autopar.runtime.parameters.state import whole_of
from autopar.runtime.ranks.agree import everywhere
from autopar.runtime.ranks.collectives import as_sent
from autopar.runtime.variants.run import ParallelRun, on_all_ranks
from autopar.words.texts import parse_bytes

SHARD_SIZE = "5GB"
"""The size of a file, if the tensors of a model are more; as ``save_pretrained`` does."""


@on_all_ranks
def load_safetensors(pm: ParallelRun, folder: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Load a folder of safetensors files by the names of the model on one device.

    Every rank must call it, and see the folder. Each reads from the files what it stores, piece by piece: no rank holds
    more than its own part and a few megabytes. A model that was built on the meta device has its weights then.

    Args:
        pm: a parallel module, or a pipeline.
        folder: with ``model.safetensors.index.json`` and the files that it names, or with one file; or one file.
        strict: missing and unexpected names are errors. One name of a tied parameter is enough. Values are cast to the
            stored dtype.

    Raises:
        RunError: names or shapes do not fit, or a file is missing or broken; on all ranks alike, and, where headers
            show it, before anything was changed.
    """
    path, (group, _) = Path(folder), pm.ranks()
    stored = pm.in_state_dict()
    specs = specs_of(pm, stored, group)
    with everywhere(group):
        tensors = tensors_in(path)
        problem = misfit(specs, tensors, strict, str(path))
        if problem is not None:
            raise RunError(problem)
    with everywhere(group):
        for names in by_source(specs).values():
            target = next((stored[name] for name in names if name in stored), None)
            there = next((name for name in names if name in tensors), None)
            if target is not None and there is not None:
                local = target.detach()
                tensors[there].read_into(local.to_local() if isinstance(local, DTensor) else local, box_held(local))
        _count_as_written(stored)


def _count_as_written(stored: Mapping[str, torch.Tensor]) -> None:
    """Mark parameters as changed, for autograd and the program: their shards are written directly."""
    for value in {id(t): t for t in stored.values()}.values():
        if not value.is_inference():
            torch.autograd.graph.increment_version(value)


@on_all_ranks
def save_safetensors(
    pm: ParallelRun, folder: str | os.PathLike[str], *, max_shard_size: int | str = SHARD_SIZE
) -> None:
    """Save the weights with the model's names and shapes, for ``from_pretrained`` and :func:`load_safetensors`.

    Every rank must call it; rank 0 writes. Tensors are gathered one at a time. Files get their names when all are
    written. Tied parameters are saved under their first name, as ``save_pretrained`` does.

    Args:
        pm: a parallel module, or a pipeline.
        folder: made if it is not there; files of the same names are replaced.
        max_shard_size: bytes of a file, such as ``"5GB"``; a larger tensor has a file of its own.

    Raises:
        RunError: it could not be written, on all ranks.
    """
    path, (group, first), me = Path(folder), pm.ranks(), dist.get_rank()
    stored = pm.in_state_dict()
    whole_specs = specs_of(pm, stored, group)
    specs = {n: (shape, dtype) for n, (shape, dtype, source) in whole_specs.items() if n == source}
    with everywhere(group):
        shards = _shards(specs, int(parse_bytes(max_shard_size) or 0))
        if me == first:
            _make_folder(path)
    senders = _senders(pm, stored, group)
    files = [SINGLE] if len(shards) == 1 else [
        f"model-{k + 1:05d}-of-{len(shards):05d}.safetensors" for k in range(len(shards))
    ]  # fmt: skip
    error: Exception | None = None
    for file, names in zip(files, shards, strict=True):
        with contextlib.ExitStack() as stack:
            writer = None
            if me == first and error is None:
                try:
                    opened = SummedFile(path / f"{file}.part")
                    stack.enter_context(contextlib.suppress(OSError))  # of closing what had no room
                    stack.callback(opened.file.close)
                    writer = Writer(opened, {name: specs[name] for name in names})
                except OSError as failed:
                    error = failed
            for name in names:
                value = _at_first(pm, stored.get(name), specs[name], senders[name], group, first)
                if writer is not None and value is not None and error is None:
                    try:
                        writer.add(value)
                    except OSError as failed:
                        error = failed
            if writer is not None and error is None:
                try:
                    os.fsync(opened.fileno())
                except OSError as failed:
                    error = failed
    with everywhere(group, lambda e: RunError(f"the weights could not be written to {path}: {e}")):
        try:
            if error is not None:
                raise error
            if me == first:
                _name_files(path, files, shards, specs)
        finally:
            if me == first:  # nothing of what failed takes the room of the next one
                for file in (*files, INDEX):
                    (path / f"{file}.part").unlink(missing_ok=True)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"the weights could not be written to {path}: {error}; give a folder") from None


def _name_files(
    path: Path, files: list[str], shards: list[list[str]], specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Give all files their names once they are written; the index goes last."""
    for file in files:
        (path / f"{file}.part").rename(path / file)
    if len(files) == 1:
        (path / INDEX).unlink(missing_ok=True)
        return
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in specs.values())
    index = {
        "metadata": {"total_size": size},
        "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
    }
    part = path / f"{INDEX}.part"
    part.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    part.rename(path / INDEX)
    (path / SINGLE).unlink(missing_ok=True)


def _shards(specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], most: int) -> list[list[str]]:
    """Split the names into files, in the model's order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, (shape, dtype) in specs.items():
        if dtype not in NAMES:
            raise RunError(f"'{name}' is {dtype}, which safetensors files do not have")
        n_bytes = prod(shape) * dtype.itemsize
        if shards[-1] and size + n_bytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += n_bytes
    return shards


def _senders(pm: ParallelRun, stored: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> dict[str, int]:
    """Map each tensor to the rank that sends it to rank 0: in a pipeline, the first of a group that has it."""
    ranks = dist.get_process_group_ranks(group)
    if pm.leads is None:
        return dict.fromkeys(stored, ranks[0])
    everyone: list[Any] = [None] * len(ranks)
    dist.all_gather_object(everyone, [*stored] if pm.leads else [], group=group)
    senders: dict[str, int] = {}
    for rank, names in zip(ranks, everyone, strict=True):
        for name in names:
            senders.setdefault(name, rank)
    return senders


def _at_first(
    pm: ParallelRun, value: torch.Tensor | None, spec: tuple[tuple[int, ...], torch.dtype], sender: int,
    group: dist.ProcessGroup, first: int,
) -> torch.Tensor | None:  # fmt: skip
    """Gather a whole tensor on the first rank, None elsewhere; those that have a part of it call this together."""
    me, whole = dist.get_rank(), None
    if value is not None:
        value = value.detach()
        whole = whole_of(value)
    if sender == first:
        return whole if me == first else None
    if me == sender:
        assert whole is not None
        dist.send(as_sent(whole.contiguous()), first, group=group)
    elif me == first:
        whole = torch.empty(spec[0], dtype=spec[1], device=pm.device)
        dist.recv(as_sent(whole), sender, group=group)
        return whole
    return None
