"""Models with routed experts whose routers prefer one of them, so that others have no rows."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from zoo_wide import WIDE


def skewed(model: torch.nn.Module) -> torch.nn.Module:
    """The router prefers one expert, so that others have no rows."""
    with torch.no_grad():
        for path, param in model.named_parameters():
            if "router" in path or path.endswith("gate.weight"):
                param[0] *= 30
                param[1:3] *= 0.01
    return model


def mixtral() -> tuple[torch.nn.Module, dict[str, Any]]:
    case = WIDE["mixtral_batched"]()
    return skewed(case.model), {**case.kwargs}


def switch() -> tuple[torch.nn.Module, dict[str, Any]]:
    """One expert for each token, in double precision, the routers too."""
    case = WIDE["switch"]()
    for part in case.model.modules():
        if type(part).__name__.endswith("Router"):
            part.dtype = torch.float64
    return skewed(case.model.double()), {**case.kwargs}


def deepseek() -> tuple[torch.nn.Module, dict[str, Any]]:
    """A shared expert and 64 routed ones, of which each token has 8, as in DeepSeek-V3."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=48, hidden_size=32, intermediate_size=48, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=64, num_experts_per_tok=8, n_shared_experts=1,
        n_group=8, topk_group=4, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=32, use_cache=False,
        experts_implementation="batched_mm",
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).double().train()
    ids = torch.randint(0, 48, (8, 8), generator=torch.Generator().manual_seed(1))
    return skewed(model), {"input_ids": ids, "labels": ids, "use_cache": False}


MODELS = {"mixtral": mixtral, "switch": switch, "deepseek": deepseek}
