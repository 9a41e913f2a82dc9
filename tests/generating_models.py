"""Small models that generate: of ``transformers``, and a plain one that is handed its caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

LENGTH = 96
"""Tokens that caches hold."""
VOCABULARY = 96
ROWS = 4
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
OF_DECODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
HOWS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"num_beams": 2},
}  # fmt: skip


@dataclass
class Generating:
    """A model, what it generates from, and an example for ``parallelize``."""

    model: Any
    call: dict[str, torch.Tensor]
    example: dict[str, torch.Tensor]

    def tokens(self, model: Any, how: str, count: int = 64, seed: int = 3) -> torch.Tensor:
        """Generate in one of the ways of :data:`HOWS`, two beams of each of half as many rows."""
        rows = ROWS // 2 if how == "beams" else ROWS
        call = {name: tensor[:rows] for name, tensor in self.call.items()}
        torch.manual_seed(seed)
        return model.generate(**call, max_new_tokens=count, pad_token_id=0, **HOWS[how])


def prompts(padded: bool = True) -> dict[str, torch.Tensor]:
    """Return prompts of 5 to 9 tokens, filled up on the left."""
    ids = torch.randint(3, VOCABULARY, (ROWS, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = mask[2, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _decoder(model: Any) -> Generating:
    return Generating(model, prompts(), {"input_ids": prompts()["input_ids"]})


def gpt2(**options: Any) -> Generating:
    """Return a GPT-2."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}
    return _decoder(transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL, **sizes, **options)))


def llama(**options: Any) -> Generating:
    """Return a Llama with two heads of keys for four."""
    torch.manual_seed(0)
    return _decoder(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **OF_DECODER, **options)))


def mixture() -> Generating:
    """Return a Qwen3 with experts."""
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return _decoder(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, **OF_DECODER, **experts)))


def windows() -> Generating:
    """Return a Mistral, all of whose layers look back 16 tokens."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SMALL, **OF_DECODER, sliding_window=16)
    return _decoder(transformers.MistralForCausalLM(config))


def mixed_windows() -> Generating:
    """Return a Gemma 2, every other layer of which looks back 16 tokens."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**{**SMALL, "pad_token_id": 0}, **OF_DECODER, head_dim=8, sliding_window=16)
    return _decoder(transformers.Gemma2ForCausalLM(config))


def t5() -> Generating:
    """Return a T5, and texts of 4 to 9 tokens, filled up on the right, for an encoder of 12."""
    torch.manual_seed(5)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
        tie_word_embeddings=False, initializer_factor=3.0, eos_token_id=None,
    )  # fmt: skip
    texts = prompts(padded=False)
    texts["attention_mask"][0, 4:] = 0
    longest = torch.randint(3, VOCABULARY, (ROWS, 12), generator=torch.Generator().manual_seed(2))
    return Generating(transformers.T5ForConditionalGeneration(config), texts, {"input_ids": longest})


def whisper() -> Generating:
    """Return a Whisper, and sounds."""
    torch.manual_seed(5)
    config = transformers.WhisperConfig(
        **SMALL, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20, max_target_positions=LENGTH,
        pad_token_id=0, decoder_start_token_id=2, begin_suppress_tokens=None, suppress_tokens=None, init_std=0.3,
    )  # fmt: skip
    sounds = {"input_features": torch.randn(ROWS, 8, 40, generator=torch.Generator().manual_seed(3))}
    return Generating(transformers.WhisperForConditionalGeneration(config), sounds, sounds)


MODELS: dict[str, Callable[[], Generating]] = {
    "gpt2": gpt2, "llama": llama, "mixture": mixture, "windows": windows, "mixed windows": mixed_windows, "t5": t5,
    "whisper": whisper,
}  # fmt: skip


class HandedCaches(nn.Module):
    """A decoder of one block that is handed its caches of ``[rows, heads, length, size]`` and gives back new ones."""

    def __init__(self, length: int = 80, heads: int = 2, size: int = 8) -> None:
        super().__init__()
        self.shape, self.length = (ROWS, heads, length, size), length
        self.embed, self.place = nn.Embedding(VOCABULARY, heads * size), nn.Embedding(length, heads * size)
        self.q, self.k, self.v = (nn.Linear(heads * size, heads * size, bias=False) for _ in range(3))
        self.head = nn.Linear(heads * size, VOCABULARY, bias=False)

    def caches(self) -> dict[str, torch.Tensor]:
        """Return empty caches."""
        return {name: torch.zeros(self.shape, dtype=self.head.weight.dtype) for name in "kv"}

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, caches: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return logits of tokens ``[rows, new]`` at positions ``[new]``, and the caches after them."""
        rows, heads, length, size = caches["k"].shape
        x = self.embed(tokens) + self.place(positions)
        q, k, v = (one(x).view(rows, -1, heads, size).transpose(1, 2) for one in (self.q, self.k, self.v))
        new = {"k": caches["k"].index_copy(2, positions, k), "v": caches["v"].index_copy(2, positions, v)}
        mask = torch.arange(length) <= positions[:, None]
        out = F.scaled_dot_product_attention(q, new["k"], new["v"], attn_mask=mask)
        return self.head(x + out.transpose(1, 2).flatten(2)), new

    @torch.no_grad()
    def greedy(self, prompt: torch.Tensor, count: int) -> torch.Tensor:
        """Return a prompt of ``[rows, length]`` and ``count`` likeliest tokens, on one device."""
        tokens, caches, at = prompt, self.caches(), torch.arange(prompt.shape[1])
        for _ in range(count):
            logits, caches = self(tokens[:, at], at, caches)
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1)[:, None]], dim=1)
            at = torch.tensor([tokens.shape[1] - 1])
        return tokens
