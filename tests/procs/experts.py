"""What one rank does in the tests of routed experts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from balanced_experts import balanced
from procs.habits import weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from written_experts import LAYERS, SomeExperts
from zoo_wide import WIDE

import autopar
from autopar.errors import RunError
from autopar.lower import emit
from autopar.torch_private import TorchDispatchMode

HIDDEN = 8
Batch = tuple[tuple[Any, ...], dict[str, Any]]


class Loop(nn.Module):
    """Experts of which those without rows are passed over: the first never has any, the last only what stands out."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(HIDDEN, 16), nn.SiLU(), nn.Linear(16, HIDDEN)) for _ in range(4)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        stands_out = torch.where(tokens[:, :1] > 5, 100.0, -100.0)
        scores = self.gate(tokens) + torch.cat([stands_out - 200, stands_out * 0, stands_out * 0, stands_out], 1)
        weights, picked = scores.softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            rows, which = torch.where(picked == e)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, which, None])
        return x + out.view_as(x)


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Loop(), Loop())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layers(x), y)


def loops() -> tuple[nn.Module, list[Batch]]:
    """In the first batch the last expert has rows in the last example alone; in the second none at all."""
    torch.manual_seed(0)
    x, y, again = (torch.randn(4, 4, HIDDEN) for _ in range(3))
    x[-1, :, 0] = 10
    return Loops(), [((x, y), {}), ((again, y), {})]


def of_the_zoo(name: str) -> tuple[nn.Module, list[Batch]]:
    """With a skewed routing, so that some experts have no rows; in double precision, routers too."""
    case = WIDE[name]()
    case.model.double()
    for part in case.model.modules():
        if type(part).__name__.endswith("Router"):
            part.dtype = torch.float64
    with torch.no_grad():
        for path, param in case.model.named_parameters():
            if "router" in path or path.endswith("gate.weight"):
                param[0] *= 30
                param[1:3] *= 0.01
    return case.model, [(case.args, case.kwargs)] * 2


def balancing() -> tuple[nn.Module, list[Batch]]:
    """With losses, statistics and biases that balance the experts."""
    model, args = balanced()
    return model, [(args, {})] * 2


