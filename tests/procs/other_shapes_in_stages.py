"""What one rank does in the tests of pipelines that are called with other shapes than those of ``parallelize``."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
import torch.distributed as dist
from procs.habits import difference, said
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import swa_utils

import autopar

CUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"stages": 2, "cuts": ["blocks.2"], "schedule": "1f1b"},
    "interleaved": {"stages": 2, "cuts": ["blocks.1", "blocks.2", "blocks.3"], "schedule": "interleaved-1f1b"},
}
STEPS = [(8, 6), (5, 6), (8, 6), (5, 6), (8, 9), (1, 6), (7, 6), (20, 6)]
"""Rows and length of each step's batch; four microbatches of two rows were planned."""
CAPTURES = [0, 1, 1, 1, 2, 2, 2, 2]
"""How often the model was captured again by then: for one row, and for the length 9."""


class Tower(nn.Module):
    """Blocks between a tied embedding and head, with a skip past all of them and a buffer that each forward changes."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4)
        )
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("places", torch.randn(32, 8))
        self.double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.training:
            with torch.no_grad():
                self.seen.add_(x.shape[0])
        first = h = self.embed(x) + self.places[: x.shape[1]]
        for block in self.blocks:
            h = h + block(h)
        out = self.head(h + first)
        if labels is None:
            return out
        return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten()), out


def batch(rows: int, length: int, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and labels, of which some do not count: none of the first two rows, if there are more."""
    generator = torch.Generator().manual_seed(1000 * number + 10 * rows + length)
    words = torch.randint(0, 30, (rows, length + 1), generator=generator)
    labels = words[:, 1:].clone()
    labels[-1, :2] = -100
    if rows > 2:
        labels[:2] = -100
    return words[:, :-1], labels


def pair(cut: str = "1f1b", tied: bool = True, **options: Any) -> tuple[Any, Tower]:
    """A model in stages, and the same on one device; the first one's original is gone."""
    model = Tower(tied)
    alone = copy.deepcopy(model)
    options = {"microbatches": 4, **CUTS[cut], **options}
    pm = autopar.parallelize(model, dist.get_world_size(), batch(8, 6), **options)
    del model
    gc.collect()
    return pm, alone


def epochs(cut: str, tied: bool) -> tuple[float, list[int]]:
    """Steps of AdamW with batches of several sizes, then validation with others: the worst difference, captures."""
    pm, alone = pair(cut, tied)
    before = list(pm.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (pm, alone)]
    worst, captures = 0.0, []
    for i, (rows, length) in enumerate(STEPS):
        words, labels = batch(rows, length, i)
        loss = pm.train_step(words, labels)
        wanted = alone(words, labels)[0]
        wanted.backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        worst = max(worst, difference(loss, wanted.detach()), difference(pm.clip_grad_norm_(1.0), norm))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        captures.append(pm._autopar.programs.captures)
    assert all(a is b for a, b in zip(before, pm.parameters(), strict=True))
    for m in (pm, alone):
        m.eval()
    for rows, length in ((11, 7), (8, 6)):
        words, labels = batch(rows, length)
        with torch.no_grad():
            loss, out = alone(words, labels)
            worst = max(worst, *(difference(a, b) for a, b in zip(pm(words, labels), (loss, out), strict=True)))
            worst = max(worst, difference(pm.evaluate(words, labels), loss), difference(pm(words), out))
    have, wanted_state = autopar.full_state_dict(pm, all_ranks=True), alone.state_dict()
    return max(worst, *(difference(have[name], value) for name, value in wanted_state.items())), captures


