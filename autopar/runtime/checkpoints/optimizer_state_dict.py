"""The state of an optimizer as one device has it: what ``optimizer.state_dict()`` gives there, and what it loads.

On one mesh an optimizer's own ``load_state_dict`` takes such a state, since it places what it is given; its
``state_dict`` has DTensors. In a pipeline every rank's optimizer has the parameters of its own stages only, numbered
from 0: here they get the numbers that they have in the optimizer of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime.checkpoints.full_state_dict import OnFirstRank
from autopar.runtime.parameters.state import whole_of
from autopar.runtime.ranks.agree import everywhere
from autopar.runtime.variants.run import ParallelRun, on_all_ranks
from autopar.words.trees import PyTree

Groups = list[list[str]]
"""Names of the parameters of each group of an optimizer."""


@on_all_ranks
def full_optimizer_state_dict(
    pm: ParallelRun, optimizer: torch.optim.Optimizer, *, all_ranks: bool = False
) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` of one process, on the CPU of rank 0; the other ranks get ``{}``.

    Every rank must call it. Parameters are numbered as one process numbers them: in each group in the order in which
    the optimizer was given them, in a pipeline in the order of ``model.parameters()``.

    Args:
        pm: a parallel module, or a pipeline.
        optimizer: the optimizer of the module's parameters; on every rank with as many groups.
        all_ranks: give it to every rank.

    Raises:
        RunError: the optimizer has a tensor that is no parameter of the module, ranks have different groups, or one
            of a pipeline lists parameters in another order than the model.
    """
    (group, first), me = pm.ranks(), dist.get_rank()
    whole, mine = _groups(pm, optimizer, group)
    keep = all_ranks or me == first or pm.leads is not None
    states: dict[str, dict[str, Any]] = {}
    params = {name: p for names, g in zip(mine, optimizer.param_groups) for name, p in zip(names, g["params"])}
    for name in [name for names in whole for name in names if name in params]:
        values = {key: _whole(value, keep) for key, value in optimizer.state.get(params[name], {}).items()}
        if values and (pm.leads is not False):
            states[name] = values
    if pm.leads is not None:
        everyone: list[Any] = [None] * dist.get_world_size(group)
        if all_ranks:
            dist.all_gather_object(everyone, states, group=group)
        else:
            dist.gather_object(states, everyone if me == first else None, dst=first, group=group)
        for of_rank in reversed(everyone):
            states |= of_rank or {}
    if not all_ranks and me != first:
        return OnFirstRank()
    numbers = {name: k for k, name in enumerate(name for names in whole for name in names)}
    return {
        "state": {numbers[name]: states[name] for name in numbers if name in states},
        "param_groups": [
            {
                **{key: _whole(value, True) for key, value in of_group.items() if key not in ("params", "param_names")},
                **({"param_names": names} if "param_names" in of_group else {}),
                "params": [numbers[name] for name in names],
            } for names, of_group in zip(whole, optimizer.param_groups, strict=True)
        ],
    }  # fmt: skip


