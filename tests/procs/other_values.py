"""What one rank does in the tests of values that change after ``parallelize(..., on_change="recapture")``."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from procs.habits import batches, difference, said, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.stages.step_program import StepProgram
from autopar.runtime.variants import program_cache


class Switched(nn.Module):
    """Values that change numbers, operators, which parameters are read, what is returned, and which buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.Linear(12, 6)
        self.side, self.drop = nn.Linear(12, 6), nn.Dropout(0.0)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("mask", torch.arange(12.0) % 3)
        self.scale, self.power, self.gate, self.auxiliary, self.masked = 1.0, 1, False, False, True
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        h = self.norm(self.up(x))
        h = h * self.mask if self.masked else h
        out = self.down(h.tanh() if self.gate else h.relu()) ** self.power
        out = self.drop(out + self.side(h)) if self.auxiliary else out
        if self.gate and self.training:
            with torch.no_grad():
                self.seen.add_(out.mean(0))
        loss = (out * self.scale - x).square().mean()
        return (loss + self.side.weight.square().sum(), out) if self.auxiliary else loss


SCHEDULE: list[dict[str, Any]] = [
    {}, {"scale": 2.0}, {"gate": True}, {"gate": False}, {"gate": True}, {"gate": False, "auxiliary": True},
    {"auxiliary": False, "masked": False}, {"masked": True}, {"power": 2}, {"power": 1, "auxiliary": True}, {},
    {"scale": 0.5},
]  # fmt: skip
"""What is set before each step."""
CUTS: dict[str, dict[str, Any]] = {
    "batch": {"constraints": {"*up": {"data": "b"}}},
    "zero": {"constraints": {"*up": {"data": "b"}}, "params": {"*.weight": "S0 use", "*.bias": "S0 step"}},
    "tensor": {"constraints": {"*up": {"data": "n"}, "*down": {"data": "k"}}},
}


def spread(model: nn.Module, x: torch.Tensor, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    return autopar.parallelize(model, mesh, x, on_change="recapture", **options)


def stepped(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    loss = out[0] if isinstance(out, tuple) else out
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def scheduled(cut: str, compiled: bool = False) -> tuple[float, list[int], int]:
    """Steps of AdamW while values change, beside eager mode: the worst difference, captures by step, kept programs."""
    model, xs = Switched(), batches(len(SCHEDULE))
    alone = copy.deepcopy(model)
    pm = spread(model, xs[0], **CUTS[cut])
    if compiled:
        pm.compile(backend="eager")
    parameters = list(pm.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (pm, alone)]
    worst, counts = 0.0, []
    again = program_cache.Programs._captured_again
    with mock.patch.object(program_cache.Programs, "_captured_again", autospec=True, side_effect=again) as count:
        for values, x in zip(SCHEDULE, xs, strict=True):
            for name, value in values.items():
                setattr(pm, name, value)
                setattr(alone, name, value)
            losses = [stepped(m, optimizer, x) for m, optimizer in zip((pm, alone), optimizers, strict=True)]
            worst = max(worst, difference(*losses))
            counts.append(count.call_count)
    assert all(a is b for a, b in zip(parameters, pm.parameters(), strict=True))
    if pm._autopar.stage.compile_args is not None:
        stages = [pm._autopar.stage, *(fields["stages"][0] for fields in pm._autopar.programs.kept)]
        assert all(isinstance(stage.run_program, StepProgram) and stage.run_program.forms for stage in stages)
    have, wanted = autopar.full_state_dict(pm, all_ranks=True), alone.state_dict()
    for name, value in wanted.items():
        worst = max(worst, difference(have[name], value)) if value.abs().max() else worst
    return worst, counts, len(pm._autopar.programs.kept)


def evaluated() -> float:
    """A flag that changes while the module is in eval mode, and back in training."""
    model, (x, y, *_) = Switched(), batches(2)
    alone = copy.deepcopy(model)
    pm = spread(model, x, **CUTS["batch"])
    worst = 0.0
    for mode, gate in ((True, False), (False, False), (False, True), (True, True), (True, False), (False, True)):
        for m in (pm, alone):
            m.train(mode)
            m.gate = gate
        worst = max(worst, difference(pm(y), alone(y).detach()))
    return worst


def pinned() -> float:
    """Pins of operators, parameters and recomputation that concern only what a later call leaves out."""
    model, (x, y, *_) = Switched(), batches(2)
    model.auxiliary = True
    alone = copy.deepcopy(model)
    pins = {"constraints": {"*side": {"data": "b"}}, "params": {"side.*": "S0 step"}, "recompute": ["side"]}
    pm = spread(model, x, **pins)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (pm, alone)]
    worst = 0.0
    for auxiliary, given in ((True, x), (False, y), (True, y)):
        pm.auxiliary = alone.auxiliary = auxiliary
        losses = [stepped(m, optimizer, given) for m, optimizer in zip((pm, alone), optimizers, strict=True)]
        worst = max(worst, difference(*losses))
    return worst


def in_stages() -> tuple[float, int]:
    """A pipeline whose numbers change, and whose operators do: the worst difference, and programs that are kept."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down, self.scale, self.gate = nn.Linear(6, 12), nn.Linear(12, 6), 1.0, False
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x) * self.scale
            return (self.down(h.tanh() if self.gate else h.relu()) - x * self.scale).square().mean()

    model, xs = Scaled(), batches(6)
    alone = copy.deepcopy(model)
    options: dict[str, Any] = {"stages": 2, "schedule": "1f1b", "microbatches": 2, "cuts": ["down"]}
    pm = autopar.parallelize(model, 2, xs[0], on_change="recapture", **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (pm, alone)]
    worst = 0.0

    def both(x: torch.Tensor) -> float:
        mine = pm.train_step(x, optimizer=optimizers[0])
        return difference(mine, stepped(alone, optimizers[1], x))

    for scale, x in zip((1.0, 2.0, 1.0, 2.0), xs, strict=False):
        pm.scale = alone.scale = scale
        worst = max(worst, both(x))
    pm.eval()
    pm.scale = alone.scale = 3.0
    worst = max(worst, difference(pm(xs[0]), alone(xs[0])))
    pm.train()
    for gate, x in ((True, xs[4]), (False, xs[5])):
        pm.gate = alone.gate = gate
        worst = max(worst, both(x))
    worst = max(worst, max(difference(whole(p), alone.get_parameter(n)) for n, p in pm.named_parameters()))
    return worst, len(pm._autopar.programs.kept)


def apart(how: str) -> str:
    """Ranks that set different values: what each is told."""
    model, x = Switched(), batches(1)[0]
    pm = spread(model, x, **CUTS["batch"])
    pm(x)
    if how == "different":
        pm.scale = 2.0 + dist.get_rank()
    elif dist.get_rank() == 0:
        pm.scale = 2.0
    if how == "different":
        return said(lambda: pm(x))
    pm(x).backward()
    return "no error"


def without_a_plan() -> str:
    """A pin that the other graph cannot bear: what is said, and that the module goes on with the old value."""
    model, x = Switched(), batches(1)[0]
    pm = spread(model, x, **CUTS["batch"], memory_limit="100kB")
    pm(x)
    no_room = autopar.errors.InfeasibleError("no room")
    with mock.patch("autopar.parallelizing.replanning.on_only_mesh", side_effect=no_room):
        pm.gate = True
        text = said(lambda: pm(x))
    pm.gate = False
    pm(x).backward()
    return text