def averaged() -> float:
    """Averages of the weights, and a copy that trains on by itself: both take batches of any size."""
    pm, alone = pair()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (pm, alone)]
    averages = [swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)) for m in (pm, alone)]

    def both(mine: Any, other: nn.Module, *data: torch.Tensor) -> float:
        wanted = other(*data)[0]
        wanted.backward()
        return difference(mine.train_step(*data), wanted.detach())

    worst = 0.0
    for number, rows in enumerate((8, 5, 8)):
        worst = max(worst, both(pm, alone, *batch(rows, 6, number)))
        for optimizer, average, m in zip(optimizers, averages, (pm, alone), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(m)
    words, labels = batch(7, 6)
    with torch.no_grad():
        outputs = zip(*(average.eval()(words, labels) for average in averages), strict=True)
        worst = max(worst, *(difference(a, b) for a, b in outputs))
    twins = [copy.deepcopy(m) for m in (pm, alone)]
    others = [torch.optim.SGD(m.parameters(), lr=0.5) for m in twins]
    for number in range(2):
        worst = max(worst, both(*twins, *batch(7, 6, number)))
        for optimizer in others:
            optimizer.step()
    return max(worst, both(pm, alone, words, labels))


def of_inputs() -> float:
    """A layer in front gets its gradient from both runs of a batch that microbatches do not divide."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    front = nn.Linear(3, 4).double()
    alone, alone_front = copy.deepcopy(model), copy.deepcopy(front)
    data = torch.randn(7, 3, dtype=torch.float64)
    example = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    pm = autopar.parallelize(
        model, 2, example, loss_fn=lambda out: out.square().mean(), stages=2, cuts=["2"], microbatches=4
    )
    x, alone_x = front(data), alone_front(data)
    loss = pm.train_step(x)
    wanted = alone(alone_x).square().mean()
    wanted.backward()
    assert front.weight.grad is not None and alone_front.weight.grad is not None
    return max(
        difference(loss, wanted.detach()), difference(front.weight.grad, alone_front.weight.grad),
        *(difference(p.grad.full_tensor(), alone.get_parameter(n).grad) for n, p in pm.named_parameters()),
    )  # fmt: skip


def refused() -> list[str]:
    """Calls that no capture mends, and that the pipeline goes on."""
    pm, alone = pair()
    words, labels = batch(5, 6)
    fixed = pair(shapes="fixed")[0]
    texts = [
        said(lambda: pm.train_step(words.double(), labels)), said(lambda: pm.train_step(words)),
        said(lambda: pm.train_step(words, labels[:3])), said(lambda: fixed.train_step(words, labels)),
    ]  # fmt: skip
    assert difference(pm.train_step(words, labels), alone(words, labels)[0].detach()) < 1e-9
    assert difference(fixed.train_step(*batch(8, 6)), alone(*batch(8, 6))[0].detach()) < 1e-9
    return texts


def alone_with_it() -> str:
    """Only rank 1 has a smaller batch."""
    pm, _ = pair()
    pm.train_step(*batch(8, 6))
    pm.train_step(*batch(8 - 2 * dist.get_rank(), 6))
    return "no error"


def own(batch: tuple[torch.Tensor, ...], parts: int) -> tuple[torch.Tensor, ...]:
    """This rank's rows: those of the nth ranks of both groups are the same."""
    place = dist.get_rank() % (dist.get_world_size() // 2) * parts // (dist.get_world_size() // 2)
    return tuple(x.chunk(parts)[place] for x in batch)


def pair_of_own_rows(cut: str, mesh: str) -> tuple[Any, Tower]:
    """A model in two stages on meshes of sizes such as ``1x2``, of which every rank has its own rows, and it alone."""
    model = Tower()
    alone = copy.deepcopy(model)
    options = {**CUTS[cut], "microbatches": 2, "stages": None}
    shape = (2, *(int(n) for n in mesh.split("x")))
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipe", "data", "tensor")[: len(shape)])
    example = own(batch(8, 6), dist.get_world_size() // 2)
    return autopar.parallelize(model, device_mesh, example, batch="local", **options), alone


def local_batch(cut: str, mesh: str) -> float:
    """Every rank is called with its own rows, of which some labels are ignored; then with fewer of them."""
    parts = dist.get_world_size() // 2
    pm, alone = pair_of_own_rows(cut, mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (pm, alone)]
    worst = 0.0
    for number, rows in enumerate((8, 8, 4, 3 * parts, 8)):
        words, labels = batch(rows, 6, number)
        wanted = alone(words, labels)[0]
        wanted.backward()
        loss = pm.train_step(*own((words, labels), parts), optimizer=optimizers[0])
        optimizers[1].step()
        optimizers[1].zero_grad()
        worst = max(worst, difference(loss, wanted.detach()))
    for m in (pm, alone):
        m.eval()
    words, labels = batch(5 * parts, 7)
    with torch.no_grad():
        loss, out = pm(*own((words, labels), parts))
        wanted, wanted_out = alone(words, labels)
        worst = max(worst, difference(loss, wanted), difference(out, own((wanted_out,), parts)[0]))
    drawn = list(pm.sampler(range(12), shuffle=False))
    assert drawn == list(range(12))[dist.get_rank() % parts :: parts]
    have, state = autopar.full_state_dict(pm, all_ranks=True), alone.state_dict()
    return max(worst, *(difference(have[name], value) for name, value in state.items()))


UNEQUAL = [(4, 4), (4, 3), (1, 4), (2, 9), (4, 4)]
"""Rows of the two parts of the batch in each step: with as many as planned, fewer, hardly any, more than planned."""


def unequal_rows(cut: str) -> float:
    """Parts of a batch have not equally many rows, of which some labels are ignored (in one step all of a part's): the
    numbers of one device with all rows."""
    pm, alone = pair_of_own_rows(cut, "2")
    place = dist.get_rank() % 2
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (pm, alone)]
    worst = 0.0
    for number, counts in enumerate(UNEQUAL):
        words, labels = batch(sum(counts), 6, number)
        wanted = alone(words, labels)[0]
        wanted.backward()
        loss = pm.train_step(*(x.split(counts)[place] for x in (words, labels)))
        worst = max(worst, difference(loss, wanted.detach()))
        mine = ((n, p.grad) for n, p in pm.named_parameters() if p.grad is not None)
        worst = max(worst, *(difference(grad.full_tensor(), alone.get_parameter(n).grad) for n, grad in mine))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for m in (pm, alone):
        m.eval()
    with torch.no_grad():
        for counts in UNEQUAL[1:4]:
            words, labels = batch(sum(counts), 6)
            mine = tuple(x.split(counts)[place] for x in (words, labels))
            (loss, out), (wanted, wanted_out) = pm(*mine), alone(words, labels)
            worst = max(worst, difference(loss, wanted), difference(out, wanted_out.split(counts)[place]))
            worst = max(worst, difference(pm.evaluate(*mine), wanted))
    have, state = autopar.full_state_dict(pm, all_ranks=True), alone.state_dict()
    return max(worst, *(difference(have[name], value) for name, value in state.items()))


def unequal_rows_at_a_place() -> list[str]:
    """Ranks 1 and 3, which are to have the same rows, have not equally many; rows of other lengths; then a step."""
    pm, alone = pair_of_own_rows("1f1b", "2")
    rank = dist.get_rank()
    words, labels = batch(8, 6)
    texts = [said(lambda: pm.train_step(*(x[: 3 if rank == 3 else 4] for x in (words, labels))))]
    words_longer, labels_longer = batch(4 - rank % 2, 6 + rank % 2)
    texts.append(said(lambda: pm.train_step(words_longer, labels_longer)))
    assert difference(pm.train_step(*own((words, labels), 2)), alone(words, labels)[0].detach()) < 1e-9
    return texts


def other_rows_at_a_place() -> list[str]:
    """Ranks 1 and 3, which are to have the same rows, have not; and a number of stages that is not given."""
    parts = dist.get_world_size() // 2
    pm = autopar.parallelize(Tower(), 4, own(batch(8, 6), parts), batch="local", **{**CUTS["1f1b"], "microbatches": 2})
    words, labels = own(batch(8, 6), parts)
    texts = [said(lambda: pm.train_step(words.roll(int(dist.get_rank() == 3), 0), labels))]
    texts.append(said(lambda: autopar.parallelize(Tower(), 4, batch(8, 6), batch="local", stages="auto")))
    return texts
