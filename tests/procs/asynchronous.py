"""What one rank does in the tests of asynchronous pipelines: train, and train by the definition on one device."""

from __future__ import annotations

import copy
import dataclasses
import os
import unittest.mock
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from procs.cases import OneDevice, cut, difference
from procs.pipelines import ONE, Config, cut_stages, make_plan, part_of, seed_of
from zoo import ZOO, as_float64, loss_of

import autopar
from autopar.allocations import Allocations
from autopar.capture import capture
from autopar.comparison import program_vs_eager
from autopar.errors import PlanError, RunError
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import stage_edges_of
from autopar.plans.weight_versions import versions_of
from autopar.runtime.as_module.spreading import pipelined
from autopar.runtime.pipelines.stage_in_flight import Flight
from autopar.torch_private import pytree
from cost_models.schedules import build, live_at_peak
from hardware_profiles import load_cluster

LR = 1e-2
OPTIMIZERS: Mapping[str, Any] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda params: torch.optim.AdamW(params, lr=LR),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=LR),
    "adafactor, gradients of zero": lambda params: torch.optim.Adafactor(params, lr=LR, eps=(1e-8, 1e-3)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipeline to compare: so many steps in one stream, then a drain, then some more."""

    config: Config
    optimizer: str = "adamw"
    steps: int = 20
    again: int = 2
    schedule_lr: bool = True


class Delayed:
    """The definition, on one device: a history of weights, and gradients of older ones added to the newest.

    Args:
        model: a copy; ``loss`` gives the loss of a part of a batch, of the weights that the model has.
        stage_of: the stage that reads each parameter.
    """

    def __init__(self, model: torch.nn.Module, stage_of: Mapping[str, int], n_stages: int, optimizer: str) -> None:
        self.model, self.stage_of, self.n_stages = model, stage_of, n_stages
        self.params = dict(model.named_parameters())
        self.optimizer = OPTIMIZERS[optimizer](self.params.values())
        self.begin()

    def begin(self) -> None:
        """Begin a stream with the weights of now as version 0."""
        self.history = [self._now()]

    def _now(self) -> dict[str, torch.Tensor]:
        return {name: param.detach().clone() for name, param in self.params.items()}

    def _put(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(values[name])

    def update(self, delays: Mapping[str, int], losses: Sequence[Any]) -> float:
        """Make the next version from the mean gradient of `losses`, at weights `delays` versions old, by parameter."""
        t = len(self.history) - 1
        self._put({name: self.history[max(0, t - delays[name])][name] for name in self.params})
        total = 0.0
        for loss in losses:
            value = loss() / len(losses)
            value.backward()
            total += float(value.detach())
        self._put(self.history[-1])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.history.append(self._now())
        return total

    def pipedream(self, losses: Sequence[Any]) -> float:
        """A step of PipeDream: w_s(t + 1) of w_s(t - S + 1 + s)."""
        delays = {name: self.n_stages - 1 - self.stage_of.get(name, 0) for name in self.params}
        return sum(self.update(delays, [loss]) for loss in losses) / len(losses)

    def two_versions(self, losses: Sequence[Any]) -> float:
        """A step of 2BW: w(t + 1) of w(t - 1)."""
        return self.update(dict.fromkeys(self.params, 1), losses)


def compare(cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [compare_one(case) for case in cases]


def compare_one(case: Case) -> dict[str, Any]:
    """Steps of a stream, a drain, and steps of another one: losses and the weights after each drain."""
    config = case.config
    torch.manual_seed(5)
    zoo = as_float64(ZOO[config.name](**config.zoo))
    k = config.microbatches
    captured, one = (
        dataclasses.replace(program_vs_eager.promoted(each), constants=program_vs_eager.doubled(each.constants))
        for each in (capture(zoo.model, *cut(zoo.batch, k, 0)), part_of(zoo, k))
    )
    for tensor in zoo.model.state_dict().values():
        dist.broadcast(tensor, src=0)
    reference = OneDevice(zoo.model, captured)
    pm = pipelined(zoo.model, one, make_plan(one, config))
    stage_of = {n.target: part.number for part in pm._autopar.parts for _, n in part.graph.of_kind("param")}
    delayed = Delayed(reference.model, stage_of, len(pm.plan.stages), case.optimizer)
    way = delayed.pipedream if config.schedule == "pipedream" else delayed.two_versions
    ours = OPTIMIZERS[case.optimizer](pm.parameters())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (ours, delayed.optimizer)]
    found: dict[str, Any] = {"loss": 0.0, "weight": (0.0, ""), "buffers": 0.0}
    number = 0
    for steps in (case.steps, case.again):
        losses, wanted = [], []
        for _ in range(steps):
            batch = zoo.batch if number % 2 else zoo.batch2
            torch.manual_seed(number)
            losses.append(pm.train_step(*batch[0], optimizer=ours, **batch[1]))

            def part(i: int, batch: Any = batch, number: int = number) -> Any:
                args, kwargs = cut(batch, k, i)
                reference.seed = seed_of(number, captured, i)
                return loss_of(reference(*args, **kwargs))

            wanted.append(way([lambda i=i: part(i) for i in range(k)]))  # type: ignore[misc]
            if case.schedule_lr:
                for scheduler in schedulers:
                    scheduler.step()
            number += 1
        pm.drain()
        delayed.begin()
        for loss, want in zip(losses, wanted, strict=True):
            found["loss"] = max(found["loss"], abs(float(loss) - want) / max(1.0, abs(want)))
        state = pm.full_state_dict()
        if dist.get_rank() == 0:
            wanted_state = reference.model.state_dict()
            assert set(state) == set(wanted_state), set(state) ^ set(wanted_state)
            found["weight"] = max(found["weight"], difference(state, wanted_state))
    found["moved"] = float(losses[0]) - float(losses[-1])
    return found


def peaks(name: str, schedule: str, n_microbatches: int, zoo: Mapping[str, Any]) -> tuple[int, int, int, str]:
    """The real peak in bytes of this rank's first steps, a stage on each rank, what the plan says, with what of it are
    older versions, and where the peak was."""
    torch.manual_seed(5)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    case = ZOO[name](**zoo)
    captured = part_of(case, n_microbatches)
    order = build(schedule, ranks, ranks, n_microbatches)
    config = Config(name, schedule, (ONE,) * ranks, n_microbatches, even=True)
    starts, graphs = cut_stages(captured.graph, order, config)
    cluster, live, versions = load_cluster("local-x1"), live_at_peak(order, [1.0] * ranks), versions_of(order)
    stages = [
        dataclasses.replace(
            plan_graph(part.graph, cluster, ONE, Options(
                microbatches=n_microbatches, in_flight=live[number], versions=versions[number]
            )),
            first=begin, devices=(number,),
        )
        for number, (begin, part) in enumerate(zip(starts, graphs, strict=True))
    ]  # fmt: skip
    plan = Plan(captured.graph.fingerprint, cluster.name, tuple(stages), order, stage_edges_of(graphs))
    pm = pipelined(case.model, captured, plan)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=LR, foreach=False)
    pm.compare_every = 0  # copies of parameters, now and then
    args, kwargs = case.batch
    count = Allocations()
    for x in pytree.tree_leaves(case.batch):
        if isinstance(x, torch.Tensor):
            count.ignore(x)  # the caller's
    for param in pm.parameters():
        count.note(param)
    with count:
        for _ in range(4):
            pm.train_step(*args, optimizer=optimizer, **kwargs)
        pm.drain()
    price = stages[rank].price
    return count.peak_bytes, price.memory_bytes, price.version_bytes, count.at


def said_by(call: Any) -> str:
    try:
        call()
    except (PlanError, RunError) as error:
        return str(error)
    return ""


def from_a_script() -> dict[str, str]:
    """What a script meets: what is refused while microbatches are in flight, and works after drain()."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh())))
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    pm = autopar.parallelize(
        model, example_inputs=(x,), loss_fn=torch.nn.functional.mse_loss, targets=(y,), stages=2, microbatches=4,
        schedule="pipedream-2bw",
    )  # fmt: skip
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.2, momentum=0.9)
    said = {
        "no optimizer": said_by(lambda: pm.train_step(x, y)),
        "scaler": said_by(lambda: pm.train_step(x, y, optimizer=optimizer, scaler=torch.amp.GradScaler("cpu"))),
        "clip": said_by(lambda: pm.clip_grad_norm_(1.0)),
    }
    pm.drain()  # nothing is there
    before = float(pm.evaluate(x, y))
    losses = [pm.train_step(x, y, optimizer=optimizer) for _ in range(8)]
    other = torch.optim.SGD(pm.parameters(), lr=0.2)
    said |= {
        "evaluate": said_by(lambda: pm.evaluate(x, y)),
        "state_dict": said_by(pm.state_dict),
        "full_state_dict": said_by(pm.full_state_dict),
        "load": said_by(lambda: pm.load_full_state_dict({})),
        "copy": said_by(lambda: copy.deepcopy(pm)),
        "save": said_by(lambda: autopar.save(optimizer.state_dict() if dist.get_rank() else {}, os.devnull)),
        "another optimizer": said_by(lambda: pm.train_step(x, y, optimizer=other)),
        "fewer rows": said_by(lambda: pm.train_step(x[:12], y[:12], optimizer=optimizer)),
    }
    losses.append(pm.train_step(x, y, optimizer=optimizer))  # none of these did any harm
    with torch.no_grad():
        next(iter(pm.parameters())).mul_(1.0)
    said["written"] = said_by(lambda: pm.train_step(x, y, optimizer=optimizer))
    pm.drain()
    state = pm.full_state_dict()
    after = float(pm.evaluate(x, y))
    losses += [pm.train_step(x, y, optimizer=optimizer) for _ in range(2)]
    pm.drain()
    pm.load_full_state_dict(state)
    assert float(pm.evaluate(x, y)) == after < before, (before, after)
    assert [tuple(loss.shape) for loss in losses] == [()] * len(losses) and losses[0].dtype == torch.float32
    assert abs(float(losses[0]) - before) < 1e-6 and float(losses[0]) == float(losses[1]) > float(losses[-1])
    said["note"] = pm.plan.notes[0]
    return said


