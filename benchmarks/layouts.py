"""The default search beside layouts that experts published (portfolio.py has many more, made at random and by hand).

    python benchmarks/layouts.py                      the table of expert layouts, a line a case, each in a process
    python benchmarks/layouts.py llama-8b-64          one case
    python benchmarks/layouts.py llama-8b-64 bf16-mixed    under a precision policy; else in bfloat16 throughout

The models are on the meta device. A row has the seconds of a step by autopar's own price for the search and for the
layout pinned in the words of ``autopar plan --like``, their ratio, and the CPU-seconds of both searches after capture.
A layout that does not fit as it is published is priced once more with ``recompute=full``, and the row says so (``as``).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

LLAMA_8B = {"hidden": 4096, "ffn": 14336, "heads": 32, "layers": 32}
LLAMA_70B = {"hidden": 8192, "ffn": 28672, "heads": 64, "layers": 80}
LLAMA_405B = {"hidden": 16384, "ffn": 53248, "heads": 128, "layers": 126}
GPT2_SMALL = {"hidden": 768, "heads": 12, "layers": 12}
GPT3 = {"hidden": 12288, "heads": 96, "layers": 96}
T5_3B = {"hidden": 1024, "ffn": 16384, "heads": 32, "layers": 24}
VIT_22B = {"hidden": 6144, "ffn": 24576, "heads": 48, "layers": 48}
MIXTRAL = {"hidden": 4096, "ffn": 14336, "heads": 32, "layers": 32}
QWEN3_30B = {"hidden": 2048, "ffn": 768, "heads": 32, "layers": 48}
T5_11B = {"hidden": 1024, "ffn": 65536, "heads": 128, "layers": 24}
VIT_H = {"hidden": 1280, "ffn": 5120, "heads": 16, "layers": 32}
WHISPER_LARGE = {"hidden": 1280, "ffn": 5120, "heads": 20, "layers": 32}
DEEPSEEK_V3 = {"hidden": 7168, "ffn": 18432, "heads": 128, "layers": 61}

TORCHTITAN = "torchtitan (Liang et al. 2024, arXiv:2410.06511): FSDP2 alone"
NEMO = "NVIDIA NeMo's recipe for Llama 3 70B (tensor 4, 4 stages, context 2, virtual 5), context left out"
NEMO_405B = "after NeMo's recipe for 405B on 576 (tensor 8, 9 stages, virtual 7), 8 stages"
META = "The Llama 3 Herd of Models (2024, arXiv:2407.21783), table 4; at 16 stages the virtual degree is autopar's"
KORTHIKANTI = "Korthikanti et al. 2022 (arXiv:2205.05198), table 3: tensor 8, 8 stages, interleaved by 3"
NARAYANAN = "after Narayanan et al. 2021 (arXiv:2104.04473), table 1: tensor 8 in a node, stages across"
ALONE = "what everyone runs: data parallelism"
MODEL_PARALLEL = "tensor parallelism in a node (the 22B of Korthikanti et al. 2022, table 3), data across"
NEMO_MIXTRAL = "after NVIDIA NeMo's recipe for Mixtral 8x7B on 64 (4 stages, virtual 8, experts over 8)"
DEEPSEEK = (
    "after DeepSeek-V3 (2024, arXiv:2412.19437): experts over 64 devices, no tensor parallelism, 8 stages for its 16, "
    "1F1B and full recomputation for DualPipe and FP8"
)

BRIDGE = "NVIDIA Megatron-Bridge's recipe for Qwen3-30B-A3B on 16 H100: experts over 16, no tensor parallelism"

CASES: dict[str, tuple[str, dict[str, Any], str, int, int, str, str]] = {
    # name: (family, shape, cluster, rows, sequence, layout, where it is published)
    "llama-8b-8": ("llama", LLAMA_8B, "dgx-h100", 16, 8192, "dp=8", TORCHTITAN),
    "llama-8b-64": ("llama", LLAMA_8B, "dgx-h100-x8", 128, 8192, "dp=64", TORCHTITAN),
    "llama-70b-64": ("llama", LLAMA_70B, "dgx-h100-x8", 128, 8192, "tp=4,pp=4,dp=4,vp=5,sp", NEMO),
    "llama-70b-256": ("llama", LLAMA_70B, "dgx-h100-x32", 512, 8192, "tp=4,pp=4,dp=16,vp=5,sp", NEMO),
    "llama-405b-512": ("llama", LLAMA_405B, "dgx-h100-x64", 256, 8192, "tp=8,pp=8,dp=8,vp=7,sp", NEMO_405B),
    "llama-405b-2048": ("llama", LLAMA_405B, "dgx-h100-x256", 1024, 8192, "tp=8,pp=16,dp=16,vp=7,sp", META),
    "llama-405b-16384": ("llama", LLAMA_405B, "dgx-h100-x2048", 2048, 8192, "tp=8,pp=16,dp=128,vp=7,zero=1,sp", META),
    "mixtral-8x7b-64": ("mixtral", MIXTRAL, "dgx-h100-x8", 256, 4096, "pp=4,dp=16,ep=8,vp=8", NEMO_MIXTRAL),
    "deepseek-v3-512": (
        "deepseek",
        DEEPSEEK_V3,
        "dgx-h100-x64",
        1024,
        4096,
        "pp=8,dp=64,ep=64,recompute=full",
        DEEPSEEK,
    ),
    "deepseek-v3-1024": (
        "deepseek",
        DEEPSEEK_V3,
        "dgx-h100-x128",
        2048,
        4096,
        "pp=16,dp=64,ep=64,recompute=full",
        DEEPSEEK,
    ),
    "qwen3-30b-a3b-16": ("qwen3", QWEN3_30B, "dgx-h100-x2", 256, 4096, "dp=16,ep=16,mbs=1", BRIDGE),
    "t5-11b-32": ("t5", T5_11B, "dgx-a100-x4", 128, 512, "tp=8,dp=4,m=4", MODEL_PARALLEL),
    "vit-h-32": ("vit", VIT_H, "dgx-a100-x4", 2048, 224, "dp=32,m=1", ALONE),
    "whisper-large-8": ("whisper", WHISPER_LARGE, "dgx-a100", 64, 3000, "dp=8,m=1", ALONE),
    "gpt2-8": ("gpt2", GPT2_SMALL, "dgx-h100", 64, 1024, "dp=8,m=1", ALONE),
    "gpt3-64": ("gpt2", GPT3, "dgx-a100-x8", 64, 2048, "tp=8,pp=8,vp=3,sp", KORTHIKANTI),
    "gpt3-1024": ("gpt2", GPT3, "dgx-a100-x128", 1536, 2048, "tp=8,pp=8,dp=16,mbs=1,sp", NARAYANAN),
    "resnet-50-8": ("resnet", {}, "dgx-h100", 256, 224, "dp=8,m=1", ALONE),
    "t5-3b-16": ("t5", T5_3B, "dgx-h100-x2", 64, 512, "dp=16", ALONE),
    "vit-22b-64": ("vit", VIT_22B, "dgx-h100-x8", 256, 224, "tp=8,dp=8,m=4", MODEL_PARALLEL),
}


def model_of(family: str, shape: dict[str, Any], seq: int) -> Any:
    """The model on the meta device, in bfloat16 but for ResNet."""
    import torch
    import transformers as t

    with torch.device("meta"):
        if family == "llama":
            config = t.LlamaConfig(
                hidden_size=shape["hidden"], intermediate_size=shape["ffn"], num_hidden_layers=shape["layers"],
                num_attention_heads=shape["heads"], num_key_value_heads=8, vocab_size=128256,
                max_position_embeddings=seq, use_cache=False,
            )  # fmt: skip
            return t.LlamaForCausalLM(config).to(torch.bfloat16)
        if family == "mixtral":
            config = t.MixtralConfig(
                hidden_size=shape["hidden"], intermediate_size=shape["ffn"], num_hidden_layers=shape["layers"],
                num_attention_heads=shape["heads"], num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
                vocab_size=32000, max_position_embeddings=seq, use_cache=False,
            )  # fmt: skip
            return t.MixtralForCausalLM(config).to(torch.bfloat16)
        if family == "qwen3":
            config = t.Qwen3MoeConfig(
                hidden_size=shape["hidden"], moe_intermediate_size=shape["ffn"], intermediate_size=6144,
                num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=4,
                head_dim=128, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
                max_position_embeddings=seq, use_cache=False,
            )  # fmt: skip
            return t.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
        if family == "whisper":
            config = t.WhisperConfig(
                d_model=shape["hidden"], encoder_ffn_dim=shape["ffn"], decoder_ffn_dim=shape["ffn"],
                encoder_attention_heads=shape["heads"], decoder_attention_heads=shape["heads"],
                encoder_layers=shape["layers"], decoder_layers=shape["layers"], vocab_size=51866, num_mel_bins=128,
                use_cache=False,
            )  # fmt: skip
            return t.WhisperForConditionalGeneration(config).to(torch.bfloat16)
        if family == "deepseek":
            config = t.DeepseekV3Config(
                hidden_size=shape["hidden"], intermediate_size=shape["ffn"], num_hidden_layers=shape["layers"],
                num_attention_heads=shape["heads"], num_key_value_heads=shape["heads"], moe_intermediate_size=2048,
                n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4,
                first_k_dense_replace=3, routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=1536,
                qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, vocab_size=129280,
                max_position_embeddings=seq, use_cache=False,
            )  # fmt: skip
            return t.DeepseekV3ForCausalLM(config).to(torch.bfloat16)
        if family == "gpt2":
            config = t.GPT2Config(
                vocab_size=51200, n_positions=seq, n_embd=shape["hidden"], n_layer=shape["layers"],
                n_head=shape["heads"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            )  # fmt: skip
            return t.GPT2LMHeadModel(config).to(torch.bfloat16)
        if family == "t5":
            config = t.T5Config(
                d_model=shape["hidden"], d_ff=shape["ffn"], d_kv=128, num_layers=shape["layers"],
                num_heads=shape["heads"], dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
            )  # fmt: skip
            return t.T5ForConditionalGeneration(config).to(torch.bfloat16)
        if family == "vit":
            config = t.ViTConfig(
                hidden_size=shape["hidden"], intermediate_size=shape["ffn"], num_hidden_layers=shape["layers"],
                num_attention_heads=shape["heads"], image_size=seq, patch_size=14, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0, num_labels=1000,
            )  # fmt: skip
            return t.ViTForImageClassification(config).to(torch.bfloat16)
        return t.ResNetForImageClassification(t.ResNetConfig(num_labels=1000))


def batch_of(family: str, rows: int, seq: int, model: Any) -> dict[str, Any]:
    """Keyword arguments with the loss."""
    import torch

    with torch.device("meta"):
        if family in ("vit", "resnet"):
            labels = torch.zeros(rows, dtype=torch.long)
            return {"pixel_values": torch.zeros(rows, 3, seq, seq, dtype=model.dtype), "labels": labels}
        if family == "whisper":
            features = torch.zeros(rows, 128, seq, dtype=model.dtype)
            return {"input_features": features, "labels": torch.zeros(rows, 448, dtype=torch.long)}
        ids = torch.zeros(rows, seq, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}


def graphs_of(case: str, precision: str | None) -> Callable[[int], Any]:
    """The graph of a microbatch of a case, by the number of microbatches in a step."""
    from autopar.capture import capture
    from autopar.capture.microbatches import resized
    from autopar.words.precision import parse_precision

    family, shape, _, rows, seq, _, _ = CASES[case]
    model = model_of(family, shape, seq)
    policy = parse_precision(precision)
    whole, half = (
        capture(model, (), batch_of(family, n, seq, model), precision=policy).graph for n in (rows, rows // 2)
    )

    @cache
    def graph_of(microbatches: int) -> Any:
        return resized(whole, half, rows, rows // 2, rows // microbatches)

    return graph_of


def experts_in(plan: Any) -> dict[str, Any]:
    """How a plan cuts routed experts: on which axes, and how many blocks so; nothing for a model without."""
    ways: Counter[str] = Counter()
    for stage in plan.stages:
        for name, options in stage.ops.items():
            if "expert_block" in name:
                cuts = zip(options, stage.mesh, strict=True)
                ways[", ".join(f"{option} over {axis}={n}" for option, (axis, n) in cuts if n > 1)] += 1
    return {"experts": dict(ways)} if ways else {}


def measure(case: str, precision: str | None = None) -> dict[str, Any]:
    """One case in this process: the search, and the published layout."""
    warnings.simplefilter("ignore")
    import autopar.rules  # noqa: F401
    from autopar.capture.microbatches import numbers_of_parts
    from autopar.errors import AutoparError
    from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
    from autopar.planner.layouts.pricing import pinned_layout
    from hardware_profiles import load_cluster

    _, _, cluster, rows, _, text, source = CASES[case]
    hardware, graph_of = load_cluster(cluster), graphs_of(case, precision)
    n, base = hardware.n_devices, PipelineOptions(1)
    start = time.process_time()
    search = plan_pipeline({m: graph_of(m) for m in numbers_of_parts(rows)}, hardware, n, base)
    searched = time.process_time()
    seconds = search.plan.seconds
    row: dict[str, Any] = {"case": case, "search s": round(seconds, 4), "plan": search.tried[0][0]}
    row |= experts_in(search.plan)
    row["search CPU s"] = round(searched - start, 1)
    said: dict[str, Any] = {}
    for layout in (text, *([f"{text},recompute=full"] if "recompute" not in text else [])):
        try:
            pinned = pinned_layout(graph_of, hardware, layout, rows)
        except (AutoparError, ValueError) as error:
            said.setdefault("published s", str(error).splitlines()[0][:80])
            continue
        said |= {"as": layout, "its s": round(pinned.seconds, 4), "its GiB": round(pinned.memory_bytes / 2**30, 1)}
        said |= {"search / published": round(seconds / pinned.seconds, 4)}
        if pinned.fits:
            break
    row["pinned CPU s"] = round(time.process_time() - searched, 1)
    return row | {"source": source, "published": text} | said


def main() -> None:
    """Print a line for every case."""
    if sys.argv[1:]:
        print(json.dumps(measure(*sys.argv[1:3])))
        return
    for case in CASES:
        done = subprocess.run([sys.executable, __file__, case], capture_output=True, text=True)
        print(done.stdout.strip() or f"{case}: {(done.stderr.strip().splitlines() or ['?'])[-1]}", flush=True)


if __name__ == "__main__":
    main()
