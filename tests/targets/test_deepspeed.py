"""DeepSpeed: what it can say, and that its configs are read back as what they were written from."""

import json
from dataclasses import replace

import pytest
from targets.hugging_face_exports import assert_same, captured_of, export_of, read, read_text, written

from autopar.errors import AutoparError
from autopar.planner.layouts.layout_words import parse_layout
from autopar.targets import target_named
from autopar.targets.pricing import layout_words
from cost_models.parameter_overlap import shares_of
from hardware_profiles import load_cluster

TARGET = target_named("deepspeed")

LAYOUTS = [
    ("dp=4,zero=0,mbs=1", "llama", "bf16-mixed", "adamw"),
    ("dp=4,zero=0,mbs=2,recompute=full", "llama", "32-true", "sgd"),
    ("dp=4,zero=1,mbs=2", "llama", "bf16-mixed", "adamw"),
    ("dp=4,zero=1,m=4,recompute=full", "llama", "16-mixed", "sgd_momentum"),
    ("dp=4,zero=1,mbs=2", "llama", "bf16-true", "adamw"),
    ("dp=4,zero=2,m=1", "llama", "params=bfloat16,reduce=bfloat16", "adamw"),
    ("dp=4,zero=3,mbs=1", "llama", "bf16-mixed", "adamw"),
    ("dp=4,fsdp,mbs=1,recompute=full", "llama", "bf16-mixed", "adamw"),
    ("dp=2,tp=2,zero=1,mbs=2", "llama", "bf16-mixed", "adamw"),
    ("tp=4,mbs=4", "llama", "bf16-mixed", "adamw"),
    ("dp=2,tp=2,zero=3,mbs=1", "llama", "bf16-mixed", "adamw"),
    ("dp=2,cp=2:ulysses,zero=1,mbs=1", "llama", "bf16-mixed", "adamw"),
    ("cp=4:ulysses,zero=3,mbs=4,recompute=full", "llama", "bf16-mixed", "adamw"),
    ("dp=4,ep=4,zero=1,mbs=1", "mixtral", "bf16-mixed", "adamw"),
    ("dp=4,ep=2,zero=0,mbs=2", "mixtral", "bf16-mixed", "adamw"),
    ("dp=2,tp=2,ep=4,etp=1,zero=1,mbs=1", "mixtral", "bf16-mixed", "adamw"),
]


@pytest.mark.parametrize(("words", "model", "precision", "optimizer"), LAYOUTS)
def test_a_config_is_read_as_what_was_written(words, model, precision, optimizer, tmp_path):
    export = export_of("deepspeed", words, model=model, precision=precision, optimizer=optimizer)
    assert not TARGET.refuses(export.layout, export.model)
    files = written(tmp_path, export, "deepspeed")
    config = read(tmp_path / "ds_config.json", "deepspeed")
    assert_same(config, export)
    assert config.software == TARGET.software
    compile(files.files["train.py"], "train.py", "exec")
    if "training_arguments.json" in files.files:
        assert_same(read(tmp_path / "training_arguments.json", "accelerate"), export)


@pytest.mark.parametrize(
    ("words", "model", "numbers"),
    [
        ("dp=2,cp=2:ring", "llama", ("cp=2:ring", "cp=2:ulysses")),
        ("tp=2,cp=2:ulysses", "llama", ("cp=2", "tp=2")),
        ("tp=8", "llama", ("tp=8", "num_key_value_heads=4")),
        ("cp=16:ulysses", "llama", ("cp=16", "num_attention_heads=8")),
        ("tp=4", "mixtral", ("tp=4", "ep=1")),
        ("dp=16,ep=16", "mixtral", ("ep=16", "8 experts")),
        ("dp=4,tp=2,ep=2", "mixtral", ("ep=2", "tp=2", "etp=1")),
        ("dp=4,ep=2,cp=2:ulysses,zero=3", "mixtral", ("zero=3", "cp=2")),
        ("dp=4,ep=2", "llama", ("ep=2", "llama")),
    ],
)  # fmt: skip
def test_a_layout_that_deepspeed_has_not_is_refused_with_numbers(words, model, numbers):
    facts = captured_of(model, "bf16-mixed")[3]
    why = TARGET.refuses(parse_layout(words), facts)
    assert all(number in why for number in numbers), why


def test_models_of_ones_own_are_cut_by_rows_alone():
    facts = replace(captured_of("llama", "bf16-mixed")[3], family="", config={})
    assert not TARGET.refuses(parse_layout("dp=4,zero=3"), facts)
    assert "plan" in TARGET.refuses(parse_layout("tp=2"), facts)
    assert "causal" in TARGET.refuses(parse_layout("cp=2:ulysses"), facts)


