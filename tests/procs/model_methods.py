"""What one rank does in the tests of the model's methods, called on its parallel module."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from procs.habits import difference, said
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


class Speaker(nn.Module):
    """As of nanoGPT: counts its parameters, generates, and some methods that no parallel module can honour."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop, self.head = nn.Embedding(20, 8), nn.Dropout(0.5), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.width = 8
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        out = self.head(self.drop(self.embed(x))) * self.scale
        return out if y is None else nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())

    def get_num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def generate(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            x = torch.cat([x, self(x)[:, -1].argmax(-1, keepdim=True)], 1)
        return x

    def loss_twice(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 2 * self(x, y)

    @torch.no_grad()
    def shrink(self) -> None:
        self.embed.weight.mul_(0.5)

    def widen(self) -> None:
        self.more = nn.Linear(8, 8)

    def configure_optimizers(self, rate: float) -> torch.optim.Optimizer:
        named = dict(self.named_parameters())
        spared = [p for p in named.values() if getattr(p, "_no_weight_decay", False)]
        decayed = [p for p in named.values() if not getattr(p, "_no_weight_decay", False)]
        common = {"lr": rate, "momentum": 0.9}
        return torch.optim.SGD([{"params": decayed, "weight_decay": 0.1, **common}, {"params": spared, **common}])

    def freeze(self) -> None:
        self.embed.requires_grad_(False)

    @torch.no_grad()
    def stream(self, x: torch.Tensor) -> Iterator[float]:
        for i in range(3):
            yield self(x)[:, i].sum().item()

    def later(self, x: torch.Tensor) -> Any:
        return lambda: self(x)

    def anneal(self) -> None:
        self.width = self.width // 2

    def silence(self) -> None:
        self.embed.weight.register_hook(lambda grad: grad * 0)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, 20, (rows, 6), generator=torch.Generator().manual_seed(rows))
    return words[:, :-1], words[:, 1:]


def spread(model: nn.Module, how: str) -> Any:
    if how == "pipeline":
        return autopar.parallelize(model, 2, batch(), stages=2, schedule="1f1b", microbatches=2, cuts=["head"])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    params = {"*": "S0 use"} if how == "zero" else {}
    return autopar.parallelize(model, mesh, batch(), params=params, constraints={"*head": {"data": "n"}})


def called(how: str, keeps: bool) -> list[Any]:
    """Methods after a step of training: the same as on one device."""
    model = Speaker()
    alone = copy.deepcopy(model)
    pm = spread(model, how)
    if not keeps:
        del model
        gc.collect()
    pm.eval()
    alone.eval()
    results: list[Any] = []
    for m in (pm, alone):
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(1.5)
        results += [m.get_num_params(), m.generate(batch()[0], 5), m.width]
    assert pm.module is pm
    with torch.no_grad():
        results += [pm.loss_twice(*batch()), alone.loss_twice(*batch())]
    return results


def parts_called_alone(how: str) -> tuple[float, list[str]]:
    """Parts, of this stage and of others, with and without gradients: the same on every rank."""
    model = Speaker()
    alone = copy.deepcopy(model)
    pm = spread(model, how)
    hidden = alone.embed(batch()[0]).detach()
    with torch.no_grad():
        worst = max(difference(pm.embed(batch()[0]), hidden), difference(pm.head(hidden), alone.head(hidden)))
    return worst, [said(lambda: pm.embed(batch()[0])), said(lambda: pm.head(hidden))]


def refused(keeps: bool) -> list[str]:
    """What cannot be honoured, and that the module goes on."""
    model = Speaker()
    pm = spread(model, "zero")
    kept = [model] if keeps else []
    del model
    gc.collect()
    x, y = batch()
    texts = [
        said(lambda: pm.loss_twice(x, y)), said(lambda: pm.shrink()), said(lambda: pm.get_input_embeddings()),
        said(lambda: pm.widen()), said(lambda: pm.later(x)), said(lambda: pm.silence()), said(lambda: pm.anneal()),
    ]  # fmt: skip
    if keeps:
        assert pm.width == 4  # the model's own attribute
    else:
        pm(x, y).backward()
    kept.clear()
    return texts


def trained(how: str) -> float:
    """Steps of an optimizer that a method has made, what a method streams, and a method that freezes a part."""
    model = Speaker()
    model.drop.p = 0.0
    alone = copy.deepcopy(model)
    for m in (model, alone):  # copy.deepcopy leaves attributes of parameters out
        m.embed.weight._no_weight_decay = True
    pm = spread(model, how)
    worst, (x, y) = 0.0, batch()
    optimizers = [m.configure_optimizers(0.5) for m in (pm, alone)]
    assert all(any(p is q for q in pm.parameters()) for group in optimizers[0].param_groups for p in group["params"])
    for _ in range(3):
        losses = []
        for m, optimizer in zip((pm, alone), optimizers, strict=True):
            if how == "pipeline" and m is pm:
                loss = m.train_step(x, y)
            else:
                loss = m(x, y)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        worst = max(worst, difference(*losses))
    for m in (pm, alone):
        m.eval()
    streams = [torch.tensor(list(m.stream(x))) for m in (pm, alone)]
    worst = max(worst, difference(*streams))
    if how != "pipeline":
        pm.freeze()
        assert not pm.embed.weight.requires_grad and not pm.get_parameter("head.weight").requires_grad
    return worst


def on_one_rank(what: str) -> str:
    """Rank 0 alone calls a method, or evaluates, while rank 1 goes on training."""
    pm = spread(Speaker(), "zero")
    x, y = batch()
    pm(x, y).backward()
    if dist.get_rank() == 0:
        if what == "method":
            pm.generate(x, 2)
        elif what == "eval":
            pm.eval()
            pm(x, y)
        else:
            with torch.no_grad():
                pm(x, y)
    pm(x, y).backward()
    return "no error"
