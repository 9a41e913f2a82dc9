"""Seconds of the Triton kernels of attention with dropout by the sizes of their blocks, on a GPU.

    python benchmarks/attention_blocks.py [--seconds 100] [--output blocks.json]

The fastest sizes of each row belong into ``attention_triton.blocks_of``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_rows.kernels import seconds_of

from autopar.rules.attention import attention_triton
from autopar.rules.families.sharded_random import halves, threshold_of

SHAPES = [(8, 12, 1024, 64), (4, 32, 2048, 64), (2, 32, 4096, 128)]
BLOCKS = [
    (q, k, warps, stages)
    for q, k, warps in ((64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 128, 4), (128, 32, 4))
    for stages in (2, 3)
]


def row(shape: tuple[int, int, int, int], blocks: tuple[int, int, int, int]) -> dict[str, Any]:
    """Seconds of the forward and of the backward of one call, causal, in bfloat16."""
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    seed = torch.full((), 11, device="cuda")
    hashes = halves(seed, 3, (*shape[:3], shape[2]), ((),) * 4, q.device)
    form = SimpleNamespace(is_causal=True, scale=shape[3] ** -0.5, threshold=threshold_of(0.1), unscaled=1 / 0.9)
    tensors = (q, k, v, None, *hashes)
    out, log_sum = torch.empty_like(q), torch.empty(shape[:3], device="cuda")
    size = dict(zip(("QUERIES", "KEYS", "num_warps", "num_stages"), blocks, strict=True))
    kept = attention_triton.blocks_of
    attention_triton.blocks_of = lambda *args: {**kept(*args), **size}
    try:
        forward = seconds_of(lambda: attention_triton.forward(tensors, form, out, log_sum), "cuda")
        backward = seconds_of(lambda: attention_triton.backward(grad, out, log_sum, tensors, form), "cuda")
    except Exception as error:
        return {"shape": shape, "blocks": blocks, "error": str(error).splitlines()[0][:120]}
    finally:
        attention_triton.blocks_of = kept
    return {"shape": shape, "blocks": blocks, "forward": forward, "backward": backward}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--output", type=Path, default=Path("blocks.json"))
    asked = parser.parse_args()
    until, rows = time.perf_counter() + asked.seconds, []
    for shape in SHAPES:
        for blocks in BLOCKS:
            if time.perf_counter() < until:
                rows.append(row(shape, blocks))
                print(rows[-1], flush=True)
                asked.output.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
