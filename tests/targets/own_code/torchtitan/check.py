"""TorchTitan's own code on exported folders: ``check.py FOLDER ...``; a line each, exit code 1 if it refuses one.

Of every folder: its ``ConfigManager`` parses the command that ranks run; ``ParallelDims`` builds the meshes under a
fake process group; the model is built on the meta device, split into the stages of a pipeline and parallelized by the
model's own function (sharding, recomputation, compile, FSDP), as ranks 0 and the last would; and the parts are counted.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")


def checked(folder: Path, rank: int) -> dict[str, object]:
    """Return what torchtitan made of an exported folder on one rank."""
    about = json.loads((folder / "case.json").read_text())
    world = int(about["devices"])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.tools import utils

    logging.disable(logging.CRITICAL)
    # no accelerator: meshes are of the processor, and nothing is computed
    for module in (utils, parallel_dims):
        module.device_type = "cpu"
    arguments = list(about["argv"])[2:]
    config = ConfigManager().parse_args([*arguments, "--parallelism.spmd_backend=partial_dtensor"])
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    dims = ParallelDims.from_config(config.parallelism, world)
    dims.build_mesh()
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = spec.model.build()
    model.verify_module_protocol()
    total = sum(p.numel() for p in model.parameters())
    batch = dims.dp_replicate * dims.dp_shard
    training = config.training
    assert training.global_batch_size % (training.local_batch_size * batch) == 0, "batch"
    shared = {
        "parallel_dims": dims, "training": training, "parallelism": config.parallelism,
        "compile_config": config.compile, "ac_config": config.activation_checkpoint, "dump_folder": str(folder),
    }  # fmt: skip
    stages = 1
    if dims.pp_enabled:
        schedule, parts, _, _ = spec.pipelining_fn(
            model, device=torch.device("meta"), model_config=spec.model, parallelize_fn=spec.parallelize_fn,
            loss_fn=config.loss.build(compile_config=config.compile), **shared,
        )  # fmt: skip
        stages = dims.pp * len(parts)
        microbatches = schedule._n_microbatches
    else:
        parts = [spec.parallelize_fn(model, **shared)]
        microbatches = training.global_batch_size // (training.local_batch_size * batch)
    wrapped = sum(type(m).__name__.endswith("CheckpointWrapper") for part in parts for m in part.modules())
    sharded = sum(type(m).__name__.startswith("FSDP") for part in parts for m in part.modules())
    mine = [getattr(p, "to_local", lambda p=p: p)() for part in parts for p in part.parameters()]
    local = sum(p.numel() for p in mine)
    blocks = [list(part.layers) for part in parts]
    return {
        "parameters": total, "parameters of rank": local, "stages": stages, "microbatches": microbatches,
        "blocks": [f"{part[0]}-{part[-1]}" if part else "" for part in blocks], "recomputed": wrapped,
        "sharded modules": sharded, "dims": [dims.pp, dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp, dims.ep],
    }  # fmt: skip


def differing_fields() -> int:
    """Print how what autopar knows of the installed release differs from it; return whether it does."""
    from importlib.metadata import version

    import fields

    kept = Path(__file__).resolve().parents[4] / "autopar" / "targets" / "trainers" / "torchtitan"
    known = json.loads((kept / "fields.json").read_text())[version("torchtitan")]
    found = json.loads(fields.dump(fields.installed_fields()))
    names = [name for name in {**known, **found} if known.get(name, ...) != found.get(name, ...)]
    configs = json.loads((kept / "configs.json").read_text()) != json.loads(fields.dump(fields.registered()))
    print(f"{'DIFFER' if names or configs else 'accepted'} fields of torchtitan {version('torchtitan')}: {len(found)}"
          f"{', other: ' + ', '.join(names) if names else ''}{', other configs' if configs else ''}", flush=True)
    return int(bool(names) or configs)


def rank_of(folder: Path, rank: int) -> tuple[bool, str]:
    """Check one rank in a process of its own."""
    command = [sys.executable, __file__, "--rank", str(rank), str(folder)]
    with tempfile.TemporaryFile("w+") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=900)
        out.seek(0)
        lines = [line.rstrip() for line in out if line.strip()]
    return done.returncode == 0, lines[-1] if lines else ""


def main() -> int:
    """Check all folders."""
    if sys.argv[1:2] == ["--rank"]:
        print(json.dumps(checked(Path(sys.argv[3]).resolve(), int(sys.argv[2]))))
        return 0
    failed = differing_fields()
    for name in sys.argv[1:]:
        folder = Path(name).resolve()
        last = int(json.loads((folder / "case.json").read_text())["devices"]) - 1
        ranks = (0, last) if "pp=" in json.loads((folder / "case.json").read_text())["words"] else (0,)
        for rank in ranks:
            passed, line = rank_of(folder, rank)
            failed += not passed
            print(f"{'accepted' if passed else 'REFUSED'} {folder.name}, rank {rank}: {line}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
