"""What one rank does in the tests of random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from procs.habits import said
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

ROWS, LENGTH, WIDTH = 8, 8, 16


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * 0 + torch.randn_like(x)


class Drops(Noise):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.up(x), 0.5, self.training)


class Masks(Noise):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * (torch.rand(x.shape[0], 64, device=x.device) > 0.5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Denoiser(nn.Module):
    """Dropout, noise, and paths that are left out for a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.drop = Attention(), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + 0.1 * torch.randn_like(x)
        x = x + self.attention(x)
        x = x + self.drop(self.down(self.drop(F.gelu(self.up(x))) * torch.rand(len(x), 1, 32, dtype=x.dtype)))
        kept = (torch.rand(len(x)) > 0.2).to(x.dtype)
        return F.mse_loss(x * kept[:, None, None], y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, y


def steps(model: Any, given: tuple[torch.Tensor, ...], in_steps: bool = False) -> list[float]:
    """Losses of three steps of SGD."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        if in_steps:
            loss = model.train_step(*given)
        else:
            loss = model(*given)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


ATTENTION = "*:scaled_dot_product_attention"
HOW: dict[str, dict[str, Any]] = {
    "rows": {"constraints": {"*": {"axis": "b"}}},
    "columns": {"constraints": {"*up": {"axis": "n"}, "*down": {"axis": "k"}, "*qkv": {"axis": "n"}}},
    "ring": {"constraints": {ATTENTION: {"axis": "ring"}}},
    "queries": {"constraints": {ATTENTION: {"axis": "q"}}},
    "gathered and again": {
        "constraints": {"*": {"axis": "b"}}, "params": {"*": "S0 use"}, "recompute": ["attention"],
    },
    "2 microbatches": {"constraints": {"*": {"axis": "b"}}, "microbatches": 2},
    "4 microbatches": {"constraints": {"*up": {"axis": "n"}}, "microbatches": 4},
    "own rows": {"batch": "local"},
    "own rows in 2 microbatches": {"batch": "local", "microbatches": 2},
    "stages": {"stages": 2, "microbatches": 4},
    "own rows in stages": {"stages": 2, "microbatches": 2, "batch": "local"},
    "seeded apart": {"constraints": {"*": {"axis": "b"}}},
}  # fmt: skip


def alike(how: str, random: str) -> tuple[list[float], list[float], bool]:
    """Losses of a plan, eager mode's, and whether torch's generator stands where it does there.

    On four ranks what cuts something cuts it over the second axis of 2 x 2.
    """
    options, n, given = dict(HOW[how]), dist.get_world_size(), batch()
    mesh: Any = n
    if "constraints" in options:
        names, shape = (("axis",), (n,)) if n == 2 else (("data", "axis"), (2, 2))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    own = given
    if "batch" in options and "stages" not in options:
        own = tuple(x.chunk(n)[dist.get_rank()] for x in given)
    eager = Denoiser()
    torch.manual_seed(7)
    wanted = steps(eager, given)
    stands = torch.get_rng_state()
    pm = autopar.parallelize(Denoiser(), mesh, own, random=random, **options)
    torch.manual_seed(7 + (dist.get_rank() if how == "seeded apart" else 0))
    losses = steps(pm, own, "microbatches" in options)
    return losses, wanted, torch.equal(torch.get_rng_state(), stands)


def share_alike(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a == b).double().mean())


def apart(kind: str) -> dict[str, float]:
    """What share of numbers is alike: of two modules, of a module and its copy, of two calls, of copies of training and
    eval, after the same seed."""
    x, mesh = torch.ones(8, 64), init_device_mesh("cpu", (2,), mesh_dim_names=("axis",))
    models = [globals()[kind]() for _ in range(2)]
    for model in models:
        nn.init.eye_(model.up.weight)
    torch.manual_seed(1)
    options: Any = {"constraints": {"up": {"axis": "b"}}}
    a, b = (autopar.parallelize(model, mesh, (x,), **options) for model in models)

    def call(pm: Any) -> torch.Tensor:
        return pm(x).detach().clone()

    def seeded(by: Callable[[], Any], pm: Any) -> torch.Tensor:
        by()
        return call(pm)

    copied = copy.deepcopy(a)
    first, second, of_copy, again = call(a), call(b), call(copied), call(a)
    state = torch.get_rng_state()
    found = {"modules": share_alike(first, second), "copy": share_alike(first, of_copy),
             "calls": share_alike(first, again)}  # fmt: skip
    for name, by in (("manual_seed", lambda: torch.manual_seed(3)), ("set", lambda: torch.set_rng_state(state))):
        found[name] = share_alike(seeded(by, a), seeded(by, a))
        found[f"{name}, copy"] = share_alike(seeded(by, a), seeded(by, copied))
    torch.manual_seed(5)
    before = call(a), call(a)
    torch.manual_seed(5)
    between = [call(a)]
    with torch.random.fork_rng():
        torch.manual_seed(9)
        call(a)
    between.append(call(a))
    found["fork_rng"] = share_alike(torch.cat(before), torch.cat(between))
    a.eval()
    found["eval"] = share_alike(call(a), call(a))
    return found


def resumed(path: str) -> tuple[list[float], list[float]]:
    """Four steps in two microbatches, and the last two again, resumed in four by another process's module."""
    import torch.distributed.checkpoint as dcp

    mesh, given = init_device_mesh("cpu", (2,), mesh_dim_names=("axis",)), batch()
    torch.manual_seed(3)
    pm = autopar.parallelize(Denoiser(), mesh, given, **HOW["2 microbatches"])
    for _ in range(2):
        pm.train_step(*given)
    pm.zero_grad()
    dcp.save({"model": pm.state_dict()}, checkpoint_id=str(Path(path) / "saved"))
    went_on = [float(pm.train_step(*given)) for _ in range(2)]
    torch.manual_seed(100)
    later = autopar.parallelize(Denoiser(), mesh, given, **HOW["4 microbatches"])
    state = {"model": later.state_dict()}
    dcp.load(state, checkpoint_id=str(Path(path) / "saved"))
    later.load_state_dict(state["model"])
    return went_on, [float(later.train_step(*given)) for _ in range(2)]


def taken_back() -> float:
    """What share of noise is alike where a module takes its own weights of before back, and goes on."""
    x, mesh = torch.ones(8, 64), init_device_mesh("cpu", (2,), mesh_dim_names=("axis",))
    torch.manual_seed(1)
    pm = autopar.parallelize(Noise(), mesh, (x,), constraints={"up": {"axis": "b"}})
    before = {name: value.clone() for name, value in pm.state_dict().items()}
    first = pm(x).detach().clone()
    pm.load_state_dict(before)
    return share_alike(first, pm(x).detach())


def refused() -> list[str]:
    """What is said of a program that torch's numbers do not go with."""
    mesh, given = init_device_mesh("cpu", (2,), mesh_dim_names=("axis",)), batch()
    pm = autopar.parallelize(Denoiser(), mesh, given, random="torch")
    return [said(pm.compile), said(lambda: autopar.GraphedStep(pm, *given)),
            said(lambda: autopar.parallelize(Denoiser(), mesh, given, random="torch", compile=True)),
            said(lambda: autopar.parallelize(Denoiser(), mesh, given, random="numpy"))]  # fmt: skip
