"""Attention with dropout, forward and backward: at once and in blocks of queries. CPU-seconds, and bytes at the peak.

    OMP_NUM_THREADS=1 python benchmarks/attention_dropout.py [longest]

The peak is counted by storage, in whatever any operator makes (no allocator's rounding).
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch

from autopar.allocations import Allocations
from autopar.rules.attention import attention_in_blocks
from autopar.rules.attention.attention import attention_with_dropout

HEADS, INNER, P = 4, 64, 0.1


def step(n: int, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, INNER, requires_grad=True) for _ in range(3))
    y = attention_with_dropout(
        q, k, v, None, P, causal, cut={}, seed=torch.tensor(3), site=1, shape=tuple(q.shape), shards=((),) * 4
    )
    torch.autograd.grad(y, (q, k, v), torch.ones_like(y))


def measured(n: int, causal: bool, fewest: int) -> tuple[float, int]:
    attention_in_blocks.FEWEST_SCORES = fewest
    with Allocations() as allocations:
        step(n, causal)
    taken = []
    for _ in range(3):
        start = time.process_time()
        step(n, causal)
        taken.append(time.process_time() - start)
    return median(taken), allocations.peak_bytes


def main() -> None:
    torch.set_num_threads(1)
    longest = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    print("   S  causal   at once            in blocks          time   memory")
    for n in (256, 512, 1024, 2048, 4096, 8192):
        for causal in (False, True) if n <= longest else ():
            (once, all_bytes), (parts, of_blocks) = measured(n, causal, 1 << 62), measured(n, causal, 0)
            print(
                f"{n:5}  {causal!s:6}  {once:6.2f} s {all_bytes / 2**20:7.0f} MiB {parts:6.2f} s "
                f"{of_blocks / 2**20:6.0f} MiB  x {parts / once:4.2f}  1/{all_bytes / of_blocks:.1f}", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
