"""Let DeepSpeed's own config, validators and, where a case runs, engine read exported folders."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import fields
from deepspeed.module_inject.auto_ep_config import validate_autoep_config
from deepspeed.runtime import config as own
from one_device import compared
from transformers import HfArgumentParser, TrainingArguments

KEPT = Path(__file__).parents[4] / "autopar/targets/trainers/deepspeed/fields.json"


class Ulysses:
    """The groups of sequence parallelism, of which a config asks only the size."""

    def __init__(self, size):
        self.get_sequence_parallel_world_size = lambda: size


def check(folder):
    """Return what DeepSpeed made of a folder."""
    case = json.loads((folder / "case.json").read_text())
    settings = json.loads((folder / "ds_config.json").read_text())
    run = json.loads((folder / "run.json").read_text())
    devices = case["devices"]
    own.dist.get_rank, own.dist.get_world_size = (lambda: 0), (lambda *_: devices)
    sequence = settings.get("sequence_parallel_size", 1)
    config = own.DeepSpeedConfig(dict(settings), mpu=Ulysses(sequence) if sequence > 1 else None)
    tensor = max(config.tensor_parallel_config.autotp_size, 1)
    ranks = devices // tensor // sequence
    rows = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * ranks
    assert rows == run["batch"], f"{rows} rows of a step, the plan has {run['batch']}"
    experts = config.expert_parallel_config
    validate_autoep_config(experts, devices, 1, tensor, sequence, zero_stage=config.zero_optimization_stage)
    said = (
        f"ZeRO-{config.zero_optimization_stage}, {config.train_micro_batch_size_per_gpu} rows x "
        f"{config.gradient_accumulation_steps} x {ranks} ranks, autotp {tensor}, autoep {experts.autoep_size}, "
        f"sequence {sequence}, bf16 {config.bfloat16_config.enabled}, fp16 {config.float16_config.enabled}, "
        f"{config.optimizer_name}"
    )
    if (folder / "training_arguments.json").exists():
        arguments = json.loads((folder / "training_arguments.json").read_text())
        arguments |= {"deepspeed": str(folder / "ds_config.json"), "bf16": False, "fp16": False, "use_cpu": True}
        HfArgumentParser(TrainingArguments).parse_dict(arguments)
        said += "; TrainingArguments"
    if case.get("runs"):
        params = settings["optimizer"]["params"]
        said += "; " + compared(folder, ["train.py"], {"DS_ACCELERATOR": "cpu"}, params["lr"], params["weight_decay"])
    return said


def main():
    failed = fields.fields() != json.loads(KEPT.read_text())
    print(f"fields.json is {'not what' if failed else 'what'} DeepSpeed has", flush=True)
    for folder in map(Path, sys.argv[1:]):
        try:
            print(f"{folder.name}: {check(folder.resolve())}", flush=True)
        except Exception as error:
            failed = True
            print(f"{folder.name}: REFUSED {type(error).__name__}: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
