"""What one rank does in the pipeline tests: train in stages and on one device side by side, return the differences."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from procs.cases import LR, OneDevice, cut, difference, whole
from zoo import ZOO, as_float64, loss_of

import autopar
from autopar.allocations import Allocations
from autopar.capture import Captured, capture
from autopar.capture.in_parts import captured_in_parts
from autopar.comparison import program_vs_eager
from autopar.errors import PlanError, RunError
from autopar.planner.inter_op.exact.shared_buffers import with_agreed_buffers
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.memory.recompute import patterns_in, segments_of
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.planner.intra_op.random_plans import random_plan
from autopar.plans.plan import Plan
from autopar.plans.stage_graphs import StageGraph, hot_ops, stage_edges_of
from autopar.plans.stage_graphs import cut as stages_of
from autopar.rules.families.sharded_random import seed_at
from autopar.rules.registry import rules_of
from autopar.runtime.as_module.spreading import pipelined
from autopar.runtime.batches.runs import rows_of_microbatch
from autopar.runtime.stages.seeds import seed_after
from autopar.runtime.stages.stage import Stage
from autopar.torch_private import pytree
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from cost_models.schedules import SCHEDULES as RECORDS
from cost_models.schedules import build, live_at_peak, parse, search, times
from cost_models.schedules.actions import Schedule
from hardware_profiles import load_cluster

ONE = Mesh.of(data=1)
SCHEDULES = {name: kind.fewest for name, kind in RECORDS.items()} | {"interleaved-1f1b:3": 3, "zb-h1:2": 2}
"""Schedules, and the stages that each group holds."""
"""The synchronous schedules, and how many stages a group holds."""
MODELS = ("gpt2", "llama", "t5", "unet", "resnet", "vit")
TWO = (ONE, ONE)
THREE = Mesh.of(data=3)


@dataclasses.dataclass(frozen=True)
class Config:
    """A model cut at random places into the stages of a schedule; ``meshes`` are those of the groups of ranks."""

    name: str
    schedule: str
    meshes: tuple[Mesh, ...]
    microbatches: int
    stages: int = 0
    seed: int | None = None  # of the stages' plans; None for optimal ones
    cuts: int = 0  # seed of the places
    even: bool = False  # stages of as many operators each, instead
    zoo: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lifetime: str = ""
    clip: float = 0.0
    evaluate: bool = False
    recompute: tuple[str, ...] = ()
    rows: str = ""  # of the schedule, instead of a name
    gather_again: bool = False  # about half of the copies that could be
    compiled: bool = False  # as generated Python
    make_again: bool = False  # stretches of operators run again, and about half of what they make is given up


def microbatches_from(schedule: str, groups: int, wanted: int) -> int:
    """The smallest number from ``wanted`` on that the schedule can do."""
    for k in range(wanted, 100):
        try:
            build(schedule, groups * SCHEDULES[schedule], groups, k)
        except ValueError:
            continue
        return k
    raise AssertionError(f"{schedule} on {groups} groups")


def by_three(name: str, microbatches: int) -> dict[str, Any]:
    """Options of a model that a mesh of three can cut."""
    return {"rows": 3 * microbatches, **({"hidden": 48, "heads": 6} if name == "gpt2" else {})}


def size(mesh: Mesh) -> int:
    n = 1
    for _, k in mesh:
        n *= k
    return n


def make_plan(captured: Captured, config: Config) -> Plan:
    graph = captured.graph
    n_stages = config.stages or len(config.meshes)
    if config.schedule == "searched":
        schedule = search(times(n_stages, 1.0, 1.2, 0.5, transfer_seconds=0.1), config.microbatches).schedule
    elif config.rows:
        schedule = parse(config.rows)
    else:
        schedule = build(config.schedule, n_stages, len(config.meshes), config.microbatches)
    starts, graphs = cut_stages(graph, schedule, config)
    cluster = load_cluster(f"local-x{max(map(size, config.meshes))}")
    first = 0
    devices = []
    for mesh in config.meshes:
        devices.append(tuple(range(first, first + size(mesh))))
        first += size(mesh)
    stored: dict[tuple[int, str], Any] = {}
    choices = []
    for number, (begin, stage) in enumerate(zip(starts, graphs, strict=True)):
        group = schedule.rank_of_stage[number]
        mesh = config.meshes[group]
        again = patterns_in(stage.graph, config.recompute)
        rules, priced = rules_of(stage.graph), pricer(cluster, mesh)
        segments = segments_of(stage.graph, rules, again)
        for attempt in range(100):
            if config.seed is None:
                plan = plan_graph(stage.graph, cluster, mesh, Options(recompute=again))
            else:
                seed = config.seed + number + 1000 * attempt
                plan = random_plan(
                    stage.graph, rules, priced, seed, recompute=segments, gather_again=config.gather_again,
                    make_again=config.make_again,
                )  # fmt: skip
            places = {name: choice.stored for name, choice in plan.params.items()}
            if all(stored.get((group, name), state) == state for name, state in places.items()):
                break  # a parameter of two stages of one group is stored once
        else:
            raise AssertionError(f"stage {number}: no plan stores its parameters like the other stage of group {group}")
        stored.update({(group, name): state for name, state in places.items()})
        params = {
            name: dataclasses.replace(choice, lifetime=config.lifetime or choice.lifetime)
            for name, choice in plan.params.items()
        }
        choices.append(dataclasses.replace(plan, first=begin, devices=devices[group], params=params))
    agreed = with_agreed_buffers(graphs, choices, schedule, cluster)
    return Plan(graph.fingerprint, cluster.name, tuple(agreed), schedule, stage_edges_of(graphs))


def cut_stages(graph: Graph, schedule: Schedule, config: Config) -> tuple[list[str], Sequence[StageGraph]]:
    """First operators of all stages, and the stages: of even numbers of operators, or cut at random places."""
    ops = [graph.nodes[i].name for i in hot_ops(graph)]
    n = schedule.n_stages
    rng = random.Random(config.cuts)
    for attempt in range(1000):
        if config.even:
            places = [p * len(ops) // n + attempt for p in range(1, n)]
        else:
            places = sorted(rng.sample(range(1, len(ops)), n - 1))
        try:
            graphs = stages_of(graph, [ops[p] for p in places])
        except PlanError as error:
            if "is changed in stage" not in str(error):  # a cut through a batch norm
                raise
            continue
        trained = {schedule.rank_of_stage[g.number] for g in graphs if any(n.kind == "param" for n in g.graph.nodes)}
        if len(trained) == schedule.n_ranks:  # torch.optim wants parameters on every rank
            return [ops[p] for p in (0, *places)], graphs
    raise AssertionError(f"no cut found for {config}")


def part_of(case: Any, microbatches: int) -> Captured:
    """One of so many microbatches, captured as parallelize does it."""
    part: Captured = captured_in_parts(
        lambda batch: capture(case.model, batch[0], batch[1]), (*case.batch, ()), microbatches, case.model
    )  # fmt: skip
    return part


def compare(configs: Sequence[Config]) -> list[dict[str, Any]]:
    return [compare_one(config) for config in configs]


def compare_one(config: Config) -> dict[str, Any]:
    """Two AdamW steps on two batches: losses, gradients of both steps, weights and buffers after them."""
    torch.manual_seed(5 + dist.get_rank())  # rank 0's weights count
    case = as_float64(ZOO[config.name](**config.zoo))
    k = config.microbatches
    captured, one = (
        dataclasses.replace(program_vs_eager.promoted(each), constants=program_vs_eager.doubled(each.constants))
        for each in (capture(case.model, *cut(case.batch, k, 0)), part_of(case, k))
    )
    for tensor in case.model.state_dict().values():
        dist.broadcast(tensor, src=0)
    reference = OneDevice(case.model, captured)
    pm = pipelined(case.model, one, make_plan(one, config))
    if config.compiled:
        pm.compile(backend="eager")
    ours = torch.optim.AdamW(pm.parameters(), lr=LR)
    theirs = torch.optim.AdamW(reference.model.parameters(), lr=LR)
    found: dict[str, Any] = {"loss": 0.0, "gradient": (0.0, ""), "clip": 0.0}
    for step, batch in enumerate((case.batch, case.batch2)):
        torch.manual_seed(step)
        loss = pm.train_step(*batch[0], **batch[1])
        want = torch.zeros(())
        for i in range(k):
            args, kwargs = cut(batch, k, i)
            reference.seed = seed_of(step, captured, i)
            part = loss_of(reference(*args, **kwargs)) * shares(config, batch)[i]
            part.backward()
            want = want + part.detach()
        found["loss"] = max(found["loss"], abs(loss.item() - want.item()) / max(1.0, abs(want.item())))
        if config.evaluate:  # the same weights, so the same loss
            torch.manual_seed(step)
            again = pm.evaluate(*batch[0], **batch[1])
            found["loss"] = max(found["loss"], abs(loss.item() - again.item()) / max(1.0, abs(want.item())))
        wanted = {n: p.grad for n, p in reference.model.named_parameters(remove_duplicate=False) if p.grad is not None}
        grads = {n: whole(p.grad) for n, p in pm.named_parameters(remove_duplicate=False) if p.grad is not None}
        own = {n for n, p in pm.named_parameters(remove_duplicate=False) if p.requires_grad}
        assert set(grads) == set(wanted) & own, (set(grads) ^ (set(wanted) & own), dist.get_rank())
        if grads:
            found["gradient"] = max(found["gradient"], difference(grads, {n: wanted[n] for n in grads}))
        if config.clip:
            mine = float(pm.clip_grad_norm_(config.clip))
            other = float(torch.nn.utils.clip_grad_norm_(reference.model.parameters(), config.clip))
            found["clip"] = max(found["clip"], abs(mine - other) / other)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = pm.full_state_dict()
    if dist.get_rank() == 0:
        wanted_state = reference.model.state_dict()
        assert set(state) == set(wanted_state), set(state) ^ set(wanted_state)
        found["weight"] = difference(state, wanted_state)
    return found


def seed_of(step: int, captured: Captured, i: int) -> torch.Tensor:
    """Of microbatch ``i`` of the first step after ``torch.manual_seed(step)``."""
    rows = rows_of_microbatch(captured)
    return seed_at(torch.tensor(seed_after(step)), i * rows, rows, rows)


def shares(config: Config, batch: Any) -> list[float]:
    """By what part each microbatch counts: by its labels that are not ignored, where there are labels to ignore."""
    labels = batch[1].get("labels")
    if labels is None or not (labels == -100).any():
        return [1 / config.microbatches] * config.microbatches
    read = labels[:, 1:] if config.name in ("gpt2", "llama") else labels  # of the next token
    counts = [int((part != -100).sum()) for part in read.chunk(config.microbatches)]
    return [count / sum(counts) for count in counts]


def evaluates(configs: Sequence[Config]) -> list[dict[str, Any]]:
    return [evaluates_one(config) for config in configs]


def evaluates_one(config: Config) -> dict[str, Any]:
    """A step of training, eval mode, training again: losses, outputs and weights, against one device in each mode."""
    torch.manual_seed(5)
    case = as_float64(ZOO[config.name](**config.zoo))
    k, double = config.microbatches, program_vs_eager.promoted
    captured, one = (
        dataclasses.replace(double(each), constants=program_vs_eager.doubled(each.constants))
        for each in (capture(case.model, *cut(case.batch, k, 0)), part_of(case, k))
    )
    reference = OneDevice(case.model, captured)
    pm = pipelined(case.model, one, make_plan(one, config))
    ours = torch.optim.SGD(pm.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.model.parameters(), lr=0.1)
    found: dict[str, Any] = {"loss": 0.0, "output": 0.0}
    for step in range(2):
        torch.manual_seed(step)
        pm.train_step(*case.batch[0], optimizer=ours, **case.batch[1])
        for i in range(k):
            args, kwargs = cut(case.batch, k, i)
            reference.seed = seed_of(step, captured, i)
            (loss_of(reference(*args, **kwargs)) * shares(config, case.batch)[i]).backward()
        theirs.step()
        theirs.zero_grad()
        model = reference.model.eval()
        other = capture(model, *cut(case.batch2, k, 0))
        other = dataclasses.replace(double(other), constants=program_vs_eager.doubled(other.constants))
        alone = OneDevice(model, other)
        with torch.no_grad():
            wanted = [alone(*args, **kwargs) for args, kwargs in (cut(case.batch2, k, i) for i in range(k))]
        reference.model.train()
        want = sum(float(loss_of(w)) * share for w, share in zip(wanted, shares(config, case.batch2), strict=True))
        pm.eval()
        losses = [pm.evaluate(*case.batch2[0], **case.batch2[1])]
        names = list(inspect.signature(case.model.forward).parameters)
        if "args" not in names:  # the same call by keywords
            losses.append(pm.evaluate(**dict(zip(names, case.batch2[0], strict=False)), **case.batch2[1]))
        whole_output = pm(*case.batch2[0], **case.batch2[1])
        losses.append(loss_of(whole_output))
        found["loss"] = max(found["loss"], *(abs(float(x) - want) / abs(want) for x in losses))
        leaves = zip(*(torch.utils._pytree.tree_leaves(x) for x in (whole_output, *wanted)), strict=True)
        for mine, *parts in leaves:
            if isinstance(mine, torch.Tensor) and mine.ndim:
                assert not mine.requires_grad
                found["output"] = max(found["output"], float((mine - torch.cat(parts)).abs().max()))
        with pytest.raises(RunError, match="call train"):
            pm.train_step(*case.batch[0], **case.batch[1])
        pm.train()
        with pytest.raises(RunError, match="train_step"):
            pm(*case.batch[0], **case.batch[1])
        with pytest.raises(RunError, match="microbatches is 3, and a pipeline's schedule says how many a step has"):
            pm.train_step(*case.batch[0], microbatches=3, **case.batch[1])
    state = pm.full_state_dict()
    found["weight"] = difference(state, reference.model.state_dict()) if state else (0.0, "")
    return found


class _Odd(torch.nn.Module):
    """Eval mode leaves out more than dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) * 2 if self.training else self.a(x)).square().mean()


