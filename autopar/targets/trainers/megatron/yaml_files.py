"""Yaml files: Megatron's own, Megatron-MoE-ModelZoo's, Megatron-Bridge's overrides, and NeMo's of 1.x and 2.x."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autopar.errors import closest
from autopar.targets.strict_yaml import parse_yaml
from autopar.targets.target import Config, Source
from autopar.targets.trainers.megatron.configs import config_of
from autopar.targets.trainers.megatron.fields import tables
from autopar.targets.trainers.megatron.nemo import OFF, known, option_of, resolved, set_numbers, set_option, take
from autopar.targets.trainers.megatron.options import MegatronOptions, options_of_words
from autopar.targets.trainers.megatron.shell import Script, split
from hardware_profiles.strict import Unreadable, parse_count

NEMO = "nemo"
SECTIONS = ("language_model", "model_parallel")
DISTRIBUTED = ("distributed_fused_adam", "mcore_distributed_optim", "distributed_fused_sgd")
"""Optimizers of NeMo 1.x that store in shards (nemo/core/optim)."""
Tree = dict[str, Any]


def tree_of(source: Source) -> Tree | None:
    """Return the contents of a yaml file; None where it is none, or has no fields at the top."""
    try:
        found = parse_yaml(source.text)
    except (Unreadable, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def kind_of(tree: Tree) -> str:
    """Return whose yaml it is: ``zoo``, ``megatron``, ``bridge``, ``nemo1``, ``nemo2``; empty for none of them."""
    trainer, model = tree.get("trainer"), tree.get("model")
    if "MODEL_ARGS" in tree:
        return "zoo"
    if any(isinstance(tree.get(name), dict) for name in SECTIONS):
        return "megatron"
    if isinstance(trainer, dict) and isinstance(trainer.get("strategy"), dict):
        return "nemo2"
    if isinstance(trainer, dict) and isinstance(model, dict) and "micro_batch_size" in model:
        return "nemo1"
    if "trainer" not in tree and isinstance(model, dict) and isinstance(tree.get("train"), dict):
        return "bridge"
    return ""


def read_yaml(source: Source, tree: Tree) -> Config:
    """Return what a yaml says.

    Raises:
        ConfigError: a field is unknown, or cannot be honoured.
    """
    readers = {"zoo": _zoo, "megatron": _megatron, "bridge": _bridge_tree, "nemo1": _nemo1, "nemo2": _nemo2}
    return readers[kind_of(tree)](source, tree)


def _zoo(source: Source, tree: Tree) -> Config:
    """Read ``MODEL_ARGS``: options with values, of which true is a flag and false leaves it out."""
    arguments = tree["MODEL_ARGS"]
    if not isinstance(arguments, dict):
        raise source.error("MODEL_ARGS", "is no list of options with values; write --option: value")
    script = Script({str(name): str(value) for name, value in (tree.get("ENV_VARS") or {}).items()})
    words: list[str] = []
    for name, value in arguments.items():
        if value is False or value is None:
            continue
        words.append(str(name))
        if value is not True:
            text = str(value)
            words += split(script, text[1:-1] if re.fullmatch(r"\[[\w ]+\]", text) else text)
    return config_of(options_of_words(source, words), None)


def _megatron(source: Source, tree: Tree) -> Config:
    """Read the yaml of ``--yaml-cfg``: sections of TransformerConfig, and options by the names of their variables."""
    options = MegatronOptions(source)
    names = known("bridge")["model"] | known("bridge")["ddp"] | OLDER_YAML
    names |= {option[2:].removeprefix("no-").replace("-", "_") for option in tables()["older"]}
    for section in SECTIONS:
        part = tree.get(section)
        if isinstance(part, dict):
            _take_numbers(options, f"{section}.", part)
            take(options, f"{section}.", part, names)
    others = {key: value for key, value in tree.items() if key not in SECTIONS}
    _take_numbers(options, "", others)
    take(options, "", others, names)
    return config_of(options, None)


OLDER_YAML = frozenset(
    """
    spec inference_batch_times_seqlen_threshold layernorm_epsilon data_impl log_learning_rate_to_tensorboard
    wandb_id adam_beta1 nodes use_checkpoint_args rotary_interleaved num_layers_per_virtual_pipeline_stage
    delay_grad_reduce delay_param_gather overlap_param_gather retro_add_retriever log_batch_size_to_tensorboard
    async_tensor_model_parallel_allreduce encoder_pipeline_model_parallel_size pipeline_model_parallel_split_rank
    standalone_embedding_stage no_data_sharding bert_binary_head loss_scale use_mcore_models recompute_activations
    barrier_with_L1_time use_one_sent_docs params_dtype moe_token_dropping moe_extended_tp start_weight_decay
    use_distributed_optimizer deprecated_use_mcore_models timing_log_level titles_data_path
