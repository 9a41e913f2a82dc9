"""What one rank does in the tests of optimizers: a model trained on two ranks, its parameters cut, beside eager mode.

Each function gives the worst relative difference of losses and weights, or what was said.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from procs.habits import difference, said
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar

Params = Iterable[torch.Tensor]
Maker = Callable[[Any], torch.optim.Optimizer]


class Small(nn.Module):
    """Three layers of which one is shorter than the ranks' pieces; a matrix, a vector and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.tanh(self.first(x))) * self.scale - x[:, :3]).square().mean()


class Flat(nn.Module):
    """Matrices alone, as Muon takes them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 10, bias=False), nn.Linear(10, 3, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.tanh(self.first(x))) - x[:, :3]).square().mean()


MAKERS: dict[str, Maker] = {
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5, weight_decay=0.01),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.05, weight_decay=0.01),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "Adam": lambda p: optim.Adam(p, lr=0.05),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=0.05, amsgrad=True, maximize=True, weight_decay=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.05),
    "AdamW tensor lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.05, dtype=torch.float64)),
    "Adamax": lambda p: optim.Adamax(p, lr=0.05),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1, t0=1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.05),
    "RAdam": lambda p: optim.RAdam(p, lr=0.05),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}
"""Every optimizer of torch that steps by ``step()`` alone."""

VARIANTS: dict[str, Maker] = {
    **{
        f"{kind} foreach={foreach}": (lambda p, k=kind, f=foreach: getattr(optim, k)(p, lr=0.05, foreach=f))
        for kind in (
            "Adadelta",
            "Adagrad",
            "Adam",
            "AdamW",
            "Adamax",
            "ASGD",
            "NAdam",
            "RAdam",
            "RMSprop",
            "Rprop",
            "SGD",
        )
        for foreach in (True, False)
    },
    **{
        f"{kind} fused": (lambda p, k=kind: getattr(optim, k)(p, lr=0.05, fused=True))
        for kind in ("Adagrad", "Adam", "AdamW", "SGD")
    },
    "SGD momentum fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
}

BESIDE_A_HOST = Path(__file__).parents[1] / "data" / "beside-a-host.toml"
LAYOUTS: dict[str, dict[str, Any]] = {
    "cut": {"constraints": {"*linear*": {"data": "n"}}},
    "rows": {"constraints": {"*linear*": {"data": "b"}}},
    "ZeRO-3": {"constraints": {"*linear*": {"data": "b"}}, "params": {"*t.*": "S0 use"}},
    "host": {"constraints": {"*linear*": {"data": "n"}}, "cluster": BESIDE_A_HOST, "offload": {"optimizer": 1}},
    "host ZeRO-3": {
        "constraints": {"*linear*": {"data": "b"}}, "params": {"*t.*": "S0 use"}, "cluster": BESIDE_A_HOST,
        "offload": {"parameters": 1},
    },
}


def inputs(count: int = 4) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=drawn, dtype=torch.float64) for _ in range(count)]


_spread: dict[tuple[type, str], Any] = {}


def spread(model: nn.Module, layout: str) -> Any:
    """The model's values on two ranks, as one of :data:`LAYOUTS` says; of one class and layout always one module."""
    key = type(model), layout
    if key not in _spread:
        _spread[key] = spread_anew(model, layout)
    else:
        _spread[key].load_state_dict(model.state_dict())
        _spread[key].zero_grad()
    return _spread[key]


def spread_anew(model: nn.Module, layout: str, **options: Any) -> Any:
    """On two ranks, as one of :data:`LAYOUTS` says."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    pm = autopar.parallelize(model, mesh, inputs(1)[0], verify_capture=False, **LAYOUTS[layout], **options)
    if layout != "rows":
        assert any(isinstance(p, DTensor) and any(map(str, p.placements)) for p in pm.parameters())
        assert any(p.to_local().numel() < p.numel() for p in pm.parameters()), "nothing is cut"
    return pm


def train(model: Any, optimizer: torch.optim.Optimizer, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Losses."""
    losses = []
    for x in xs:

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            return loss

        if isinstance(optimizer, optim.LBFGS):
            losses.append(optimizer.step(closure))
        else:
            losses.append(closure())
            optimizer.step()
    return [torch.as_tensor(loss).detach() for loss in losses]


