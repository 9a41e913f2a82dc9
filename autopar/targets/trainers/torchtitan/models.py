"""The models that torchtitan has code for, with the sizes of a Hugging Face config.

A family is a module of ``torchtitan.models`` and the call in it that builds the model's config. What the module fixes
(biases, activations, sinks) has to be so in the config, or the model is another one and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.targets.target import ModelFacts

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A module of torchtitan's models.

    Attributes:
        module: its name in ``torchtitan.models``.
        head: how it initializes the weights of the head.
        layers: the function that makes the configs of all layers, and its arguments from a config.
        fixed: fields of the config that its code has no choice of, with their values.
        needs: fields that its code needs.
        rope: the class of its rotary embedding, and the field of its size.
    """

    module: str
    head: str
    layers: str
    arguments: Callable[[Values], dict[str, Any]]
    fixed: Mapping[str, tuple[Any, ...]]
    needs: tuple[str, ...]
    rope: str
    rope_size: Callable[[Values], int]


def _head_size(config: Values) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _llama(config: Values) -> dict[str, Any]:
    return {
        "n_layers": config["num_hidden_layers"], "dim": config["hidden_size"],
        "n_heads": config["num_attention_heads"], "n_kv_heads": config["num_key_value_heads"],
        "hidden_dim": config["intermediate_size"],
    }  # fmt: skip


def _qwen3(config: Values) -> dict[str, Any]:
    return {**_llama(config), "head_dim": _head_size(config)}


def _qwen3_moe(config: Values) -> dict[str, Any]:
    dense = {key: value for key, value in _qwen3(config).items() if key != "hidden_dim"}
    return {
        **dense, "moe_hidden_dim": config["moe_intermediate_size"], "num_experts": _experts(config),
        "top_k": config["num_experts_per_tok"], "moe_comm_backend": "standard",
    }  # fmt: skip


def _deepseek(config: Values) -> dict[str, Any]:
    score = config.get("scoring_func") or ("sigmoid" if config["model_type"] == "deepseek_v3" else "softmax")
    groups = config.get("n_group") or 1
    return {
        "n_layers": config["num_hidden_layers"], "n_dense_layers": config["first_k_dense_replace"],
        "dim": config["hidden_size"], "n_heads": config["num_attention_heads"],
        "q_lora_rank": config.get("q_lora_rank") or 0, "kv_lora_rank": config["kv_lora_rank"],
        "qk_nope_head_dim": config["qk_nope_head_dim"], "qk_rope_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"], "mscale": float(_rope(config).get("mscale_all_dim") or 1.0),
        "dense_hidden_dim": config["intermediate_size"],
        "moe_hidden_dim": config["moe_intermediate_size"], "num_experts": _experts(config),
        "num_shared_experts": config["n_shared_experts"], "router_top_k": config["num_experts_per_tok"],
        "router_score_func": score, "router_num_expert_groups": groups if groups > 1 else None,
        "router_num_limited_groups": config.get("topk_group") if groups > 1 else None,
        "router_route_scale": float(config.get("routed_scaling_factor") or 1.0),
        "router_route_norm": bool(config.get("norm_topk_prob")), "moe_comm_backend": "standard",
        "non_blocking_capacity_factor": None,
    }  # fmt: skip


def _gpt_oss(config: Values) -> dict[str, Any]:
    return {
        "n_layers": config["num_hidden_layers"], "dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"], "num_experts": _experts(config),
        "top_k": config["num_experts_per_tok"], "load_balance_coeff": 1e-3, "moe_comm_backend": "standard",
    }  # fmt: skip


def _experts(config: Values) -> int:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return int(next(config[name] for name in names if config.get(name)))


