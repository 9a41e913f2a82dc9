"""What one rank does in the tests of optimizers that need whole matrices, beside one device."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from procs.habits import difference, said, whole
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import autopar
from autopar.runtime.parameters.to_owners import ToOwners
from autopar.runtime.repairs import optimizer_steps, step_trial

Model = Any
Optimizers = list[torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """An embedding that is also the last layer, or not; blocks; a frozen layer; a layer that not every call uses."""

    def __init__(self, tied: bool = True, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.fixed = nn.Linear(width, width)
        self.fixed.requires_grad_(False)
        self.head = nn.Linear(width, 20, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(self.fixed(h)).flatten(0, 1), y.flatten())


class StackedExperts(nn.Module):
    """Experts of which each weight is stacked: matrices in batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 10) / 4), nn.Parameter(torch.randn(4, 10, 6) / 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.einsum("bd,edh->ebh", x, self.up)
        return (torch.einsum("ebh,ehd->ebd", torch.tanh(h), self.down) - x).square().mean()


def batches(count: int, rows: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(0, 20, (2, rows, 5), generator=drawn)) for _ in range(count)]  # type: ignore[misc]


def usual(model: Model, kind: Any = optim.Muon) -> Optimizers:
    """Muon for matrices of hidden layers, AdamW for the rest, as scripts have it."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    hidden = [p for name, p in trained.items() if p.ndim == 2 and "table" not in name and "head" not in name]
    rest = [p for name, p in trained.items() if not any(p is each for each in hidden)]
    made = [kind(hidden, lr=0.02)] if hidden else []
    return [*made, optim.AdamW(rest, lr=0.01)]


def train(
    model: Model, optimizers: Optimizers, given: list[tuple[torch.Tensor, torch.Tensor]], clip: bool = False,
    scaled: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    """Losses; the rate falls from step to step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    schedules = [optim.lr_scheduler.StepLR(each, 1, 0.9) for each in optimizers]
    losses = []
    for batch in given:
        loss = model(*batch)
        scaler.scale(loss).backward()
        for each in optimizers:
            scaler.unscale_(each)
        if clip:
            if hasattr(model, "clip_grad_norm_"):
                model.clip_grad_norm_(0.5)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each in optimizers:
            scaler.step(each)
        scaler.update()
        for each, schedule in zip(optimizers, schedules, strict=True):
            each.zero_grad()
            schedule.step()
        losses.append(loss.detach())
    return losses