def odd_eval() -> tuple[float, str]:
    """How far stages are from a model whose code asks for the mode, in both modes; what they say to other modes of a
    part."""
    torch.manual_seed(0)
    model, x = _Odd(), torch.randn(4, 4)
    pm = autopar.parallelize(copy.deepcopy(model), 2, (x,), stages=2, schedule="1f1b", microbatches=2)
    apart = []
    for mode in (False, True, False):
        pm.train(mode), model.train(mode)
        apart.append(float(pm.evaluate(x) - model(x)))
    try:
        next(pm.children()).train()
    except RunError as error:
        return max(map(abs, apart)), str(error)
    raise AssertionError("train() of a part passed")


def fails_in_the_middle() -> None:
    """Rank 1 raises in its second forward, while rank 0 waits for its gradients."""
    config = Config("mlp", "1f1b", (ONE, ONE), 4)
    case = ZOO["mlp"]()
    captured = capture(case.model, *cut(case.batch, 4, 0))
    pm = pipelined(case.model, captured, make_plan(captured, config))
    if dist.get_rank() == 1:
        run, calls = Stage.run, []

        def trouble(stage: Stage, *values: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise ValueError("trouble in stage 1")
            return run(stage, *values, **options)

        Stage.run = trouble  # type: ignore[method-assign]  # until the process ends
    pm.train_step(*case.batch[0], **case.batch[1])


def searched_from_a_script(recompute: tuple[str, ...]) -> tuple[list[float], str, str]:
    """What a script does that asks for the best order: losses, the schedule's name, and what asking for 2BW says."""
    torch.manual_seed(0)
    case = ZOO["gpt2"]()
    batch = case.batch[1]
    pm = autopar.parallelize(
        case.model, 2, batch, stages=2, schedule="searched", microbatches=4, recompute=recompute
    )  # fmt: skip
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    losses = [float(pm.train_step(*case.batch[0], optimizer=optimizer, **case.batch[1])) for _ in range(3)]
    try:
        autopar.parallelize(ZOO["gpt2"]().model, 2, batch, stages=2, schedule="pipedream-2bw", microbatches=4)
    except PlanError as error:
        return losses, pm.plan.schedule.name, str(error)
    raise AssertionError("2BW was planned for a tied embedding")


def chosen_microbatches() -> tuple[list[float], list[float], int]:
    """Losses of a pipeline whose number of microbatches was chosen, those of one device, and the number."""
    torch.manual_seed(0)
    case = ZOO["gpt2"]()
    alone = copy.deepcopy(case.model)
    args, kwargs = case.batch
    pm = autopar.parallelize(case.model, 2, kwargs, stages=2, microbatches=[2, 4])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pm, alone)]
    mine, reference = [], []
    for _ in range(3):
        mine.append(float(pm.train_step(*args, optimizer=optimizers[0], **kwargs)))
        loss = alone(*args, **kwargs)["loss"]
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        reference.append(float(loss))
    return mine, reference, pm.plan.microbatches


