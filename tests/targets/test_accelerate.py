"""Accelerate and Trainer arguments: what they can say, and that their files are read back as they were written."""

import json
from dataclasses import replace

import pytest
from targets.hugging_face_exports import (
    ROWS,
    assert_same,
    captured_of,
    export_of,
    own_file,
    read,
    read_text,
    script,
    written,
)

from autopar.errors import AutoparError
from autopar.planner.layouts.layout_words import parse_layout
from autopar.targets import target_named
from autopar.targets.pricing import read_config

TARGET = target_named("accelerate")

LAYOUTS = [
    ("dp=4,zero=0,mbs=1", "llama", "bf16-mixed", "adamw"),
    ("dp=4,zero=0,mbs=2,recompute=full", "llama", "32-true", "sgd_momentum"),
    ("dp=4,zero=3,mbs=2", "llama", "bf16-mixed", "adamw"),
    ("dp=4,fsdp,m=4,recompute=full", "llama", "16-mixed", "sgd"),
    ("dp=4,fsdp,mbs=2", "llama", "bf16-true", "adamw"),
    ("dp=4,fsdp,mbs=2", "llama", "params=bfloat16,reduce=bfloat16", "adamw"),
    ("dp=4,fsdp=2,mbs=1,recompute=full", "llama", "bf16-mixed", "adamw"),
    ("dp=4,fsdp=keep,m=1", "llama", "bf16-mixed", "adamw"),
    ("tp=4,mbs=2,recompute=full", "llama", "bf16-mixed", "adamw"),
    ("tp=4,mbs=4", "llama", "bf16-mixed", "adamw"),
    ("dp=2,cp=2:ring,fsdp,mbs=1", "llama", "bf16-mixed", "adamw"),
    ("cp=4:allgather,fsdp,mbs=4,recompute=full", "llama", "bf16-mixed", "adamw"),
    ("dp=4,fsdp,mbs=1,recompute=full", "mixtral", "bf16-mixed", "adamw"),
]


@pytest.mark.parametrize(("words", "model", "precision", "optimizer"), LAYOUTS)
def test_files_are_read_as_what_was_written(words, model, precision, optimizer, tmp_path):
    export = export_of("accelerate", words, model=model, precision=precision, optimizer=optimizer)
    assert not TARGET.refuses(export.layout, export.model)
    files = written(tmp_path, export, "accelerate")
    config = read(tmp_path / "accelerate.yaml", "accelerate")
    assert_same(config, export)
    assert config.devices == 4
    compile(files.files["train.py"], "train.py", "exec")
    if "training_arguments.json" in files.files:
        assert_same(read(tmp_path / "training_arguments.json", "accelerate"), export)
        changed = json.loads(files.files["training_arguments.json"]) | {"per_device_train_batch_size": 7}
        (tmp_path / "training_arguments.json").write_text(json.dumps(changed))
        with pytest.raises(AutoparError, match=r"per_device_train_batch_size: is 7, run.json says"):
            read(tmp_path / "accelerate.yaml", "accelerate")


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ("dp=2,cp=2:ulysses,fsdp", ("cp=2:ulysses", "cp=2:ring")),
        ("dp=2,cp=2", ("cp=2", "zero=0", "FSDP2")),
        ("dp=2,tp=2", ("tp=2", "dp=2", "zero=0")),
        ("dp=2,tp=2,fsdp", ("tp=2", "fsdp")),
        ("tp=8", ("tp=8", "num_key_value_heads=4")),
    ],
)  # fmt: skip
def test_a_layout_that_accelerate_has_not_is_refused_with_numbers(words, numbers):
    facts = captured_of("llama", "bf16-mixed")[3]
    why = TARGET.refuses(parse_layout(words), facts)
    assert all(number in why for number in numbers), why


def test_models_of_ones_own_are_cut_by_rows_alone():
    facts = replace(captured_of("llama", "bf16-mixed")[3], family="", config={})
    assert not TARGET.refuses(parse_layout("dp=4,fsdp"), facts)
    assert "plan" in TARGET.refuses(parse_layout("tp=2"), facts)
    assert "causal" in TARGET.refuses(parse_layout("dp=2,cp=2,fsdp"), facts)


def test_a_file_of_ones_own_goes_along_and_its_rows_are_divided(tmp_path):
    export = export_of("accelerate", "dp=4,fsdp,mbs=2,recompute=full", model=own_file(tmp_path), precision="32-true")
    files = written(tmp_path / "run", export, "accelerate")
    assert "training_arguments.json" not in files.files and "Block" in files.files["accelerate.yaml"]
    config = read(tmp_path / "run" / "accelerate.yaml", "accelerate")
    assert config.words == {"dp": "4", "fsdp": "", "recompute": "full", "mbs": "2"} and config.batch == ROWS
    train = script(tmp_path / "run")
    model, rows = train.make_model(), []
    for microbatch in range(2):
        for rank in range(4):
            args, kwargs = train.batch_of(0, microbatch, 2, rank, 4)
            assert train.loss_of(model(*args, **kwargs)).ndim == 0
            rows += args[0][:, 0].tolist()
    assert rows == [8.0 * row for row in range(ROWS)]  # every row once


def test_formats_that_accelerate_cannot_say_are_refused():
    for words, precision in (("dp=4,zero=0,mbs=1", "params=bfloat16,reduce=bfloat16"),
                             ("dp=4,fsdp,mbs=1", "moments=bfloat16")):  # fmt: skip
        with pytest.raises(AutoparError, match="precision"):
            TARGET.write(export_of("accelerate", words, precision=precision))


