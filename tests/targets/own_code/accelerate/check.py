"""Let accelerate's own config, launcher, mesh and FSDP plugin read exported folders; train where a case runs."""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import fields
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from one_device import compared
from transformers import HfArgumentParser, TrainingArguments

HERE = Path(__file__).parent
KEPT = HERE.parents[3] / "autopar/targets/trainers/hugging_face/fields.json"


class Accelerated:
    """What a mesh asks of an Accelerator."""

    def __init__(self, devices, fsdp):
        self.num_processes, self.multi_device, self.is_fsdp2, self.is_main_process = devices, devices > 1, fsdp, False
        self.distributed_type = "FSDP" if fsdp else "MULTI_GPU"


def check(folder):
    """Return what accelerate made of a folder."""
    case = json.loads((folder / "case.json").read_text())
    run = json.loads((folder / "run.json").read_text())
    config = load_config_from_file(str(folder / "accelerate.yaml"))
    args = launch_command_parser().parse_args(["--config_file", str(folder / "accelerate.yaml"), "train.py"])
    args, _, _ = _validate_launch_command(args)
    args.main_process_port, args.num_machines = 0, 1
    before = dict(os.environ)
    os.environ.update(prepare_multi_gpu_env(args))
    try:
        said = [f"{config.distributed_type.value} of {config.num_processes}, {config.mixed_precision}"]
        fsdp = config.distributed_type == "FSDP"
        mesh = ParallelismConfig() if config.parallelism_config else None
        ranks, tensor = case["devices"], mesh is not None and mesh.tp_size > 1
        if mesh is not None:
            mesh._validate_accelerator(Accelerated(case["devices"], fsdp))
            sizes = {k: v for k, v in mesh._sizes.items() if v > 1}
            built = mesh.build_device_mesh("cpu")
            assert built.size() == case["devices"], f"a mesh of {built.size()} ranks, the plan has {case['devices']}"
            ranks //= mesh.non_data_parallel_size
            said.append(f"mesh {sizes} {mesh.cp_handler or ''}".strip())
        if fsdp:
            plugin = FullyShardedDataParallelPlugin()
            wrapped, again = plugin.transformer_cls_names_to_wrap, plugin.activation_checkpointing
            said.append(f"FSDP2, reshard {plugin.reshard_after_forward}, {wrapped}, recompute {again}")
            assert plugin.fsdp_version == 2
        rows = run["rows"] * run["microbatches"] * ranks
        assert rows == run["batch"], f"{rows} rows of a step, the plan has {run['batch']}"
    finally:
        os.environ.clear()
        os.environ.update(before)
    if (folder / "training_arguments.json").exists():
        arguments = json.loads((folder / "training_arguments.json").read_text())
        arguments |= {"bf16": False, "fp16": False, "use_cpu": True}
        own = HfArgumentParser(TrainingArguments).parse_dict(arguments)[0]
        assert not fsdp or own.fsdp_plugin_args["fsdp_version"] == 2
        said.append("TrainingArguments")
    if case.get("runs"):
        said.append(compared(folder, [str(HERE / "on_processors.py"), "train.py"], {}, 1e-4, 0.01, saved=tensor))
    return "; ".join(said)


def main():
    failed = fields.fields() != json.loads(KEPT.read_text())
    print(f"fields.json is {'not what' if failed else 'what'} accelerate has", flush=True)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for folder in map(Path, sys.argv[1:]):
        try:
            devices = json.loads((folder / "case.json").read_text())["devices"]
            torch.distributed.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
            print(f"{folder.name}: {check(folder.resolve())}", flush=True)
        except Exception as error:
            failed = True
            print(f"{folder.name}: REFUSED {type(error).__name__}: {error}", flush=True)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
