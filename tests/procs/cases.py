"""What one rank does in the process tests; functions here are started by ``run_local`` in fresh interpreters.

``compare`` trains a model of the zoo with autopar and eagerly, side by side on every rank, and returns the worst
differences. One call checks many configurations, because starting processes is what takes time.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fnmatch
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from zoo import ZOO, Case, as_float64, loss_of

import autopar
from autopar.capture import Captured, capture
from autopar.comparison import program_vs_eager
from autopar.lower.emit import lower
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.memory.recompute import segments_of
from autopar.planner.intra_op.mesh_plan import Options, plan_graph
from autopar.planner.intra_op.random_plans import random_plan
from autopar.plans.plan import Plan
from autopar.rules.registry import rules_of
from autopar.runtime.as_module.spreading import on_mesh
from autopar.runtime.parameters import gathering
from autopar.runtime.parameters.gathering import Unit
from autopar.runtime.stages import registering, stage
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

LR = 1e-2
TWO = Mesh.of(data=2)


@dataclasses.dataclass(frozen=True)
class Config:
    """One thing to compare: a model, a mesh, what is pinned, how it is called."""

    name: str
    mesh: Mesh
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lifetime: str = ""
    zoo: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    microbatches: int = 1
    foreach: bool = False
    double: bool = False
    eager: bool = False  # compare with the model itself, not with its graph on one device
    seed: int | None = None  # a random plan
    cluster: str = ""
    clip: float = 0.0


def device_mesh(mesh: Mesh) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(n for _, n in mesh), mesh_dim_names=mesh.names)


def make_case(config: Config) -> Case:
    case = ZOO[config.name](**config.zoo)
    return as_float64(case) if config.double else case


def make_plan(captured: Captured, config: Config) -> Plan:
    cluster = load_cluster(config.cluster or f"local-x{dist.get_world_size()}")
    if config.seed is not None:
        graph, rules = captured.graph, rules_of(captured.graph)
        again = segments_of(graph, rules, config.options.get("recompute", ()))
        plan = random_plan(graph, rules, pricer(cluster, config.mesh), config.seed, recompute=again)
    else:
        plan = plan_graph(captured.graph, cluster, config.mesh, Options(**config.options))
    if config.lifetime:
        lived = {n: dataclasses.replace(c, lifetime=config.lifetime) for n, c in plan.params.items()}
        plan = dataclasses.replace(plan, params=lived)
    return Plan.alone(plan)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def difference(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Worst ``max|a - b| / (max|b| + 1e-3 largest)``, and whose it is."""
    largest = max(float(t.abs().max()) for t in b.values() if t.is_floating_point())
    worst, name = 0.0, ""
    for key, want in b.items():
        error = float((a[key].double() - want.double()).abs().max()) / (float(want.abs().max()) + 1e-3 * largest)
        if not error <= worst:
            worst, name = error, key
    return worst, name


class OneDevice(torch.nn.Module):
    """A captured graph run whole, for models whose own code casts to float32: the graph can be promoted, they cannot.

    That a graph on one device equals its model in eager mode is tested in one process.
    """

    def __init__(self, model: torch.nn.Module, captured: Captured) -> None:
        super().__init__()
        self.model, self.captured = copy.deepcopy(model), captured
        self.lowered = lower(captured.graph, program_vs_eager.one_device(captured.graph))
        self.seed = torch.tensor(0)  # of random ops

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = {
            **self.captured.constants,
            **dict(self.model.named_buffers(remove_duplicate=False)),
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **program_vs_eager.inputs_of(self.captured, args, kwargs),
        }
        values = [self.seed if slot.kind == "seed" else state[slot.name] for slot in self.lowered.slots]
        flat = self.lowered.module(*values)
        for name, new in zip(self.lowered.updates, flat[len(self.lowered.outputs) :], strict=True):
            state[name].copy_(new.detach())
        return torch.utils._pytree.tree_unflatten(list(flat[: len(self.lowered.outputs)]), self.captured.out_spec)


def compare(configs: Sequence[Config]) -> list[dict[str, Any]]:
    return [compare_one(config) for config in configs]


def cut(batch: tuple[Any, Any], k: int, i: int) -> tuple[Any, Any]:
    """Microbatch ``i`` of ``k``."""

    def piece(x: Any) -> Any:
        return x.chunk(k, 0)[i] if isinstance(x, torch.Tensor) else x

    return tuple(map(piece, batch[0])), {n: piece(x) for n, x in batch[1].items()}


