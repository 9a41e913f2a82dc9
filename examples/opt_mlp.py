"""The MLP block of OPT-125M (768 -> 3072 -> 768) on two ranks: the first layer cut by columns, the second by rows.

The block then needs exactly one all-reduce forward. Output, gradients and weights after optimizer steps equal those of
one device; the time of each collective is printed. ``python examples/opt_mlp.py``
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.profiling.collective_seconds import time_collectives

BATCH, TOKENS, HIDDEN, FFN, STEPS = 2, 128, 768, 3072, 3


class Block(nn.Module):
    """Two linear layers with a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b s h] -> [b s h]
        return self.fc2(torch.relu(self.fc1(x)))


def main() -> None:
    torch.manual_seed(0)
    block = Block().double()  # in float32 the order of sums alone makes a difference above 1e-6
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64)
    target = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64)
    one = copy.deepcopy(block)
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    # n and k are the output and input features of a linear layer: the letters of its rule
    pins = {"fc1": {"tensor": "n"}, "fc2": {"tensor": "k"}}
    pm = autopar.parallelize(block, mesh, x, constraints=pins)
    show = print if dist.get_rank() == 0 else lambda *args: None
    show(pm.program.code)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (pm, one))
    for step in range(STEPS):
        y, wanted = pm(x), one(x)
        difference = (y - wanted).norm().item()
        nn.functional.mse_loss(y, target).backward()
        nn.functional.mse_loss(wanted, target).backward()
        for name, parameter in one.named_parameters():
            gradient = pm.get_parameter(name).grad.full_tensor()
            assert torch.allclose(gradient, parameter.grad, rtol=0, atol=1e-12), name
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in one.named_parameters():
            weight = pm.get_parameter(name).full_tensor()
            assert torch.allclose(weight, parameter, rtol=0, atol=1e-9), name
        show(f"step {step}: |activations - one device| = {difference:.2e}, gradients and weights equal")
        assert difference < 1e-6
    forward = time_collectives(lambda: pm(x))
    both = time_collectives(lambda: nn.functional.mse_loss(pm(x), target).backward())
    for title, times in (("forward", forward), ("forward and backward", both)):
        show(f"collectives, {title}:")
        for t in times:
            show(f"  {t.name:15} {t.shapes:15} {t.seconds * 1e3:7.2f} ms")
    assert [t.name for t in forward] == ["all_reduce"], forward


if __name__ == "__main__":
    autopar.run_local(main, 2)
