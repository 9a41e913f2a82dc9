"""Graphs of transformers' Llama and GPT-2, captured on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from autopar.capture import capture
from autopar.capture.microbatches import numbers_of_parts, resized
from autopar.words.graph import Graph


def llama(rows: int, length: int, dtype: torch.dtype = torch.float32, **config: Any) -> Graph:
    """With these fields of a ``LlamaConfig``; eight heads by default."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "use_cache": False, **config}
    return _graph(LlamaForCausalLM, LlamaConfig(**sizes), rows, length, dtype)


def gpt2(rows: int, length: int, dtype: torch.dtype = torch.float32, **config: Any) -> Graph:
    """With these fields of a ``GPT2Config``, and without dropout."""
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return _graph(GPT2LMHeadModel, GPT2Config(n_positions=length, **without, **config), rows, length, dtype)


def gpt2_in_parts(rows: int, length: int, dtype: torch.dtype = torch.float32, **config: Any) -> dict[int, Graph]:
    """A batch of so many rows, by number of microbatches."""
    whole, half = (gpt2(n, length, dtype, **config) for n in (rows, rows // 2))
    return {m: resized(whole, half, rows, rows // 2, rows // m) for m in numbers_of_parts(rows)}


def _graph(kind: Any, config: Any, rows: int, length: int, dtype: torch.dtype) -> Graph:
    with torch.device("meta"):
        model, ids = kind(config).to(dtype), torch.zeros(rows, length, dtype=torch.long)
    return capture(model, (), {"input_ids": ids, "labels": ids}).graph
