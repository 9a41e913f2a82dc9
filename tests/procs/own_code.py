"""What one rank does in the tests of a user's own backward: three steps beside eager mode."""

from __future__ import annotations

import copy
from typing import Any

import torch
from procs.habits import difference, weights
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import autopar


class Stashed(Function):
    """Keeps its tensors on ``ctx`` itself, where no saved-tensor hook sees them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.w = x, w
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.w, (grad.t() @ ctx.x) * 2


class Clipped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.01, 0.01)


class Again(Function):
    """Runs a module again in its backward, which gives the module's parameters their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(grad)
        return x.grad, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mid, self.inner, self.down = (nn.Linear(6, 6) for _ in range(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda y: torch.tanh(self.up(y)), x, use_reentrant=False)
        h.register_hook(lambda g: g / (g.norm() + 0.1))
        h = self.mid(Again.apply(Clipped.apply(h), self.inner))
        return (Stashed.apply(torch.tanh(h), self.down.weight) + self.down.bias - x).square().mean()


def trains(how: dict[str, Any], piped: bool) -> float:
    """The worst difference of losses and weights over three steps."""
    model = Net()
    truth = copy.deepcopy(model)
    g = torch.Generator().manual_seed(1)
    data = [torch.randn(8, 6, generator=g, dtype=torch.float64) for _ in range(3)]
    if piped:
        pm = autopar.parallelize(model, 2, data[0], **how)
    else:
        pm = autopar.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), data[0], **how)
    mine, theirs = torch.optim.SGD(pm.parameters(), 0.1), torch.optim.SGD(truth.parameters(), 0.1)
    worst = 0.0
    for x in data:
        wanted = truth(x)
        wanted.backward()
        theirs.step()
        theirs.zero_grad()
        loss = pm.train_step(x, optimizer=mine)
        worst = max(worst, difference(loss, wanted))
    return max(worst, weights(pm, truth))
