"""Whole state dicts, with the names and shapes of the model on one device.

Sharded checkpoints need nothing from here: ``pm.state_dict()`` holds DTensors, and ``torch.distributed.checkpoint``
saves them from one mesh and loads them on another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.agree import mesh_group, same_error
from autopar.runtime.executor import ParallelModule
from autopar.runtime.state import local_piece


def full_state_dict(pm: ParallelModule, *, all_ranks: bool = False) -> dict[str, torch.Tensor]:
    """The state dict of the model on one device, on the CPU of rank 0; the other ranks get ``{}``.

    Every rank must call it. Parameters are gathered one at a time.

    Args:
        all_ranks: give it to every rank.
    """
    keep = all_ranks or dist.get_rank() == int(pm.device_mesh.mesh.flatten()[0])
    seen: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    named = {**dict(pm.named_parameters(remove_duplicate=False)), **dict(pm.named_buffers(remove_duplicate=False))}
    for name in pm.state_dict():
        value = named[name]
        if id(value) not in seen:
            value_ = value.detach()
            whole = value_.full_tensor() if isinstance(value_, DTensor) else value_
            seen[id(value)] = whole.to("cpu", copy=True) if keep else whole.new_empty(0)
        if keep:
            found[name] = seen[id(value)]
    return found


def load_full_state_dict(pm: ParallelModule, state: Mapping[str, torch.Tensor] | None, *, strict: bool = True) -> None:
    """Load a state dict of the model on one device.

    Args:
        state: on every rank, or on rank 0 alone (None elsewhere), which then sends each tensor in turn.
        strict: missing and unexpected names are errors. One name of a tied parameter is enough.

    Raises:
        RunError: names or shapes do not fit; on all ranks alike, and before anything was changed.
    """
    mesh = pm.device_mesh
    group, device = mesh_group(mesh), pm._device
    ranks = mesh.mesh.flatten().tolist()
    me = dist.get_rank()
    if me == ranks[0] and state is None:
        problem: str | None = "load_full_state_dict: rank 0 has no state dict; pass it there at least"
    else:
        problem = _problem(pm, state, strict) if state is not None else None
    same_error(group, problem, RunError)
    have = torch.tensor([state is not None], dtype=torch.int64, device=device)
    dist.all_reduce(have, op=dist.ReduceOp.MIN, group=group)
    everywhere = bool(have.item())
    params = dict(pm.named_parameters(remove_duplicate=False))
    named = {**params, **dict(pm.named_buffers(remove_duplicate=False))}
    names: dict[int, list[str]] = {}
    for name in pm.state_dict():
        names.setdefault(id(named[name]), []).append(name)
    present = [set(state or ())]
    dist.broadcast_object_list(present, src=ranks[0], group=group)
    for aliases in names.values():
        source = next((name for name in aliases if name in present[0]), None)
        if source is None:
            continue
        target = named[source]
        if everywhere:
            assert state is not None
            whole = state[source]
        else:
            whole = torch.empty(target.shape, dtype=target.dtype, device=device)
            if state is not None and me == ranks[0]:
                whole.copy_(state[source])
            dist.broadcast(whole, src=ranks[0], group=group)
        with torch.no_grad():
            if isinstance(target, DTensor):
                placements = [f"S{p.dim}" if p.is_shard() else "R" for p in target.placements]  # type: ignore[attr-defined]
                target.to_local().copy_(local_piece(whole, tuple(placements), mesh))
            else:
                target.copy_(whole)


def _problem(pm: ParallelModule, state: Mapping[str, Any], strict: bool) -> str | None:
    own = pm.state_dict()
    named = {**dict(pm.named_parameters(remove_duplicate=False)), **dict(pm.named_buffers(remove_duplicate=False))}
    known = {id(named[name]) for name in own if name in state}
    missing = [name for name in own if name not in state and id(named[name]) not in known]
    unexpected = [name for name in state if name not in own]
    lines = []
    if strict and missing:
        lines.append(f"{len(missing)} missing: {_some(missing)}")
    if strict and unexpected:
        lines.append(f"{len(unexpected)} unexpected: {_some(unexpected)}")
    for name, value in state.items():
        if name in own and tuple(value.shape) != tuple(own[name].shape):
            lines.append(f"{name}: shape {tuple(value.shape)} in the state dict, {tuple(own[name].shape)} in the model")
    if not lines:
        return None
    return "the state dict is not this model's\n  " + "\n  ".join(lines) + "\n  pass the state_dict() of the same model"


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
