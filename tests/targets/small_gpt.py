"""A small GPT in plain torch, whose query, key and value are a Linear each: ``small_gpt.py:make``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, BLOCKS, PLACES, ROWS = 256, 32, 4, 4, 16, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, places, _ = x.shape
        q, k, v = (f(x).view(rows, places, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(rows, places, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class WholeHeads(Attention):
    """Attention whose views have the whole number of heads in place of -1: on shards they cut the places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, places, _ = x.shape
        q, k, v = (f(x).view(rows, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(rows, places, -1))


class Skipping(GPT):
    """A GPT whose embedding is added behind the last block, too."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x + first)).flatten(0, 1), labels.flatten())


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (ROWS, PLACES), generator=generator)
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def make() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return GPT(), inputs()


def make_tied() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return GPT(tied=True), inputs()


def make_skipping() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Skipping(), inputs()


def make_whole_heads() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = GPT()
    for block in model.blocks:
        block.attention.__class__ = WholeHeads
    return model, inputs()