""".split()
)
"""Fields of the yaml files of earlier releases that are no options of this one."""


def _take_numbers(options: MegatronOptions, where: str, fields: Tree) -> None:
    """Take number formats from fields that say them each by itself."""
    for name in ("bf16", "fp16"):
        if fields.get(name) not in OFF:
            set_numbers(options, f"{where}{name}", name)
    narrow = fields.get("fp8")
    if narrow not in OFF:
        short = {True: "hybrid"}.get(narrow, str(narrow)) if isinstance(narrow, bool) else str(narrow)
        set_option(options, "--fp8-format", f"{where}fp8", "e4m3" if fields.get("fp8_e4m3") is True else short)
    if fields.get("fp4") not in OFF:
        set_option(options, "--fp4-format", f"{where}fp4", fields["fp4"])
    if fields.get("fp8_recipe") not in OFF and narrow not in OFF:
        set_option(options, "--fp8-recipe", f"{where}fp8_recipe", fields["fp8_recipe"])
    if fields.get("grad_reduce_in_fp32") is False and "--bf16" in options.values:
        options.values["--grad-reduce-in-bf16"] = []


def _count(source: Source, field: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, list):
        return len(value)
    try:
        return parse_count(str(value))
    except Unreadable:
        if "${" in str(value) or value in (-1, "-1", "auto"):
            return None
        raise source.error(field, f"is {value!r}; give a whole number of 1 or more") from None


def _devices(source: Source, trainer: Tree) -> int | None:
    each = _count(source, "trainer.devices", trainer.get("devices"))
    nodes = _count(source, "trainer.num_nodes", trainer.get("num_nodes", 1))
    return each * nodes if each and nodes else None


def _nemo1(source: Source, raw: Tree) -> Config:
    tree = resolved(raw)
    assert isinstance(tree, dict)
    options = MegatronOptions(source)
    trainer, model = tree["trainer"], tree["model"]
    names = known("nemo1")
    for key in trainer:
        if key not in names["trainer"] and key not in LIGHTNING:
            raise source.error(
                f"trainer.{key}", f"is no field that is known; {closest(str(key), sorted(names['trainer']))}"
            )
    precision = model.get("precision") or trainer.get("precision", 32)
    set_numbers(options, "trainer.precision", str(precision))
    _take_numbers(options, "model.", {k: v for k, v in model.items() if k not in ("bf16", "fp16")})
    optim = model.get("optim") or {}
    take(options, "model.", {k: v for k, v in model.items() if not isinstance(v, dict)}, names["model"])
    if "--seq-length" not in options.values and isinstance(model.get("data"), dict):
        set_option(options, "--seq-length", "model.data.seq_length", model["data"].get("seq_length"))
    for key in model:
        if key not in names["model"] and option_of(str(key)) is None:
            raise source.error(
                f"model.{key}", f"is no field that is known; {closest(str(key), sorted(names['model']))}"
            )
    _nemo_optimizer(options, optim, names["optim"])
    if model.get("fsdp") not in OFF:
        options.values["--use-torch-fsdp2"] = []
    return config_of(options, _devices(source, trainer), NEMO)


LIGHTNING = frozenset(
    """
    accelerator devices num_nodes precision logger enable_checkpointing use_distributed_sampler max_epochs max_steps
    max_time log_every_n_steps val_check_interval limit_val_batches limit_test_batches limit_train_batches
    accumulate_grad_batches gradient_clip_val benchmark enable_model_summary strategy plugins callbacks
    num_sanity_val_steps
    replace_sampler_ddp enable_progress_bar gradient_clip_algorithm default_root_dir fast_dev_run detect_anomaly
    check_val_every_n_epoch min_epochs min_steps overfit_batches reload_dataloaders_every_n_epochs profiler
    sync_batchnorm
    inference_mode barebones deterministic resume_from_checkpoint checkpoint_callback_params gpus
""".split()
)
"""Arguments of Lightning's Trainer."""


def _nemo_optimizer(options: MegatronOptions, optim: Tree, names: frozenset[str]) -> None:
    name = str(optim.get("name", "fused_adam"))
    options.names["--optimizer"] = "model.optim.name"
    options.values["--optimizer"] = [
        "sgd" if "sgd" in name else "adam" if "adam" in name or name in DISTRIBUTED else name
    ]
    if name in DISTRIBUTED:
        options.values["--use-distributed-optimizer"] = []
        for field, option in (("overlap_grad_sync", "--overlap-grad-reduce"),
                              ("overlap_param_sync", "--overlap-param-gather")):  # fmt: skip
            if optim.get(field, True) not in OFF:
                options.values[option] = []
    if optim.get("grad_sync_dtype") in ("bf16", "bfloat16"):
        options.values["--grad-reduce-in-bf16"] = []
    for key in optim:
        if key not in names and key not in OPTIMS:
            raise options.source.error(
                f"model.optim.{key}", f"is no field that is known; {closest(str(key), sorted(names))}"
            )


OPTIMS = frozenset(
    """
    name lr weight_decay betas eps sched bucket_cap_mb overlap_grad_sync overlap_param_sync contiguous_grad_buffer
    contiguous_param_buffer grad_sync_dtype param_sync_dtype dtype master_weights average_grad_sync with_fp8_params
    nccl_ub store_param_remainders distribute_within_nodes momentum bias_correction ddp_bucket_size align_param_gather
""".split()
)


