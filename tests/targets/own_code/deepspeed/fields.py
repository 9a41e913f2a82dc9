"""Print the fields of a DeepSpeed config as its own code has them, as JSON; with a file, compare with it."""

import copy
import dataclasses
import json
import sys
from pathlib import Path

import deepspeed
from deepspeed.compile.config import CompileConfig
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.runtime import config as own
from deepspeed.runtime.activation_checkpointing import config as activation
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

DOCUMENTED = ("sequence_parallel_size", "compile", "gradient_clipping", "wall_clock_breakdown", "vocabulary_size")


class Recorder(dict):
    """A config that remembers which fields it is asked for."""

    asked: set[str] = set()

    def get(self, key, default=None):
        Recorder.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        Recorder.asked.add(key)
        return super().__contains__(key)

    def keys(self):
        return Keys(self)

    def __copy__(self):
        return self


class Keys:
    def __init__(self, owner):
        self.owner = owner

    def __contains__(self, key):
        return key in self.owner

    def __iter__(self):
        return dict.__iter__(self.owner)


def pydantic_fields(model):
    names = set()
    for name, field in model.model_fields.items():
        names |= {name, field.alias} - {None}
    return sorted(names)


def top_fields():
    copied = copy.copy
    own.copy.copy = lambda value: value if isinstance(value, Recorder) else copied(value)
    own.copy.deepcopy, deep = (lambda value: value), own.copy.deepcopy
    try:
        own.DeepSpeedConfig(Recorder(train_micro_batch_size_per_gpu=1))
    finally:
        own.copy.copy, own.copy.deepcopy = copied, deep
    return sorted((Recorder.asked | set(DOCUMENTED)) - set(own._REMOVED_TOP_LEVEL_CONFIG_KEYS))


def upper(module, *names):
    return sorted(getattr(module, name) for name in names)


def fields():
    removed = {**own._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    removed |= {f"zero_optimization.{key}": why for key, why in own._REMOVED_ZERO_CONFIG_KEYS.items()}
    act = activation
    return {
        "version": deepspeed.__version__.partition("+")[0],
        "fields": top_fields(),
        "removed": sorted(removed),
        "sections": {
            "zero_optimization": pydantic_fields(DeepSpeedZeroConfig),
            "zero_optimization.offload_optimizer": pydantic_fields(DeepSpeedZeroOffloadOptimizerConfig),
            "zero_optimization.offload_param": pydantic_fields(DeepSpeedZeroOffloadParamConfig),
            "bf16": pydantic_fields(DeepSpeedBF16Config),
            "fp16": pydantic_fields(DeepSpeedFP16Config),
            "compile": pydantic_fields(CompileConfig),
            "tensor_parallel": pydantic_fields(TPTrainingConfig),
            "expert_parallel": sorted(f.name for f in dataclasses.fields(AutoEPConfig) if not f.name.startswith("_")),
            "optimizer": ["legacy_fusion", "params", "type"],
            "data_types": upper(own, "GRAD_ACCUM_DTYPE", "PARAM_DTYPE", "BUFFER_DTYPE", "KEEP_IN_FP32_MODULES"),
            "torch_autocast": upper(own, "TORCH_AUTOCAST_ENABLED", "TORCH_AUTOCAST_DTYPE",
                                    "TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES"),
            "activation_checkpointing": upper(
                act, "ACT_CHKPT_PARTITION_ACTIVATIONS", "ACT_CHKPT_NUMBER_CHECKPOINTS",
                "ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION", "ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY",
                "ACT_CHKPT_CPU_CHECKPOINTING", "ACT_CHKPT_PROFILE"),
        },
    }  # fmt: skip


if __name__ == "__main__":
    found = fields()
    if len(sys.argv) > 1:
        kept = json.loads(Path(sys.argv[1]).read_text())
        if kept != found:
            sys.exit(f"{sys.argv[1]} is not what deepspeed {found['version']} has; write it again")
        print(f"fields are those of deepspeed {found['version']}")
    else:
        print(json.dumps(found, indent=1))
