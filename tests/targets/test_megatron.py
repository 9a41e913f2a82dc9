"""Megatron: what is written is read as the same layout; scripts and yaml files of others; what is refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.frontends.models import load_model
from autopar.planner.layouts.layout_words import Layout, parse_layout
from autopar.planner.layouts.pricing import PricedLayouts
from autopar.planner.layouts.stage_starts import sizes_of
from autopar.targets import target_named
from autopar.targets.exporting import Exporter
from autopar.targets.space import refusal, text_of
from autopar.targets.target import Config, ConfigError, ModelFacts, Source
from autopar.targets.trainers.megatron import writing
from autopar.targets.trainers.megatron.shell import read_script
from autopar.words.precision import parse_precision

TARGET = target_named("megatron")
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 50257, "n_embd": 1536, "n_layer": 24, "n_head": 16, "n_positions": 4096,
    "activation_function": "gelu_new", "tie_word_embeddings": True,
}  # fmt: skip
QWEN_MOE = {
    **LLAMA, "model_type": "qwen2_moe", "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 2048, "norm_topk_prob": False,
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "model_type": "deepseek_v3", "n_routed_experts": 64, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
}  # fmt: skip


def facts(config: dict[str, Any]) -> ModelFacts:
    experts = config.get("num_experts") or config.get("n_routed_experts") or 0
    layers = config.get("num_hidden_layers") or config["n_layer"]
    return ModelFacts(config["model_type"], config, layers, ("model.layers",), 0, experts)


def read(text: str, name: str = "train.sh") -> Config:
    source = Source(Path(name), text)
    assert TARGET.reads is not None and TARGET.reads(source)
    assert TARGET.read is not None
    return TARGET.read(source)


def written(words: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, m: int = 8, seq: int = 4096,
            precision: str | None = "bf16-mixed", optimizer: str = "adamw"
            ) -> tuple[Layout, dict[str, str]]:  # fmt: skip
    """Return a layout and the files that are written for it; stages are those of an even division."""
    layout, model = parse_layout(words), facts(config)
    stages = sizes_of(model.blocks, layout.groups * layout.chunks)
    monkeypatch.setattr(writing, "counts", lambda _: stages)
    monkeypatch.setattr(writing, "whole_blocks", lambda *_: [])
    monkeypatch.setattr(writing, "shares_of", lambda _: SimpleNamespace(steps=0.0, parameters=0.0))
    export: Any = SimpleNamespace(
        layout=layout, model=model, rows=m * layout.rows * layout.sizes["dp"], sequence=seq, microbatches=m,
        rows_of_rank=layout.rows, precision=parse_precision(precision), optimizer=optimizer, priced=None,
    )  # fmt: skip
    return layout, dict(writing.write(export).files)


def alike(layout: Layout) -> tuple[object, ...]:
    """Return all of a layout that has a price; ``full:4`` of stages of 4 blocks is ``full``."""
    return (
        layout.sizes, layout.experts, layout.experts_travel, layout.groups, layout.chunks, layout.rows, layout.schedule,
        layout.zero, layout.sequence_parallel,
        layout.way if layout.sizes["cp"] > 1 else "", set(layout.recompute.split("+")),
    )  # fmt: skip


AXES = [
    "",
    "tp=2",
    "tp=4,sp",
    "pp=4",
    "pp=3,vp=3",
    "tp=2,sp,pp=8,vp=2",
    "cp=2:allgather",
    "tp=2,sp,cp=4:ring",
    "cp=2:ulysses",
]
STORAGES = ["", "zero=1", "zero=3"]
AGAIN = ["none", "full", "full:1", "selective:mlp"]


@pytest.mark.parametrize("config", [LLAMA, GPT2, QWEN_MOE, DEEPSEEK], ids=lambda c: c["model_type"])
def test_what_is_written_is_read_as_the_same_layout(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    experts = ["", "ep=4", "ep=4,etp=1"] if facts(config).experts else [""]
    count = 0
    for axes, storage, again, ep in list(product(AXES, STORAGES, AGAIN, experts))[:: len(experts)]:
        words = ",".join(filter(None, [axes, "dp=8", "mbs=2", storage, ep, f"recompute={again}"]))
        layout = parse_layout(words)
        if refusal(TARGET, layout, facts(config)):
            continue
        layout, files = written(words, config, monkeypatch)
        found = read(files["arguments.txt"], "arguments.txt")
        assert alike(parse_layout(text_of({**found.words, "dp": "8"}))) == alike(layout), words
        assert (found.batch, found.sequence, found.software) == (128, 4096, None), words
        assert len(found.unpriced) == bool(layout.sizes["cp"] > 1 and layout.experts > 1 and not layout.experts_travel)
        assert found.model["hidden_size"] == config.get("hidden_size", config.get("n_embd"))
        count += 1
    assert count >= 40


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "32-true", "fp8-mixed", "fp8-delayed-mixed",
                                       "mxfp8-mixed",
                                       "nvfp4-mixed", "reduce=bfloat16", "moments=bfloat16",
                                       "params=float16,reduce=float16",
                                       "products=fp8,narrow_gathers=true"])  # fmt: skip
def test_formats_are_read_as_they_were_written(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, files = written("dp=8,zero=1", LLAMA, monkeypatch, precision=precision)
    assert parse_precision(read(files["arguments.txt"], "a.txt").precision) == parse_precision(precision)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "sgd_momentum"])
def test_optimizers_are_read_as_they_were_written(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, files = written("dp=8", LLAMA, monkeypatch, optimizer=optimizer)
    assert read(files["arguments.txt"], "a.txt").optimizer == optimizer


def test_a_plan_is_written_with_its_stages_and_priced_alike(tmp_path: Path) -> None:
    small = {**LLAMA, "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
             "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(small))
    loaded = load_model(f"hf:{tmp_path}/config.json", 16, 64)
    captured = capture(loaded.model, loaded.args, loaded.kwargs, precision=parse_precision("bf16-mixed"))
    layouts = PricedLayouts(loaded.model, captured, (loaded.args, loaded.kwargs))
    exporter = Exporter(TARGET, loaded, captured, layouts, "dgx-h100", 16)
    plan = exporter.of_words("tp=2,sp,pp=2,dp=2,zero=1,mbs=1,recompute=full:1")
    _, files = exporter.export(plan)
    assert '"Et*3|t*2L"' in files.files["arguments.txt"]
    found = read(files.files["arguments.txt"], "arguments.txt")
    again = layouts.price(exporter.where, text_of({**found.words, "dp": "2"}))
    assert (again.seconds, again.memory_bytes) == (plan.seconds, plan.memory_bytes)
    assert found.model["num_hidden_layers"] == 5


def test_bridge_overrides_say_the_same_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (
        "tp=2,sp,pp=3,vp=3,dp=8,zero=1,recompute=selective:mlp",
        "cp=2:ulysses,dp=8,zero=1,mbs=2,recompute=full:1",
    ):
        layout, files = written(words, LLAMA, monkeypatch, precision="fp8-mixed")
        found = read(files["bridge_overrides.txt"], "overrides.txt")
        assert alike(parse_layout(text_of({**found.words, "dp": "8"}))) == alike(layout)
        assert (found.software, found.precision) == ("nemo", "fp8-mixed")


def test_uneven_stages_are_a_layout_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    _, files = written("pp=3,dp=2", LLAMA, monkeypatch)
    assert '--pipeline-model-parallel-layout "Et*11|t*11|t*10L"' in files["arguments.txt"]
    _, files = written("pp=4,vp=3,dp=2", LLAMA, monkeypatch)
    assert '"Et*2|t*2|(t*3|)*8t*2|t*2L"' in files["arguments.txt"]


def test_the_program_of_a_rank_hands_the_arguments_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, files = written("tp=2,sp,dp=2", LLAMA, monkeypatch)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    checkout = tmp_path / "megatron"
    checkout.mkdir()
    out = tmp_path / "out.json"
    (checkout / "pretrain_gpt.py").write_text(
        "import json, os, sys\n"
        f"json.dump([sys.argv[1:], os.environ['CUDA_DEVICE_MAX_CONNECTIONS']], open({str(out)!r}, 'w'))\n"
    )
    subprocess.run([sys.executable, str(tmp_path / "pretrain.py"), "--log-interval", "5"], check=True, timeout=60,
                   env={"MEGATRON_LM": str(checkout), "PATH": "/usr/bin:/bin"})  # fmt: skip
    words, connections = json.loads(out.read_text())
    assert words == [*shlex.split(files["arguments.txt"], comments=True), "--log-interval", "5"]
    assert connections == "1"


@pytest.mark.parametrize(("words", "config", "part"), [
    ("tp=3,dp=2", LLAMA, "tp=3 does not divide the 32 heads"),
    ("pp=2,dp=2,schedule=zb-h1", LLAMA, "schedule 1f1b or interleaved-1f1b, zb-h1 is asked for"),
    ("dp=2,zero=2", LLAMA, "has zero 0 or 1 or 3"),
    ("tp=2,ep=2,dp=2", QWEN_MOE, "need sequence parallelism"),
    ("ep=3,dp=3", QWEN_MOE, "ep=3 does not divide the 64 experts"),
    ("ep=2,dp=2", LLAMA, "has none"),
    ("dp=2,recompute=selective:self_attn", LLAMA, "selective:self_attn is asked for"),
    ("dp=2,recompute=every:2", LLAMA, "every:2 is asked for"),
    ("cp=3:ulysses,dp=2", LLAMA, "8 heads of keys and values"),
    ("pp=2,dp=2,fsdp", LLAMA, "pp=2 is asked for"),
    ("pp=4,vp=2,dp=2,m=2", LLAMA, "pp=4, m=2 is asked for"),
    ("dp=2,precision=bf16-true", LLAMA, "float32 masters"),
    ("dp=2", {**LLAMA, "model_type": "vit"}, "pretrain_vision_classify.py, last in 0.16"),
    ("dp=2", {**LLAMA, "model_type": "whisper"}, "does not build the family 'whisper'"),
    ("dp=2", {**LLAMA, "hidden_act": "gelu"}, "the config has gelu"),
])  # fmt: skip
def test_what_it_cannot_run_is_one_sentence(words: str, config: dict[str, Any], part: str) -> None:
    assert part in refusal(TARGET, parse_layout(words), facts(config))


def test_a_batch_that_interleaved_stages_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="as many microbatches as pp=4"):
        written("pp=4,vp=2,dp=2", LLAMA, monkeypatch, m=2)
    with pytest.raises(ConfigError, match="have to be equal here; use 15 or 18"):
        written("pp=3,vp=2,dp=2", LLAMA, monkeypatch, m=16)
    with pytest.raises(ConfigError, match="2 x cp = 8 places in a row, there are 1004"):
        written("cp=4,dp=2", LLAMA, monkeypatch, seq=1004)


SCRIPT = r"""
#!/bin/bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"2"}
WORLD=$(($GPUS_PER_NODE*$NNODES))
CHECKPOINTS=$1
TP=4          # a comment
DTYPE="fp8"
DISTRIBUTED=(--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096   # sizes
    --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096
)
if [[ "$DTYPE" == "fp8" ]]; then
    MODEL_ARGS+=("--fp8-format hybrid" --fp8-recipe tensorwise)
