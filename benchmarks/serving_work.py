"""The work of a step of four models, from the numbers of their configurations alone: used to check prices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cost_models.serving.work import (
    FORMAT_BYTES,
    REQUESTS,
    Attention,
    Experts,
    MatrixProduct,
    RowWork,
    StepExchange,
    StepWork,
)

DATA = Path(__file__).parent / "serving_data"


def config_of(model: str) -> dict[str, Any]:
    """Return the configuration of a model by the name of its file."""
    return json.loads((DATA / f"{model}.json").read_text(encoding="utf-8"))


def work_of(
    config: dict[str, Any],
    *,
    weights: str,
    cache: str,
    tensor: int,
    attention_data: int = 1,
    expert: int = 1,
    expert_weights: str | None = None,
    expert_activations: str | None = None,
) -> StepWork:
    """Return the work of a step on one rank of a worker of ``tensor * attention_data`` devices.

    Args:
        config: numbers of a Hugging Face configuration.
        weights: format of the weights of blocks, and of the activations in their products.
        cache: format of the cache.
        tensor: tensor parallel ranks of attention and dense layers.
        attention_data: ranks that attend to requests of their own.
        expert: expert parallel ranks.
        expert_weights: format of the experts' weights where they differ.
        expert_activations: format in which the experts' products are computed; None for that of their weights.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, size = config["num_attention_heads"] // tensor, config["head_dim"]
    kv_heads = max(1, config["num_key_value_heads"] // tensor)
    dense = weights
    products = [
        MatrixProduct((heads + 2 * kv_heads) * size, hidden, dense, dense, layers),
        MatrixProduct(hidden, heads * size, dense, dense, layers),
        MatrixProduct(config["vocab_size"] // tensor, hidden, "bf16", "bf16", 1, REQUESTS),
    ]
    experts: tuple[Experts, ...] = ()
    n_experts = config.get("num_experts") or config.get("num_local_experts")
    devices = tensor * attention_data
    if n_experts:
        middle = config.get("moe_intermediate_size", config["intermediate_size"]) // (devices // expert)
        form = expert_weights or weights
        experts = (
            Experts(n_experts // expert, n_experts, config["num_experts_per_tok"],
                    ((2 * middle, hidden), (hidden, middle)), form, expert_activations or form,
                    attention_data, layers),
        )  # fmt: skip
        products.append(MatrixProduct(n_experts, hidden, "bf16", "bf16", layers))
    else:
        middle = config["intermediate_size"] // tensor
        products += [
            MatrixProduct(2 * middle, hidden, dense, dense, layers),
            MatrixProduct(hidden, middle, dense, dense, layers),
        ]
    window = config.get("sliding_window")
    full = layers // 2 if window else layers
    attentions = [Attention(heads, kv_heads, size, size, None, cache, True, full)]
    if window:
        attentions.append(Attention(heads, kv_heads, size, size, window, cache, True, layers - full))
    return StepWork(
        tuple(products), tuple(attentions), experts, _rows(config, heads, kv_heads, size, layers),
        _exchanges(config, tensor, attention_data, bool(n_experts), layers), layers,
        _weight_bytes(products, experts, config),
        *_cache_bytes(kv_heads, size, cache, full, layers - full, window), config["vocab_size"] // tensor,
    )  # fmt: skip


def _rows(config: dict[str, Any], heads: int, kv_heads: int, size: int, layers: int) -> RowWork:
    """Norms with residuals, rotary embeddings with the write to the cache, activations: bytes of bf16 rows."""
    hidden, attended = config["hidden_size"], (heads + 2 * kv_heads) * size
    middle = 0 if config.get("num_experts") or config.get("num_local_experts") else config["intermediate_size"]
    return RowWork(2.0 * layers * (2 * 4 * hidden + 2 * attended + 3 * middle), 5 * layers)


def _exchanges(
    config: dict[str, Any], tensor: int, data: int, has_experts: bool, layers: int
) -> tuple[StepExchange, ...]:
    row = 2.0 * config["hidden_size"]
    found = []
    if tensor > 1:
        found.append(StepExchange("all_reduce", row, tensor, 1, layers if data > 1 else 2 * layers))
        found.append(StepExchange("all_gather", 2.0 * config["vocab_size"], tensor, 1, 1, REQUESTS))
    if data > 1 and has_experts:
        found.append(StepExchange("all_gather", row * data, data, tensor, layers))
        found.append(StepExchange("reduce_scatter", row * data, data, tensor, layers))
    return tuple(found)


def _weight_bytes(products: list[MatrixProduct], experts: tuple[Experts, ...], config: dict[str, Any]) -> float:
    total = sum(p.count * p.n * p.k * FORMAT_BYTES[p.weights] for p in products)
    total += sum(e.count * e.local * n * k * FORMAT_BYTES[e.weights] for e in experts for n, k in e.shapes)
    return total + 2.0 * config["vocab_size"] * config["hidden_size"]


def _cache_bytes(
    kv_heads: int, size: int, cache: str, full: int, windowed: int, window: int | None
) -> tuple[float, float]:
    token = kv_heads * 2 * size * (1.0 if cache == "fp8" else 2.0)
    return full * token, windowed * token * (window or 0)