@on_all_ranks
def load_full_optimizer_state_dict(
    pm: ParallelRun, optimizer: torch.optim.Optimizer, state: Mapping[str, Any] | None
) -> None:
    """Load the state of the optimizer of one process; each rank keeps its pieces. Every rank must call it.

    Args:
        pm: a parallel module, or a pipeline.
        optimizer: the optimizer of the module's parameters, built as in that process: the same groups, in the same
            order.
        state: what ``optimizer.state_dict()`` gave there. On every rank, or on rank 0 alone (None elsewhere), which
            then sends the state of one parameter after the other.

    Raises:
        RunError: it has other groups, or a state of another shape; on all ranks alike, and nothing was changed.
    """
    (group, first), me = pm.ranks(), dist.get_rank()
    state = None if isinstance(state, OnFirstRank) else state
    whole, mine = _groups(pm, optimizer, group)
    order = [name for names in whole for name in names]
    with everywhere(group):
        if me == first and state is None:
            raise RunError("load_full_optimizer_state_dict: rank 0 has no state; pass it there at least")
        if state is not None:
            _check(state, whole)
    groups = [[{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]] if state else None]
    dist.broadcast_object_list(groups, src=first, group=group)
    here = {name for names in mine for name in names}
    stored = dict(zip([n for g in state["param_groups"] for n in g["params"]], order, strict=True)) if state else {}
    by_name = {stored[number]: of_param for number, of_param in state["state"].items()} if state else {}
    states: dict[str, Any] = {}
    for name in order:
        box = [by_name.get(name) if me == first else None]
        dist.broadcast_object_list(box, src=first, group=group)
        if name in here and box[0] is not None:
            states[name] = _whole(box[0], True)  # a copy: the optimizer goes on to write in it
    at, of_groups = 0, []
    ready: dict[int, Any] = {}
    assert groups[0] is not None
    for names, options in zip(mine, groups[0], strict=True):
        kept = {"param_names": names} if "param_names" in options else {}
        of_groups.append({**options, **kept, "params": list(range(at, at + len(names)))})
        ready |= {at + k: states[name] for k, name in enumerate(names) if name in states}
        at += len(names)
    with everywhere(group):
        optimizer.load_state_dict({"state": ready, "param_groups": of_groups})


def _whole(value: PyTree, keep: bool) -> PyTree:
    """Return a value of a state as one device has it, on the CPU; the ranks that share a DTensor call this together."""
    if isinstance(value, torch.Tensor):
        whole = whole_of(value.detach())
        return whole.to("cpu", copy=True) if keep else None
    if isinstance(value, Mapping):
        return {key: _whole(item, keep) for key, item in value.items()}
    return type(value)(_whole(item, keep) for item in value) if type(value) in (list, tuple) else value


def _groups(pm: ParallelRun, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> tuple[Groups, Groups]:
    """Return the names in each group of the whole model's optimizer, and of this rank's, in their orders."""
    ties = pm.tied_names()
    named = {id(p): ties.get(name, name) for name, p in reversed(list(pm.named_parameters(remove_duplicate=False)))}
    named |= {id(p): ties.get(name, name) for name, p in pm.named_parameters()}
    mine: Groups = []
    with everywhere(group):
        for of_group in optimizer.param_groups:
            strange = sum(id(p) not in named for p in of_group["params"] if p.numel() or pm.leads is None)
            if strange:
                raise RunError(
                    f"the optimizer has {strange} tensors that are no parameters of the parallel module; build it of "
                    "pm.parameters()"
                )
            mine.append([named[id(p)] for p in of_group["params"] if id(p) in named])
    if pm.leads is None:
        return mine, mine
    place = {name: k for k, name in enumerate(pm.parameter_order())}
    with everywhere(group):
        for k, names in enumerate(mine):
            if names != sorted(names, key=place.__getitem__):
                raise RunError(
                    f"group {k} of the optimizer lists its parameters in another order than model.parameters() "
                    f"('{names[0]}', ..): no rank of a pipeline has all of them, so how they stand in one process "
                    "cannot be told; build the group in the order of pm.named_parameters()"
                )
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    numbers = {len(groups) for groups in everyone}
    if len(numbers) > 1:
        raise RunError(
            f"the optimizer has {min(numbers)} groups of parameters on one rank and {max(numbers)} on another; give "
            "each rank the same groups, empty ones too"
        )
    merged = [sorted({n for groups in everyone for n in groups[k]}, key=place.__getitem__) for k in range(len(mine))]
    return merged, mine


def _check(state: Mapping[str, Any], whole: Groups) -> None:
    """Check that a state is of an optimizer with the groups `whole`.

    Raises:
        RunError: it is not.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise RunError("load_full_optimizer_state_dict: give what optimizer.state_dict() gives in one process")
    there, here = [len(g["params"]) for g in state["param_groups"]], [len(names) for names in whole]
    if there != here:
        raise RunError(
            f"the state is of an optimizer with groups of {', '.join(map(str, there))} parameters, this one has "
            f"{', '.join(map(str, here))}; build both of the same parameters, in the same groups"
        )