FSDP2 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("num_machines", "num_machine", ("num_machine", "num_machines")),
        ("fsdp_version", "fsdp_versions", ("fsdp_config.fsdp_versions", "fsdp_version")),
        ("FSDP\n", "MEGATRON_LM\n", ("distributed_type", "Megatron")),
        ("FSDP\n", "TP\n", ("distributed_type", "TP")),
        ("bf16", "bf8", ("mixed_precision", "bf8")),
        ("num_processes: 16", "num_processes: many", ("num_processes", "many")),
        ("fsdp_version: 2", "fsdp_version: 1\n  fsdp_sharding_strategy: HYBRID_SHARD", ("HYBRID_SHARD", "dp_shard")),
        ("num_machines: 2", "num_machines: 2\nnum_machines: 4", ("num_machines", "twice")),
        ("fsdp_config:", "parallelism_config:\n  parallelism_config_tp_size: 3\nfsdp_config:", ("3", "16")),
        ("fsdp_config:", "x: !!python/object/apply:os.system [ls]\nfsdp_config:", ("YAML", "python/object")),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_one_error_that_names_the_field(old, new, named, tmp_path):
    assert old in FSDP2
    with pytest.raises(AutoparError) as error:
        read_text(tmp_path, "accelerate.yaml", FSDP2.replace(old, new, 1), "accelerate")
    assert all(name in str(error.value) for name in named), error.value
    assert "\n" not in str(error.value)


def test_what_yaml_alone_leaves_open_is_said(tmp_path):
    config = read_text(tmp_path, "accelerate.yaml", FSDP2, "accelerate")
    assert config.words == {"fsdp": ""} and (config.batch, config.devices) == (None, 16)
    assert config.precision == "params=bfloat16,reduce=bfloat16"  # FSDP sums in the format that it computes in
    assert any("--batch" in note for note in config.unpriced)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("fsdp_version: 2", "fsdp_version: 2\n  fsdp_offload_params: true", "fsdp_offload_params"),
        ("TRANSFORMER_BASED_WRAP", "NO_WRAP", "fsdp_auto_wrap_policy"),
        ("mixed_precision: bf16", "mixed_precision: fp8", "fp8"),
        ("mixed_precision: bf16", "mixed_precision: 'no'", "float32"),
        ("fsdp_config:", "dynamo_config:\n  dynamo_backend: INDUCTOR\nfsdp_config:", "dynamo_config"),
    ],
)  # fmt: skip
def test_what_the_price_does_not_know_is_said(old, new, field, tmp_path):
    config = read_text(tmp_path, "accelerate.yaml", FSDP2.replace(old, new, 1), "accelerate")
    assert any(field in note for note in config.unpriced), config.unpriced


def test_older_spellings_of_fsdp(tmp_path):
    one = FSDP2.replace("fsdp_version: 2\n  fsdp_reshard_after_forward: true", "fsdp_sharding_strategy: {}")
    for strategy, words in (("FULL_SHARD", {"fsdp": ""}), ("SHARD_GRAD_OP", {"fsdp": "keep"}), ("3", {"zero": "0"})):
        config = read_text(tmp_path, "accelerate.yaml", one.format(strategy), "accelerate")
        assert config.words == words
    arguments = {"output_dir": "x", "fsdp": "full_shard auto_wrap", "gradient_accumulation_steps": 2, "bf16": True}
    config = read_text(tmp_path, "arguments.json", arguments, "accelerate")
    assert config.words == {"fsdp": "", "mbs": "8", "m": "2"}
    assert any("sync_each_batch" in note for note in config.unpriced)


def test_deepspeed_within_accelerate(tmp_path):
    text = """
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
deepspeed_config:
  gradient_accumulation_steps: 4
  zero_stage: 3
  offload_optimizer_device: cpu
"""
    config = read_text(tmp_path, "accelerate.yaml", text, "accelerate")
    assert config.words == {"m": "4", "zero": "3"} and config.software == "deepspeed-eager" and config.devices == 8
    assert any("offload_optimizer" in note for note in config.unpriced)
    file = text.partition("  gradient")[0] + "  deepspeed_config_file: ds.json\n"
    with pytest.raises(AutoparError, match=r"deepspeed_config_file: is 'ds.json'"):
        read_text(tmp_path, "accelerate.yaml", file, "accelerate")
    own = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1,
           "overlap_comm": True}, "bf16": {"enabled": "auto"}}  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(own))
    config = read_text(tmp_path, "accelerate.yaml", file, "accelerate")
    assert config.words == {"dp": "8", "mbs": "2", "zero": "1"} and config.batch == 32


def test_a_recipe_of_another_trainer_is_no_table_of_training_arguments(tmp_path):
    recipe = "output_dir: x\nlearning_rate: 0.1\ntokenizer: {path: y}\ndataset: z\nmodel: w\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    with pytest.raises(AutoparError, match=r"recipe.yaml is of no trainer that is known"):
        read_config(tmp_path / "recipe.yaml", None)
    (tmp_path / "arguments.yaml").write_text("output_dir: x\nper_device_train_batch_sise: 2\nlearning_rate: 0.1\n")
    with pytest.raises(AutoparError, match="did you mean 'per_device_train_batch_size'"):
        read_config(tmp_path / "arguments.yaml", None)