SMALL = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"zero_optimisation": {"stage": 2}}, ("zero_optimisation", "zero_optimization")),
        ({"zero_optimization": {"stages": 2}}, ("zero_optimization.stages", "stage")),
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, ("offload_param.devise", "device")),
        ({"zero_optimization": {"stage": 4}}, ("zero_optimization.stage", "4")),
        ({"zero_optimization": 3}, ("zero_optimization", "table")),
        ({"amp": {"enabled": True}}, ("amp", "removed")),
        ({"fp16": {"enabled": True}}, ("bf16.enabled", "fp16")),
        ({"train_micro_batch_size_per_gpu": "auto"}, ("train_micro_batch_size_per_gpu", "training_arguments.json")),
        ({"bf16": {"enabled": "auto"}}, ("bf16.enabled", "training_arguments.json")),
        ({"train_batch_size": 33}, ("train_batch_size", "33", "2 rows x 4")),
        ({"gradient_accumulation_steps": -1}, ("gradient_accumulation_steps", "-1")),
        ({"tensor_parallel": {"autotp_size": "two"}}, ("tensor_parallel.autotp_size", "two")),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_one_error_that_names_the_field(change, named, tmp_path):
    with pytest.raises(AutoparError) as error:
        read_text(tmp_path, "ds_config.json", {**SMALL, **change}, "deepspeed")
    assert all(name in str(error.value) for name in named), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"zero_optimization": {"stage": 2, "overlap_comm": True}}, "zero_optimization.stage"),
        ({"optimizer": {"type": "Lamb"}}, "Lamb"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "cpu_checkpointing"),
    ],
)  # fmt: skip
def test_what_the_price_does_not_know_is_said(change, field, tmp_path):
    config = read_text(tmp_path, "ds_config.json", {**SMALL, **change}, "deepspeed")
    assert any(field in note for note in config.unpriced), config.unpriced


@pytest.mark.parametrize("change", [{"stage": 1}, {"stage": 3, "overlap_comm": False}])
def test_sums_of_gradients_are_priced_after_the_backward_whether_it_says_so_or_not(change, tmp_path):
    config = read_text(tmp_path, "ds_config.json", {**SMALL, "zero_optimization": change}, "deepspeed")
    assert not any("overlap" in note for note in config.unpriced), config.unpriced
    assert shares_of(load_cluster(f"dgx-h100 as {config.software}")).reductions == 0


def test_auto_is_what_trainer_arguments_beside_it_say(tmp_path):
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}  # fmt: skip
    arguments = {"output_dir": "x", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True,
                 "gradient_checkpointing": True, "deepspeed": "ds_config.json"}  # fmt: skip
    (tmp_path / "training_arguments.json").write_text(json.dumps(arguments))
    config = read_text(tmp_path, "ds_config.json", auto, "deepspeed")
    assert config.words == {"m": "4", "mbs": "2", "zero": "3", "recompute": "full"}
    assert config.precision == "params=bfloat16,reduce=bfloat16" and config.batch is None
    with pytest.raises(AutoparError, match="train_micro_batch_size_per_gpu: is 3"):
        read_text(tmp_path, "ds_config.json", {**auto, "train_micro_batch_size_per_gpu": 3}, "deepspeed")


def test_the_third_size_of_a_batch_follows_from_two(tmp_path):
    def words(**sizes):
        config = read_text(tmp_path, "ds_config.json", {"zero_optimization": {"stage": 1}, **sizes}, "deepspeed")
        return config.batch, config.words

    assert words(train_batch_size=32) == (32, {"m": "1", "zero": "1"})
    assert words(train_batch_size=32, train_micro_batch_size_per_gpu=2)[1] == {"mbs": "2", "zero": "1"}
    assert words(train_batch_size=32, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4) == (
        32, {"dp": "4", "mbs": "2", "zero": "1"}
    )  # fmt: skip
    tensor = {"tensor_parallel": {"autotp_size": 2}}  # whose ranks DeepSpeed counts as if they had rows
    assert words(train_batch_size=32, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=4, **tensor) == (
        16, {"tp": "2", "dp": "2", "mbs": "2", "zero": "1"}
    )  # fmt: skip


def test_a_batch_that_needs_other_devices_than_the_cluster_has_is_one_error(tmp_path):
    text = {"train_batch_size": 512, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    config = read_text(tmp_path, "ds_config.json", {**text, "zero_optimization": {"stage": 3}}, "deepspeed")
    with pytest.raises(AutoparError, match=r"ds_config.json: .* make dp=128, 128 devices; the cluster has 32"):
        layout_words(config, 32, 512, "ds_config.json")
