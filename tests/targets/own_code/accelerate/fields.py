"""Print the fields of accelerate's config and of TrainingArguments from their own code, or compare with a file."""

import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path

import accelerate
import transformers
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import launch as own_launch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

SECTIONS = {  # a table of the file: the beginning of its options, and how its keys may begin in the file
    "fsdp_config": "fsdp_", "parallelism_config": "parallelism_config_", "megatron_lm_config": "megatron_lm_",
    "fp8_config": "fp8_", "dynamo_config": "dynamo_",
}  # fmt: skip
BARE = ("fsdp_config", "fp8_config", "dynamo_config")  # launch.py: a key without the beginning gets it


def options():
    """All options of ``accelerate launch``, which keys of nested tables become."""
    return {action.dest for action in launch_command_parser()._actions}


def nested():
    names = options()
    asked = set(re.findall(r'getattr\(args, "(\w+)"', inspect.getsource(own_launch)))
    asked |= set(re.findall(r"args\.(\w+)", inspect.getsource(own_launch)))
    found = {}
    for section, beginning in SECTIONS.items():
        keys = {name for name in names | asked if name.startswith(beginning)}
        if section in BARE:
            keys |= {key.removeprefix(beginning) for key in keys}
        found[section] = sorted(keys)
    deepspeed = re.findall(r"args\.(\w+)", inspect.getsource(own_launch.prepare_deepspeed_cmd_env))
    found["deepspeed_config"] = sorted({
        name for name in {*names, *deepspeed}
        if name.startswith(("deepspeed_", "zero", "zero3", "offload_", "gradient_"))
    })  # fmt: skip
    found["mpirun_config"] = sorted(name for name in names if name.startswith("mpirun_"))
    return found


def training():
    source = inspect.getsource(TrainingArguments)
    fsdp = set(re.findall(r'fsdp_config(?:\.get\(|\.setdefault\(|\[)\s*"(\w+)"', source))
    fsdp |= set(re.findall(r'"(\w+)" in self\.fsdp_config', source))
    fsdp |= {"version"}
    return {
        "fields": sorted(f.name for f in dataclasses.fields(TrainingArguments) if f.init),
        "fsdp_config": sorted({*fsdp, *(f"fsdp_{name}" for name in fsdp)}),
        "accelerator_config": sorted(f.name for f in dataclasses.fields(AcceleratorConfig)),
    }


def families():
    """Model types whose configs have a plan of tensor parallelism for their layers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = []
    for name in CONFIG_MAPPING:
        try:
            if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None):
                found.append(name)
        except Exception as error:  # a config that needs a package that is not installed
            print(f"{name}: {error}", file=sys.stderr)
    return sorted(found)


def fields():
    return {
        "version": accelerate.__version__,
        "transformers": transformers.__version__,
        "fields": sorted({*(f.name for f in dataclasses.fields(ClusterConfig)), "fp16", "dynamo_backend"}),
        "sections": nested(),
        "training_arguments": training(),
        "tensor_parallel_families": families(),
    }


if __name__ == "__main__":
    found = fields()
    if len(sys.argv) > 1:
        kept = json.loads(Path(sys.argv[1]).read_text())
        if kept != found:
            sys.exit(f"{sys.argv[1]} is not what accelerate {found['version']} has; write it again")
        print(f"fields are those of accelerate {found['version']}, transformers {found['transformers']}")
    else:
        print(json.dumps(found, indent=1))