def compare_one(config: Config) -> dict[str, Any]:
    """Two AdamW steps on two batches: losses, gradients before each step, weights and buffers after."""
    case = make_case(config)
    k = config.microbatches
    captured = capture(case.model, *cut(case.batch, k, 0))
    reference: torch.nn.Module = copy.deepcopy(case.model)
    if config.double and not config.eager:
        constants = program_vs_eager.doubled(captured.constants)
        captured = dataclasses.replace(program_vs_eager.promoted(captured), constants=constants)
        reference = OneDevice(case.model, captured)
    plan = make_plan(captured, config)
    pm = on_mesh(case.model, captured, plan, device_mesh(config.mesh))
    ours = torch.optim.AdamW(pm.parameters(), lr=LR, foreach=config.foreach)
    theirs = torch.optim.AdamW(reference.parameters(), lr=LR)
    found: dict[str, Any] = {"loss": 0.0, "gradient": (0.0, ""), "clip": 0.0}
    for batch in (case.batch, case.batch2):
        loss = pm.train_step(*batch[0], **batch[1]) if k > 1 else loss_of(pm(*batch[0], **batch[1]))
        if k == 1:
            loss.backward()
        want = torch.zeros(())
        for i in range(k):
            args, kwargs = cut(batch, k, i)
            part = loss_of(reference(*args, **kwargs)) / k
            part.backward()
            want = want + part.detach()
        found["loss"] = max(found["loss"], abs(loss.item() - want.item()) / max(1.0, abs(want.item())))
        own = reference.model if isinstance(reference, OneDevice) else reference
        wanted = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
        grads = {n: whole(p.grad) for n, p in pm.named_parameters() if p.grad is not None}
        assert set(grads) == set(wanted), set(grads) ^ set(wanted)
        found["gradient"] = max(found["gradient"], difference(grads, wanted))
        if config.clip:
            norms = [
                float(whole(torch.nn.utils.clip_grad_norm_(m.parameters(), config.clip, foreach=f)))
                for m, f in ((pm, config.foreach or None), (reference, None))
            ]
            found["clip"] = max(found["clip"], abs(norms[0] - norms[1]) / norms[1])
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state, wanted_state = pm.state_dict(), own.state_dict()
    state.pop("_extra_state", None)  # where dropout stands
    assert list(state) == list(wanted_state), (list(state), list(wanted_state))
    found["weight"] = difference({n: whole(t) for n, t in state.items()}, wanted_state)
    found["stored"] = sorted({f"{c.stored}->{c.used} {c.lifetime}" for c in plan.params.values()})
    return found


__all__ = ["Config", "autopar", "compare"]


# --- other things that need ranks ------------------------------------------------------------------------------------


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"trouble on {rank}")
    dist.barrier()


def die_on(rank: int) -> None:
    import os

    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def sleep(seconds: float) -> int:
    import os
    import time

    time.sleep(seconds)
    return os.getpid()


def plan_fails_on_rank_0() -> str:
    """A plan that cannot be made: rank 0 alone finds out, every rank hears it."""
    case = ZOO["mlp"]()
    try:
        autopar.parallelize(case.model, dist.get_world_size(), case.args, memory_limit=1000)
    except autopar.InfeasibleError as error:
        return str(error)
    return "no error"


def model_differs() -> str:
    case = ZOO["mlp"](layers=6 if dist.get_rank() == 0 else 4)
    try:
        autopar.parallelize(case.model, dist.get_world_size(), case.args)
    except autopar.CaptureError as error:
        return str(error)
    return "no error"


