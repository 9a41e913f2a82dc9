"""Train a small GPT on two ranks: what changes in a training script. ``python examples/train_gpt.py``

It learns to continue the text of this file, character by character. On a machine with accelerators start ``main`` with
``torchrun --nproc-per-node N`` instead of ``run_local``.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar

LAYERS, HIDDEN, HEADS, TOKENS, BATCH, STEPS = 4, 128, 4, 64, 16, 60


class Layer(nn.Module):
    """Causal attention and an MLP, norms first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b s h] -> [b s h]
        b, s, h = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Characters in, scores of the next character out."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, HIDDEN), nn.Parameter(torch.zeros(TOKENS, HIDDEN))
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [b s] -> [b s v]
        return self.head(self.norm(self.layers(self.embed(ids) + self.positions)))


def loss_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def main() -> list[float]:
    text = Path(__file__).read_text(encoding="utf-8")
    characters = sorted(set(text))
    data = torch.tensor([characters.index(c) for c in text])
    generator = torch.Generator().manual_seed(0)  # the same batches on every rank

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(0, len(data) - TOKENS - 1, (BATCH,), generator=generator)
        rows = torch.stack([data[i : i + TOKENS + 1] for i in starts.tolist()])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    torch.manual_seed(0)
    model = GPT(64 * -(-len(characters) // 64))  # a multiple of 64 can be cut in many ways
    ids, labels = batch()
    model = autopar.parallelize(model, dist.get_world_size(), ids, loss_fn=loss_of, targets=labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    losses = []
    for step in range(STEPS):
        loss = model(*batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}", flush=True)
    if dist.get_rank() == 0:
        price = model.plan.price
        print(f"mesh {model.plan.mesh}, predicted {price.seconds * 1e3:.1f} ms a step, last loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    first, second = autopar.run_local(main, 2)
    assert first == second, "ranks disagree"
    assert first[-1] < 0.75 * first[0]
