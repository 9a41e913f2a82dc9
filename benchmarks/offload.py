"""Offload of activations next to DeepSpeed's: Qwen3-14B on eight H200, priced at the lengths that were measured.

https://github.com/deepspeedai/DeepSpeed/pull/8255 trains with ZeRO-3, four sequences a GPU and DeepCompile: nothing is
moved, all that its pass may move, or what it plans. Its pass waits for each copy to the host, as inductor may use the
memory again; it looks for the copies back. Here the same three are priced of the same layout by autopar's prices of its
own copies, which run beside compute.

    python benchmarks/offload.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import autopar
import autopar.planner.planning  # registers offload
from autopar.frontends.models import load_model
from autopar.planner.intra_op.pins.options import Options, device_limit
from autopar.planner.layouts.pricing import PricedLayouts
from autopar.plans.offload_options import parse_offload
from hardware_profiles import load_cluster

CLUSTER, LAYOUT, ROWS = "dgx-h200 as deepspeed", "dp=8,zero=3,mbs=4,precision=bf16-true", 32
MEASURED = {2048: (1.76, 2.50, 1.85), 3072: (5.46, 7.81, 5.41), 3328: (None, 8.67, 7.38)}
WAYS = {"none": "none", "all": "activations=*", "planned": "activations"}


def rows(lengths: list[int]) -> list[dict[str, object]]:
    """Return seconds, bytes and moved bytes of each way at each length."""
    config = Path(__file__).parent / "offload_data" / "config.json"
    cluster = load_cluster(CLUSTER)
    found: list[dict[str, object]] = []
    for length in lengths:
        loaded = load_model(f"hf:{config}", ROWS, length)
        captured = autopar.capture(loaded.model, loaded.args, example_kwargs=loaded.kwargs)
        for (way, words), measured in zip(WAYS.items(), MEASURED.get(length, (None,) * 3), strict=True):
            options = Options(offload=parse_offload(words))
            row = PricedLayouts(loaded.model, captured, (loaded.args, loaded.kwargs), options).price(cluster, LAYOUT)
            (stage,) = row.plan.stages
            moved = sum(1 for _ in stage.memory.get("offload", ()))
            limit = device_limit(cluster, stage.devices, None)
            found.append({
                "length": length, "way": way, "seconds": stage.price.seconds, "memory_bytes": stage.price.memory_bytes,
                "limit_bytes": limit, "fits": stage.price.memory_bytes <= limit, "moved": moved, "measured": measured,
            })  # fmt: skip
            print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lengths", type=int, nargs="*", default=list(MEASURED))
    given = parser.parse_args()
    found = rows(given.lengths)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