def compared(pm: Any, eager: nn.Module, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The worst relative difference of losses and weights."""
    mine = dict(pm.named_parameters())
    pairs = [*zip(ours, theirs, strict=True)]
    pairs += [(mine[name].detach().full_tensor(), p.detach()) for name, p in eager.named_parameters()]
    return max(difference(a, b) for a, b in pairs)


def trained(kind: str, layout: str, before: bool) -> float:
    """One of :data:`MAKERS` or :data:`VARIANTS`, made before ``parallelize`` (after a step of it) or after."""
    make = {**MAKERS, **VARIANTS}[kind]
    eager, model, xs = Small(), Small(), inputs()
    theirs, ours = make(list(eager.parameters())), make(list(model.parameters()))
    if before:
        stepped = xs[:1] if kind != "Adafactor" else []
        train(eager, theirs, stepped)
        train(model, ours, stepped)
        pm = spread_anew(model, layout, optimizer=ours)
    else:
        pm = spread(model, layout)
        ours = make(list(pm.parameters()))
    return compared(pm, eager, train(pm, ours, xs[1:]), train(eager, theirs, xs[1:]))


def matrices(layout: str) -> float:
    """Muon."""
    eager, xs = Flat(), inputs()
    pm = spread(Flat(), layout)
    ours, theirs = (optim.Muon(list(m.parameters()), lr=0.05) for m in (pm, eager))
    return compared(pm, eager, train(pm, ours, xs), train(eager, theirs, xs))


def lbfgs(layout: str, search: str | None) -> float:
    eager, xs = Small(), inputs()
    pm = spread(Small(), layout)
    ours, theirs = (optim.LBFGS(list(m.parameters()), lr=0.5, max_iter=5, line_search_fn=search) for m in (pm, eager))
    return compared(pm, eager, train(pm, ours, xs), train(eager, theirs, xs))


def lbfgs_in_stages() -> None:
    """A rank has no inner products over the parameters of other stages."""
    pm, (x,) = Small(), inputs(1)
    pm = autopar.parallelize(pm, "pipe=2,data=1", x, verify_capture=False)
    optimizer = optim.LBFGS(pm.parameters(), lr=0.5)
    optimizer.step(lambda: pm.train_step(x))


def groups(layout: str) -> float:
    """Several groups, one frozen later, a scheduler of each kind."""
    eager, xs = Small(), inputs(8)
    pm = spread(Small(), layout)
    results = []
    for model in (pm, eager):
        named = dict(model.named_parameters())
        decay = [p for n, p in named.items() if n.endswith("weight")]
        optimizer = optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": [named["scale"]], "lr": 0.01}], lr=0.05
        )
        biases = [p for n, p in named.items() if n.endswith("bias")]
        optimizer.add_param_group({"params": biases, "betas": (0.5, 0.9)})
        warm = optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        schedule = optim.lr_scheduler.SequentialLR(
            optimizer, [warm, optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)], milestones=[2]
        )
        plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        losses = []
        for x in xs:
            losses += train(model, optimizer, [x])
            schedule.step()
            plateau.step(losses[-1])
        results.append(losses)
    return compared(pm, eager, *results)


def in_backward(layout: str) -> float:
    """An optimizer for each parameter, stepped by a hook when its gradient is there, which is then dropped."""
    eager, xs = Small(), inputs()
    pm = spread_anew(Small(), layout)
    results = []
    for model in (pm, eager):
        optimizers = {p: optim.Adam([p], lr=0.05) for p in model.parameters()}

        def hook(p: torch.Tensor, optimizers: Any = optimizers) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        losses = []
        for x in xs:
            loss = model(x)
            loss.backward()
            losses.append(loss.detach())
        results.append(losses)
    return compared(pm, eager, *results)


def spread_with_hooks(layout: str) -> None:
    """Such hooks on the model's own parameters, before ``parallelize``."""
    model = Small()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: None)
    spread_anew(model, layout)