class Selected(nn.Module):
    """A loss of the rows that have a label."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.linear(x)[y != -100], y[y != -100])


def rows_differ() -> str:
    """Ranks whose own batches have other numbers of labels, on which sizes depend."""
    y = torch.tensor([0, 1, 2, -100 if dist.get_rank() == 0 else 1])
    try:
        autopar.parallelize(Selected(), dist.get_world_size(), (torch.ones(4, 4), y), batch="local")
    except autopar.CaptureError as error:
        return str(error)
    return "no error"


def build_fails_on_rank_1() -> dict[str, tuple[str, float]]:
    """Building fails on one rank, early, on the way and late: what each rank raises, and after how many seconds."""
    case = ZOO["mlp"]()
    found = {}
    last = len(list(case.model.parameters()))

    def copied() -> nn.Module:
        return copy.deepcopy(case.model)

    for name, file, where, calls in (
        ("first", stage, "lower", 1), ("on the way", registering, "as_dtensor", 3),
        ("last parameter", registering, "as_dtensor", last), ("after all", stage, "make_units", 1),
        ("initial values", None, "", 0),
    ):  # fmt: skip
        start = time.monotonic()
        try:
            if file is not None:
                with _raises_at(file, where, calls):
                    autopar.parallelize(copied(), dist.get_world_size(), case.args, params={"*": "replicate"})
            else:
                autopar.parallelize(copied().to("meta"), 2, case.args, init=_init_fails_on_rank_1)
            found[name] = ("no error", 0.0)
        except Exception as error:
            found[name] = (f"{type(error).__name__}: {error}", time.monotonic() - start)
    return found


@contextlib.contextmanager
def _raises_at(file: Any, where: str, calls: int) -> Iterator[None]:
    """On rank 1, the given call of a function of a module fails."""
    real, count = getattr(file, where), itertools.count(1)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1 and next(count) == calls:
            raise RuntimeError("out of memory")
        return real(*args, **kwargs)

    with mock.patch.object(file, where, fails):
        yield


def _init_fails_on_rank_1(module: torch.nn.Module) -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("out of memory")
    for p in module.parameters(recurse=False):
        torch.nn.init.zeros_(p)


def losses(name: str, zoo: Mapping[str, Any], mesh: Mesh, seed: int | None, steps: int = 2) -> list[float]:
    """Losses of a model with dropout: the same on every mesh, different at every step."""
    torch.manual_seed(11)
    case = as_float64(ZOO[name](**zoo))
    captured = capture(case.model, *case.batch)
    plan = make_plan(captured, Config(name, mesh, seed=seed))
    pm = on_mesh(case.model, captured, plan, device_mesh(mesh))
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.01)
    return [float(pm.train_step(*case.args, optimizer=optimizer, **case.kwargs)) for _ in range(steps)]


def meta_state(name: str, mesh: Mesh, seed: int) -> dict[str, torch.Tensor]:
    """Weights of a model that was initialised on a mesh."""
    torch.manual_seed(3 + dist.get_rank())  # rank 0's counts
    case = ZOO[name](device="meta")
    captured = autopar.capture(case.model, case.kwargs or case.args)
    plan = make_plan(captured, Config(name, mesh, seed=seed))
    dm = device_mesh(mesh)
    pm = autopar.parallelize(case.model, dm, case.kwargs or case.args, plan=plan)
    return autopar.full_state_dict(pm)


def trained(name: str, mesh: Mesh, seed: int, steps: int = 2) -> tuple[Any, torch.optim.Optimizer, Case]:
    case = as_float64(ZOO[name]())
    captured = capture(case.model, *case.batch)
    plan = make_plan(captured, Config(name, mesh, seed=seed))
    pm = on_mesh(case.model, captured, plan, device_mesh(mesh))
    optimizer = torch.optim.AdamW(pm.parameters(), lr=LR)
    for _ in range(steps):
        pm.train_step(*case.args, optimizer=optimizer, **case.kwargs)
    return pm, optimizer, case


def save(path: str, name: str, mesh: Mesh, seed: int) -> tuple[dict[str, torch.Tensor], float]:
    """Train, save weights and optimizer state; the weights and the loss of the step that follows."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    pm, optimizer, case = trained(name, mesh, seed)
    model_state, optimizer_state = get_state_dict(pm, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    state = autopar.full_state_dict(pm)
    pm.train_step(*case.args, optimizer=optimizer, **case.kwargs)
    return state, float(pm.train_step(*case.args, **case.kwargs))


def load(path: str, name: str, mesh: Mesh, seed: int) -> tuple[dict[str, torch.Tensor], float]:
    """Load on another mesh with another plan, and go on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    pm, optimizer, case = trained(name, mesh, seed, steps=1)
    model_state, optimizer_state = get_state_dict(pm, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(pm, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    state = autopar.full_state_dict(pm)
    pm.train_step(*case.args, optimizer=optimizer, **case.kwargs)
    return state, float(pm.train_step(*case.args, **case.kwargs))


def full_round_trip(name: str, mesh: Mesh, seed: int) -> dict[str, Any]:
    """A whole state dict from rank 0 alone, bad ones, tied names."""
    case = ZOO[name]()
    original = {k: v.clone() for k, v in case.model.state_dict().items()}
    captured = capture(case.model, *case.batch)
    pm = on_mesh(case.model, captured, make_plan(captured, Config(name, mesh, seed=seed)), device_mesh(mesh))
    changed = {k: v * 2 + 1 for k, v in original.items()}
    autopar.load_full_state_dict(pm, changed if dist.get_rank() == 0 else None)
    back = autopar.full_state_dict(pm, all_ranks=True)
    alias = {k: v for k, v in original.items() if k != "lm_head.weight"}
    autopar.load_full_state_dict(pm, alias)
    again = autopar.full_state_dict(pm, all_ranks=True)
    first = next(iter(original))
    messages = []
    for bad in (
        {**original, "nonsense": torch.zeros(1)},
        {k: v for k, v in original.items() if k != "transformer.wpe.weight"},
        {**original, first: torch.zeros(3, 5)},
    ):
        try:
            autopar.load_full_state_dict(pm, bad if dist.get_rank() == 0 else None)
        except autopar.RunError as error:
            messages.append(str(error))
    return {
        "changed": all(torch.equal(back[k], changed[k]) for k in changed) and list(back) == list(changed),
        "again": all(torch.equal(again[k], original[k]) for k in original),
        "messages": messages,
    }


def eval_modes(names: Sequence[str]) -> list[float]:
    """Worst differences to the model itself in eval mode, after a step in training mode, and in training again."""
    return [_eval_mode(name) for name in names]


def _eval_mode(name: str) -> float:
    torch.manual_seed(3)
    case = as_float64(ZOO[name](**({} if name in ("resnet", "bert") else {"dropout": 0.1})))
    pm = autopar.parallelize(copy.deepcopy(case.model), dist.get_world_size(), case.args, example_kwargs=case.kwargs)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.01)
    pm.train_step(*case.args, optimizer=optimizer, **case.kwargs)
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in pm.state_dict().items()}
    state.pop("_extra_state", None)
    case.model.load_state_dict(state)
    args, kwargs = case.batch2
    with torch.no_grad():
        want = float(loss_of(case.model.eval()(*args, **kwargs)))
        found = [float(loss_of(pm.eval()(*args, **kwargs))) for _ in range(2)]
    after = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in pm.state_dict().items()}
    assert all(torch.equal(after[k], state[k]) for k in state), "eval mode changes no buffers"
    pm.train()
    again = [float(loss_of(pm(*args, **kwargs))) for _ in range(2)]
    assert again[0] != again[1] or name in ("resnet", "bert"), "dropout is on again"
    return max(abs(x - want) / abs(want) for x in found)


def bad_calls() -> dict[str, str]:
    """What a program says to calls that it was not made for."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    x, y = torch.ones(2, 4), torch.ones(2, 4)
    pm = autopar.parallelize(model, 1, x, loss_fn=torch.nn.functional.mse_loss, targets=y, shapes="fixed")
    calls = {
        "shape": lambda: pm(torch.ones(3, 4), y),
        "structure": lambda: pm(x),
        "dtype": lambda: pm(x.double(), y),
        "type": lambda: pm(x, 3),
        "train": lambda: autopar.parallelize(torch.nn.Linear(4, 4).eval(), 1, x, shapes="fixed").train(),
        "half": lambda: pm.half(),
        "uneven microbatches": lambda: pm.train_step(torch.ones(4, 4), torch.ones(6, 4)),
        "wrong microbatches": lambda: pm.train_step(torch.ones(4, 4), torch.ones(4, 4), microbatches=3),
        "too few ranks": lambda: autopar.parallelize(torch.nn.Linear(4, 4), 2, x),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
            messages[name] = "no error"
        except autopar.AutoparError as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def recomputed_in_another_thread(name: str, pattern: str, frozen: str, seed: int) -> dict[str, Any]:
    """ZeRO-3 in small units with recomputed blocks and frozen parameters; the backward runs in a thread, as for a GPU.

    Gathers of each unit in forward and backward, bytes of gathered copies alive after each, and the difference of the
    gradients from one device.
    """
    case = as_float64(ZOO[name]())
    for key, param in case.model.named_parameters():
        param.requires_grad_(not fnmatch.fnmatchcase(key, frozen))
    reference = copy.deepcopy(case.model)
    captured = capture(case.model, *case.batch)
    plan = make_plan(captured, Config(name, TWO, seed=seed, options={"recompute": [pattern]}, lifetime="use"))
    with mock.patch.object(gathering, "UNIT_BYTES", 1 << 14):
        pm = on_mesh(case.model, captured, plan, device_mesh(TWO))
    gathered: list[list[int]] = [[], []]
    now = gathered[0]
    real, units = (
        Unit.start,
        list(dict.fromkeys(h.unit for h in pm._autopar.held_params.values() if h.unit is not None)),
    )

    def start(unit: Unit) -> None:
        if not unit.ready and unit.work is None:
            now.append(units.index(unit))
        real(unit)

    def alive() -> int:
        return sum(h.leaf.untyped_storage().nbytes() for h in pm._autopar.held_params.values() if h.per_use)

    with mock.patch.object(Unit, "start", start):
        loss = loss_of(pm(*case.args, **case.kwargs))
        live = [alive()]
        now = gathered[1]
        failed: list[BaseException] = []
        thread = threading.Thread(target=_run, args=(loss.backward, failed))
        thread.start()
        thread.join()
        live.append(alive())
    if failed:
        raise failed[0]
    loss_of(reference(*case.args, **case.kwargs)).backward()
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    grads = {n: whole(p.grad) for n, p in pm.named_parameters() if p.grad is not None}
    assert set(grads) == set(wanted)
    counts = [[numbers.count(i) for i, unit in enumerate(units) if unit.per_use] for numbers in gathered]
    return {"gathers": counts, "live": live, "gradient": difference(grads, wanted)}


def _run(call: Callable[[], Any], failed: list[BaseException]) -> None:
    try:
        call()
    except BaseException as error:
        failed.append(error)
