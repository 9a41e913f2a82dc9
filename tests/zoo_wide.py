"""The wide zoo: small models of many families of ``transformers``, from a table, and some of plain torch.

``WIDE["mbart"]()`` is a :class:`~zoo.Case` in double precision, in training mode without dropout; its second batch has
other padding, other lengths and other labels. Unlike in :mod:`zoo`, sizes are as small as a family allows, and nothing
is said about which dims can be cut: the point is what capture makes of the code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import zoo_seen  # noqa: F401  (more families of zoo_composed)
from torch import Tensor, nn
from zoo import ZOO, Batch, Case, as_float64
from zoo_composed import COMPOSED
from zoo_composed import SINGLE as SINGLE_COMPOSED
from zoo_derivatives import PLAIN

ROWS, SEQ, VOCAB, CLASSES = 4, 16, 48, 5

SMALL: Mapping[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
    num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attention_dropout=0.0, dropout=0.0,
    activation_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, layerdrop=0.0, encoder_layerdrop=0.0,
    decoder_layerdrop=0.0, hidden_dropout=0.0, embedding_dropout=0.0, classifier_dropout=0.0,
    classifier_dropout_prob=0.0,
)  # fmt: skip
"""What most configurations understand, by their own names or by those that ``attribute_map`` has for them."""

SEQ2SEQ: Mapping[str, Any] = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=2,
)  # fmt: skip
IMAGES: Mapping[str, Any] = dict(image_size=16, patch_size=4, num_channels=3)
SPEECH: Mapping[str, Any] = dict(
    conv_dim=(16, 16), conv_kernel=(4, 3), conv_stride=(4, 2), num_feat_extract_layers=2, feat_proj_dropout=0.0,
    num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=4, apply_spec_augment=False, final_dropout=0.0,
    mask_time_prob=0.0,
)  # fmt: skip

EXPERTS: Mapping[str, Any] = dict(
    num_local_experts=4, num_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    experts_implementation="batched_mm",  # torch's grouped product knows no double precision
)  # fmt: skip
DEEPSEEK: Mapping[str, Any] = dict(
    EXPERTS, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
)  # fmt: skip
T5: Mapping[str, Any] = dict(
    d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
    num_decoder_layers=2,
)  # fmt: skip

# --- batches ---------------------------------------------------------------------------------------------------------


def _padded(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens from 3 on, and a mask; every row has a length of its own, and 0 after it."""
    lengths = torch.randint(SEQ // 2, SEQ + 1, (ROWS, 1), generator=g)
    mask = (torch.arange(SEQ) < lengths).long()
    return torch.randint(3, VOCAB, (ROWS, SEQ), generator=g) * mask, mask


def _labels(g: torch.Generator, mask: Tensor) -> Tensor:
    some = (torch.rand(mask.shape, generator=g) < 0.7) & (mask > 0)
    return torch.randint(3, VOCAB, mask.shape, generator=g).where(some, -100)


def tokens(g: torch.Generator) -> Batch:
    """A language model, causal or masked."""
    ids, mask = _padded(g)
    return (), {"input_ids": ids, "attention_mask": mask, "labels": _labels(g, mask)}


def unmasked(g: torch.Generator) -> Batch:
    """The same for families that take no mask, or make another thing of it."""
    ids, mask = _padded(g)
    return (), {"input_ids": ids, "labels": _labels(g, mask)}


def pairs(g: torch.Generator) -> Batch:
    """An encoder's tokens and a decoder's labels."""
    ids, mask = _padded(g)
    target, there = _padded(g)
    return (), {"input_ids": ids, "attention_mask": mask, "labels": target.where(there > 0, -100)}


def unpadded(g: torch.Generator) -> Batch:
    """Rows of full length, without a mask: families that branch on their mask see that nothing is left out."""
    ids = torch.randint(3, VOCAB, (ROWS, SEQ), generator=g)
    return (), {"input_ids": ids, "labels": _labels(g, torch.ones_like(ids))}


def unpadded_pairs(g: torch.Generator) -> Batch:
    target, there = _padded(g)
    ids = torch.randint(3, VOCAB, (ROWS, SEQ), generator=g)
    return (), {"input_ids": ids, "labels": target.where(there > 0, -100)}


def all_there(g: torch.Generator) -> Batch:
    """Rows of full length, and a mask that says so: families look at it and see that nothing is left out."""
    given = unpadded(g)[1]
    return (), {**given, "attention_mask": torch.ones_like(given["input_ids"])}


def all_pairs_there(g: torch.Generator) -> Batch:
    given = unpadded_pairs(g)[1]
    labels = torch.randint(3, VOCAB, (ROWS, SEQ), generator=g)
    return (), {**given, "labels": labels, "attention_mask": torch.ones_like(given["input_ids"])}


def shifted_pairs(g: torch.Generator) -> Batch:
    """With the decoder's inputs, which some families look at where they make them of the labels."""
    given = pairs(g)[1]
    labels = given["labels"]
    return (), {**given, "decoder_input_ids": labels.clamp(min=0).roll(1, -1).index_fill(-1, torch.tensor(0), 2)}


def sentences(g: torch.Generator) -> Batch:
    ids, mask = _padded(g)
    return (), {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, CLASSES, (ROWS,), generator=g)}