class Lars(optim.Optimizer):
    """Layer-wise rates: the norm of a parameter beside that of its gradient, as people write it."""

    def __init__(self, params: Params, lr: float = 0.5, momentum: float = 0.9, trust: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                update = p.grad.add(p, alpha=0.01)
                norm, of_update = torch.norm(p), torch.norm(update)
                rate = torch.where(
                    norm > 0, torch.where(of_update > 0, g["trust"] * norm / of_update, torch.ones_like(norm)), 1.0
                )
                buffer = self.state[p].setdefault("mu", torch.zeros_like(p))
                buffer.mul_(g["momentum"]).add_(update.mul(rate))
                p.add_(buffer, alpha=-g["lr"])


class Lamb(optim.Optimizer):
    """Adam with a trust ratio that is read as a number."""

    def __init__(self, params: Params, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p.data), torch.zeros_like(p.data)
                m, v, grad = state["m"], state["v"], p.grad.data
                m.mul_(0.9).add_(grad, alpha=0.1)
                v.mul_(0.99).addcmul_(grad, grad, value=0.01)
                update = m / v.sqrt().add(1e-6)
                norm = p.data.pow(2).sum().sqrt().clamp(0, 10)
                of_update = update.pow(2).sum().sqrt()
                trust = 1 if norm == 0 or of_update == 0 else norm / of_update
                p.data.add_(update, alpha=-g["lr"] * float(trust))


class Lion(optim.Optimizer):
    """Signs, and ``p.data = ...``."""

    def __init__(self, params: Params, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for g in self.param_groups:
            for p in filter(lambda p: p.grad is not None, g["params"]):
                m = self.state[p].setdefault("m", torch.zeros_like(p.data))
                p.data = p.data * (1 - 0.1 * g["lr"]) - g["lr"] * (0.9 * m + 0.1 * p.grad.data).sign()
                m.lerp_(p.grad.data, 0.01)


class Shampoo(optim.Optimizer):
    """Roots of the moments of rows and columns."""

    def __init__(self, params: Params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for g in self.param_groups:
            for p in g["params"]:
                grad, state = p.grad, self.state[p]
                if grad.ndim != 2:
                    p.sub_(grad, alpha=g["lr"])
                    continue
                if not state:
                    state["left"] = 0.1 * torch.eye(grad.shape[0], dtype=grad.dtype)
                    state["right"] = 0.1 * torch.eye(grad.shape[1], dtype=grad.dtype)
                state["left"] = state["left"] + grad @ grad.T
                state["right"] = state["right"] + grad.T @ grad
                values, vectors = torch.linalg.eigh(state["left"])
                left = vectors @ torch.diag(values.pow(-0.25)) @ vectors.T
                values, vectors = torch.linalg.eigh(state["right"])
                right = vectors @ torch.diag(values.pow(-0.25)) @ vectors.T
                p.sub_(left @ grad @ right, alpha=g["lr"])


CUSTOM: dict[str, Maker] = {"LARS": Lars, "LAMB": Lamb, "Lion": Lion, "Shampoo": Shampoo}


def custom(kind: str, layout: str) -> float:
    """One that somebody wrote by hand."""
    eager, xs = Small(), inputs()
    pm = spread(Small(), layout)
    ours, theirs = (CUSTOM[kind](list(m.parameters())) for m in (pm, eager))
    return compared(pm, eager, train(pm, ours, xs), train(eager, theirs, xs))


def resumed_whole(kind: str, layout: str) -> float:
    """State that ``torch.save`` had from one process, loaded into the optimizer of the parallel module."""
    eager, xs = Small(), inputs()
    theirs = MAKERS[kind](list(eager.parameters()))
    train(eager, theirs, xs[:2])
    pm = spread(copy.deepcopy(eager), layout)
    ours = MAKERS[kind](list(pm.parameters()))
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    return compared(pm, eager, train(pm, ours, xs[2:]), train(eager, theirs, xs[2:]))


class Rows(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(12, 6, sparse=True), nn.Linear(6, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x)).square().mean()


def sparse_rows(kind: str, cut: str = "b") -> Any:
    """An embedding made with ``sparse=True``, of which the gradients are added up whole; its layers are cut by rows, or
    whole on every rank (``cut="replicate"``), where nothing is added to a gradient."""
    x = torch.arange(8).reshape(4, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    eager = Rows()
    pm = autopar.parallelize(Rows(), mesh, x, constraints={"*": {"data": cut}})
    results = []
    for model in (pm, eager):
        optimizer = getattr(optim, kind)([model.table.weight], lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        results.append(losses)
    return compared(pm, eager, *results)


def refused(name: str, *args: Any) -> str:
    """What another function here says."""
    return said(lambda: globals()[name](*args))