def _nemo2(source: Source, raw: Tree) -> Config:
    """Read a NeMo 2 recipe as its command line writes it: a trainer with a strategy, a model with a config."""
    tree = resolved(raw)
    assert isinstance(tree, dict)
    options = MegatronOptions(source)
    trainer, names = tree["trainer"], known("nemo2")
    strategy = trainer["strategy"]
    take(options, "trainer.strategy.", strategy, names["strategy"])
    ddp = strategy.get("ddp")
    if isinstance(ddp, dict):
        take(options, "trainer.strategy.ddp.", ddp, known("bridge")["ddp"])
    data, model = tree.get("data"), tree.get("model")
    if isinstance(data, dict):
        take(options, "data.", data, names["data"])
    config = model.get("config", model) if isinstance(model, dict) else {}
    take(
        options, "model.config.", config, names["config"] | known("bridge")["model"] | {"config", "tokenizer", "optim"}
    )
    plugins = trainer.get("plugins")
    if isinstance(plugins, dict):
        set_numbers(options, "trainer.plugins.precision", str(plugins.get("precision", "bf16-mixed")))
        _take_numbers(options, "trainer.plugins.", {k: v for k, v in plugins.items() if k not in ("bf16", "fp16")})
    else:
        _assume_mixed(options, "trainer.plugins")
    optim = tree.get("optim")
    if isinstance(optim, dict) and isinstance(optim.get("config"), dict):
        take(options, "optim.config.", optim["config"], known("bridge")["optimizer"])
    return config_of(options, _devices(source, trainer), NEMO)


def _assume_mixed(options: MegatronOptions, field: str) -> None:
    set_numbers(options, field, "bf16-mixed")
    options.unpriced.append(f"{field}: not said; priced in bf16-mixed, as the recipes are")


def _bridge_tree(source: Source, tree: Tree) -> Config:
    flat = {f"{section}.{key}": value for section, part in tree.items() if isinstance(part, dict)
            for key, value in part.items()}  # fmt: skip
    flat |= {section: value for section, value in tree.items() if not isinstance(value, dict)}
    return read_bridge(source, flat)


def read_bridge(source: Source, overrides: Mapping[str, object], devices: int | None = None) -> Config:
    """Return what overrides of a Megatron-Bridge recipe say: ``model.tensor_model_parallel_size``.

    What they leave to the recipe is named: its values are in Python, which is not read.

    Raises:
        ConfigError: a field is none of Megatron-Bridge's, or cannot be honoured.
    """
    options = MegatronOptions(source)
    sections = known("bridge")
    parts: dict[str, Tree] = {}
    for name, value in overrides.items():
        section, dot, field = name.partition(".")
        if section not in sections:
            raise source.error(name, f"is no section of Megatron-Bridge; {closest(section, sorted(sections))}")
        parts.setdefault(section, {})[field if dot else ""] = value
    mixed = parts.pop("mixed_precision", {})
    if "" in mixed:
        set_numbers(options, "mixed_precision", str(mixed.pop("")))
    elif not any(mixed.get(name) for name in ("bf16", "fp16")):
        _assume_mixed(options, "mixed_precision")
    for section, fields in {**parts, "mixed_precision": mixed}.items():
        inner = {key.partition(".")[0]: value for key, value in fields.items() if key}
        if section == "peft":
            options.unpriced.append("peft: adapters alone are trained; the price trains all parameters")
        elif section not in ("logger", "checkpoint", "tokenizer", "validation"):
            _take_numbers(options, f"{section}.", inner)
            take(options, f"{section}.", inner, sections[section])
        else:
            _check_names(source, section, inner, sections[section])
    _assume_recipe(options)
    return config_of(options, devices, NEMO)


def _check_names(source: Source, section: str, fields: Tree, names: frozenset[str]) -> None:
    for name in fields:
        if name not in names:
            raise source.error(f"{section}.{name}", f"is no field that is known; {closest(name, sorted(names))}")


def _assume_recipe(options: MegatronOptions) -> None:
    """Name what is left to the recipe; distributed optimizer and overlaps are on in all recipes."""
    fields = {
        "--tensor-model-parallel-size": "model.tensor_model_parallel_size",
        "--pipeline-model-parallel-size": "model.pipeline_model_parallel_size",
        "--context-parallel-size": "model.context_parallel_size",
        "--expert-model-parallel-size": "model.expert_model_parallel_size",
        "--recompute-granularity": "model.recompute_granularity",
    }
    for option, field in fields.items():
        if option not in options.names:
            options.unpriced.append(f"{field}: left to the recipe, which is not read; priced as if it were 1 or off")
    for option in ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"):
        if option not in options.names:
            options.values[option] = []
    options.names |= {"--micro-batch-size": "train.micro_batch_size", "--global-batch-size": "train.global_batch_size"}
