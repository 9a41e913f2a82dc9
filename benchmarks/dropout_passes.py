"""Dropout whose bits do not depend on the mesh: in ten passes, compiled into one, and beside torch's own. CPU-seconds.

    OMP_NUM_THREADS=1 python benchmarks/dropout_passes.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from autopar.rules.families import sharded_random

SHAPE, P, SITE = (64, 512, 1024), 0.1, 3


def seconds(run: Callable[[], object], times: int = 7) -> float:
    run()
    taken = []
    for _ in range(times):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return median(taken)


def main() -> None:
    torch.set_num_threads(1)
    x, seed = torch.randn(SHAPE), torch.tensor(11)
    cut = tuple(() for _ in SHAPE)

    def dropped() -> torch.Tensor:
        return sharded_random.dropout(x, P, True, cut={}, seed=seed, site=SITE, shape=SHAPE, shards=cut)

    ten = seconds(dropped)
    sharded_random.FUSED_ON.add("cpu")
    one = seconds(dropped)
    scale, native = seconds(lambda: x * 2), seconds(lambda: torch.nn.functional.dropout(x, P))
    for name, value in (("ten passes", ten), ("compiled", one), ("x * 2", scale), ("torch's dropout", native)):
        print(f"{name:16} {1e3 * value:7.1f} ms, {value / scale:5.2f} x a multiplication")


if __name__ == "__main__":
    main()