def half_by_half(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Two optimizers with parameters of all stages each: matrices, and the rest."""
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.05), torch.optim.SGD(others, lr=0.2, momentum=0.9)]


def several_optimizers(schedule: str) -> tuple[float, str, str]:
    """Train by two optimizers in a list: the difference to one device, and what is said of others in a list."""
    model = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh())))
    torch.manual_seed(0)
    model.apply(lambda part: part.reset_parameters() if isinstance(part, torch.nn.Linear) else None).double()
    x, y = (torch.randn(16, 8, dtype=torch.float64) for _ in range(2))
    loss_fn = torch.nn.functional.mse_loss
    delayed = Delayed(copy.deepcopy(model), {}, 2, "adamw")
    pm = autopar.parallelize(
        model, example_inputs=(x,), loss_fn=loss_fn, targets=(y,), stages=2, microbatches=2, schedule=schedule
    )
    ours, wanted = half_by_half(pm), half_by_half(delayed.model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (*ours, *wanted)]
    for step in range(6):
        pm.train_step(x, y, optimizer=ours)
        late = schedule == "pipedream-2bw" and step
        now = delayed.history[-1]
        delayed._put(delayed.history[-2] if late else now)
        loss_fn(delayed.model(x), y).backward()
        delayed._put(now)
        for each in wanted:
            each.step()
            each.zero_grad()
        delayed.history.append(delayed._now())
        for scheduler in schedulers:
            scheduler.step()
    said = said_by(lambda: pm.train_step(x, y, optimizer=ours[::-1])) if schedule == "pipedream-2bw" else ""
    pm.drain()
    state = pm.full_state_dict()
    found = difference(state, delayed.model.state_dict())[0] if dist.get_rank() == 0 else 0.0
    return found, said, said_by(lambda: pm.train_step(x, y, optimizer=[ours[0], 0.1]))


def breaks_off_alike(schedule: str, then: str) -> tuple[str, list[float], list[float]]:
    """All ranks break off a step in the middle; losses of a new model behind it, and of the same one once more."""
    torch.manual_seed(0)
    x, y = torch.randn(16, 8), torch.randn(16, 8)

    def losses_of(name: str, breaks: bool = False) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(8, 8), torch.nn.Tanh())))
        pm = autopar.parallelize(
            model, example_inputs=(x,), loss_fn=torch.nn.functional.mse_loss, targets=(y,), stages=2, microbatches=4,
            schedule=name,
        )  # fmt: skip
        optimizer = torch.optim.SGD(pm.parameters(), lr=0.2)
        forward, calls = Flight.forward, 0

        def breaking(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise ZeroDivisionError("on all ranks")
            return forward(*args, **kwargs)

        with unittest.mock.patch.object(Flight, "forward", breaking if breaks else forward):
            losses = [pm.train_step(x, y, optimizer=optimizer) for _ in range(3)]
        pm.drain()
        return [float(loss) for loss in losses]

    said = ""
    try:
        losses_of(schedule, breaks=True)
    except ZeroDivisionError as error:
        said = str(error)
    return said, losses_of(then), losses_of(then)


def fails_in_flight() -> str:
    """The second rank fails in the middle of the stream: what the first one hears, and what its next call says."""
    torch.manual_seed(0)
    case = ZOO["mlp"]()
    captured = part_of(case, 4)
    pm = pipelined(case.model, captured, make_plan(captured, Config("mlp", "pipedream", (ONE, ONE), 4)))
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    pm.train_step(*case.batch[0], optimizer=optimizer, **case.batch[1])
    if dist.get_rank() == 1:
        optimizer.register_step_pre_hook(lambda *_: 1 / 0)

    def go_on() -> None:
        for _ in range(3):
            float(pm.train_step(*case.batch[0], optimizer=optimizer, **case.batch[1]))

    try:
        go_on()
    except (RunError, ZeroDivisionError) as error:
        first = str(error)
    return f"{first}\n{said_by(pm.drain)}\n{said_by(pm.full_state_dict)}"