def boxes(g: torch.Generator) -> Batch:
    corner = torch.randint(0, 30, (ROWS, SEQ, 2), generator=g)
    return (), {**tokens(g)[1], "bbox": torch.cat([corner, corner + 20], -1)}


def images(g: torch.Generator, size: int = 16) -> Batch:
    return (), {
        "pixel_values": torch.randn(ROWS, 3, size, size, generator=g),
        "labels": torch.randint(0, CLASSES, (ROWS,), generator=g),
    }


def images32(g: torch.Generator) -> Batch:
    return images(g, 32)


def maps(g: torch.Generator) -> Batch:
    given = images(g, 32)[1]
    labels = torch.randint(0, CLASSES, (ROWS, 32, 32), generator=g)
    return (), {**given, "labels": labels.where(torch.rand(labels.shape, generator=g) < 0.8, 255)}


def image_and_text(g: torch.Generator) -> Batch:
    ids, mask = _padded(g)
    pixels = torch.randn(ROWS, 3, 16, 16, generator=g)
    return (), {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "return_loss": True}


def speech(g: torch.Generator) -> Batch:
    return (), {
        "input_values": torch.randn(ROWS, 256, generator=g), "labels": torch.randint(0, CLASSES, (ROWS,), generator=g)
    }  # fmt: skip


# --- the table -------------------------------------------------------------------------------------------------------

Row = tuple[str, str, Callable[[torch.Generator], Batch], Mapping[str, Any]]
"""Configuration and model of ``transformers``, what it is fed with, and what its configuration has of its own."""

