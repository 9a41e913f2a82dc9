"""A model with numbers that neither NCCL nor gloo sends as they are: complex ones, and integers of 16 bits."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from procs.cases import whole
from procs.habits import difference

import autopar

HOW: dict[str, dict[str, Any]] = {
    "rows": {"constraints": {"*": {"data": "b"}}, "params": {"*": "I"}},
    "pieces": {"params": {"*": "S0 use"}},
    "stages": {"stages": 2, "schedule": "1f1b", "microbatches": 2},
}


class Turning(torch.nn.Module):
    """Pairs of features turned by angles that it keeps, and by ones that it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.learnt = torch.nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.register_buffer("angles", torch.polar(torch.ones(4), torch.rand(4)))
        self.register_buffer("steps", torch.arange(8, dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(self.up(x).unflatten(-1, (4, 2)))
        y = torch.view_as_real(pairs * self.angles * self.learnt).flatten(1)
        return (self.down(y) * self.steps).square().mean()


def trains(how: str, folder: str) -> dict[str, float]:
    """Worst differences to one device of the loss and gradients of a step, and of what is saved and loaded again."""
    torch.manual_seed(0)
    model, x = Turning(), torch.randn(8, 8)
    eager = copy.deepcopy(model)
    if dist.get_rank():
        with torch.no_grad():
            for value in (*model.parameters(), model.angles, model.steps):
                value.zero_()  # rank 0's values count
    pm: Any = autopar.parallelize(model, dist.get_world_size(), x, **HOW[how])
    values = dict(eager.state_dict())

    def state_differs() -> float:
        state = autopar.full_state_dict(pm, all_ranks=True)
        return max(difference(torch.view_as_real(a) if a.is_complex() else a, torch.view_as_real(b) if b.is_complex()
                   else b) for a, b in ((state[name].cpu(), value) for name, value in values.items()))  # fmt: skip

    found = {"spread": state_differs()}
    loss, wanted = pm.train_step(x), eager(x)
    wanted.backward()
    of_eager = dict(eager.named_parameters())
    found["loss"] = difference(loss.detach(), wanted.detach())
    for name, param in pm.named_parameters():
        grad, same = whole(param.grad), of_eager[name].grad
        assert same is not None
        found[name] = difference(*(torch.view_as_real(g) if g.is_complex() else g for g in (grad, same)))
    autopar.load_full_state_dict(pm, {n: v * 2 for n, v in values.items()} if not dist.get_rank() else None)
    values = {n: v * 2 for n, v in values.items()}
    found["loaded"] = state_differs()
    checkpoint = autopar.Checkpoint(folder, model=pm)
    checkpoint.save(1)
    autopar.load_full_state_dict(pm, {n: v * 3 for n, v in values.items()})
    assert checkpoint.load() == 1
    found["checkpoint"] = state_differs()
    return found


def all_train(folder: str) -> dict[str, dict[str, float]]:
    return {how: trains(how, f"{folder}/{how}") for how in HOW}
