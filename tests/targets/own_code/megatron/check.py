"""Usage: check.py FOLDER ...: what Megatron-Core's own code makes of exported folders; exit code 1 if it refuses one.

``check.py --fields [FILE]`` writes the list of options, or compares it with the file that the reader uses.
"""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from own_megatron import checked, fields


def check_folder(folder: Path) -> bool:
    """Print what Megatron makes of a folder; return whether it takes it."""
    words = shlex.split((folder / "arguments.txt").read_text(encoding="utf-8"), comments=True)
    world = int(next(line.split()[-1] for line in (folder / "pretrain.sh").read_text().splitlines()
                     if line.startswith("# devices:")))  # fmt: skip
    sharded = "--use-megatron-fsdp" in words
    try:
        args = checked(words, world, None if sharded else "1")
    except Exception as error:  # noqa: BLE001 (whatever Megatron raises is what is shown)
        print(f"{folder}: refused: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return False
    print(
        f"{folder}: tp={args.tensor_model_parallel_size} pp={args.pipeline_model_parallel_size} "
        f"vp={args.virtual_pipeline_model_parallel_size} cp={args.context_parallel_size} "
        f"dp={args.data_parallel_size} ep={args.expert_model_parallel_size} etp={args.expert_tensor_parallel_size} "
        f"mbs={args.micro_batch_size} gbs={args.global_batch_size} distributed_optimizer="
        f"{args.use_distributed_optimizer} recompute={args.recompute_granularity} dtype={args.params_dtype}"
    )
    return True


def main(words: list[str]) -> int:
    """Check folders, or the list of options."""
    if words[:1] == ["--fields"]:
        found = {"version": version("megatron-core"), "options": fields()}
        if not words[1:]:
            print(json.dumps(found, indent=0))
            return 0
        stored = json.loads(Path(words[1]).read_text(encoding="utf-8"))
        same = {name: stored[name] for name in found} == found
        print("options: as stored" if same else "options: not those of the file; write it anew")
        return 0 if same else 1
    return 0 if all([check_folder(Path(word)) for word in words]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