FAMILIES: Mapping[str, Row] = {
    # causal language models
    "gpt_neo": ("GPTNeo", "ForCausalLM", tokens, dict(
        num_layers=2, attention_types=[[["global", "local"], 1]], window_size=4)),
    "gptj": ("GPTJ", "ForCausalLM", tokens, dict(rotary_dim=4)),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", tokens, {}),
    "gpt_bigcode": ("GPTBigCode", "ForCausalLM", tokens, {}),
    "bloom": ("Bloom", "ForCausalLM", tokens, {}),
    "qwen2": ("Qwen2", "ForCausalLM", tokens, {}),
    "qwen3": ("Qwen3", "ForCausalLM", tokens, dict(head_dim=8)),
    "phi": ("Phi", "ForCausalLM", tokens, {}),
    "phi3": ("Phi3", "ForCausalLM", tokens, dict(sliding_window=6)),
    "gemma": ("Gemma", "ForCausalLM", tokens, dict(head_dim=8)),
    "gemma2": ("Gemma2", "ForCausalLM", tokens, dict(head_dim=8, sliding_window=12)),
    "gemma3": ("Gemma3Text", "Gemma3ForCausalLM", tokens, dict(head_dim=8, sliding_window=4)),
    "falcon": ("Falcon", "ForCausalLM", tokens, dict(alibi=True, new_decoder_architecture=False)),
    "stablelm": ("StableLm", "ForCausalLM", tokens, {}),
    "cohere": ("Cohere", "ForCausalLM", tokens, {}),
    "olmo": ("Olmo", "ForCausalLM", tokens, {}),
    "olmo2": ("Olmo2", "ForCausalLM", tokens, {}),
    "starcoder2": ("Starcoder2", "ForCausalLM", tokens, dict(sliding_window=6)),
    "granite": ("Granite", "ForCausalLM", tokens, {}),
    "mpt": ("Mpt", "ForCausalLM", tokens, dict(expansion_ratio=2, max_seq_len=32)),
    "codegen": ("CodeGen", "ForCausalLM", tokens, dict(rotary_dim=4)),
    "xglm": ("XGLM", "ForCausalLM", tokens, dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48)),
    "biogpt": ("BioGpt", "ForCausalLM", tokens, {}),
    "ctrl": ("CTRL", "LMHeadModel", tokens, dict(dff=48)),
    "openai_gpt": ("OpenAIGPT", "LMHeadModel", tokens, dict(afn="gelu")),
    "persimmon": ("Persimmon", "ForCausalLM", tokens, {}),
    "nemotron": ("Nemotron", "ForCausalLM", tokens, {}),
    "smollm3": ("SmolLM3", "ForCausalLM", tokens, {}),
    "glm": ("Glm", "ForCausalLM", tokens, dict(head_dim=8)),
    "mixtral": ("Mixtral", "ForCausalLM", tokens, dict(num_local_experts=4)),
    "mixtral_batched": ("Mixtral", "ForCausalLM", tokens, dict(
        num_local_experts=4, experts_implementation="batched_mm")),
    "mamba": ("Mamba", "ForCausalLM", tokens, dict(state_size=4)),
    "rwkv": ("Rwkv", "ForCausalLM", unmasked, dict(attention_hidden_size=32, context_length=32)),
    "reformer": ("Reformer", "ModelWithLMHead", tokens, dict(
        is_decoder=True, attn_layers=["local", "lsh"], axial_pos_embds=False, local_attn_chunk_length=4,
        lsh_attn_chunk_length=4, num_buckets=2, feed_forward_size=48, attention_head_size=8, hash_seed=1)),
    # encoders
    "roberta": ("Roberta", "ForMaskedLM", tokens, {}),
    "albert": ("Albert", "ForMaskedLM", tokens, dict(embedding_size=16)),
    "electra": ("Electra", "ForMaskedLM", tokens, dict(embedding_size=16)),
    "deberta": ("Deberta", "ForMaskedLM", tokens, dict(relative_attention=True, pos_att_type=["c2p", "p2c"])),
    "deberta_v2": ("DebertaV2", "ForMaskedLM", tokens, dict(relative_attention=True, pos_att_type=["c2p", "p2c"])),
    "distilbert": ("DistilBert", "ForMaskedLM", tokens, dict(dim=32, n_heads=4, n_layers=2, hidden_dim=48)),
    "mpnet": ("MPNet", "ForMaskedLM", tokens, {}),
    "camembert": ("Camembert", "ForMaskedLM", tokens, {}),
    "xlm": ("XLM", "WithLMHeadModel", tokens, dict(emb_dim=32, n_heads=4, n_layers=2, n_langs=1)),
    "xlnet": ("XLNet", "LMHeadModel", tokens, dict(d_model=32, n_head=4, n_layer=2, d_inner=48)),
    "funnel": ("Funnel", "ForMaskedLM", tokens, dict(block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=48)),
    "longformer": ("Longformer", "ForMaskedLM", all_there, dict(attention_window=4)),
    "longformer_unpadded": ("Longformer", "ForMaskedLM", unpadded, dict(attention_window=4)),
    "big_bird": ("BigBird", "ForMaskedLM", tokens, dict(attention_type="original_full")),
    "layoutlm": ("LayoutLM", "ForMaskedLM", boxes, {}),
    "modernbert": ("ModernBert", "ForMaskedLM", tokens, dict(local_attention=4, mlp_dropout=0.0)),
    "esm": ("Esm", "ForMaskedLM", tokens, dict(mask_token_id=3, position_embedding_type="rotary")),
    "convbert": ("ConvBert", "ForMaskedLM", tokens, dict(embedding_size=16, conv_kernel_size=3)),
    "squeezebert": ("SqueezeBert", "ForMaskedLM", tokens, dict(embedding_size=32)),
    "mobilebert": ("MobileBert", "ForMaskedLM", tokens, dict(
        embedding_size=16, intra_bottleneck_size=32, true_hidden_size=32)),
    "nystromformer": ("Nystromformer", "ForMaskedLM", unmasked, dict(num_landmarks=4, segment_means_seq_len=16)),
    "fnet": ("FNet", "ForMaskedLM", unmasked, {}),
    "ernie": ("Ernie", "ForMaskedLM", tokens, {}),
    "roformer": ("RoFormer", "ForMaskedLM", tokens, dict(embedding_size=16)),
    "rembert": ("RemBert", "ForSequenceClassification", sentences, dict(input_embedding_size=16)),
    # encoders and decoders
    "mt5": ("MT5", "ForConditionalGeneration", pairs, dict(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)),
    "longt5": ("LongT5", "ForConditionalGeneration", pairs, dict(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
        local_radius=3)),
    "bart": ("Bart", "ForConditionalGeneration", pairs, SEQ2SEQ),
    "mbart": ("MBart", "ForConditionalGeneration", pairs, SEQ2SEQ),
    "pegasus": ("Pegasus", "ForConditionalGeneration", pairs, SEQ2SEQ),
    "blenderbot": ("Blenderbot", "ForConditionalGeneration", pairs, SEQ2SEQ),
    "marian": ("Marian", "MTModel", pairs, SEQ2SEQ),
    "m2m_100": ("M2M100", "ForConditionalGeneration", pairs, SEQ2SEQ),
    "led": ("LED", "ForConditionalGeneration", all_pairs_there, dict(SEQ2SEQ, attention_window=4)),
    "led_unpadded": ("LED", "ForConditionalGeneration", unpadded_pairs, dict(SEQ2SEQ, attention_window=4)),
    "prophetnet": ("ProphetNet", "ForConditionalGeneration", all_pairs_there, dict(
        num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=4, num_decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=2, disable_ngram_loss=False)),
    "prophetnet_shifted": ("ProphetNet", "ForConditionalGeneration", shifted_pairs, dict(
        num_encoder_layers=1, num_decoder_layers=1, num_encoder_attention_heads=4, num_decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=2, disable_ngram_loss=False)),
    # speech
    "wav2vec2": ("Wav2Vec2", "ForSequenceClassification", speech, SPEECH),
    "hubert": ("Hubert", "ForSequenceClassification", speech, SPEECH),
    "wavlm": ("WavLM", "ForSequenceClassification", speech, dict(SPEECH, num_buckets=8, max_bucket_distance=16)),
    # vision
    "deit": ("DeiT", "ForImageClassification", images, IMAGES),
    "beit": ("Beit", "ForImageClassification", images, dict(
        IMAGES, use_relative_position_bias=True, use_mask_token=False, drop_path_rate=0.0)),
    "swin": ("Swin", "ForImageClassification", images, dict(
        IMAGES, patch_size=2, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4, drop_path_rate=0.0)),
    "convnext": ("ConvNext", "ForImageClassification", images32, dict(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)),
    "segformer": ("Segformer", "ForSemanticSegmentation", maps, dict(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3],
        strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, drop_path_rate=0.0)),
    "mobilenet_v2": ("MobileNetV2", "ForImageClassification", images32, dict(
        depth_multiplier=0.25, image_size=32)),
    "efficientnet": ("EfficientNet", "ForImageClassification", images32, dict(
        image_size=32, width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320, dropout_rate=0.0,
        drop_connect_rate=0.0)),
    "poolformer": ("PoolFormer", "ForImageClassification", images32, dict(
        hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1],
        drop_path_rate=0.0)),
    "levit": ("Levit", "ForImageClassification", images32, dict(
        image_size=32, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4], depths=[1, 1, 1], key_dim=[8, 8, 8],
        drop_path_rate=0, mlp_ratio=[2, 2, 2], attention_ratio=[2, 2, 2])),
    "dinov2": ("Dinov2", "ForImageClassification", images, dict(IMAGES, drop_path_rate=0.0)),
    "pvt": ("Pvt", "ForImageClassification", images32, dict(
        image_size=32, hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2, sequence_reduction_ratios=[2, 1],
        patch_sizes=[4, 2], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], drop_path_rate=0.0)),
    # routed experts, and more of all kinds
    "qwen2_moe": ("Qwen2Moe", "ForCausalLM", tokens, dict(
        EXPERTS, shared_expert_intermediate_size=32, decoder_sparse_step=1)),
    "qwen3_moe": ("Qwen3Moe", "ForCausalLM", tokens, dict(EXPERTS, head_dim=8)),
    "olmoe": ("Olmoe", "ForCausalLM", tokens, EXPERTS),
    "deepseek_v2": ("DeepseekV2", "ForCausalLM", tokens, DEEPSEEK),
    "deepseek_v3": ("DeepseekV3", "ForCausalLM", tokens, DEEPSEEK),
    "switch": ("SwitchTransformers", "ForConditionalGeneration", pairs, dict(
        T5, num_experts=4, expert_capacity=5, router_jitter_noise=0.0, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1)),
    "nllb_moe": ("NllbMoe", "ForConditionalGeneration", pairs, dict(
        SEQ2SEQ, num_experts=4, encoder_sparse_step=1, decoder_sparse_step=1,
        moe_token_dropout=0.0, expert_capacity=16)),
    "dbrx": ("Dbrx", "ForCausalLM", tokens, dict(
        d_model=32, n_heads=4, n_layers=2, max_seq_len=32,
        ffn_config=dict(hidden_size=32, ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2),
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0))),
    "jetmoe": ("JetMoe", "ForCausalLM", tokens, dict(EXPERTS, kv_channels=8, num_key_value_heads=4)),
    "granitemoe": ("GraniteMoe", "ForCausalLM", tokens, EXPERTS),
    "phimoe": ("Phimoe", "ForCausalLM", tokens, dict(EXPERTS, router_jitter_noise=0.0, input_jitter_noise=0.0)),
    "jamba": ("Jamba", "ForCausalLM", tokens, dict(
        EXPERTS, mamba_d_state=4, use_mamba_kernels=False, num_hidden_layers=4, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1)),
    "granitemoehybrid": ("GraniteMoeHybrid", "ForCausalLM", tokens, dict(
        EXPERTS, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=4, mamba_n_groups=1, mamba_chunk_size=4,
        layer_types=["mamba", "attention"], shared_intermediate_size=32)),
    "gpt_oss": ("GptOss", "ForCausalLM", tokens, dict(EXPERTS, head_dim=8, sliding_window=8)),
    "glm4_moe": ("Glm4Moe", "ForCausalLM", tokens, dict(DEEPSEEK, head_dim=8)),
    "ernie4_5_moe": ("Ernie4_5_Moe", "ForCausalLM", tokens, dict(
        EXPERTS, moe_num_experts=4, moe_k=2, moe_layer_start_index=1)),
    "hunyuan_v1_moe": ("HunYuanMoEV1", "ForCausalLM", tokens, dict(EXPERTS, moe_topk=2, head_dim=8)),
    "minimax": ("MiniMax", "ForCausalLM", tokens, dict(
        EXPERTS, head_dim=8, block_size=4, layer_types=["full_attention", "linear_attention"])),
    "dots1": ("Dots1", "ForCausalLM", tokens, DEEPSEEK),
    "flex_olmo": ("FlexOlmo", "ForCausalLM", tokens, EXPERTS),
    "qwen3_next": ("Qwen3Next", "ForCausalLM", tokens, dict(
        EXPERTS, head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"])),
    "llama4": ("Llama4Text", "Llama4ForCausalLM", tokens, dict(
        EXPERTS, intermediate_size_mlp=48, head_dim=8, interleave_moe_layer_step=1, num_experts_per_tok=1)),
    "sew": ("SEW", "ForSequenceClassification", speech, dict(SPEECH, squeeze_factor=2)),
    "data2vec_audio": ("Data2VecAudio", "ForSequenceClassification", speech, dict(SPEECH)),
    "wav2vec2_conformer": ("Wav2Vec2Conformer", "ForSequenceClassification", speech, dict(
        SPEECH, max_source_positions=64, position_embeddings_type=None, conformer_conv_dropout=0.0)),
    "unispeech": ("UniSpeech", "ForSequenceClassification", speech, SPEECH),
    "unispeech_sat": ("UniSpeechSat", "ForSequenceClassification", speech, SPEECH),
    "bigbird_pegasus": ("BigBirdPegasus", "ForConditionalGeneration", pairs, dict(
        SEQ2SEQ, attention_type="original_full")),
    "convnextv2": ("ConvNextV2", "ForImageClassification", images32, dict(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)),
    "hiera": ("Hiera", "ForImageClassification", images32, dict(
        image_size=[32, 32], embed_dim=8, depths=[1, 1], num_heads=[1, 2], query_stride=[2, 2], masked_unit_size=[4, 4],
        num_query_pool=1, embed_dim_multiplier=2.0, drop_path_rate=0.0)),
    "swinv2": ("Swinv2", "ForImageClassification", images, dict(
        IMAGES, patch_size=2, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4, drop_path_rate=0.0)),
    "mamba2": ("Mamba2", "ForCausalLM", unmasked, dict(
        state_size=4, num_heads=4, head_dim=16, n_groups=1, chunk_size=4, expand=2)),
    "falcon_mamba": ("FalconMamba", "ForCausalLM", unmasked, dict(state_size=4)),
    "zamba2": ("Zamba2", "ForCausalLM", tokens, dict(
        mamba_d_state=4, n_mamba_heads=2, use_mem_rope=False, num_hidden_layers=4, hybrid_layer_ids=[1, 3],
        mamba_headdim=32, chunk_size=4, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"])),
    "recurrent_gemma": ("RecurrentGemma", "ForCausalLM", tokens, dict(
        lru_width=32, attention_window_size=8, num_hidden_layers=3,
        block_types=["recurrent", "recurrent", "attention"])),
    "bamba": ("Bamba", "ForCausalLM", tokens, dict(
        mamba_n_heads=4, mamba_d_head=16, mamba_d_state=4, mamba_n_groups=1, mamba_chunk_size=4,
        attn_layer_indices=[1])),
    "lfm2": ("Lfm2", "ForCausalLM", tokens, dict(layer_types=["conv", "full_attention"])),
    "cohere2": ("Cohere2", "ForCausalLM", tokens, dict(sliding_window=8)),
    "exaone4": ("Exaone4", "ForCausalLM", tokens, {}),
    "glm4": ("Glm4", "ForCausalLM", tokens, dict(head_dim=8)),
    "helium": ("Helium", "ForCausalLM", tokens, dict(head_dim=8)),
    "diffllama": ("DiffLlama", "ForCausalLM", tokens, dict(head_dim=8)),
    "arcee": ("Arcee", "ForCausalLM", tokens, {}),
    "ministral": ("Ministral", "ForCausalLM", tokens, dict(head_dim=8, sliding_window=8)),
    "bitnet": ("BitNet", "ForCausalLM", tokens, {}),
    "seed_oss": ("SeedOss", "ForCausalLM", tokens, dict(head_dim=8, residual_dropout=0.0)),
    "umt5": ("UMT5", "ForConditionalGeneration", pairs, T5),
    "plbart": ("PLBart", "ForConditionalGeneration", pairs, SEQ2SEQ),
    "blenderbot_small": ("BlenderbotSmall", "ForConditionalGeneration", pairs, SEQ2SEQ),
    "data2vec_text": ("Data2VecText", "ForMaskedLM", tokens, {}),
    "data2vec_vision": ("Data2VecVision", "ForImageClassification", images, dict(IMAGES, drop_path_rate=0.0)),
    "xlm_roberta": ("XLMRoberta", "ForMaskedLM", tokens, {}),
    "ibert": ("IBert", "ForMaskedLM", tokens, {}),
    "luke": ("Luke", "ForMaskedLM", tokens, dict(entity_vocab_size=16, entity_emb_size=16)),
    "markuplm": ("MarkupLM", "ForSequenceClassification", sentences, {}),
    "megatron_bert": ("MegatronBert", "ForMaskedLM", tokens, {}),
    "mra": ("Mra", "ForMaskedLM", tokens, dict(block_per_row=1)),
    "yoso": ("Yoso", "ForMaskedLM", tokens, dict(use_expectation=True)),
    "xmod": ("Xmod", "ForMaskedLM", tokens, dict(languages=["en"], default_language="en", adapter_reduction_factor=2)),
    "mobilevit": ("MobileViT", "ForImageClassification", images32, dict(
        image_size=32, patch_size=2, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
        num_attention_heads=4)),
    "mobilenet_v1": ("MobileNetV1", "ForImageClassification", images32, dict(depth_multiplier=0.25)),
    "focalnet": ("FocalNet", "ForImageClassification", images32, dict(
        image_size=32, embed_dim=8, hidden_sizes=[8, 16], depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3],
        drop_path_rate=0.0)),
    "pvt_v2": ("PvtV2", "ForImageClassification", images32, dict(
        image_size=32, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4],
        mlp_ratios=[2, 2, 2, 2], drop_path_rate=0.0)),
    "swiftformer": ("SwiftFormer", "ForImageClassification", images32, dict(
        image_size=32, depths=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32], drop_path_rate=0.0,
        drop_conv_encoder_rate=0.0, drop_mlp_rate=0.0)),
    "ijepa": ("IJepa", "ForImageClassification", images, IMAGES),
    "vit_msn": ("ViTMSN", "ForImageClassification", images, IMAGES),
    # two towers
    "clip": ("CLIP", "Model", image_and_text, dict(projection_dim=16)),
    "siglip": ("Siglip", "Model", image_and_text, {}),
}  # fmt: skip