_DENSE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
_PLAIN = {"hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None)}
_LLAMA = Family(
    "llama3", "_output_linear_init(dim)", "_build_llama3_layers", _llama, _PLAIN,
    (*_DENSE, "intermediate_size"), "ComplexRoPE", _head_size,
)  # fmt: skip
_DEEPSEEK = Family(
    "deepseek_v3", "_output_linear_init(dim)", "_build_dsv3_layers", _deepseek, _PLAIN,
    ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "kv_lora_rank",
     "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size", "n_shared_experts",
     "num_experts_per_tok", "first_k_dense_replace"),
    "ComplexRoPE", lambda config: int(config["qk_rope_head_dim"]),
)  # fmt: skip
FAMILIES = {
    # torchtitan 0.3.0: torchtitan/models/__init__.py, and what each module's builder of layers takes and fixes
    "llama": _LLAMA,
    "mistral": _LLAMA,  # the same blocks, where no window slides
    "qwen3": Family(
        "qwen3", "_LINEAR_INIT", "_build_qwen3_layers", _qwen3,
        {**_PLAIN, "use_sliding_window": (False, None)}, (*_DENSE, "intermediate_size"), "CosSinRoPE", _head_size,
    ),
    "qwen3_moe": Family(
        "qwen3", "_LINEAR_INIT", "_build_qwen3_moe_layers", _qwen3_moe,
        {**_PLAIN, "use_sliding_window": (False, None), "decoder_sparse_step": (1, None), "norm_topk_prob": (True,),
         "mlp_only_layers": ([], None)},
        (*_DENSE, "moe_intermediate_size", "num_experts_per_tok"), "CosSinRoPE", _head_size,
    ),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK,  # its flavors 16B and 236B are DeepSeek-V2's
    "gpt_oss": Family(
        "gpt_oss", "_output_linear_init(dim)", "_build_gptoss_layers", _gpt_oss,
        # _make_gptoss_attn_config is called without the numbers of heads, and windows are of 128 places
        {"num_attention_heads": (64,), "num_key_value_heads": (8,), "head_dim": (64,), "sliding_window": (128,)},
        (*_DENSE, "intermediate_size", "num_experts_per_tok"), "CosSinRoPE", lambda _: 64,
    ),
}  # fmt: skip
"""By ``model_type``."""
_SCALINGS = {"default": "none", "llama3": "llama", "yarn": "yarn"}
_SCALED = {
    "llama": {"scaling_factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
              "original_max_position_embeddings": "original_max_position_embeddings"},
    "yarn": {"rope_factor": "factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
             "original_seq_len": "original_max_position_embeddings", "truncate": "truncate"},
    "none": {},
}  # fmt: skip
"""Fields of torchtitan's ``RoPE.Config`` by those of Hugging Face's ``rope_parameters``."""


def why_not(model: ModelFacts) -> str:
    """Return why torchtitan cannot train a model, in one sentence; empty if it can."""
    config: Values = model.config
    family = FAMILIES.get(model.family)
    if family is None:
        named = f"model type '{model.family}'" if model.family else "a model of one's own"
        return (
            f"torchtitan 0.3.0 trains {', '.join(FAMILIES)}, this is {named}; "
            "export to fsdp2 or accelerate, which train any model"
        )
    where = f"torchtitan's {family.module}"
    missing = [name for name in family.needs if config.get(name) is None]
    if missing:
        return f"{where} needs {missing[0]} of the config, which has none; export to fsdp2 or accelerate"
    for name, values in family.fixed.items():
        if config.get(name) not in values:
            return f"{where} has {name}={values[0]}, the config {config.get(name)}; export to fsdp2 or accelerate"
    if family.layers == "_build_llama3_layers":
        width = _head_size(config) * config["num_attention_heads"]
        if width != config["hidden_size"]:
            return (
                f"{where} has heads as wide together as the model, here they have {width} of "
                f"{config['hidden_size']}; export to fsdp2 or accelerate"
            )
        if config.get("sliding_window"):
            return f"{where} has no sliding window, the config {config['sliding_window']}; export to fsdp2"
    kind = _rope(config).get("rope_type", "default")
    if kind not in _SCALINGS:
        return f"{where} scales rotary positions by {', '.join(_SCALINGS)}, the config by {kind}; export to fsdp2"
    return ""


def _rope(config: Values) -> Mapping[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found if isinstance(found, Mapping) else {}


def rope_arguments(family: Family, config: Values) -> dict[str, Any]:
    """Return the arguments of torchtitan's rotary embedding, but for its places."""
    rope = _rope(config)
    scaling = _SCALINGS[rope.get("rope_type", "default")]
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    found: dict[str, Any] = {"dim": family.rope_size(config), "theta": float(theta)}
    if scaling != "none":
        found["scaling"] = scaling
    found |= {own: rope[its] for own, its in _SCALED[scaling].items() if rope.get(its) is not None}
    return found
