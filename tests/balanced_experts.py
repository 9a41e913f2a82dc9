"""A layer of routed experts that balances them as papers do: by losses, statistics, and biases of the router.

Each is of the whole batch: the share of rows of an expert, the mean of its probability, its count of rows in a buffer,
and the sign by which its bias moves (DeepSeek-V3's balancing without a loss).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN, EXPERTS, OF_EACH = 8, 4, 2


class Balanced(nn.Module):
    bias: torch.Tensor
    rows: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(HIDDEN, 16), nn.SiLU(), nn.Linear(16, HIDDEN)) for _ in range(EXPERTS)]
        )
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("rows", torch.zeros(EXPERTS))
        self.register_buffer("mean", torch.zeros(EXPERTS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)
        scores = logits.sigmoid()
        picked = (scores + self.bias).topk(OF_EACH, -1).indices
        weights = scores.gather(-1, picked)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            rows, which = torch.where(picked == e)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, which, None])
        with torch.no_grad():
            counts = F.one_hot(picked, EXPERTS).sum((0, 1)).to(self.rows.dtype)
            self.rows += counts
            self.bias += 0.05 * torch.sign(counts.mean() - counts)
            self.mean.mul_(0.9).add_(scores.mean(0), alpha=0.1)
        share = counts / counts.sum()
        balance = EXPERTS * (share * logits.softmax(-1).mean(0)).sum()
        z_loss = logits.logsumexp(-1).square().mean()
        return F.mse_loss(out.view_as(y), y) + 0.1 * balance + 0.01 * z_loss


def balanced() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """With a batch whose rows differ in which experts they want: no part of it has the statistics of the whole."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 6, HIDDEN), torch.randn(4, 6, HIDDEN)
    x += 3 * torch.randn(4, 1, HIDDEN)
    return Balanced(), (x, y)
