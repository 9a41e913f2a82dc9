"""Parameters that several stages of a pipeline use: their gradients are summed, so the copies stay in step.

Stages of one group of ranks share the parameter itself; groups have a copy each, and send each other what they have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import spmd_types as spmd
import torch

from autopar.graph import Spec
from autopar.plan import Plan
from autopar.runtime.reached import Reached
from autopar.runtime.stage import Stage
from autopar.runtime.state import HeldParam
from autopar.runtime.wires import Post, Wire
from autopar.staging import StageGraph
from autopar.transfer import Side, transfer
from cost_models.pipeline.actions import Action


class Ties:
    """The tied parameters of a pipeline.

    Attributes:
        stages: for each parameter that several groups hold, one stage of each group, in order.
        post: the messages between them.
    """

    def __init__(self, parts: Sequence[StageGraph], plan: Plan, rank: int, device: torch.device) -> None:
        holders: dict[str, dict[int, int]] = {}
        specs: dict[str, Spec] = {}
        for part in parts:
            for _, node in part.graph.of_kind("param"):
                if node.needs_grad:
                    group = plan.schedule.rank_of_stage[part.number]
                    holders.setdefault(node.target, {}).setdefault(group, part.number)
                    specs[node.target] = node.out
        self.stages = {
            name: tuple(sorted(by_group.values())) for name, by_group in sorted(holders.items()) if len(by_group) > 1
        }
        self.wires: dict[tuple[str, int, int], Wire] = {}
        for name, stages in self.stages.items():
            sides = {
                s: Side(plan.stages[s].params[name].stored, plan.stages[s].mesh, plan.stages[s].devices) for s in stages
            }
            for a in stages:
                for b in stages:
                    if a != b:
                        there = transfer(specs[name], sides[a], sides[b])
                        self.wires[name, a, b] = Wire(len(self.wires), name, a, b, there, None)
        places = {device for stage in plan.stages for device in stage.devices}
        rows = {
            place: tuple(Action(s, "F", 0) for s, stage in enumerate(plan.stages) if place in stage.devices)
            for place in places
        }
        self.post = Post.of(rank, device, tuple(self.wires.values()), rows, 1)

    @torch.no_grad()
    def add_up(self, stages: Mapping[int, Stage], reached: Reached | None = None) -> None:
        """Sum the gradients that this rank's stages have, in the same order everywhere. All ranks call it.

        Args:
            reached: what has a gradient in this step; None where all that wants one does.
        """
        first: dict[int, HeldParam] = {}
        for _, stage in sorted(stages.items()):
            for held in stage.held_params.values():
                keeper = first.setdefault(id(held.param), held)
                if keeper is not held and (grad := held.taken()) is not None:
                    keeper.add(grad)
        if not self.stages:
            return
        self.post.begin()
        mine: dict[tuple[str, int], torch.Tensor] = {}
        for s in sorted(stages):
            for (name, a, _), wire in self.wires.items():
                if a == s:
                    if (name, s) not in mine:
                        mine[name, s] = _gradient(stages[s].held_params[name])
                    self.post.send(wire, False, 0, mine[name, s])
        for (name, s), gradient in mine.items():
            total: torch.Tensor | None = None
            with spmd.set_current_mesh(stages[s].device_mesh):
                for a in self.stages[name]:
                    part = gradient if a == s else self.post.take(self.wires[name, a, s], False, 0)
                    total = part if total is None else total + part
            assert total is not None
            if reached is None or name in reached:
                stages[s].held_params[name].add(total)
        self.post.end()


def _gradient(held: HeldParam) -> torch.Tensor:
    grad = held.taken()
    assert held.local is not None
    return torch.zeros_like(held.local) if grad is None else grad


__all__ = ["Ties"]
