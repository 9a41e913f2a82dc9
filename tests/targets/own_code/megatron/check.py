"""Usage: check.py FOLDER ...: what Megatron-Core's own code makes of exported folders, and whether the reader's list
of options is that of its parser; exit code 1 if it refuses a folder, or the list is another one.

``check.py --fields`` writes the list of options.
"""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from own_megatron import checked, fields

STORED = Path(__file__).parents[4] / "autopar" / "targets" / "trainers" / "megatron" / "fields.json"


def check_folder(folder: Path) -> bool:
    """Print what Megatron makes of a folder; return whether it takes it."""
    words = shlex.split((folder / "arguments.txt").read_text(encoding="utf-8"), comments=True)
    world = int(json.loads((folder / "case.json").read_text(encoding="utf-8"))["devices"])
    sharded = "--use-megatron-fsdp" in words
    try:
        args = checked(words, world, None if sharded else "1")
    except Exception as error:
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


def check_fields() -> bool:
    """Return whether the stored list of options is that of the parser."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    same = {name: stored[name] for name in ("version", "options")} == found_fields()
    print("options: as stored" if same else f"options: not those of {STORED.name}; write it anew with --fields")
    return same


def found_fields() -> dict[str, object]:
    """Return the options of the parser that is installed."""
    return {"version": version("megatron-core"), "options": fields()}


def main(words: list[str]) -> int:
    """Check folders and the list of options, or write that list."""
    if words == ["--fields"]:
        print(json.dumps(found_fields(), indent=0))
        return 0
    fine = [check_folder(Path(word)) for word in words]
    return 0 if check_fields() and all(fine) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
