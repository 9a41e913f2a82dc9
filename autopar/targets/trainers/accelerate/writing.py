"""The files of accelerate: its yaml, Trainer arguments with the same decisions, and what a person runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.planner.layouts.layout_words import Layout
from autopar.targets.target import ConfigError, Export, WrittenFiles
from autopar.targets.trainers.hugging_face.model_files import blocks_wrapped, policy_of, shared_files
from autopar.words.precision import OWN, Precision

NAME = "accelerate"


def write(export: Export) -> WrittenFiles:
    """Return the files of a plan for accelerate.

    Raises:
        ConfigError: the precision cannot be said there.
    """
    layout, policy = export.layout, _policy(export)
    settings = config_of(export, policy)
    run = {
        "rows": export.rows_of_rank, "microbatches": export.microbatches, "optimizer": export.optimizer,
        "master": policy.master, "reduce": policy.reduce,
    }  # fmt: skip
    arguments = _for_trainer(export, settings) if _trainer_says(export) else None
    shared = shared_files(export, policy, NAME, run, arguments)
    notes = [
        "run.json has what accelerate.yaml cannot say (rows of a microbatch, microbatches, optimizer, the format of "
        "gradient sums, the sequence); train.py reads both"
    ]
    fill_in = []
    if arguments is not None:
        notes.append("transformers' Trainer sums gradients of FSDP2 in bfloat16")
    if layout.sizes["tp"] > 1:
        notes.append("transformers cuts the model while it loads it, so that it has to come from a checkpoint; what "
                     "its plan does not name (often the embedding) is whole, priced as cut")  # fmt: skip
        fill_in.append("checkpoint/: a checkpoint of the model, as save_pretrained writes it")
    if export.cluster.n_nodes > 1:
        fill_in.append("machine_rank and main_process_ip of accelerate.yaml, where accelerate launch starts it")
    return replace(
        shared, files={**shared.files, "accelerate.yaml": yaml_text(settings)}, fill_in=(*shared.fill_in, *fill_in),
        notes=(*notes, *shared.notes),
    )  # fmt: skip


def is_fsdp(layout: Layout) -> bool:
    """Return whether a layout is one of FSDP there, else one of DistributedDataParallel."""
    return layout.zero == 3 or layout.keeps


def config_of(export: Export, policy: Precision) -> dict[str, Any]:
    """Return the fields of accelerate.yaml."""
    layout, devices = export.layout, export.layout.n_devices
    half = {"bfloat16": "bf16", "float16": "fp16"}.get(policy.params, "no") if policy.master == "float32" else "no"
    fsdp = is_fsdp(layout)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "debug": False,
        "distributed_type": "FSDP" if fsdp else "MULTI_GPU" if devices > 1 else "NO",
        "downcast_bf16": "no", "enable_cpu_affinity": False, "machine_rank": 0, "main_training_function": "main",
        "mixed_precision": half, "num_machines": export.cluster.n_nodes, "num_processes": devices,
        "rdzv_backend": "static", "same_network": True, "use_cpu": False,
    }  # fmt: skip
    if fsdp:
        config["fsdp_config"] = {
            "fsdp_version": 2, "fsdp_reshard_after_forward": not layout.keeps,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": ",".join(blocks_wrapped(export)),
            "fsdp_activation_checkpointing": layout.recompute == "full", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False, "fsdp_offload_params": False,
        }  # fmt: skip
    dp, cp, tp = (layout.sizes[name] for name in ("dp", "cp", "tp"))
    if fsdp or tp > 1:
        shards = layout.shards if layout.shards > 1 else dp
        sizes = (dp // shards, shards) if fsdp else (1, 1)
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": sizes[0], "parallelism_config_dp_shard_size": sizes[1],
            "parallelism_config_tp_size": tp, "parallelism_config_cp_size": cp,
            "parallelism_config_cp_backend": "torch", "parallelism_config_cp_comm_strategy": STRATEGIES[layout.way],
            "parallelism_config_sp_size": 1, "parallelism_config_sp_backend": "deepspeed",
        }  # fmt: skip
    return config


STRATEGIES = {"ring": "alltoall", "allgather": "allgather", "ulysses": "allgather"}
"""How keys and values travel: torch's rotation by all-to-all sends each shard to the next rank, as a ring does."""


def _policy(export: Export) -> Precision:
    policy, layout = policy_of(export, NAME), export.layout
    fsdp = is_fsdp(layout)
    if not fsdp and policy.params != OWN and policy.reduce != policy.master:
        raise ConfigError(f"{NAME}: precision {policy}: with zero=0 gradients have the masters' format, "
                          f"{policy.master}, and are summed in it, not in {policy.reduce}; use fsdp")  # fmt: skip
    if policy.master != "float32" and policy.params not in (policy.master, OWN):
        raise ConfigError(f"{NAME}: precision {policy}: masters in {policy.master} cannot be said; use bf16-mixed")
    return policy


def _trainer_says(export: Export) -> bool:
    """Return whether TrainingArguments alone can say a layout: they have no mesh, nor momentum of SGD."""
    layout = export.layout
    mesh = max(layout.sizes["tp"], layout.sizes["cp"], layout.shards)
    return bool(export.model.family) and mesh == 1 and export.optimizer != "sgd_momentum"


def _for_trainer(export: Export, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of TrainingArguments that say how the model is cut, as accelerate.yaml does."""
    more: dict[str, Any] = {"gradient_checkpointing": export.layout.recompute == "full"}
    own = settings.get("fsdp_config")
    if own:
        keys = ("version", "reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap",
                "activation_checkpointing", "state_dict_type", "cpu_ram_efficient_loading")  # fmt: skip
        more["fsdp"] = True
        more["fsdp_config"] = {key: own[f"fsdp_{key}"] for key in keys}
        more["fsdp_config"]["transformer_layer_cls_to_wrap"] = list(blocks_wrapped(export))
        more["gradient_checkpointing"] = False
        more["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return more


def yaml_text(settings: dict[str, Any]) -> str:
    """Return a table as YAML."""
    import yaml

    return str(yaml.safe_dump(settings, sort_keys=True))
