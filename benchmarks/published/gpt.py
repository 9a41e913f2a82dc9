"""A GPT as Megatron-LM, llm-foundry and BLOOM build it: one product for queries, keys and values, head by head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class GptSizes:
    """Sizes of a :class:`Gpt`.

    Attributes:
        makes_scores: attention's scores are a tensor in memory, as before flash attention.
        casts_logits: the loss is computed of logits in float32.
    """

    vocab: int
    seq: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    dropout: float = 0.0
    makes_scores: bool = False
    casts_logits: bool = True


class Attention(nn.Module):
    """Causal self-attention whose features of queries, keys and values lie head by head, so that heads can be cut."""

    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        self.heads, self.dropout, self.makes_scores = sizes.heads, sizes.dropout, sizes.makes_scores
        self.query_key_value = nn.Linear(sizes.hidden, 3 * sizes.hidden)
        self.dense = nn.Linear(sizes.hidden, sizes.hidden)
        if self.makes_scores:
            later = torch.ones(sizes.seq, sizes.seq, dtype=torch.bool).triu(1)
            self.register_buffer("later", later, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        mixed = self.query_key_value(x).view(batch, seq, self.heads, 3 * (hidden // self.heads)).transpose(1, 2)
        q, k, v = mixed.chunk(3, dim=-1)
        if self.makes_scores:
            scores = torch.matmul(q, k.transpose(2, 3)) * (hidden // self.heads) ** -0.5
            weights = torch.softmax(scores.masked_fill(self.later, -1e4), dim=-1)
            out = torch.matmul(functional.dropout(weights, self.dropout, self.training), v)
        else:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(out.transpose(1, 2).reshape(batch, seq, hidden))


class Block(nn.Module):
    """Attention and a feed-forward of two products, each behind a LayerNorm and beside the residual."""

    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        self.input_norm, self.attn = nn.LayerNorm(sizes.hidden), Attention(sizes)
        self.middle_norm = nn.LayerNorm(sizes.hidden)
        self.up, self.down = nn.Linear(sizes.hidden, sizes.ffn), nn.Linear(sizes.ffn, sizes.hidden)
        self.dropout = sizes.dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + functional.dropout(self.attn(self.input_norm(x)), self.dropout, self.training)
        y = self.down(functional.gelu(self.up(self.middle_norm(x)), approximate="tanh"))
        return x + functional.dropout(y, self.dropout, self.training)


class Gpt(nn.Module):
    """Token and position embeddings, blocks, a last LayerNorm, logits with the embedding's table, and the loss."""

    def __init__(self, sizes: GptSizes) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(sizes.vocab, sizes.hidden), nn.Embedding(sizes.seq, sizes.hidden)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.head.weight = self.words.weight
        self.dropout, self.casts_logits = sizes.dropout, sizes.casts_logits

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = functional.dropout(self.words(input_ids) + self.positions(places), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        logits = logits.float() if self.casts_logits else logits
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


__all__ = ["Gpt", "GptSizes"]
