"""The files of DeepSpeed: ds_config.json, and what a person runs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from autopar.targets.host_shares import shares_of
from autopar.targets.target import ConfigError, Export, WrittenFiles
from autopar.targets.trainers.hugging_face.model_files import policy_of, shared_files
from autopar.words.precision import OWN, Precision

NAME = "deepspeed"
PRESETS = {"mixtral": "mixtral", "qwen3_moe": "qwen3_moe", "qwen3_5_moe": "qwen3_5_moe", "deepseek_v2": "deepseek_v2",
           "deepseek_v3": "deepseek_v3", "minimax_m3": "minimax_m3"}  # fmt: skip
"""Model types that AutoEP knows (module_inject/auto_ep_presets/registry.py), and the names of its presets."""
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def write(export: Export) -> WrittenFiles:
    """Return the files of a plan for DeepSpeed.

    Raises:
        ConfigError: the precision cannot be said there.
    """
    layout, policy = export.layout, _policy(export)
    arguments = {"deepspeed": "ds_config.json", "gradient_checkpointing": layout.recompute == "full",
                 "learning_rate": RATE, "weight_decay": 0.01, "max_grad_norm": 0.0}  # fmt: skip
    trainer_says = export.model.family and export.optimizer != "sgd_momentum" and layout.sizes["cp"] == 1
    shared = shared_files(
        export, policy, NAME, {"master": "float32" if policy.master != OWN else OWN},
        arguments if trainer_says else None,
    )  # fmt: skip
    notes = ["run.json has what ds_config.json cannot say: whether blocks are recomputed, and the sequence"]
    if layout.sizes["tp"] > 1:
        notes.append("AutoTP cuts what transformers' tensor parallel plan of the model names; embedding, logits and "
                     "loss are whole there where the plan does not name them, priced as cut")  # fmt: skip
    files = {**shared.files, "ds_config.json": json.dumps(config_of(export, policy), indent=1) + "\n"}
    return replace(shared, files=files, notes=(*notes, *shared.notes))


RATE = 1e-4


def config_of(export: Export, policy: Precision) -> dict[str, Any]:
    """Return the fields of ds_config.json."""
    layout = export.layout
    stage, tp, cp = layout.zero if not layout.keeps else 2, layout.sizes["tp"], layout.sizes["cp"]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": export.rows_of_rank,
        "gradient_accumulation_steps": export.microbatches, "gradient_clipping": 0.0, "steps_per_print": 100,
        "optimizer": _optimizer(export.optimizer, on_host=shares_of(export.priced).steps > 0),
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    if tp == 1:  # with AutoTP, DeepSpeed counts ranks of tensor parallelism as if they had rows of their own
        config["train_batch_size"] = export.rows
    if stage:
        config["zero_optimization"] |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if stage == 3:
        # as the plan: every parameter that divides is cut, and none is kept for the backward
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    config["zero_optimization"] |= _on_host(export, stage)
    if shares_of(export.priced).steps and export.optimizer != "adamw":
        config["zero_force_ds_cpu_optimizer"] = False  # torch's optimizer steps on the host
    config |= _formats(policy, stage)
    if tp > 1:
        config["tensor_parallel"] = {"autotp_size": tp}
    if cp > 1:
        config["sequence_parallel_size"] = cp
        config["seq_parallel_communication_data_type"] = SHORT.get(policy.reduce, "fp32")
    if layout.expert_ranks > 1:
        config["expert_parallel"] = {
            "enabled": True, "autoep_size": layout.expert_ranks, "expert_tensor_parallel_size": 1,
            "preset_model": PRESETS[export.model.family],
        }  # fmt: skip
    return config


def _on_host(export: Export, stage: int) -> dict[str, Any]:
    """Return the fields of what is kept on the host.

    Raises:
        ConfigError: DeepSpeed keeps it there otherwise, or not at all.
    """
    shares = shares_of(export.priced)
    if not shares.steps:
        return {}
    if not stage:
        raise ConfigError(f"{NAME}: offload_optimizer needs ZeRO, the layout has zero=0; use zero=1, 2 or 3")
    if stage < 3 and shares.steps < 1:  # runtime/zero/stage3.py alone reads the ratio
        raise ConfigError(f"{NAME}: offload_optimizer.ratio is of ZeRO-3, the layout has zero={stage} and keeps "
                          f"{shares.steps:.0%} of the state on the host; use offload optimizer=1, or zero=3")
    if shares.parameters and (stage < 3 or shares.parameters < 1):
        raise ConfigError(f"{NAME}: offload_param is of ZeRO-3 and keeps all parameters on the host, the layout has "
                          f"zero={stage} and keeps {shares.parameters:.0%}; use zero=3 and offload parameters=1")
    optimizer: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    if shares.steps < 1:
        optimizer["ratio"] = round(shares.steps, 3)
    fields: dict[str, Any] = {"offload_optimizer": optimizer}
    return fields | ({"offload_param": {"device": "cpu", "pin_memory": True}} if shares.parameters else {})


def _optimizer(name: str, on_host: bool) -> dict[str, Any]:
    if name == "adamw":  # DeepSpeed's own is a kernel that has to be compiled; torch's is priced. On the host it is
        # DeepSpeedCPUAdam that steps, which is asked for there (engine.py, zero_force_ds_cpu_optimizer)
        params = {"lr": RATE, "weight_decay": 0.01, **({} if on_host else {"torch_adam": True})}
        return {"type": "AdamW", "params": params}
    momentum = {"momentum": 0.9} if name == "sgd_momentum" else {}
    return {"type": "SGD", "params": {"lr": RATE, **momentum}}


def _formats(policy: Precision, stage: int) -> dict[str, Any]:
    """Return the sections of number formats."""
    reduce = SHORT.get(policy.reduce, "fp32")
    if policy.params in (OWN, "float32"):
        return {"communication_data_type": reduce}
    key = SHORT[policy.params]
    if policy.master == policy.params:
        return {key: {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
                "communication_data_type": reduce}  # fmt: skip
    if not stage:
        # without ZeRO, fp32 sums of gradients beside bf16 weights are refused (engine.py,
        # _do_optimizer_sanity_check); autocast has the masters as the weights
        return {"torch_autocast": {"enabled": True, "dtype": policy.params}, "communication_data_type": reduce}
    return {key: {"enabled": True}, "data_types": {"grad_accum_dtype": reduce}, "communication_data_type": reduce}


def _policy(export: Export) -> Precision:
    policy, stage = policy_of(export, NAME), export.layout.zero
    if policy.params in ("float64",) or policy.master == "float64":
        raise ConfigError(f"{NAME}: precision {policy}: float64 cannot be said there; use 32-true or bf16-mixed")
    if policy.master == policy.params == "float16":
        raise ConfigError(f"{NAME}: precision {policy}: masters in float16 cannot be said there; use 16-mixed")
    if policy.master == policy.params == "bfloat16" and (not stage or policy.reduce != "bfloat16"):
        raise ConfigError(f"{NAME}: precision {policy}: bf16_master_weights_and_grads needs ZeRO and sums in "
                          f"bfloat16, the layout has zero={stage} and reduce={policy.reduce}; use zero=1 and "
                          "bf16-true")  # fmt: skip
    if not stage and policy.params != policy.master and policy.reduce != "float32":
        raise ConfigError(f"{NAME}: precision {policy}: with zero=0 sums of gradients are float32, not "
                          f"{policy.reduce}; use zero=1")  # fmt: skip
    return policy