else
    MODEL_ARGS+=(--fp16)
fi
if [ -n "${WANDB}" ]; then MODEL_ARGS+=(--no-such-option); fi
OTHERS="--micro-batch-size 1 --global-batch-size 64 --bf16 \
   --tensor-model-parallel-size ${TP} --sequence-parallel"
torchrun ${DISTRIBUTED[@]} pretrain_gpt.py "${MODEL_ARGS[@]}" $OTHERS --save "$CHECKPOINTS/x" \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather 2>&1 | tee log.txt
"""


def test_a_script_is_read_as_text() -> None:
    found = read(SCRIPT)
    assert dict(found.words) == {"tp": "4", "sp": "", "zero": "1", "mbs": "1"}
    assert (found.batch, found.sequence, found.devices, found.precision) == (64, 4096, 16, "fp8-mixed")
    assert found.software is None
    assert found.model == {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    script = read_script(
        f"A=$(touch {mark})\nB=`touch {mark}`\ntouch {mark}\nC=$((1/0))\npython x.py --bf16 $A $B $C\n"
    )
    assert not mark.exists()
    assert len(script.commands) == 1


@pytest.mark.parametrize(("change", "part"), [
    ("--tensor-model-paralel-size 2", "did you mean '--tensor-model-parallel-size'?"),
    ("--tensor-model-parallel-size $2", "is '$2', and nothing in the file sets $2"),
    ("--tensor-model-parallel-size two", "is 'two'; give a whole number"),
    ("--pipeline-model-parallel-size 5", "32 layers do not divide over pp=5"),
    ("--use-torch-fsdp2 --pipeline-model-parallel-size 2", "is 2, --use-torch-fsdp2 works with 1 alone"),
    ("--use-torch-fsdp2 --use-distributed-optimizer", "does not work with --use-torch-fsdp2"),
    ("--global-batch-size 30", "30 is no multiple of micro batch 1 x dp=4"),
    ("--tensor-model-parallel-size 32", "does not divide the 16 devices"),
    ("--recompute-granularity some", "is 'some'; use full or selective"),
    ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*16|t*16L'",
     "2 stages, which do not divide over pp=4"),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*16|x*16L'", "has 'x'; it is made of"),
    ("--expert-tensor-parallel-size 2 --expert-model-parallel-size 2", "is 2; the price knows 1 and tp=4"),
    ("--fp16", "stands beside --bf16"),
    ("--lr", "has no value"),
])  # fmt: skip
def test_a_wrong_option_is_one_error_with_its_name(change: str, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(SCRIPT.replace("2>&1", f"{change} 2>&1"))
    assert part in str(error.value)
    assert change.split()[0] in str(error.value) or "--" in str(error.value)


def test_what_changes_the_price_and_is_not_known_is_shown() -> None:
    found = read(SCRIPT.replace("2>&1", "--optimizer-cpu-offload --log-interval 5 --rampup-batch-size 8 8 1000 2>&1"))
    assert [text.split(":")[0] for text in found.unpriced] == ["--optimizer-cpu-offload", "--rampup-batch-size"]
    assert {"--log-interval", "--save"} <= set(found.ignored)
    layers = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*20|t*12L'"
    found = read(SCRIPT.replace("2>&1", f"{layers} 2>&1"))
    assert any("20, 12" in text and "2 x 16" in text for text in found.unpriced)


def test_a_script_of_an_older_release_has_its_software() -> None:
    found = read("python pretrain_gpt.py --num-layers 24 --micro-batch-size 4 --global-batch-size 16 --seq-length 1024 "
                 "--checkpoint-activations --fp16")  # fmt: skip
    assert (found.software, found.words["recompute"]) == ("megatron-2021", "full")
    assert found.precision == "params=float16,reduce=float16"


ZOO = """
ENV_VARS: {TP: 2}
MODEL_ARGS:
  --tensor-model-parallel-size: ${TP}
  --expert-model-parallel-size: 8
  --expert-tensor-parallel-size: 1
  --num-experts: 64
  --moe-token-dispatcher-type: alltoall
  --sequence-parallel: true
  --bf16: true
  --no-save-optim: false
  --micro-batch-size: 1
  --global-batch-size: 64
  --seq-length: 4096