def far(pm: Model, eager: nn.Module, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Worst relative difference of losses, and of the parameters that this rank holds."""
    wanted = dict(eager.named_parameters())
    pairs = [*zip(ours, theirs, strict=True)]
    pairs += [(p.full_tensor() if isinstance(p, DTensor) else p, wanted[n]) for n, p in pm.named_parameters()]
    return max(difference(a.detach(), b.detach()) for a, b in pairs)


def mesh_of(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor")[: len(sizes)])


LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "rows": ((4,), {"constraints": {"*linear*": {"data": "b"}}}),
    "ZeRO-3": (
        (4,), {"constraints": {"*linear*": {"data": "b"}}, "params": {"*.up.*": "S0 use", "*.down.*": "S0 use"}},
    ),
    "tensor": ((2, 2), {"constraints": {"*linear*": {"data": "b", "tensor": "n"}}}),
    "tensor and ZeRO": (
        (2, 2), {"constraints": {"*linear*": {"data": "b", "tensor": "n"}}, "params": {"*.up.weight": "S1,S0 use"}},
    ),
}


def words(layout: str, tied: bool = True, clip: bool = False, scaled: bool = False) -> float:
    (sizes, options), how = LAYOUTS[layout], {"clip": clip, "scaled": scaled}
    eager, given = Words(tied), batches(4)
    pm = autopar.parallelize(copy.deepcopy(eager), mesh_of(*sizes), given[0], verify_capture=False, **options)
    return far(pm, eager, train(pm, usual(pm), given, **how), train(eager, usual(eager), given, **how))


def bits(sizes: tuple[int, ...], placements: list[str], dtype: torch.dtype) -> bool:
    """Muon's parameters and momentum to the bit, whatever the placements, and without a gradient in one step."""
    optimizer_steps.correct()
    mesh, drawn = mesh_of(*sizes), torch.Generator().manual_seed(2)
    placed = [Replicate() if each == "R" else Shard(int(each)) for each in placements]
    whole, cut = [], []
    for shape in ((7, 13), (16, 9), (3, 2), (160, 150), (1, 5), (129, 131)):
        values = torch.randn(shape, generator=drawn, dtype=dtype)
        whole.append(nn.Parameter(values.clone()))
        cut.append(nn.Parameter(distribute_tensor(values, mesh, placed)))
    theirs, ours = (optim.Muon(params, lr=0.05, adjust_lr_fn="match_rms_adamw") for params in (whole, cut))
    for step in range(3):
        for one, other in zip(whole, cut, strict=True):
            one.grad = torch.randn(one.shape, generator=drawn, dtype=dtype)
            other.grad = distribute_tensor(one.grad.clone(), mesh, placed)
        if step == 1:
            whole[0].grad = cut[0].grad = None
        theirs.step()
        ours.step()
    pairs = list(zip(whole, cut, strict=True))
    same = [torch.equal(one, other.detach().full_tensor()) for one, other in pairs]  # type: ignore[attr-defined]
    moments = [(theirs.state[a]["momentum_buffer"], ours.state[b]["momentum_buffer"]) for a, b in pairs]
    return all(same) and all(torch.equal(one, other.full_tensor()) for one, other in moments)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of each all-to-all that this rank begins in this scope."""
    real, sizes = dist.all_to_all_single, []

    def noting(out: torch.Tensor, given: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(given.nbytes)
        return real(out, given, *args, **options)

    with mock.patch.object(dist, "all_to_all_single", noting):
        yield sizes


def sent() -> dict[str, Any]:
    """Of a step of Muon: collectives and bytes, and how many matrices each rank orthogonalizes."""
    optimizer_steps.correct()
    mesh, drawn = mesh_of(4), torch.Generator().manual_seed(2)
    params = [
        nn.Parameter(distribute_tensor(torch.randn(64, 32, generator=drawn), mesh, [Shard(0)])) for _ in range(8)
    ]
    optimizer = optim.Muon(params, lr=0.01)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    iterations = []
    import torch.optim._muon as of_torch

    real = of_torch._zeropower_via_newtonschulz

    def noting(matrix: torch.Tensor, *args: Any) -> torch.Tensor:
        iterations.append(tuple(matrix.shape))
        return real(matrix, *args)

    with counted() as sizes, mock.patch.object(of_torch, "_zeropower_via_newtonschulz", noting):
        optimizer.step()
    return {"sizes": sizes, "iterations": iterations}


def pipeline(tied: bool, axes: int, kind: Any = optim.Muon) -> float:
    """Stages, on each of which several ranks store a matrix together, along one axis or two."""
    eager, given = Words(tied), batches(3)
    options: dict[str, Any] = {"constraints": {"*linear*": {"data": "b", "tensor": "n"}}} if axes == 2 else {}
    pm: Any = autopar.parallelize(
        copy.deepcopy(eager), dist.get_world_size(), given[0], stages=2, schedule="1f1b", microbatches=2,
        verify_capture=False, **options,
    )  # fmt: skip
    ours, theirs = usual(pm, kind), usual(eager, kind)
    losses, wanted = [], []
    for batch in given:
        losses.append(torch.as_tensor(pm.train_step(*batch)).detach())
        wanted.append(eager(*batch).detach())
        eager.zero_grad()
        eager(*batch).backward()
        for each in (*ours, *theirs):
            each.step()
            each.zero_grad()
    meshes = {p.device_mesh for p in pm.parameters() if isinstance(p, DTensor)}
    assert {len(mesh.shape) for mesh in meshes} == {axes}
    return far(pm, eager, losses, wanted)


class Turning(optim.Optimizer):
    """A Muon as people write it: any number of dims, momentum and a count in the state, a step for each parameter."""

    def __init__(self, params: Any, lr: float = 0.02, fails: bool = False, counts: bool = False) -> None:
        super().__init__(params, {"lr": lr, "counted": 0})
        self.fails, self.counts = fails, counts

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["momentum"] = 0, torch.zeros_like(p)
                    state["sides"] = [torch.zeros(p.shape[-1], p.shape[-1], dtype=p.dtype)]
                state["step"] += 1
                group["counted"] += self.counts
                if self.fails and p.shape[-1] == 24 and state["step"] == 2:
                    raise ArithmeticError("no root of this matrix")
                state["momentum"].mul_(0.9).add_(p.grad)
                x = state["momentum"].double()
                x = x / x.norm(dim=(-2, -1), keepdim=True) if p.ndim > 1 else x.sign()
                if p.ndim > 1:
                    state["sides"][0].lerp_((x.mT @ x).reshape(-1, *x.shape[-1:] * 2).mean(0).to(p.dtype), 0.1)
                    for _ in range(3):
                        x = 1.5 * x - 0.5 * x @ x.mT @ x
                p.sub_(x.to(p.dtype), alpha=group["lr"] / state["step"] ** 0.5)
        return loss


class Coupled(Turning):
    """One rate for all parameters, from the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        norms = [p.grad.norm() for p in group["params"] if p.grad is not None]
        total = sum(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) for norm in norms)
        group["lr"] = 0.02 / (1 + total)
        return super().step(closure)


