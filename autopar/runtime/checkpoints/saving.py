"""``autopar.save``: a script's ``torch.save``, on every rank.

A script of one process saves ``{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}``. On
several ranks these hold DTensors, each rank's own pieces, and every rank would write the same file. Here they are put
together one after the other, rank 0 writes the file as one device would have written it, and the others wait until it
is there.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.checkpoints.durable_files import summed, sync_folder
from autopar.runtime.checkpoints.full_state_dict import OnFirstRank, full_state_dict
from autopar.runtime.parameters.state import whole_of
from autopar.runtime.ranks.agree import everywhere
from autopar.runtime.repairs.dtensor_fixes import meet_at
from autopar.runtime.variants.run import EXTRA, is_parallel
from autopar.words.trees import PyTree


def save(state: Any, file: str | os.PathLike[str] | IO[bytes]) -> None:
    """Save with ``torch.save`` what one device would have, by rank 0; every rank must call it.

    Args:
        state: what ``torch.save`` takes: a state dict of a parallel module or of its optimizer, or anything with such
            inside of dicts, lists and tuples. DTensors in it are gathered, one at a time; a parallel module stands for
            its :func:`~autopar.runtime.checkpoints.full_state_dict.full_state_dict`. Where dropout stands
            (``_extra_state``) is left out, so that the model on one device loads it: :class:`autopar.Checkpoint` keeps
            that.
        file: a path, which gets the whole file at once, or a file that is open on every rank, into which rank 0 writes.

    Raises:
        RunError: a tensor is on some ranks only, as those of a pipeline's stages are; not all ranks call it; or the
            file could not be written, and what was there before is as it was.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        _write(_whole(state, True), file)
        return
    tensors = list(_dtensors(state))
    meshes = {tensor.device_mesh for tensor in tensors}
    partial = next((mesh.size() for mesh in meshes if mesh.size() != dist.get_world_size()), None)
    if partial is None:
        for mesh in meshes:
            meet_at(mesh, "saves", f"a state of {len(tensors)} tensors in pieces")
    with everywhere(dist.group.WORLD):  # a rank whose stage has no state yet would wait for the others
        if partial is not None:
            raise RunError(
                f"autopar.save: the state has tensors on {partial} of {dist.get_world_size()} ranks, as a stage of "
                "a pipeline has: save autopar.full_state_dict(pm) and "
                "autopar.full_optimizer_state_dict(pm, optimizer), or use autopar.Checkpoint"
            )
    first = dist.get_rank() == 0
    gathered = _whole(state, first)
    with everywhere(dist.group.WORLD):
        if first:
            _write(gathered, file)


def _write(state: Any, file: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write a file; one at a path gets its name, and takes the place of an earlier one, when it is whole."""
    if not isinstance(file, str | os.PathLike):
        torch.save(state, file)
        file.flush()
        return
    path = Path(file)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with summed(beside, {}) as opened:
            torch.save(state, opened)  # type: ignore[arg-type]
        os.replace(beside, path)
        sync_folder(path.parent)
    except OSError as error:
        kept = "; the file that was there is as it was" if path.exists() else ""
        raise RunError(f"autopar.save: {path} could not be written: {error.strerror or error}{kept}") from error
    finally:
        beside.unlink(missing_ok=True)


def _dtensors(value: PyTree) -> Iterator[DTensor]:
    """Yield the DTensors in a state, in its order."""
    if isinstance(value, DTensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _dtensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _dtensors(item)


def _whole(value: PyTree, keep: bool) -> PyTree:
    """Return a state with plain tensors; without them if it is not kept."""
    if is_parallel(value):
        return full_state_dict(value)
    if isinstance(value, DTensor):
        whole = whole_of(value.detach())
        return whole.to("cpu", copy=True) if keep else None
    if isinstance(value, OnFirstRank):
        return {}
    if isinstance(value, Mapping):
        items = {key: _whole(item, keep) for key, item in value.items() if key != EXTRA}
        return OrderedDict(items) if isinstance(value, OrderedDict) else items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_whole(item, keep) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_whole(item, keep) for item in value)
    return value
