"""What one rank does in the tests of calls with other shapes than those of ``parallelize``."""

from __future__ import annotations

import copy
import gc
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from procs.habits import difference, said
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.variants import program_cache

CUTS: dict[str, dict[str, Any]] = {
    "batch": {"constraints": {"*up": {"data": "b"}}},
    "zero": {"constraints": {"*up": {"data": "b"}}, "params": {"*.weight": "S0 use", "*.bias": "S0 step"}},
    "tensor": {"constraints": {"*up": {"data": "n"}, "*down": {"data": "k"}}},
}
SIZES = [(8, 6), (8, 6), (5, 6), (8, 6), (5, 6), (8, 9), (1, 6), (8, 6)]
"""Rows and length of each step's batch."""


class Words(nn.Module):
    """A model whose loss depends on the labels, if there are any, with a buffer that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(30, 6), nn.LayerNorm(6)
        self.up, self.down, self.drop = nn.Linear(6, 12), nn.Linear(12, 30), nn.Dropout(0.0)
        self.register_buffer("seen", torch.zeros(()))
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, scaled: bool = False) -> Any:
        if self.training:
            with torch.no_grad():
                self.seen.add_(x.shape[0])
        out = self.down(self.drop(self.up(self.norm(self.embed(x))).relu()))
        out = out * 2 if scaled else out
        if labels is None:
            return out
        return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=0), out


def batch(rows: int, length: int, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and labels, some of which are ignored."""
    generator = torch.Generator().manual_seed(1000 * number + 10 * rows + length)
    words = torch.randint(0, 30, (rows, length + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


def spread(model: nn.Module, example: Any, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    return autopar.parallelize(model, mesh, example, **options)


def pair(cut: str, **options: Any) -> tuple[Any, Words]:
    """A model spread as ``cut`` says, and the same on one device; the first one's original is gone."""
    model = Words()
    alone = copy.deepcopy(model)
    pm = spread(model, batch(8, 6), **CUTS[cut], **options)
    del model
    gc.collect()
    return pm, alone


def worst_parameter(pm: Any, alone: nn.Module) -> float:
    have, wanted = autopar.full_state_dict(pm, all_ranks=True), alone.state_dict()
    assert have.keys() == wanted.keys()
    return max(difference(have[name], value) for name, value in wanted.items())


def worst_gradient(pm: Any, alone: nn.Module) -> float:
    return max(difference(p.grad.full_tensor(), alone.get_parameter(n).grad) for n, p in pm.named_parameters())


def epochs(cut: str, compiled: bool = False) -> tuple[float, list[int], int]:
    """Steps of AdamW with batches of several sizes: the worst difference, captures by step, kept programs."""
    pm, alone = pair(cut)
    if compiled:
        pm.compile(backend="eager")
    before = list(pm.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (pm, alone)]
    worst, counts = 0.0, []
    again = program_cache.Programs._captured_again
    with mock.patch.object(program_cache.Programs, "_captured_again", autospec=True, side_effect=again) as count:
        for i, (rows, length) in enumerate(SIZES):
            words, labels = batch(rows, length, i)
            losses = []
            for m, optimizer in zip((pm, alone), optimizers, strict=True):
                loss, out = m(words, labels=labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append((loss.detach(), out.detach()))
            worst = max(worst, *(difference(a, b) for a, b in zip(*losses, strict=True)))
            counts.append(count.call_count)
    assert all(a is b for a, b in zip(before, pm.parameters(), strict=True))
    return max(worst, worst_parameter(pm, alone)), counts, len(pm._autopar.programs.kept)


def evaluated(cut: str) -> float:
    """Training with a larger batch for validation in between, without labels, with another flag."""
    pm, alone = pair(cut)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (pm, alone)]
    worst = 0.0
    for i in range(3):
        for m, optimizer in zip((pm, alone), optimizers, strict=True):
            m.train()
            m(*batch(8, 6, i))[0].backward()
            optimizer.step()
            optimizer.zero_grad()
            m.eval()
        words, labels = batch(11, 7, i)
        with torch.no_grad():
            worst = max(worst, difference(pm(words, labels)[0], alone(words, labels)[0]))
            worst = max(worst, difference(pm(words), alone(words)))
            worst = max(worst, difference(pm(words, scaled=True), alone(words, scaled=True)))
    return max(worst, worst_parameter(pm, alone))


def accumulated(cut: str) -> float:
    """Gradients of batches of two sizes add up: backward by backward, of one sum, and in parts of uneven steps."""
    pm, alone = pair(cut)
    worst = 0.0
    for m in (pm, alone):
        for rows in (8, 5):
            m(*batch(rows, 6))[0].backward()
        (m(*batch(3, 6))[0] + m(*batch(8, 6))[0]).backward()
    worst = max(worst, worst_gradient(pm, alone))
    pm.zero_grad()
    alone.zero_grad()
    words, labels = batch(20, 6)  # 4 parts of 5 rows
    labels = labels.clamp(min=1)
    mine = pm.train_step(words, labels)
    theirs = alone(words, labels)[0]
    theirs.backward()
    worst = max(worst, difference(mine, theirs.detach()))
    return max(worst, worst_gradient(pm, alone))


def with_targets() -> float:
    """A loss function with targets: other sizes, and without targets the model's own output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4)).double()
    alone, worst = copy.deepcopy(model), 0.0

    def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
        return x, torch.randint(0, 4, (rows,), generator=generator)

    x, y = data(8)
    loss_of = nn.functional.cross_entropy
    pm = spread(model, x, loss_fn=loss_of, targets=y, constraints={"*": {"data": "b"}})
    for rows in (8, 5, 8, 3):
        x, y = data(rows)
        loss, wanted = pm(x, y), loss_of(alone(x), y)
        worst = max(worst, difference(loss.detach(), wanted.detach()))
        loss.backward()
        wanted.backward()
    pm.eval()
    alone.eval()
    worst = max(worst, difference(pm(x), alone(x).detach()))
    return max(worst, worst_gradient(pm, alone))


def copied() -> float:
    """A copy follows shapes, too (weights that are averaged are validated with other batches)."""
    pm, alone = pair("zero")
    twin = copy.deepcopy(pm)
    words, labels = batch(5, 6)
    return max(difference(m(words, labels)[0], alone(words, labels)[0]) for m in (twin, pm, twin))


def refused() -> list[str]:
    """Calls that no capture mends, and that the module goes on."""
    pm, alone = pair("batch")
    words, labels = batch(5, 6)
    fixed = pair("batch", shapes="fixed")[0]
    texts = [
        said(lambda: pm(words, labels, labels, labels)), said(lambda: pm(words.double(), labels)), said(lambda: pm()),
        said(lambda: pm(words, labels[:3])), said(lambda: fixed(words, labels)), said(lambda: fixed(words)),
    ]  # fmt: skip
    assert difference(pm(words, labels)[0], alone(words, labels)[0]) < 1e-9
    assert difference(fixed(*batch(8, 6))[0], alone(*batch(8, 6))[0]) < 1e-9
    return texts


def alone_with_it() -> str:
    """Only rank 1 has a smaller batch."""
    pm, _ = pair("batch")
    pm(*batch(8, 6))[0].backward()
    pm(*batch(8 - 3 * dist.get_rank(), 6))[0].backward()
    return "no error"