class Talking(Turning):
    """One that shares work out by itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = self.param_groups[0]["params"]
        for at, p in enumerate(params):
            if at % dist.get_world_size() == dist.get_rank():
                p.sub_(p.grad @ p.grad.T @ p.grad, alpha=0.1)
            dist.broadcast(p, at % dist.get_world_size())


def by_hand(layout: str) -> float:
    """One that somebody wrote, through a closure in one step."""
    sizes, options = LAYOUTS[layout]
    eager, given = Words(), batches(3)
    pm = autopar.parallelize(copy.deepcopy(eager), mesh_of(*sizes), given[0], verify_capture=False, **options)
    losses: list[list[torch.Tensor]] = []
    for model in (pm, eager):
        optimizer = Turning([p for p in model.parameters() if p.requires_grad])
        found = train(model, [optimizer], given[:2])

        def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = model(*given[2])
                loss.backward()
            return loss.detach()

        losses.append([*found, optimizer.step(closure)])
        if model is pm:
            assert step_trial.kind_of(optimizer) == step_trial.WHOLE
            state = next(iter(optimizer.state.values()))
            assert state["step"] == 3 and isinstance(state["momentum"], DTensor)
    return far(pm, eager, *losses)


def experts() -> float:
    """Stacked matrices, under one that steps on them in batches."""
    drawn = torch.Generator().manual_seed(1)
    eager, xs = StackedExperts(), [torch.randn(8, 6, dtype=torch.float64, generator=drawn) for _ in range(3)]
    pm = autopar.parallelize(
        copy.deepcopy(eager), mesh_of(4), (xs[0],), verify_capture=False, params={"up": "S0 use", "down": "S1 use"}
    )
    assert any(p.to_local().numel() < p.numel() for p in pm.parameters())
    losses: list[list[torch.Tensor]] = []
    for model in (pm, eager):
        optimizer = Turning(list(model.parameters()))
        found = []
        for x in xs:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        losses.append(found)
    return far(pm, eager, *losses)


def kinds() -> list[str]:
    """What trials find: one that steps on each matrix by itself, one that couples them, one that talks, elementwise."""
    mesh = mesh_of(4)
    params = [nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])) for _ in range(2)]
    made = [kind(params) for kind in (Turning, Coupled, Talking, optim.AdamW, optim.Muon, optim.Adafactor)]
    return [step_trial.kind_of(each) for each in made]


def talking() -> str:
    optimizer_steps.correct()
    params = [nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh_of(4), [Shard(0)]))]
    params[0].grad = torch.ones_like(params[0])
    return said(Talking(params).step)


def refused(what: str) -> str:
    """What a step says that one owner cannot do, that counts in its group, or that is another one on one rank."""
    optimizer_steps.correct()
    mesh = mesh_of(4)
    params = [nn.Parameter(distribute_tensor(torch.randn(8, 8 * k), mesh, [Shard(0)])) for k in (1, 2, 3)]
    if what == "other matrices":
        params = params[: 3 - (dist.get_rank() == 1)]
        optimizer: torch.optim.Optimizer = optim.Muon(params)
    else:
        optimizer = Turning(params, fails=what == "fails", counts=what == "counts")
    for p in params:
        p.grad = torch.ones_like(p)
    if what == "fails":
        optimizer.step()
        before = [whole(p).clone() for p in params]
        text = said(optimizer.step)
        assert all(torch.equal(whole(p), was) for p, was in zip(params, before, strict=True))
        assert all(len(group["params"]) == 3 for group in optimizer.param_groups)
        return text
    if what == "closure":
        def twice(self: Any, closure: Any = None) -> None:
            closure()
            closure()

        kind = type("Twice", (Turning,), {"step": twice})
        autopar.whole_matrix_step(kind)
        return said(lambda: kind(params).step(lambda: None))
    return said(optimizer.step)


def resumed(kind: str, how: str) -> float:
    """Saved under one layout and loaded under another, beside a run that goes on."""
    make = {"Muon": optim.Muon, "by hand": Turning}[kind]
    eager, given = Words(), batches(4)
    sizes, options = LAYOUTS["ZeRO-3"]
    pm = autopar.parallelize(copy.deepcopy(eager), mesh_of(*sizes), given[0], verify_capture=False, **options)
    theirs, ours = usual(eager, make), usual(pm, make)
    for model, optimizers in ((pm, ours), (eager, theirs)):
        for batch in given[:2]:
            model(*batch).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
    sizes, options = LAYOUTS["tensor"]
    other = autopar.parallelize(copy.deepcopy(Words()), mesh_of(*sizes), given[0], verify_capture=False, **options)
    anew = usual(other, make)
    autopar.load_full_state_dict(other, autopar.full_state_dict(pm, all_ranks=True))
    if how == "full":
        for each, before in zip(anew, ours, strict=True):
            whole = autopar.full_optimizer_state_dict(pm, before, all_ranks=True)
            autopar.load_full_optimizer_state_dict(other, each, whole)
    else:
        box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(box)
        dcp.save({"optimizer": get_optimizer_state_dict(pm, ours)}, checkpoint_id=box[0])
        if kind == "by hand":  # which makes its state at its first step
            for p in other.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else None
            was = {n: p.detach().clone() for n, p in other.named_parameters()}
            anew[0].step()
            other.zero_grad()
            with torch.no_grad():
                for n, p in other.named_parameters():
                    p.copy_(was[n])
        state = {"optimizer": get_optimizer_state_dict(other, anew)}
        dcp.load(state, checkpoint_id=box[0])
        set_optimizer_state_dict(other, anew, state["optimizer"])
    losses: list[list[torch.Tensor]] = []
    for model, optimizers in ((other, anew), (eager, theirs)):
        found = []
        for batch in given[2:]:
            loss = model(*batch)
            loss.backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
            found.append(loss.detach())
        losses.append(found)
    return far(other, eager, *losses)


def ways_back(sizes: tuple[int, ...], placements: list[str]) -> bool:
    """Tensors that come to their owners and back are what they were."""
    from autopar.runtime.parameters.placed_alike import state_of
    from autopar.runtime.parameters.state import local_of
    from autopar.runtime.parameters.to_owners import Stored

    mesh, drawn = mesh_of(*sizes), torch.Generator().manual_seed(3)
    placed = [Replicate() if each == "R" else Shard(int(each)) for each in placements]
    wholes = [torch.randn(shape, generator=drawn) for shape in ((5, 3), (8, 8), (1, 9), (2, 3, 4))]
    cut = [distribute_tensor(whole, mesh, placed) for whole in wholes]
    way = ToOwners(mesh, [Stored(tuple(t.shape), state_of(t)) for t in cut], [1, 3, 0, 3])
    found = way.gather([local_of(t) for t in cut]).wait()
    assert list(found) == way.owned and all(torch.equal(found[i], wholes[i]) for i in found)
    back = way.scatter({i: 2 * whole for i, whole in found.items()}, wholes[0]).wait()
    return all(torch.equal(piece, 2 * local_of(t)) for piece, t in zip(back, cut, strict=True))
