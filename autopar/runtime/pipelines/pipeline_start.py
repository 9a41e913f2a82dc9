"""What the ranks of a pipeline make together before each has its own stages: groups, meshes, and values to place.

All ranks come through here alike, also for what they are not part of; afterwards they go different ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture import Captured
from autopar.errors import PlanError, RunError
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import StageGraph
from autopar.runtime.pipelines.ties import Tied, groups_between, tied_parameters
from autopar.runtime.pipelines.wires import Wire, wires_of
from autopar.runtime.ranks.agree import FirstRankValues
from autopar.runtime.ranks.groups import Groups, groups_for
from autopar.runtime.repairs.functions_of_all_parameters import refuse_norms_on
from autopar.runtime.stages.registering import Placing


@dataclass(frozen=True)
class Start:
    """Where this rank stands.

    Attributes:
        wires, tied: what crosses between stages, and what several groups of ranks hold; of the whole pipeline.
        mine: this rank's stages, by number.
        meshes: theirs.
        everyone: the group of all ranks.
    """

    wires: tuple[Wire, ...]
    tied: tuple[Tied, ...]
    groups: Groups
    mine: Sequence[int]
    meshes: Mapping[int, DeviceMesh]
    everyone: Any


def check_fits(plan: Plan, captured: Captured) -> None:
    """Refuse a plan of another model or for another number of ranks.

    Raises:
        PlanError: the plan is for another model. RunError: not as many ranks as devices in the plan.
    """
    plan.validate()
    if plan.fingerprint != captured.graph.fingerprint:
        raise PlanError(
            f"the plan was made for a model with fingerprint {plan.fingerprint}, this one has "
            f"{captured.graph.fingerprint}: shapes, operators or names differ; plan this model again"
        )
    if plan.n_devices != dist.get_world_size():
        raise RunError(f"the plan is for {plan.n_devices} ranks, {dist.get_world_size()} are running")


def begun(parts: Sequence[StageGraph], plan: Plan, device_type: str) -> Start:
    """Make all groups that the pipeline will ever need, on all ranks in one order."""
    wires, tied = wires_of(parts, plan), tied_parameters(parts, plan)
    groups = groups_for(torch.device(device_type))
    groups.make(groups_between(parts, plan, wires, tied))
    mine = [s for s, stage in enumerate(plan.stages) if dist.get_rank() in stage.devices]
    meshes = {s: groups.mesh(plan.stages[s].mesh, plan.stages[s].devices) for s in mine}
    if len({stage.devices for stage in plan.stages}) > 1:
        for mesh in meshes.values():  # torch's functions take one rank's parameters for all there are
            refuse_norms_on(mesh)
    return Start(wires, tied, groups, mine, meshes, groups.of(range(plan.n_devices)))


def unread_in(model: torch.nn.Module, captured: Captured, parts: Sequence[StageGraph]) -> dict[str, str]:
    """Return parameters and buffers of the model that no stage reads, each with the first name of the same tensor.

    A head for another task is such. They have to be on some rank, since they are in the state dict.
    """
    read = {node.target for part in parts for node in part.graph.nodes if node.kind in ("param", "buffer")}
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))
    firsts: dict[int, str] = {}
    tied = captured.graph.tied
    return {
        name: firsts.setdefault(id(value), name)
        for name, value in named.items() if tied.get(name, name) not in read
    }  # fmt: skip


def take_values(
    model: torch.nn.Module, start: Start, values: Callable[[str], torch.Tensor] | None, placings: Iterable[Placing]
) -> None:
    """Give this rank's stages their parts of the model's values, one whole value after the other.

    They are rank 0's, so that ranks that were seeded differently agree.

    Args:
        values: gives them by name, and is called on every rank for every name; by default they are sent from rank 0.
        placings: one for each of this rank's stages. What two of them share is given to the first.
    """
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    params = set(named)
    named.update(model.named_buffers(remove_duplicate=False))
    if values is None:
        values = FirstRankValues(named, start.everyone, 0, start.groups.device)
    readers = {name: [placing for placing in placings if placing.wants(name)] for name in named}

    def give(name: str, whole: torch.Tensor) -> None:
        for placing in readers[name][:1] if name in params else readers[name]:
            placing.arrives(name, whole)

    for name in named:
        give(name, values(name))  # nothing here holds it while the next one comes
