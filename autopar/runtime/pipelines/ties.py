"""Parameters that several stages of a pipeline use: their gradients are summed, so the copies stay in step.

Stages of one group of ranks share the parameter itself; groups have a copy each. Where they store it alike, the ranks
that hold the same piece add up its gradient in one all-reduce; where not, each sends the others what they lack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import spmd_types as spmd
import torch
import torch.distributed as dist

from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import StageGraph
from autopar.plans.transfer import Side, transfer
from autopar.runtime.gradients.gradient_reduction import in_dtype
from autopar.runtime.gradients.reached import Reached
from autopar.runtime.parameters.state import HeldParam
from autopar.runtime.pipelines.wires import Post, Wire, pairs_of
from autopar.runtime.ranks.groups import Groups, Wanted
from autopar.runtime.stages.plan_groups import groups_of
from autopar.runtime.stages.stage import Stage
from autopar.words.graph import Spec
from cost_models.schedules.actions import Action


@dataclass(frozen=True)
class Tied:
    """A parameter that several groups of ranks hold: ``stages`` has one stage of each group, in order.

    ``alike`` says that all of them store it alike on meshes of one shape: then the nth ranks of all holders have the
    same piece, and its gradient is one all-reduce among them.
    """

    name: str
    spec: Spec
    stages: tuple[int, ...]
    alike: bool

    def rank_sets(self, plan: Plan) -> list[tuple[int, ...]]:
        """List, for every shard, the ranks that have it; empty if holders store it differently."""
        columns = zip(*(plan.stages[s].devices for s in self.stages), strict=True) if self.alike else ()
        return [tuple(sorted(column)) for column in columns]


def tied_parameters(parts: Sequence[StageGraph], plan: Plan) -> tuple[Tied, ...]:
    """List the trained parameters that several groups of ranks hold, by name."""
    holders: dict[str, dict[int, int]] = {}
    specs: dict[str, Spec] = {}
    for part in parts:
        for _, node in part.graph.of_kind("param"):
            if node.needs_grad:
                group = plan.schedule.rank_of_stage[part.number]
                holders.setdefault(node.target, {}).setdefault(group, part.number)
                specs[node.target] = node.out
    tied = []
    for name, by_group in sorted(holders.items()):
        stages = tuple(sorted(by_group.values()))
        kinds = {(plan.stages[s].params[name].stored, plan.stages[s].mesh) for s in stages}
        if len(stages) > 1:
            tied.append(Tied(name, specs[name], stages, len(kinds) == 1))
    return tuple(tied)


def tie_wires(tied: Sequence[Tied], plan: Plan) -> dict[tuple[str, int, int], Wire]:
    """Map name, sender and receiver (stages) to what holders that store a parameter differently send each other."""
    wires: dict[tuple[str, int, int], Wire] = {}
    for each in tied:
        if each.alike:
            continue
        name = each.name
        sides = {
            s: Side(plan.stages[s].params[name].stored, plan.stages[s].mesh, plan.stages[s].devices)
            for s in each.stages
        }
        for a in each.stages:
            for b in each.stages:
                if a != b:
                    wires[name, a, b] = Wire(len(wires), name, a, b, transfer(each.spec, sides[a], sides[b]), None)
    return wires


def groups_between(
    parts: Sequence[StageGraph], plan: Plan, wires: Sequence[Wire], tied: Sequence[Tied]
) -> list[Wanted]:
    """List all groups of a pipeline, also those of what crosses between its stages, in the order of their making."""
    holders = [ranks for each in tied for ranks in each.rank_sets(plan)]
    return groups_of(parts, plan, holders, pairs_of([*wires, *tie_wires(tied, plan).values()]))


class Ties:
    """The tied parameters of a pipeline.

    Attributes:
        stages: for each parameter that several groups hold, one stage of each group, in order.
        post: the messages between holders that store a parameter differently.
    """

    def __init__(self, tied: Sequence[Tied], plan: Plan, rank: int, groups: Groups) -> None:
        """Initialize the object.

        Args:
            groups: with those that the plan needs.
        """
        self.tied = tied
        self.stages = {each.name: each.stages for each in tied}
        self.groups = {each.name: groups.of(ranks) for each in tied for ranks in each.rank_sets(plan) if rank in ranks}
        self.wires = tie_wires(tied, plan)
        places = {device for stage in plan.stages for device in stage.devices}
        rows = {
            place: tuple(Action(s, "F", 0) for s, stage in enumerate(plan.stages) if place in stage.devices)
            for place in places
        }
        wires = tuple(self.wires.values())
        self.post = Post.of(rank, groups.device, wires, rows, 1, groups.channels(pairs_of(wires)))

    @torch.no_grad()
    def add_up(self, stages: Mapping[int, Stage], reached: Reached | None = None) -> None:
        """Sum the gradients that the ranks' stages have; copies stay equal to the bit. All ranks call it.

        Args:
            reached: what has a gradient in this step; None if all that wants one does.
        """
        first: dict[int, HeldParam] = {}
        for _, stage in sorted(stages.items()):
            for held_param in stage.held_params.values():
                keeper = first.setdefault(id(held_param.param), held_param)
                if keeper is not held_param and (grad := held_param.taken()) is not None:
                    keeper.add_stored(grad)
        if not self.stages:
            return
        gradients = {
            (each.name, s): _gradient(stages[s].held_params[each.name])
            for each in self.tied for s in each.stages if s in stages
        }  # fmt: skip
        for (name, s), gradient in gradients.items():  # in the order of names: no two ranks begin with different groups
            if name in self.groups:
                total = in_dtype(gradient, stages[s].home.gradient_dtype)
                dist.all_reduce(total, group=self.groups[name])
                gradients[name, s] = total.to(gradient.dtype)
        for (name, s), total in self._by_messages(stages, gradients).items():
            gradients[name, s] = total
        for (name, s), total in gradients.items():
            if reached is None or name in reached:
                stages[s].held_params[name].add(total)

    def _by_messages(
        self, stages: Mapping[int, Stage], gradients: Mapping[tuple[str, int], torch.Tensor]
    ) -> dict[tuple[str, int], torch.Tensor]:
        """Sum what holders store differently: each sends its value to all others, and adds in one order."""
        self.post.begin()
        for (name, a, _), wire in self.wires.items():
            if a in stages:
                self.post.send(wire, False, 0, gradients[name, a])
        sums: dict[tuple[str, int], torch.Tensor] = {}
        for (name, s), gradient in gradients.items():
            if name in self.groups:
                continue
            total: torch.Tensor | None = None
            with spmd.set_current_mesh(stages[s].device_mesh):
                for a in self.stages[name]:
                    part = gradient if a == s else self.post.take(self.wires[name, a, s], False, 0)
                    total = part if total is None else total + part
            assert total is not None
            sums[name, s] = total
        self.post.end()
        return sums


def _gradient(held_param: HeldParam) -> torch.Tensor:
    """Return the gradient of a step, which the parameter then no longer has, on the device."""
    grad = held_param.taken()
    assert held_param.local is not None
    grad = torch.zeros_like(held_param.local) if grad is None else grad.contiguous()
    return grad if held_param.carrier is None else held_param.carrier.to_device(grad)
