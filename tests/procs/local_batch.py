"""What one rank does in the tests of batches of which every rank has its own rows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from procs.habits import difference, said
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import autopar

CUTS: dict[str, dict[str, Any]] = {
    "data": {"constraints": {"*up": {"data": "b"}}},
    "zero": {"constraints": {"*up": {"data": "b"}}, "params": {"*.weight": "S0 use"}},
    "tensor": {"constraints": {"*up": {"data": "n"}, "*down": {"data": "k"}}},
}


class Net(nn.Module):
    """Batch statistics and ignored labels: both have a meaning over the whole batch alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.Linear(12, 5)
        self.double()

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        out = self.down(self.norm(self.up(x)).relu())
        return out if y is None else (F.cross_entropy(out, y, ignore_index=0), out)


def data(rows: int, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rows)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 5, (rows,), generator=generator)


def own(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """This rank's rows."""
    return tuple(x.chunk(dist.get_world_size())[dist.get_rank()] for x in batch)


def spread(model: nn.Module, example: Any, mesh: tuple[int, ...] = (2,), **options: Any) -> Any:
    names = ("data", "tensor")[: len(mesh)]
    return autopar.parallelize(
        model, init_device_mesh("cpu", mesh, mesh_dim_names=names), example, batch="local", **options
    )


def worst_gradient(pm: Any, alone: nn.Module) -> float:
    return max(difference(p.grad.full_tensor(), alone.get_parameter(n).grad) for n, p in pm.named_parameters())


def trained(cut: str, mesh: tuple[int, ...] = (2,)) -> float:
    """Losses, this rank's outputs, gradients and buffers, with batches of two sizes."""
    ranks = dist.get_world_size()
    return as_one_process(cut, mesh, [[rows // ranks] * ranks for rows in (8, 8, 16, 8)])


def as_one_process(cut: str, mesh: tuple[int, ...], rows_of_ranks: Sequence[Sequence[int]]) -> float:
    """How far losses, outputs, gradients and buffers are from those of one process with the rows of all ranks, batch by
    batch; then outputs in eval mode."""
    model, place = Net(), dist.get_rank()
    alone, worst = copy.deepcopy(model), 0.0
    pm = spread(model, own(data(8)), mesh, **CUTS[cut])
    for number, counts in enumerate(rows_of_ranks):
        whole = data(sum(counts), number)
        mine = tuple(x.split(counts)[place] for x in whole)
        (loss, out), (wanted, wanted_out) = pm(*mine), alone(*whole)
        worst = max(worst, difference(loss.detach(), wanted.detach()))
        worst = max(worst, difference(out.detach(), wanted_out.detach().split(counts)[place]))
        loss.backward()
        wanted.backward()
    worst = max(worst, worst_gradient(pm, alone))
    pm.eval()
    alone.eval()
    with torch.no_grad():
        return max(worst, difference(pm(mine[0]), alone(whole[0]).split(counts)[place]))


def outside(cut: str, mesh: tuple[int, ...] = (2,)) -> float:
    """A loss that the script computes of its own rows: gradients of the mean of the ranks' losses, as with DDP."""
    model = Net()
    alone = copy.deepcopy(model)
    x, y = data(8)
    pm = spread(model, own((x,))[0], mesh, **CUTS[cut])
    F.cross_entropy(pm(own((x,))[0]), own((y,))[0]).backward()
    ranks = dist.get_world_size()
    outs, labels = alone(x).chunk(ranks), y.chunk(ranks)
    losses = [F.cross_entropy(o, t) for o, t in zip(outs, labels, strict=True)]
    torch.stack(losses).mean().backward()
    return worst_gradient(pm, alone)


def in_parts(cut: str) -> float:
    """Microbatches of rows of every rank."""
    model = Net()
    model.norm = nn.LayerNorm(12).double()  # type: ignore[assignment]
    alone = copy.deepcopy(model)
    x, y = data(16)
    y[9:15] = 0  # ignored, and not as many in each microbatch
    pm = spread(model, own(data(8)), **CUTS[cut])
    worst = 0.0
    for count in (None, 2, 4):
        pm.zero_grad()
        alone.zero_grad()
        mine, theirs = pm.train_step(*own((x, y)), microbatches=count), alone(x, y)[0]
        theirs.backward()
        worst = max(worst, difference(mine, theirs.detach()), worst_gradient(pm, alone))
    return worst


def loaded() -> tuple[list[int], list[int], int, str, int]:
    """Rows that the sampler and the loader of each rank draw, in two epochs; of another loader what is said."""
    dataset = TensorDataset(torch.arange(20))
    pm = spread(Net(), own(data(8)), **CUTS["data"])
    sampler = pm.sampler(dataset, seed=3)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    loader = pm.shard(DataLoader(dataset, 8, shuffle=True))
    drawn = [int(v) for (rows,) in loader for v in rows]
    text = said(lambda: pm.shard(DataLoader(dataset, batch_sampler=[[0, 1], [2, 3]])))
    everywhere = autopar.parallelize(Net(), 2, data(8))
    whole = len(next(iter(everywhere.shard(DataLoader(dataset, 8, shuffle=True))))[0])
    return first, drawn, next(iter(loader))[0].shape[0], text, whole


def uneven(cut: str, mesh: tuple[int, ...] = (2,)) -> float:
    """Ranks have other numbers of rows than the others: the numbers of one process with all of them, with batch
    statistics and ignored labels; then as many again; then in eval mode."""
    ranks = dist.get_world_size()
    some_fewer, each_other = [4 - r % 2 for r in range(ranks)], [1 + r for r in range(ranks)]
    return as_one_process(cut, mesh, ([4] * ranks, some_fewer, [4] * ranks, each_other))


def uneven_outside(cut: str) -> float:
    """A loss that the script computes of a rank's own rows counts by their part of all; inputs get their gradients."""
    model = Net()
    alone = copy.deepcopy(model)
    x, y = data(8)
    counts = [5, 2]
    pm = spread(model, own((x.clone().requires_grad_(),))[0].detach().requires_grad_(), **CUTS[cut])
    place = dist.get_rank()
    mine = x[:7].split(counts)[place].clone().requires_grad_()
    F.cross_entropy(pm(mine), y[:7].split(counts)[place]).backward()
    whole = x[:7].clone().requires_grad_()
    F.cross_entropy(alone(whole), y[:7]).backward()
    assert mine.grad is not None and whole.grad is not None
    return max(worst_gradient(pm, alone), difference(mine.grad, whole.grad.split(counts)[place]))


def uneven_in_parts(cut: str) -> float:
    """Steps in microbatches, of rows that divide neither among the ranks nor into microbatches."""
    model = Net()
    model.norm = nn.LayerNorm(12).double()  # type: ignore[assignment]
    alone = copy.deepcopy(model)
    pm = spread(model, own(data(8)), **CUTS[cut])
    worst = 0.0
    place = dist.get_rank()
    for counts, count in (([4, 4], None), ([8, 5], None), ([7, 7], None), ([7, 7], 2), ([8, 8], None)):
        x, y = data(sum(counts))
        y[2:5] = 0  # ignored, and not as many in each microbatch
        pm.zero_grad()
        alone.zero_grad()
        mine = tuple(t.split(counts)[place] for t in (x, y))
        loss, theirs = pm.train_step(*mine, microbatches=count), alone(x, y)[0]
        theirs.backward()
        worst = max(worst, difference(loss, theirs.detach()), worst_gradient(pm, alone))
    return worst


def lengths_differ() -> str:
    """Rank 1 has other columns, too: an error on both ranks; then the training goes on."""
    pm = spread(nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 5)).double(), own(data(8))[0])
    rows = 4 - dist.get_rank()
    text = said(lambda: pm(torch.zeros(rows, 6 + dist.get_rank(), dtype=torch.float64)))
    pm(own(data(8))[0]).sum().backward()
    return text


def unequal() -> str:
    """Rank 1 has fewer rows, and other shapes are not followed."""
    pm = spread(Net(), own(data(8)), **CUTS["data"], shapes="fixed")
    pm(*own(data(8)))[0].backward()
    pm(*data(4 - dist.get_rank()))[0].backward()
    return "no error"


class Pairs(nn.Module):
    """Rows that are compared with others of the same rank; or classes weighed by a table, as many as rows."""

    def __init__(self, indexed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.indexed = nn.Linear(6, 4).double(), indexed

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        return (h - h[other]).square().mean() if self.indexed else (h * other).square().mean()


def indexed() -> str:
    """Indices into a rank's own rows."""
    x, partner = torch.randn(4, 6).double(), torch.tensor([1, 0, 3, 2])
    return said(lambda: autopar.parallelize(Pairs(True), dist.get_world_size(), (x, partner), batch="local"))


def table() -> float:
    """A table of as many entries as a rank has rows, the same on all ranks."""
    generator = torch.Generator().manual_seed(7)
    batch, weights = torch.randn(8, 6, generator=generator).double(), torch.randn(4, generator=generator).double()
    model = Pairs(False)
    alone = copy.deepcopy(model)
    mine = batch[4 * dist.get_rank() :][:4]
    pm = autopar.parallelize(model, dist.get_world_size(), (mine, torch.ones(4).double()), batch="local")
    loss, wanted = pm(mine, weights), alone(batch, weights)
    loss.backward()
    wanted.backward()
    return max(abs(float(loss.detach() - wanted.detach())), worst_gradient(pm, alone))