LEFT_OUT = {
    "XLNet": ("max_position_embeddings",), "Funnel": ("num_hidden_layers",), "ProphetNet": ("num_hidden_layers",),
    "Swin": ("num_hidden_layers", "num_attention_heads"), "Swinv2": ("num_hidden_layers", "num_attention_heads"),
}  # fmt: skip
"""What of :data:`SMALL` a configuration refuses."""

SINGLE = ("switch", "nllb_moe", "xglm", "mixtral", "prophetnet", "prophetnet_shifted", "mra", *SINGLE_COMPOSED)
"""Families that do not run in double precision."""


def _config(name: str, own: Mapping[str, Any]) -> Any:
    import transformers

    kind = getattr(transformers, name + "Config")
    if name in ("CLIP", "Siglip"):
        text = dict(SMALL, num_key_value_heads=4, projection_dim=16, projection_size=32)
        return kind(text_config=text, vision_config=dict(text, **IMAGES), **own)
    given = {**SMALL, **own}
    if "layer_types" in own:
        given["num_hidden_layers"] = len(own["layer_types"])
    return kind(**{k: v for k, v in given.items() if k not in LEFT_OUT.get(name, ())})


def _case(name: str) -> Case:
    import transformers

    config, head, feed, own = FAMILIES[name]
    kind = getattr(transformers, head if hasattr(transformers, head) and head != "Model" else config + head)
    torch.manual_seed(0)
    model: nn.Module = kind(_config(config, own)).train()
    (args, kwargs), batch2 = (feed(torch.Generator().manual_seed(seed)) for seed in (1, 2))
    case = Case(name, model, args, kwargs, "outputs.loss", batch2)
    return case if name in SINGLE else as_float64(case)


WIDE: dict[str, Callable[[], Case]] = {
    **{name: functools.partial(_case, name) for name in FAMILIES},
    **COMPOSED,
    **PLAIN,
}

EVERY: dict[str, Callable[[], Case]] = {
    **{name: functools.partial(lambda make: as_float64(make()), make) for name, make in ZOO.items()},
    **WIDE,
}
"""All families of the three zoos."""
