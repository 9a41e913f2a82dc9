"""Models and batches: at the sizes that people train, and small for ``--quick``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]
Made = tuple[nn.Module, Batch]


def _words(vocabulary: int, batch: int, tokens: int) -> Batch:
    ids = torch.randint(0, vocabulary, (batch, tokens))
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2(quick: bool, layers: int | None = None, dropout: float = 0.0) -> Made:
    """GPT-2 small (124M): 8 x 1,024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    vocabulary, width, heads, n, tokens, batch = (257, 32, 4, 2, 16, 4) if quick else (50257, 768, 12, 12, 1024, 8)
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=tokens, n_embd=width, n_layer=layers or n, n_head=heads, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
        attn_implementation="sdpa",
    )  # fmt: skip
    return GPT2LMHeadModel(config), _words(vocabulary, batch, tokens)


def llama_1b(quick: bool, layers: int | None = None) -> Made:
    """A Llama of 1.2B parameters (the shape of Llama-3.2-1B): 4 x 2,048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary, width, inner, n, heads, kv, tokens, batch = (
        (256, 32, 64, 2, 4, 2, 16, 4) if quick else (128256, 2048, 8192, 16, 32, 8, 2048, 4)
    )
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers or n,
        num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=tokens, use_cache=False,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config), _words(vocabulary, batch, tokens)


def mixtral(quick: bool, layers: int | None = None) -> Made:
    """A Mixtral-like of 8 experts, 2 of them for each token (0.6B parameters): 4 x 1,024 tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    vocabulary, width, inner, n, heads, kv, tokens, batch = (
        (256, 32, 64, 2, 4, 2, 16, 4) if quick else (32000, 1024, 3584, 6, 16, 4, 1024, 4)
    )
    config = MixtralConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers or n,
        num_attention_heads=heads, num_key_value_heads=kv, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=tokens, use_cache=False, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    return MixtralForCausalLM(config), _words(vocabulary, batch, tokens)


def t5(quick: bool, layers: int | None = None) -> Made:
    """T5-large (738M), without dropout: 8 x 512 tokens in, 128 out."""
    from transformers import T5Config, T5ForConditionalGeneration

    vocabulary, width, inner, n, heads, tokens, out, batch = (
        (256, 32, 64, 2, 4, 16, 8, 4) if quick else (32128, 1024, 4096, 24, 16, 512, 128, 8)
    )
    config = T5Config(
        vocab_size=vocabulary, d_model=width, d_ff=inner, num_layers=layers or n, num_heads=heads,
        d_kv=width // heads, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    ids, labels = torch.randint(1, vocabulary, (batch, tokens)), torch.randint(1, vocabulary, (batch, out))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": labels}


def vit(quick: bool, layers: int | None = None) -> Made:
    """ViT-L/16 (304M): 32 images of 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    size, patch, width, inner, n, heads, batch = (
        (16, 8, 32, 64, 2, 4, 4) if quick else (224, 16, 1024, 4096, 24, 16, 32)
    )
    config = ViTConfig(
        image_size=size, patch_size=patch, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers or n,
        num_attention_heads=heads, num_labels=100, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )  # fmt: skip
    images = torch.randn(batch, 3, size, size)
    return ViTForImageClassification(config), {"pixel_values": images, "labels": torch.randint(0, 100, (batch,))}


def resnet50(quick: bool, layers: int | None = None) -> Made:
    """ResNet-50 (25M): 64 images of 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    widths, depths, size, batch = (
        ([16, 32], [1, 1], 32, 4) if quick else ([256, 512, 1024, 2048], [3, 4, 6, 3], 224, 64)
    )
    config = ResNetConfig(
        embedding_size=16 if quick else 64, hidden_sizes=widths, depths=[layers] * len(widths) if layers else depths,
        layer_type="bottleneck", num_labels=100,
    )  # fmt: skip
    images = torch.randn(batch, 3, size, size)
    return ResNetForImageClassification(config), {"pixel_values": images, "labels": torch.randint(0, 100, (batch,))}


MODELS: dict[str, Callable[..., Made]] = {
    "GPT-2": gpt2, "Llama-1B": llama_1b, "ResNet-50": resnet50, "ViT-L": vit, "T5-large": t5, "Mixtral-like": mixtral,
}  # fmt: skip


def on(device: str, made: Made, dtype: torch.dtype = torch.float32) -> Made:
    """The model and its batch on a device, floating-point tensors in one dtype."""
    model, batch = made
    there = {k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in batch.items()}
    return model.to(device, dtype), there


def make(name: str, device: str, quick: bool, dtype: torch.dtype = torch.float32, **options: Any) -> Made:
    """The named model with weights drawn on the device itself, which is faster for large ones."""
    torch.manual_seed(0)
    with torch.device(device):
        model, batch = MODELS[name](quick, **options)
    return on(device, (model.train(), batch), dtype)


__all__ = ["MODELS", "make"]