def written(name: str) -> tuple[nn.Module, list[Batch]]:
    """A layer as people write it; one of its experts never has rows."""
    torch.manual_seed(1)
    x, y = (torch.randn(4, 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    return LAYERS[name]().double(), [((x, y), {}), ((x.flip(0) * 2, y), {})]


def uneven() -> tuple[nn.Module, list[Batch]]:
    """Five experts, which no two ranks have equally many of."""
    torch.manual_seed(1)
    x, y = (torch.randn(4, 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    return SomeExperts(5, True).double(), [((x, y), {}), ((x.flip(0) * 2, y), {})]


PLAIN: dict[str, Callable[[], tuple[nn.Module, list[Batch]]]] = {
    "loops": loops, "balanced": balancing, "uneven": uneven,
}  # fmt: skip
WRITTEN = ("AnyOfSeveral", "Counts", "Parts", "PartsOfStacked", "GatheredMatrices")
PLAIN |= {name: partial(written, name) for name in WRITTEN}


def trained(name: str, **options: Any) -> float:
    """Largest difference of losses and weights after two steps of AdamW to one process.

    An expert without rows is not decayed, nor moved by the momentum of an earlier step: it has no gradient.
    """
    model, batches = PLAIN[name]() if name in PLAIN else of_the_zoo(name)
    alone = copy.deepcopy(model)
    devices = 2 if "stages" in options else init_device_mesh(
        "cpu", (dist.get_world_size(),), mesh_dim_names=("expert",)
    )
    pm = autopar.parallelize(model, devices, batches[0][0], example_kwargs=batches[0][1], **options)
    steps = [torch.optim.AdamW(m.parameters(), 0.05, eps=1e-3, weight_decay=0.3) for m in (pm, alone)]
    worst = 0.0
    for args, kwargs in batches:
        for optimizer in steps:
            optimizer.zero_grad()
        theirs = _loss(alone(*args, **kwargs))
        theirs.backward()
        if "stages" in options:
            mine = pm.train_step(*args, **kwargs)
        else:
            mine = _loss(pm(*args, **kwargs))
            mine.backward()
        worst = max(worst, abs(float(mine.detach()) - float(theirs.detach())))
        theirs_of = dict(alone.named_parameters())
        for path, param in pm.named_parameters():
            assert (param.grad is None) == (theirs_of[path].grad is None), f"{path} has a gradient, or has none"
        for optimizer in steps:
            optimizer.step()
    theirs_now = {name: x for name, x in alone.named_buffers() if x.is_floating_point()}
    for name, mine in pm.named_buffers():
        if name in theirs_now:
            worst = max(worst, float((_whole(mine) - theirs_now[name]).abs().max()))
    return max(worst, weights(pm, alone))


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _loss(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss  # type: ignore[no-any-return]


def all_cuts(name: str, cuts: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    return {how: trained(name, **options) for how, options in cuts.items()}


class Stack(nn.Module):
    """A product and a layer, so that gradients go on behind the experts."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.before, self.layer = nn.Linear(HIDDEN, HIDDEN), LAYERS[name]()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layer(self.before(x), y)  # type: ignore[no-any-return]


class Events(TorchDispatchMode):
    """In which order products are computed, and rows set out and are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name == "all_to_all_single" and args[0].is_floating_point():
            self.log.append("begin")
        elif name == "wait_tensor" and args[0].is_floating_point():
            self.log.append("wait")
        elif name in ("mm", "addmm"):
            self.log.append("product")
        return func(*args, **(kwargs or {}))


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for _, p in sorted(model.named_parameters()) if p.grad is not None]


def beside(name: str) -> dict[str, Any]:
    """A layer with a shared expert whose routed rows travel, with and without products beside them.

    Returns:
        what happens in a step with them (``events``), whether loss and gradients are those without to the last bit
        (``same``), and how far they are from one process (``worst``).
    """
    torch.manual_seed(2)
    model = Stack(name).double()
    x, y = (torch.randn(4, 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("expert",))
    pins = {"*expert_block*": {"expert": "travel"}}
    results, logs = [], []
    for plans in (emit.beside, lambda *_: []):
        with patch.object(emit, "beside", plans):
            pm = autopar.parallelize(copy.deepcopy(model), mesh, (x, y), constraints=pins)
        with Events() as events:
            loss = pm(x, y)
            loss.backward()
        results.append([loss, *_gradients(pm)])
        logs.append(events.log)
    theirs = model(x, y)
    theirs.backward()
    wanted = [theirs, *_gradients(model)]
    whole = [_whole(mine.detach()) for mine in results[0]]
    return {
        "events": logs,
        "same": all(torch.equal(_whole(a.detach()), _whole(b.detach())) for a, b in zip(*results, strict=True)),
        "worst": max(float((a - b).abs().max()) for a, b in zip(whole, wanted, strict=True)),
    }


def exchanged(name: str, sizes: tuple[int, ...], ways: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Any]:
    """Train and evaluate with each of the ways to exchange rows.

    Returns by way: how far losses, gradients and the loss in eval mode are from one process, and whether all numbers
    are those of the first way to the last bit.
    """
    names = ("data", "tensor")[: len(sizes)]
    results: dict[tuple[str, ...], Any] = {}
    first: list[torch.Tensor] = []
    for way in ways:
        model, batches = PLAIN[name]() if name in PLAIN else of_the_zoo(name)
        alone, (args, kwargs) = copy.deepcopy(model), batches[0]
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        pins = {"*expert_block*": dict(zip(names, way, strict=True))}
        pm = autopar.parallelize(model, mesh, args, example_kwargs=kwargs, constraints=pins)
        numbers = []
        for m in (pm, alone):
            loss = _loss(m(*args, **kwargs))
            loss.backward()
            gradients = [_whole(grad) for grad in _gradients(m)]
            m.eval()
            with torch.no_grad():
                numbers.append([loss.detach(), *gradients, _loss(m(*args, **kwargs))])
        mine, theirs = numbers
        first = first or mine
        worst = max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))
        results[way] = worst, all(map(torch.equal, mine, first))
    return results


def exceeded() -> str:
    """All rows go to one rank, where at most 1.5 times an equal share may."""
    torch.manual_seed(1)
    model = LAYERS["SharedExpert"]().double()
    x, y = (torch.randn(4, 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        x[..., 0] = 10
        model.gate.weight.zero_()
        model.gate.weight[2:, 0] = torch.tensor([3.0, 2.0])  # the last two experts of four, both of one rank
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("expert",))
    pm = autopar.parallelize(model, mesh, (x, y), constraints={"*expert_block*": {"expert": "travel@1.5"}})
    try:
        pm(x, y)
    except RunError as error:
        return str(error)
    return ""


def in_chunks() -> list[str]:
    """What happens in a step in two chunks."""
    torch.manual_seed(2)
    model = Stack("SharedExpert").double()
    x, y = (torch.randn(4, 4, HIDDEN, dtype=torch.float64) for _ in range(2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("expert",))
    pm = autopar.parallelize(model, mesh, (x, y), constraints={"*expert_block*": {"expert": "travel/2"}})
    with Events() as events:
        pm(x, y).backward()
    return events.log
