"""Models that ``pretrain_gpt.py`` trains: Megatron-LM's arguments from the fields of a Hugging Face config.

Names of arguments: megatron/training/arguments.py and the fields of TransformerConfig and MLATransformerConfig
(megatron/core/transformer/transformer_config.py), megatron-core 0.19.2. How Hugging Face's fields translate is that of
Megatron-LM's own examples (examples/llama, examples/mixtral, examples/post_training/modelopt/conf).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.targets.target import ModelFacts

Arguments = dict[str, str]
"""Values of arguments by name; those of flags are empty."""

LAST_RELEASE = {
    "t5": "pretrain_t5.py, last in 0.17", "bert": "pretrain_bert.py, last in 0.17",
    "vit": "pretrain_vision_classify.py, last in 0.16",
}  # fmt: skip
"""Scripts that are no longer in Megatron-LM 0.19: the tags core_v0.16.0 to core_v0.18.0 of its repository."""
OTHERS = "export to fsdp2 or accelerate, which train any model"


def model_arguments(model: ModelFacts, sequence: int | None, tp: int) -> Arguments:
    """Return the arguments that describe a model; ``refused_model`` of it must be empty.

    Args:
        sequence: places of a row.
        tp: ranks of tensor parallelism, which the padded vocabulary is a multiple of.
    """
    config = model.config
    arguments = FAMILIES[model.family](config)
    places = max(_int(config, "max_position_embeddings", "n_positions"), sequence or 0)
    vocabulary = _int(config, "vocab_size")
    arguments |= {
        "--max-position-embeddings": str(places),
        "--seq-length": str(sequence or places),
        "--vocab-size": str(vocabulary),
        "--make-vocab-size-divisible-by": str(_granularity(vocabulary, tp)),
    }
    if not config.get("tie_word_embeddings", False):
        arguments["--untie-embeddings-and-output-weights"] = ""
    return arguments


def refused_model(model: ModelFacts) -> str:
    """Return why ``pretrain_gpt.py`` cannot train a model, in one sentence; empty if it can."""
    if model.family not in FAMILIES:
        if model.family in LAST_RELEASE:
            return f"Megatron-LM 0.19 trains no {model.family} ({LAST_RELEASE[model.family]}); {OTHERS}"
        what = f"the family '{model.family}'" if model.family else "a model that is no Hugging Face config"
        return f"Megatron-LM's pretrain_gpt.py does not build {what}, it builds {', '.join(FAMILIES)}; {OTHERS}"
    config = model.config
    act = config.get("hidden_act") or config.get("activation_function")
    known = ("gelu", "gelu_new", "gelu_pytorch_tanh") if model.family == "gpt2" else ("silu", "swish")
    if act not in known:
        return f"Megatron-LM's arguments have {known[0]} for {model.family}, the config has {act}; {OTHERS}"
    scaling = str(_rope(config).get("rope_type", "default"))
    if scaling not in _scalings(model.family):
        return (
            f"Megatron-LM's arguments scale rotary embeddings of {model.family} as "
            f"{', '.join(_scalings(model.family))}, the config as {scaling}; {OTHERS}"
        )
    biases = bool(config.get("attention_bias")), bool(config.get("mlp_bias", config.get("attention_bias")))
    if biases[0] != biases[1] or (any(biases) and model.family != "llama"):
        return (
            f"Megatron-LM's arguments have biases for all products or for q, k, v alone, the config has "
            f"attention_bias={config.get('attention_bias')} with mlp_bias={config.get('mlp_bias', 'none')}; {OTHERS}"
        )
    return ""


def _scalings(family: str) -> tuple[str, ...]:
    return {"llama": ("default", "llama3"), "deepseek_v2": MLA_ROPES, "deepseek_v3": MLA_ROPES}.get(
        family, ("default",)
    )


MLA_ROPES = ("default", "yarn")


def _llama(config: Mapping[str, object]) -> Arguments:
    """Return the arguments of a decoder with rotary embeddings, RMS norms and a gated MLP."""
    heads = _int(config, "num_attention_heads")
    groups = _int(config, "num_key_value_heads") or heads
    rope = _rope(config)
    arguments = {
        "--num-layers": str(_int(config, "num_hidden_layers")),
        "--hidden-size": str(_int(config, "hidden_size")),
        "--ffn-hidden-size": str(_int(config, "intermediate_size")),
        "--num-attention-heads": str(heads),
        "--kv-channels": str(_int(config, "head_dim") or _int(config, "hidden_size") // heads),
        "--position-embedding-type": "rope",
        "--rotary-base": str(round(_float(rope, "rope_theta", 10000.0))),
        "--normalization": "RMSNorm",
        "--norm-epsilon": _number(_float(config, "rms_norm_eps", 1e-6)),
        "--swiglu": "",
        "--attention-dropout": _number(_float(config, "attention_dropout")),
        "--hidden-dropout": _number(_float(config, "resid_pdrop")),
        "--init-method-std": _number(_float(config, "initializer_range", 0.02)),
    }
    if groups != heads:
        arguments |= {"--group-query-attention": "", "--num-query-groups": str(groups)}
    if not config.get("attention_bias"):
        arguments["--disable-bias-linear"] = ""
    if rope.get("rope_type") == "llama3":
        arguments |= {"--use-rope-scaling": "", "--rope-scaling-factor": _number(_float(rope, "factor", 8.0))}
    part = _float(rope, "partial_rotary_factor", 1.0)
    if part != 1.0:
        arguments["--rotary-percent"] = _number(part)
    window = config.get("sliding_window")
    if isinstance(window, int) and window and config.get("use_sliding_window", True):
        arguments["--window-size"] = f"{window - 1},0"
    return arguments


def _qwen2(config: Mapping[str, object]) -> Arguments:
    return {**_llama(config), "--add-qkv-bias": ""}


def _qwen3(config: Mapping[str, object]) -> Arguments:
    return {**_llama(config), "--qk-layernorm": ""}


def _gpt2(config: Mapping[str, object]) -> Arguments:
    hidden = _int(config, "n_embd")
    return {
        "--num-layers": str(_int(config, "n_layer")),
        "--hidden-size": str(hidden),
        "--ffn-hidden-size": str(_int(config, "n_inner") or 4 * hidden),
        "--num-attention-heads": str(_int(config, "n_head")),
        "--position-embedding-type": "learned_absolute",
        "--normalization": "LayerNorm",
        "--norm-epsilon": _number(_float(config, "layer_norm_epsilon", 1e-5)),
        "--attention-dropout": _number(_float(config, "attn_pdrop")),
        "--hidden-dropout": _number(_float(config, "resid_pdrop")),
        "--init-method-std": _number(_float(config, "initializer_range", 0.02)),
    }


def _experts(config: Mapping[str, object], size: int) -> Arguments:
    """Return the arguments of routed experts without dropped rows; ``size``: features inside an expert."""
    experts = _int(config, "num_local_experts", "num_experts", "n_routed_experts")
    arguments = {
        "--num-experts": str(experts),
        "--moe-router-topk": str(_int(config, "num_experts_per_tok")),
        "--moe-ffn-hidden-size": str(size),
        "--moe-router-load-balancing-type": "aux_loss",
        "--moe-aux-loss-coeff": _number(_float(config, "router_aux_loss_coef")),
        "--moe-token-dispatcher-type": "alltoall",
        "--moe-grouped-gemm": "",
    }
    return arguments


def _mixtral(config: Mapping[str, object]) -> Arguments:
    return {**_llama(config), **_experts(config, _int(config, "intermediate_size"))}


def _qwen_moe(config: Mapping[str, object]) -> Arguments:
    layers = _int(config, "num_hidden_layers")
    dense = config.get("mlp_only_layers")
    step = _int(config, "decoder_sparse_step") or 1
    kinds = [int(i not in (dense if isinstance(dense, list) else ()) and (i + 1) % step == 0) for i in range(layers)]
    arguments = _experts(config, _int(config, "moe_intermediate_size"))
    if not all(kinds):
        arguments["--moe-layer-freq"] = _pattern(kinds)
    if not config.get("norm_topk_prob"):  # weights of the chosen experts are those of a softmax over all of them
        arguments["--moe-router-pre-softmax"] = ""
    return arguments


def _qwen2_moe(config: Mapping[str, object]) -> Arguments:
    shared = _int(config, "shared_expert_intermediate_size")
    return {
        **_qwen2(config), **_qwen_moe(config), "--moe-shared-expert-intermediate-size": str(shared),
        "--moe-shared-expert-gate": "",
    }  # fmt: skip


def _qwen3_moe(config: Mapping[str, object]) -> Arguments:
    return {**_qwen3(config), **_qwen_moe(config)}


def _deepseek(config: Mapping[str, object]) -> Arguments:
    """Return the arguments of DeepSeek-V2 and V3: latent attention, dense layers first, shared and routed experts."""
    base = _llama(config)
    for name in ("--kv-channels", "--group-query-attention", "--num-query-groups"):
        base.pop(name, None)
    rope = _rope(config)
    latent = {
        "--multi-latent-attention": "",
        "--kv-lora-rank": str(_int(config, "kv_lora_rank")),
        "--qk-head-dim": str(_int(config, "qk_nope_head_dim")),
        "--qk-pos-emb-head-dim": str(_int(config, "qk_rope_head_dim")),
        "--v-head-dim": str(_int(config, "v_head_dim")),
        "--qk-layernorm": "",
        "--rope-type": "rope",
    }
    if _int(config, "q_lora_rank"):
        latent["--q-lora-rank"] = str(_int(config, "q_lora_rank"))
    if rope.get("rope_type") == "yarn":
        latent |= {
            "--rope-type": "yarn",
            "--rotary-scaling-factor": _number(_float(rope, "factor", 40.0)),
            "--mscale": _number(_float(rope, "mscale", 1.0)),
            "--mscale-all-dim": _number(_float(rope, "mscale_all_dim")),
        }
    layers, dense = _int(config, "num_hidden_layers"), _int(config, "first_k_dense_replace")
    size = _int(config, "moe_intermediate_size")
    experts = _experts(config, size)
    experts["--moe-layer-freq"] = _pattern([0] * min(dense, layers) + [1] * max(0, layers - dense))
    if _int(config, "n_shared_experts"):
        experts["--moe-shared-expert-intermediate-size"] = str(_int(config, "n_shared_experts") * size)
    experts["--moe-router-topk-scaling-factor"] = _number(_float(config, "routed_scaling_factor", 1.0))
    if _int(config, "n_group") > 1:
        experts |= {
            "--moe-router-num-groups": str(_int(config, "n_group")),
            "--moe-router-group-topk": str(_int(config, "topk_group")),
        }
    return {**base, **latent, **experts, "--moe-router-pre-softmax": ""}


def _deepseek_v3(config: Mapping[str, object]) -> Arguments:
    arguments = _deepseek(config)
    arguments.pop("--moe-router-pre-softmax")
    return {
        **arguments, "--moe-router-score-function": "sigmoid", "--moe-router-enable-expert-bias": "",
        "--moe-router-dtype": "fp32",
    }  # fmt: skip


FAMILIES: dict[str, Callable[[Mapping[str, object]], Arguments]] = {
    "gpt2": _gpt2, "llama": _llama, "mistral": _llama, "phi3": _llama, "qwen2": _qwen2, "qwen3": _qwen3,
    "mixtral": _mixtral, "qwen2_moe": _qwen2_moe, "qwen3_moe": _qwen3_moe, "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek_v3,
}  # fmt: skip
"""What each ``model_type`` of a config becomes."""


def _pattern(kinds: list[int]) -> str:
    """Return ``([0]*3+[1]*58)``: which layers have experts, one run of equal ones after the other."""
    runs: list[list[int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1][1] += 1
        else:
            runs.append([kind, 1])
    return "(" + "+".join(f"[{kind}]*{n}" for kind, n in runs) + ")"


def _granularity(vocabulary: int, tp: int) -> int:
    """Return what the vocabulary is padded to a multiple of, times `tp`: 128, or less where that keeps its size."""
    return next((n for n in (128, 64, 32, 16, 8, 4, 2) if vocabulary % (n * tp) == 0), 1)


def _rope(config: Mapping[str, object]) -> Mapping[str, object]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta")
    given = dict(found) if isinstance(found, Mapping) else {}
    return {**({"rope_theta": theta} if theta is not None else {}), **given}


def _int(config: Mapping[str, object], *names: str) -> int:
    """Return the first of these fields that is a whole number, else 0."""
    found = (config.get(name) for name in names)
    return next((v for v in found if isinstance(v, int) and not isinstance(v, bool)), 0)


def _float(config: Mapping[str, object], name: str, default: float = 0.0) -> float:
    value = config.get(name)
    return float(value) if isinstance(value, int | float) else default


def _number(value: float) -> str:
    return f"{value:g}"
