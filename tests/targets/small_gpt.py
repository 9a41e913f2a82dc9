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


class Spread(GPT):
    """A GPT whose loss has the spread of its rows, which a part of the batch has otherwise."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, labels) + self.tokens(ids).mean(1).std(0).mean()


class Averaging(GPT):
    """A GPT that keeps a mean of what it embeds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(self.tokens(ids).mean((0, 1)), alpha=0.1)
        return super().forward(ids, labels)


class InADict(GPT):
    """A GPT whose labels are one place off, and whose loss comes in a dict behind another output."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss + 0.01 * x.square().mean()}


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


def make_spread() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Spread(), inputs()


def make_averaging() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Averaging(), inputs()


def make_ignoring() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Labels that do not count, unevenly many in rows and all in one; a term of the loss that is no mean of them."""
    given = inputs()
    for row in range(ROWS):
        given["labels"][row, : 1 + 2 * row] = -100
    given["labels"][0] = -100
    return InADict(), given


def make_other_weights() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Weights that every process draws for itself."""
    torch.manual_seed(torch.seed())
    return GPT(), inputs()