def refused_rows() -> list[str]:
    """What rows say that cannot be run."""
    captured = capture(ZOO["resnet"]().model, *cut(ZOO["resnet"]().batch, 2, 0))
    plan = make_plan(captured, Config("resnet", "1f1b", TWO, 2))
    found = []
    for rows in (
        "rank 0 holds 0: 0F0 0B0 0F1 0B1\nrank 1 holds 1: 1F0 1F1 1B0 1B1",
        "rank 0 holds 0: 0F1 0F0 0B0 0B1\nrank 1 holds 1: 1F0 1F1 1B0 1B1",
    ):
        schedule = parse("schedule mine stages 2 microbatches 2\n" + rows)
        try:
            pipelined(ZOO["resnet"]().model, captured, dataclasses.replace(plan, schedule=schedule))
        except PlanError as error:
            found.append(str(error))
    return found


def planned_on_three() -> list[float]:
    """What a script does on three ranks: two stages, one of them on two ranks."""
    torch.manual_seed(0)
    case = ZOO["gpt2"]()
    pm = autopar.parallelize(case.model, 3, case.batch[1], stages=2, schedule="1f1b", microbatches=4)
    assert sorted(len(s.devices) for s in pm.plan.stages) == [1, 2]
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    return [float(pm.train_step(*case.batch[0], optimizer=optimizer, **case.batch[1])) for _ in range(3)]


