"""A decoder with caches in its buffers, written by hand as gpt-fast is: for tests of inference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """Sizes of a :class:`CachedDecoder`.

    Attributes:
        batch: rows of the caches.
        length: positions of the caches.
        experts: experts of each block, of which 2 are used; 0 for a dense block.
        rope: positions by rotation; else they are learnt.
        slices: caches are written by slice assignment; else by ``index_copy_``.
    """

    vocab: int = 48
    batch: int = 4
    length: int = 80
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    dim: int = 32
    experts: int = 0
    rope: bool = False
    slices: bool = False


class KVCache(nn.Module):
    """Keys and values of all positions, ``[batch, heads, length, dim of a head]``."""

    def __init__(self, sizes: Sizes) -> None:
        """Initialize empty caches."""
        super().__init__()
        shape = sizes.batch, sizes.kv_heads, sizes.length, sizes.dim // sizes.heads
        self.slices = sizes.slices
        self.register_buffer("k", torch.zeros(shape), persistent=False)
        self.register_buffer("v", torch.zeros(shape), persistent=False)

    def update(self, input_pos: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values at their positions; return all."""
        if self.slices:
            self.k[:, :, input_pos] = k
            self.v[:, :, input_pos] = v
        else:
            self.k.index_copy_(2, input_pos, k)
            self.v.index_copy_(2, input_pos, v)
        return self.k, self.v


class Attention(nn.Module):
    """Attention to a cache, with groups of heads that share keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        """Initialize random weights."""
        super().__init__()
        self.sizes, self.head = sizes, sizes.dim // sizes.heads
        self.q = nn.Linear(sizes.dim, sizes.heads * self.head, bias=False)
        self.k = nn.Linear(sizes.dim, sizes.kv_heads * self.head, bias=False)
        self.v = nn.Linear(sizes.dim, sizes.kv_heads * self.head, bias=False)
        self.o = nn.Linear(sizes.heads * self.head, sizes.dim, bias=False)
        self.cache = KVCache(sizes)

    def forward(self, x: torch.Tensor, input_pos: torch.Tensor, mask: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """Return what ``x`` at positions ``input_pos`` attends to."""
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, self.sizes.heads, self.head).transpose(1, 2)
        k = self.k(x).view(rows, length, self.sizes.kv_heads, self.head).transpose(1, 2)
        v = self.v(x).view(rows, length, self.sizes.kv_heads, self.head).transpose(1, 2)
        if self.sizes.rope:
            q, k = turned(q, turn), turned(k, turn)
        k, v = self.cache.update(input_pos, k, v)
        groups = self.sizes.heads // self.sizes.kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(out.transpose(1, 2).reshape(rows, length, -1))


def turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotate halves of heads by angles ``turn`` of ``[length, dim / 2]``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * turn.cos() - b * turn.sin(), a * turn.sin() + b * turn.cos()], dim=-1)


class Experts(nn.Module):
    """Experts as batched products, of which each token uses two."""

    def __init__(self, sizes: Sizes) -> None:
        """Initialize random weights."""
        super().__init__()
        self.router = nn.Linear(sizes.dim, sizes.experts, bias=False)
        self.up = nn.Parameter(torch.randn(sizes.experts, sizes.dim, 2 * sizes.dim) * 0.2)
        self.down = nn.Parameter(torch.randn(sizes.experts, 2 * sizes.dim, sizes.dim) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of two experts of each token."""
        scores, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = torch.zeros_like(self.router(x)).scatter(-1, chosen, scores)
        hidden = F.gelu(torch.einsum("btd,edh->beth", x, self.up))
        return torch.einsum("beth,ehd,bte->btd", hidden, self.down, weights)


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, sizes: Sizes) -> None:
        """Initialize random weights."""
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(sizes.dim), nn.LayerNorm(sizes.dim)
        self.attention = Attention(sizes)
        dense = nn.Sequential(nn.Linear(sizes.dim, 4 * sizes.dim), nn.GELU(), nn.Linear(4 * sizes.dim, sizes.dim))
        self.mlp: nn.Module = Experts(sizes) if sizes.experts else dense

    def forward(self, x: torch.Tensor, input_pos: torch.Tensor, mask: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """Return ``x`` after the block."""
        x = x + self.attention(self.norm1(x), input_pos, mask, turn)
        return x + self.mlp(self.norm2(x))


class CachedDecoder(nn.Module):
    """A causal language model that is called with new tokens and their positions."""

    def __init__(self, sizes: Sizes) -> None:
        """Initialize random weights and empty caches."""
        super().__init__()
        self.sizes = sizes
        self.tokens = nn.Embedding(sizes.vocab, sizes.dim)
        self.positions = nn.Embedding(sizes.length, sizes.dim)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm = nn.LayerNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, sizes.vocab, bias=False)
        mask = torch.tril(torch.ones(sizes.length, sizes.length, dtype=torch.bool))
        self.register_buffer("causal", mask, persistent=False)
        half = sizes.dim // sizes.heads // 2
        angles = torch.arange(sizes.length)[:, None] / 100.0 ** (torch.arange(half) / half)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, tokens: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        """Return logits of ``tokens`` of ``[batch, new]`` at positions ``input_pos`` of ``[new]``."""
        x = self.tokens(tokens)
        if not self.sizes.rope:
            x = x + self.positions(input_pos)
        mask, turn = self.causal[input_pos], self.angles[input_pos]
        for block in self.blocks:
            x = block(x, input_pos, mask, turn)
        return self.head(self.norm(x))


def made(sizes: Sizes, dtype: torch.dtype = torch.float64, seed: int = 0) -> CachedDecoder:
    """Return a decoder with seeded weights, in eval mode."""
    torch.manual_seed(seed)
    return CachedDecoder(sizes).to(dtype).eval()


def prompt_of(sizes: Sizes, length: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a seeded prompt of all rows, and its positions."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(sizes.vocab, (sizes.batch, length), generator=generator), torch.arange(length)


@torch.no_grad()
def greedy(model: nn.Module, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """Return ``count`` greedy tokens of each row after a prompt of ``[batch, length]``."""
    length = prompt.shape[1]
    logits = model(prompt, torch.arange(length))
    made_tokens = [logits[:, -1].argmax(-1)]
    for i in range(count - 1):
        logits = model(made_tokens[-1][:, None], torch.tensor([length + i]))
        made_tokens.append(logits[:, -1].argmax(-1))
    return torch.stack(made_tokens, dim=1)
