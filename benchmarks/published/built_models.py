"""Models of published runs on the meta device, from their sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from published.rows import Run, Shape, UnpricedError

if TYPE_CHECKING:
    import torch

OLD = ("megatron-2021", "megatron-deepspeed-2022", "megatron-deepspeed-2020")
"""Software that makes the whole table of attention's scores in memory: before flash attention."""


def attention_of(run: Run) -> str:
    """How attention is computed, as ``transformers`` calls it: ``eager`` makes the table of scores, ``sdpa`` does not.

    Sequence lengths of MosaicML's table go to 65,536, which only flash attention can do; BLOOM's and vTrain's runs were
    before it.
    """
    return "eager" if run.software in OLD else "sdpa"


def dropout_of(run: Run) -> float:
    """Of attention and of the hidden states: Megatron-LM's default was a tenth, later recipes have none."""
    return 0.1 if run.software in OLD else 0.0


def casts_logits(run: Run) -> bool:
    """Whether the loss reads logits in float32: llm-foundry's fused cross entropy reads them as they are."""
    return run.software != "llm-foundry"


def model_of(run: Run) -> torch.nn.Module:
    """The model of a run.

    Raises:
        UnpricedError: it cannot be built.
    """
    return build(run.shape, attention_of(run), dropout_of(run), casts_logits(run))


def key_of(run: Run) -> str:
    """What is equal for runs of one model."""
    return repr((run.shape, attention_of(run), dropout_of(run), casts_logits(run)))


def build(shape: Shape, attention: str, dropout: float, casts: bool) -> torch.nn.Module:
    """A model that returns its loss, in bfloat16.

    Raises:
        UnpricedError: ``transformers`` refuses such sizes.
    """
    import torch
    import transformers

    from published.gpt import Gpt, GptSizes

    try:
        with torch.device("meta"):
            if shape.family == "gpt":
                sizes = GptSizes(
                    shape.vocab, shape.seq, shape.hidden, shape.layers, shape.heads, shape.ffn, dropout,
                    attention == "eager", casts,
                )  # fmt: skip
                return Gpt(sizes).to(torch.bfloat16)
            config, kind = _config(transformers, shape)
            config._attn_implementation = attention
            return kind(config).to(torch.bfloat16)
    except (ValueError, TypeError, AttributeError, ZeroDivisionError, RuntimeError) as error:
        raise UnpricedError(f"no such model can be built: {str(error).splitlines()[0][:120]}") from None


def _config(t: Any, shape: Shape) -> tuple[Any, Any]:
    common = {
        "vocab_size": shape.vocab, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.seq, "use_cache": False, "tie_word_embeddings": shape.is_tied,
    }  # fmt: skip
    if shape.family == "nemotron":
        config = t.NemotronConfig(intermediate_size=shape.ffn, head_dim=shape.head_dim, **common)
        return config, t.NemotronForCausalLM
    if shape.family == "qwen3":
        return t.Qwen3Config(intermediate_size=shape.ffn, head_dim=shape.head_dim, **common), t.Qwen3ForCausalLM
    if shape.family == "qwen3-moe":
        config = t.Qwen3MoeConfig(
            intermediate_size=shape.ffn, head_dim=shape.head_dim, moe_intermediate_size=shape.moe_ffn or shape.ffn,
            num_experts=shape.experts, num_experts_per_tok=shape.topk, decoder_sparse_step=1, norm_topk_prob=True,
            **common,
        )  # fmt: skip
        return config, t.Qwen3MoeForCausalLM
    if shape.family in ("mixtral", "gpt-oss"):  # GPT-OSS has learned sinks and windows beside the same sizes
        config = t.MixtralConfig(
            intermediate_size=shape.moe_ffn or shape.ffn, num_local_experts=shape.experts,
            num_experts_per_tok=shape.topk, head_dim=shape.head_dim, **common,
        )  # fmt: skip
        return config, t.MixtralForCausalLM
    if shape.family == "deepseek":
        groups = 8 if shape.experts % 8 == 0 and shape.experts == 256 else 1
        first = 3 if shape.layers > 30 and shape.experts == 256 else 1
        config = t.DeepseekV3Config(
            intermediate_size=shape.ffn, moe_intermediate_size=shape.moe_ffn, n_routed_experts=shape.experts,
            n_shared_experts=2 if shape.experts in (64, 160) else 1, num_experts_per_tok=shape.topk, n_group=groups,
            topk_group=min(4, groups), first_k_dense_replace=min(first, shape.layers - 1), routed_scaling_factor=2.5,
            kv_lora_rank=512, q_lora_rank=1536 if shape.hidden >= 5120 else None, qk_rope_head_dim=64,
            qk_nope_head_dim=128, v_head_dim=128, **common,
        )  # fmt: skip
        return config, t.DeepseekV3ForCausalLM
    config = t.LlamaConfig(intermediate_size=shape.ffn, head_dim=shape.head_dim, **common)
    return config, t.LlamaForCausalLM


def batch_of(rows: int, seq: int) -> dict[str, Any]:
    """Keyword arguments with the labels of the loss."""
    import torch

    with torch.device("meta"):
        ids = torch.zeros(rows, seq, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


__all__ = ["attention_of", "batch_of", "key_of", "model_of"]
