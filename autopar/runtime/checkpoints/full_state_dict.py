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

from autopar.errors import RunError, first_few
from autopar.runtime.parameters.placed_alike import like
from autopar.runtime.ranks.agree import same_error
from autopar.runtime.ranks.collectives import as_sent
from autopar.runtime.variants.run import EXTRA, ParallelRun, on_all_ranks

SHOWN = 6
"""Names of a state dict that a message lists."""


class OnFirstRank(dict[str, torch.Tensor]):
    """The empty state dict of a rank that is not the first."""

    def __missing__(self, name: str) -> torch.Tensor:
        """Raise an error.

        Raises:
            RunError: it says where the state dict is.
        """
        raise RunError(
            f"full_state_dict gives '{name}', as everything, to rank 0 alone: use it there (if dist.get_rank() == 0:), "
            "or call full_state_dict(pm, all_ranks=True) on every rank"
        )


@on_all_ranks
def full_state_dict(pm: ParallelRun, *, all_ranks: bool = False) -> dict[str, torch.Tensor]:
    """Return the state dict of the model on one device, on the CPU of rank 0; the other ranks get ``{}``.

    Every rank must call it, and rank 0 alone is given something: another rank saves nothing, or asks for
    ``all_ranks=True``. Its :class:`OnFirstRank` says so when it is asked for a tensor, and goes back into
    :func:`load_full_state_dict` as it is. Parameters are gathered one at a time.

    Args:
        pm: a parallel module, or a pipeline.
        all_ranks: give it to every rank.

    Returns:
        Parameters and persistent buffers by the names that they have in the model, tied ones under each of their names;
        plain tensors of global shape on the CPU, in the dtype in which they are stored. They are copies.

    Raises:
        RunError: not all ranks call it; on all of them.
    """
    state = pm.full_state(all_ranks)
    return OnFirstRank() if state is None else state


@on_all_ranks
def load_full_state_dict(pm: ParallelRun, state: Mapping[str, torch.Tensor] | None, *, strict: bool = True) -> None:
    """Load a state dict of the model on one device; each rank copies its pieces into its own parameters and buffers.

    Every rank must call it.

    Args:
        pm: a parallel module, or a pipeline.
        state: tensors of global shape by the names of the model, on any device; values are cast to the stored dtype. On
            every rank, or on rank 0 alone (None elsewhere), which then sends each tensor in turn.
        strict: missing and unexpected names are errors. One name of a tied parameter is enough.

    Raises:
        RunError: names or shapes do not fit; on all ranks alike, and before anything was changed.
    """
    (group, first), device, me = pm.ranks(), pm.device, dist.get_rank()
    if isinstance(state, OnFirstRank):
        state = None
    stored = pm.in_state_dict()
    specs = specs_of(pm, stored, group)
    if me == first and state is None:
        problem: str | None = "load_full_state_dict: rank 0 has no state dict; pass it there at least"
    else:
        problem = misfit(specs, state, strict) if state is not None else None
    same_error(group, problem, RunError)
    have = torch.tensor([state is not None], dtype=torch.int64, device=device)
    dist.all_reduce(have, op=dist.ReduceOp.MIN, group=group)
    everywhere = bool(have.item())
    present = [set(state or ())]
    dist.broadcast_object_list(present, src=first, group=group)
    for names in by_source(specs).values():
        source = next((name for name in names if name in present[0]), None)
        if source is None:
            continue
        target = next((stored[name] for name in names if name in stored), None)
        if everywhere:
            assert state is not None
            whole = state[source]
        else:
            shape, dtype, _ = specs[source]
            whole = torch.empty(shape, dtype=dtype, device=device)
            if state is not None and me == first:
                whole.copy_(state[source])
            dist.broadcast(as_sent(whole), src=first, group=group)
        if target is not None:
            with torch.no_grad():
                piece = like(target, whole)
                (target.to_local() if isinstance(target, DTensor) else target).copy_(
                    piece.to_local() if isinstance(piece, DTensor) else piece
                )


Specs = dict[str, tuple[tuple[int, ...], torch.dtype, str]]
"""Shape, dtype and the first of its names, by name."""


def specs_of(pm: ParallelRun, stored: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> Specs:
    """Return the shape, dtype and the first name of everything in the state dict, on any rank."""
    firsts: dict[int, str] = {}
    specs = {n: (tuple(t.shape), t.dtype, firsts.setdefault(id(t), n)) for n, t in stored.items()}
    if pm.leads is None:
        return specs
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, specs, group=group)
    ties = pm.tied_names()  # a stage may know one name of a tied parameter only
    return {
        name: (shape, dtype, ties.get(name, source))
        for theirs in everyone for name, (shape, dtype, source) in theirs.items()
    }  # fmt: skip


def by_source(specs: Specs) -> dict[str, list[str]]:
    """Group all names of each tensor by the first."""
    names: dict[str, list[str]] = {}
    for name, (_, _, source) in specs.items():
        names.setdefault(source, []).append(name)
    return names


def misfit(specs: Specs, state: Mapping[str, Any], strict: bool, where: str = "the state dict") -> str | None:
    """Say how a state dict, or another mapping of shapes by name, does not fit a model; None if it fits."""
    given = {specs[name][2] for name in state if name in specs}
    missing = [name for name, (_, _, source) in specs.items() if name not in state and source not in given]
    unexpected = [name for name in state if name not in specs and name != EXTRA]
    lines = []
    if strict and missing:
        lines.append(f"{len(missing)} missing: {first_few(missing, SHOWN)}")
    if strict and unexpected:
        lines.append(f"{len(unexpected)} unexpected: {first_few(unexpected, SHOWN)}")
    for name, value in state.items():
        if name in specs and tuple(value.shape) != specs[name][0]:
            lines.append(f"{name}: shape {tuple(value.shape)} in {where}, {specs[name][0]} in the model")
    if not lines:
        return None
    return f"{where} is not this model's\n  " + "\n  ".join(lines) + "\n  pass the state_dict() of the same model"