def peaks(
    name: str, schedule: str, n_microbatches: int, zoo: Mapping[str, Any], compiled: bool = False
) -> tuple[int, int, str]:  # fmt: skip
    """The real peak in bytes of this rank's second step, a stage on each rank, what the plan says, and where the peak
    was. Every stage is planned with as many microbatches in flight as the schedule has there."""
    torch.manual_seed(5)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    case = ZOO[name](**zoo)
    captured = part_of(case, n_microbatches)
    order = build(schedule, ranks, ranks, n_microbatches)
    config = Config(name, schedule, (ONE,) * ranks, n_microbatches, even=True)
    starts, graphs = cut_stages(captured.graph, order, config)
    cluster = load_cluster("local-x1")
    live = live_at_peak(order, [1.0] * ranks)
    stages = [
        dataclasses.replace(
            plan_graph(part.graph, cluster, ONE, Options(microbatches=n_microbatches, in_flight=live[number])),
            first=begin, devices=(number,),
        )
        for number, (begin, part) in enumerate(zip(starts, graphs, strict=True))
    ]  # fmt: skip
    plan = Plan(captured.graph.fingerprint, cluster.name, tuple(stages), order, stage_edges_of(graphs))
    pm = pipelined(case.model, captured, plan)
    if compiled:
        pm.compile(backend="eager")
    optimizer = torch.optim.AdamW(pm.parameters(), lr=LR, foreach=False)
    args, kwargs = case.batch
    pm.train_step(*args, optimizer=optimizer, **kwargs)
    count = Allocations()
    for x in pytree.tree_leaves(case.batch):
        if isinstance(x, torch.Tensor):
            count.ignore(x)  # the caller's
    for x in (*pm.parameters(), *(x for state in optimizer.state.values() for x in state.values())):
        count.note(x)
    with count:
        pm.train_step(*args, optimizer=optimizer, **kwargs)
    return count.peak_bytes, stages[rank].price.memory_bytes, count.at
