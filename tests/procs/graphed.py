"""What one rank does in the tests of recorded steps."""

from __future__ import annotations

import copy

import torch
from procs.cases import whole
from procs.compiled import batch, spread
from procs.habits import difference, said
from recorded_kernels import RecordedKernels
from torch import nn

import autopar


def trained(cut: str | None) -> float:
    """The worst difference of steps of AdamW, some with gradients of two batches, recorded and not recorded."""
    pm = spread(cut)
    plain = copy.deepcopy(pm)
    step = autopar.GraphedStep(pm, *batch(8), recorder=RecordedKernels())
    assert difference(pm.blocks[0].norm.running_mean, plain.blocks[0].norm.running_mean) == 0
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (pm, plain)]
    worst = 0.0
    for i in range(4):
        for m, optimizer, run in zip((pm, plain), optimizers, (step, plain.train_step), strict=True):
            losses = []
            for k in range(1 + i % 2):
                x, y = batch(8)
                torch.manual_seed(10 * i + k)
                losses.append(run(x + i + k, y.roll(i)))
            m.losses = torch.stack(losses)
            optimizer.step()
            optimizer.zero_grad(set_to_none=i != 1)
        worst = max(worst, difference(pm.losses, plain.losses))
    pairs = zip([*pm.parameters(), *pm.buffers()], [*plain.parameters(), *plain.buffers()], strict=True)
    return max(worst, *(difference(whole(a), whole(b)) for a, b in pairs))


def refused() -> list[str]:
    """What recorded steps say to what they cannot do."""
    pm = spread(None)
    step = autopar.GraphedStep(pm, *batch(8), recorder=RecordedKernels())
    texts = [said(lambda: autopar.GraphedStep(pm, *batch(8))), said(lambda: step(*batch(5)))]
    pm.head.weight.requires_grad_(False)
    texts.append(said(lambda: step(*batch(8))))
    pm.head.weight.requires_grad_(True)
    step(*batch(8))
    pm.head.weight.register_hook(lambda grad: grad)
    texts.append(said(lambda: autopar.GraphedStep(pm, *batch(8), recorder=RecordedKernels())))

    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            return (out if x.sum() > -1e9 else -out).sum()

    branching = autopar.parallelize(Branches(6, 5), 1, batch()[0].float())
    texts.append(said(lambda: autopar.GraphedStep(branching, batch()[0].float(), recorder=RecordedKernels())))
    return texts


def on_ranks() -> list[float]:
    return [trained(cut) for cut in ("tensor", "data")]