"""
NEMO1 = """
trainer: {num_nodes: 4, devices: 8, precision: bf16}
model:
  micro_batch_size: 1
  global_batch_size: 512
  tensor_model_parallel_size: 8
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 4
  sequence_parallel: true
  encoder_seq_length: 4096
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 32
  activations_checkpoint_granularity: selective
  optim: {name: mcore_distributed_optim, lr: 1e-4, overlap_grad_sync: true}
"""
NEMO2 = """
trainer:
  devices: 8
  num_nodes: 2
  plugins: {precision: bf16-mixed, grad_reduce_in_fp32: false}
  strategy: {tensor_model_parallel_size: 2, sequence_parallel: true, context_parallel_size: 2,
             ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true, overlap_param_gather: true}}
data: {micro_batch_size: 1, global_batch_size: 128, seq_length: 8192}
model: {config: {num_layers: 32, hidden_size: 4096}}
"""
MEGATRON = """
language_model: {num_layers: 24, hidden_size: 1024, num_attention_heads: 16, recompute_granularity: full,
                 recompute_method: uniform, recompute_num_layers: 1, add_bias_linear: False, num_moe_experts: null}
model_parallel: {tensor_model_parallel_size: 4, sequence_parallel: True, bf16: True}
micro_batch_size: 2
global_batch_size: 128
seq_length: 4096
use_distributed_optimizer: True
"""
BRIDGE = """
model: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, sequence_parallel: true}
train: {micro_batch_size: 1, global_batch_size: 64}
mixed_precision: bf16_with_mxfp8_mixed
"""


@pytest.mark.parametrize(("text", "words", "rest"), [
    (ZOO, {"tp": "2", "sp": "", "ep": "8", "etp": "1", "mbs": "1"},
     (64, 4096, None, "bf16-mixed", "megatron-2023-plain")),
    (NEMO1, {"tp": "8", "sp": "", "pp": "2", "vp": "4", "zero": "1", "mbs": "1"},
     (512, 4096, 32, "bf16-mixed", "nemo")),
    (NEMO2, {"tp": "2", "sp": "", "cp": "2:ring", "zero": "1", "mbs": "1"}, (128, 8192, 16, "reduce=bfloat16", "nemo")),
    (MEGATRON, {"tp": "4", "sp": "", "zero": "1", "recompute": "full", "mbs": "2"},
     (128, 4096, None, "bf16-mixed", "megatron-2023-plain")),
    (BRIDGE, {"tp": "2", "sp": "", "pp": "2", "zero": "1", "mbs": "1"}, (64, None, None, "mxfp8-mixed", "nemo")),
], ids=["zoo", "nemo1", "nemo2", "megatron", "bridge"])  # fmt: skip
def test_yaml_files(text: str, words: dict[str, str], rest: tuple[object, ...]) -> None:
    found = read(text, "config.yaml")
    assert dict(found.words) == words
    assert (found.batch, found.sequence, found.devices, found.precision, found.software) == rest


@pytest.mark.parametrize(("text", "old", "new", "part"), [
    (NEMO1, "sequence_parallel", "sequence_paralel", "model.sequence_paralel"),
    (NEMO1, "devices", "device", "trainer.device"),
    (NEMO2, "context_parallel_size", "context_parallel_sizes", "trainer.strategy.context_parallel_sizes"),
    (MEGATRON, "bf16: True", "bf16: True, tp: 2", "model_parallel.tp"),
    (BRIDGE, "micro_batch_size", "microbatch_size", "train.microbatch_size"),
    (ZOO, "--bf16", "--bf61", "--bf61"),
])  # fmt: skip
def test_a_misspelt_field_of_a_yaml_is_named(text: str, old: str, new: str, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(text.replace(old, new), "config.yaml")
    assert part in str(error.value)


def test_files_of_others_are_not_taken() -> None:
    assert TARGET.reads is not None
    for name, text in (("ds.json", '{"train_batch_size": 8}'), ("a.yaml", "distributed_type: FSDP\n"),
                       ("b.yaml", "- 1"),
                       ("train.sh", "torchrun train.py --lr 1e-4"), ("job.toml", "[model]\nname = 'llama3'"),
                       ("c.yaml", "a: [1, 2"), ("empty.txt", "")):  # fmt: skip
        assert not TARGET.reads(Source(Path(name), text)), name


@pytest.mark.parametrize(
    "text", ['"', "A=(", "${", "$((", "if [ x", '--num-layers "', "`", "A=$(", "fi fi done", "a\\"]
)
def test_broken_scripts_are_one_error(text: str) -> None:
    assert TARGET.read is not None
    with pytest.raises(AutoparError):
        TARGET.read(Source(Path("x.sh"), text))
