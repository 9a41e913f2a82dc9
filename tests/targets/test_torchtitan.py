"""The target torchtitan: its files give back the words, what it refuses, and files of others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.capture import capture
from autopar.frontends.models import load_model
from autopar.planner.layouts.layout_words import parse_layout, words_of
from autopar.planner.layouts.pricing import PricedLayouts
from autopar.plans.clusters import get_cluster
from autopar.targets import target_named
from autopar.targets.model_facts import facts_of
from autopar.targets.space import refusal
from autopar.targets.target import ConfigError, Export, ModelFacts, Source
from autopar.targets.trainers.torchtitan import reading
from autopar.words.precision import parse_precision

TITAN = target_named("torchtitan")
CLUSTER = "dgx-h100-x2 as torchtitan"
ROWS, PLACES = 32, 64
LAYOUTS = (
    "dp=16", "dp=16,fsdp", "dp=16,fsdp,mbs=2", "dp=16,fsdp=8", "dp=16,fsdp=4,recompute=full", "dp=16,fsdp=keep,mbs=2",
    "dp=8,tp=2", "dp=8,tp=2,sp,fsdp,recompute=every:2", "dp=4,tp=4,sp,fsdp=2,recompute=every:3",
    "dp=4,cp=4:allgather,fsdp", "dp=2,tp=2,sp,cp=4:allgather,fsdp,recompute=full", "dp=4,pp=4,zero=1",
    "dp=4,pp=4", "dp=4,pp=4,fsdp,mbs=2", "dp=2,tp=2,sp,pp=4,zero=1,schedule=gpipe,mbs=2",
    "dp=4,tp=2,pp=2,vp=4,zero=1,sp",
    "dp=4,pp=4,vp=2,zero=1,recompute=full:1", "dp=8,pp=2,vp=2,zero=1,recompute=every:2,mbs=2", "dp=2,pp=8,zero=1",
    "dp=4,pp=2,cp=2:allgather,zero=1,recompute=full",
)  # fmt: skip
PRICED_AGAIN = ("dp=16,fsdp=keep,mbs=2", "dp=4,pp=4,vp=2,zero=1,recompute=full:1")
ALIKE = {"tp": "1", "pp": "1", "vp": "1", "cp": "1", "ep": "1", "recompute": "none", "mbs": "1", "zero": "0"}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 256, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(config))
    loaded = load_model(f"hf:{file}", ROWS, PLACES)
    captured = capture(loaded.model, loaded.args, loaded.kwargs, precision=parse_precision("bf16-mixed"))
    priced = PricedLayouts(loaded.model, captured, (loaded.args, loaded.kwargs))
    return loaded, captured, priced, facts_of(loaded.model, captured)


def exported(layouts, words: str, precision: str = "bf16-mixed") -> Export:
    loaded, captured, priced, facts = layouts
    found = priced.price(CLUSTER, words)
    policy = parse_precision(precision)
    return Export(found, loaded, captured, facts, get_cluster(CLUSTER), CLUSTER, ROWS, PLACES, policy, "adamw")


def alike(words: str) -> dict[str, str]:
    """Return words without those that say nothing, and with one name for each thing."""
    found = {word: value for word, value in words_of(words).items() if ALIKE.get(word) != value}
    if found.get("schedule") == "interleaved-1f1b":
        del found["schedule"]
    return found


@pytest.mark.parametrize("words", LAYOUTS)
def test_files_give_back_the_words(layouts, words):
    export = exported(layouts, words)
    assert refusal(TITAN, export.layout, export.model) == ""
    files = TITAN.write(export).files
    source = Source(Path("torchtitan_plan.py"), files["torchtitan_plan.py"])
    assert TITAN.reads(source)
    config = TITAN.read(source)
    said = ",".join(word + (f"={value}" if value else "") for word, value in config.words.items())
    assert alike(said) == alike(words)
    assert (config.batch, config.sequence, config.devices) == (ROWS, PLACES, 16)
    assert (config.optimizer, config.precision, config.unpriced) == ("adamw", "bf16-mixed", ())
    assert config.model["num_hidden_layers"] == 8
    if words in PRICED_AGAIN:
        again = layouts[2].price(CLUSTER, said)
        assert again.seconds == export.priced.seconds and again.memory_bytes == export.priced.memory_bytes


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "moments=bfloat16", "master=bfloat16,moments=bfloat16"])
def test_formats_come_back(layouts, precision):
    export = exported(layouts, "dp=16,fsdp,mbs=2", precision)
    config = TITAN.read(Source(Path("plan.py"), TITAN.write(export).files["torchtitan_plan.py"]))
    assert parse_precision(config.precision) == parse_precision(precision)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true", "fp8-mixed"])
def test_other_formats_are_refused(layouts, precision):
    with pytest.raises(ConfigError, match="bf16-mixed"):
        TITAN.write(exported(layouts, "dp=16,fsdp,mbs=2", precision))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("dp=2,tp=8", "num_key_value_heads=4"), ("dp=4,cp=4,fsdp", "cp"), ("dp=4,cp=4:allgather", "zero=0"),
        ("dp=16,zero=1", "fsdp"), ("dp=16,zero=2", "zero"), ("dp=8,pp=2,schedule=zb-h1", "zb-h1"),
        ("dp=4,pp=4,m=2", "as many microbatches"), ("dp=4,pp=4,vp=2,m=9", "rounds"), ("dp=16,optimizer=sgd", "sgd"),
        ("dp=16,recompute=selective:mlp", "recompute"),
    ],
)  # fmt: skip
def test_what_it_cannot_run(layouts, words, what):
    assert what in refusal(TITAN, parse_layout(words), layouts[3])


def test_what_its_experts_cannot():
    config = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "vocab_size": 128, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_local_experts": 8,
        "hidden_act": "silu",
        "norm_topk_prob": True, "model_type": "qwen3_moe",
    }  # fmt: skip
    model = ModelFacts("qwen3_moe", config, 4, ("model.layers",), 1, experts=8)
    assert refusal(TITAN, parse_layout("dp=8,ep=8,fsdp"), model) == ""
    assert refusal(TITAN, parse_layout("dp=4,tp=4,etp=1,ep=8,fsdp"), model) == ""
    assert "write etp=1,ep=8" in refusal(TITAN, parse_layout("dp=4,tp=4,ep=2,fsdp"), model)
    assert "divide 8" in refusal(TITAN, parse_layout("dp=16,ep=16,fsdp"), model)
    assert "zero=0" in refusal(TITAN, parse_layout("dp=8,ep=8"), model)
    other = replace(model, config={**config, "norm_topk_prob": False})
    assert "norm_topk_prob" in refusal(TITAN, parse_layout("dp=8,fsdp"), other)


def test_other_models_are_refused(layouts):
    vision = ModelFacts("vit", {"model_type": "vit"}, 12, ("vit.encoder.layer",), 1)
    assert "fsdp2" in refusal(TITAN, parse_layout("dp=8"), vision)
    facts = layouts[3]
    tied = replace(facts, config={**facts.config, "tie_word_embeddings": True})
    assert "tied" in refusal(TITAN, parse_layout("dp=8,pp=2"), tied)
    biased = replace(facts, config={**facts.config, "attention_bias": True})
    assert "attention_bias" in refusal(TITAN, parse_layout("dp=8"), biased)


def read(name: str, text: str):
    source = Source(Path(name), text)
    assert TITAN.reads(source)
    return TITAN.read(source)


OLD = """
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 8
seq_len = 8192
[parallelism]
tensor_parallel_degree = 8
data_parallel_shard_degree = {shards}
pipeline_parallel_degree = {pp}
pipeline_parallel_schedule = "{schedule}"
[activation_checkpoint]
mode = "{mode}"
selective_ac_option = "2"
[compile]
enable = true
"""


def test_toml_of_older_releases():
    config = read("old.toml", OLD.format(shards=4, pp=2, schedule="Interleaved1F1B", mode="selective"))
    assert config.words == {
        "dp": "4", "tp": "8", "pp": "2", "sp": "", "mbs": "1", "zero": "1", "schedule": "interleaved-1f1b", "vp": "2",
        "recompute": "every:2",
    }  # fmt: skip
    assert (config.batch, config.devices, config.model["num_hidden_layers"]) == (32, 64, 80)
    assert [each.partition(":")[0] for each in config.unpriced] == ["stages"]  # torchtitan's own division: 20-21-20-19
    open_ended = read("old.toml", OLD.format(shards=-1, pp=1, schedule="1F1B", mode="full"))
    assert open_ended.batch is None and "dp" not in open_ended.words and open_ended.words["fsdp"] == ""


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("seq_len = 8192", "seq_lem = 8192"), ("[compile]", "[compiler]"), ('"2"', '"often"'),
        ('"70B"\n', '"70B"\nflavour = 1\n'),
        ("local_batch_size = 8", "local_batch_size = 0"), ("local_batch_size = 8", "global_batch_size = 9"),
        ("seq_len = 8192", "enable_cpu_offload = true"), ("seq_len = 8192", 'dtype = "float16"'),
        ("tensor_parallel_degree = 8", "expert_parallel_degree = 3"), ('name = "llama3"', 'name = "flux"'),
        ("tensor_parallel_degree = 8", "data_parallel_replicate_degree = -1"), ('"1F1B"', '"2F2B"'),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_honoured(change, what):
    text = OLD.format(shards=4, pp=2, schedule="1F1B", mode="selective")
    assert change in text
    with pytest.raises(ConfigError) as error:
        read("old.toml", text.replace(change, what))
    assert str(error.value).startswith("old.toml: ") and "\n" not in str(error.value)


def test_a_command_of_overrides():
    config = read("run.sh", """
        #!/bin/bash
        NGPU=${NGPU:-64}
        MODULE=llama3 CONFIG=llama3_70b ./run_train.sh --parallelism.tensor_parallel_degree 8 \\
            --training.local-batch-size=4 --compile.enable activation_checkpoint:full --training.steps 20
    """)  # fmt: skip
    words = {"dp": "8", "tp": "8", "pp": "1", "sp": "", "mbs": "4", "fsdp": "", "recompute": "full"}
    assert (config.words, config.batch, config.devices) == (words, 32, 64)
    assert config.model["hidden_size"] == 8192 and config.unpriced == ()


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("torchrun -m torchtitan.train --module llama3 --config llama3_8b --parallelism.tensor_parallel 8",
         "parallelism.tensor_parallel"),
        ("torchrun -m torchtitan.train --module llama3 --config llama3_9b --training.seq_len 8", "--config"),
        ("CONFIG_FILE=./configs/mine.toml ./run_train.sh --training.seq_len 8", "CONFIG_FILE"),
        ("./run_train.sh --module llama3 --config llama3_8b --training.seq_len $LENGTH", "training.seq_len"),
        ("torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b "
         "--parallelism.data_parallel_shard_degree 3", "parallelism"),
    ],
)  # fmt: skip
def test_commands_that_cannot_be_read(text, field):
    with pytest.raises(ConfigError, match=f"run.sh: {field}:"):
        read("run.sh", text)


def test_a_config_function_is_never_run(tmp_path):
    text = """
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.qwen3 import model_registry
open("{mark}", "w").write("run")
def mine():
    return Trainer.Config(
        model_spec=model_registry("30B-A3B"),
        training=TrainingConfig(local_batch_size=2, seq_len={places}),
        parallelism=ParallelismConfig(data_parallel_shard_degree=8, expert_parallel_degree=8),
        activation_checkpoint=FullAC.Config(),
    )
"""
    mark = tmp_path / "mark"
    config = read("mine.py", text.format(mark=mark, places=4096))
    assert config.words["ep"] == "8" and config.words["recompute"] == "full" and config.model["num_experts"] == 128
    with pytest.raises(ConfigError, match=r"training.seq_len: is 2 \*\* count\(\)"):
        read("mine.py", text.format(mark=mark, places="2 ** count()"))
    assert not mark.exists()


def test_a_model_of_other_sizes_than_it_says_is_refused() -> None:
    text = (
        "MODEL = {'num_hidden_layers': 40}\n\n\ndef model():\n    return layers(n_layers=39)\n\n\n"
        "def plan():\n    return Config(training=TrainingConfig(steps=1), parallelism=ParallelismConfig())\n"
    )
    with pytest.raises(ConfigError, match=r"is 40, and the model is built with n_layers=39"):
        reading.read(Source(Path("torchtitan_plan.py"), text))
