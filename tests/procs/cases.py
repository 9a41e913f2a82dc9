"""What one rank does in the process tests; functions here are started by ``run_local`` in fresh interpreters.

``compare`` trains a model of the zoo with autopar and eagerly, side by side on every rank, and returns the worst
differences. One call checks many configurations, because starting processes is what takes time.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from zoo import ZOO, Case, as_float64, loss_of

import autopar
from autopar.api import plan_captured
from autopar.capture import Captured, capture
from autopar.placements import Mesh
from autopar.plan import Plan
from autopar.planner.draw import random_plan
from autopar.planner.price import pricer
from autopar.planner.search import Options
from autopar.rules.registry import rules_of
from autopar.runtime.executor import ParallelModule
from hardware_profiles import load_cluster

LR = 1e-2


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
    seed: int | None = None  # a random plan
    cluster: str = ""
    clip: float = 0.0


def device_mesh(mesh: Mesh) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(n for _, n in mesh), mesh_dim_names=tuple(a for a, _ in mesh))


def make_case(config: Config) -> Case:
    case = ZOO[config.name](**config.zoo)
    return as_float64(case) if config.double else case


def make_plan(captured: Captured, config: Config) -> Plan:
    cluster = load_cluster(config.cluster or f"local-x{dist.get_world_size()}")
    if config.seed is not None:
        plan = random_plan(captured.graph, rules_of(captured.graph), pricer(cluster, config.mesh), config.seed)
    else:
        plan = plan_captured(captured, cluster, config.mesh, Options(**config.options))
    if config.lifetime:
        lived = {n: dataclasses.replace(c, lifetime=config.lifetime) for n, c in plan.params.items()}
        plan = dataclasses.replace(plan, params=lived)
    return plan


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
    plan = make_plan(captured, config)
    reference = copy.deepcopy(case.model)
    pm = ParallelModule(case.model, captured, plan, device_mesh(config.mesh))
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
        wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
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
    state, wanted_state = pm.state_dict(), reference.state_dict()
    assert list(state) == list(wanted_state), (list(state), list(wanted_state))
    found["weight"] = difference({n: whole(t) for n, t in state.items()}, wanted_state)
    found["stored"] = sorted({f"{c.stored}->{c.used} {c.lifetime}" for c in plan.params.values()})
    return found


__all__ = ["Config", "autopar", "compare"]
