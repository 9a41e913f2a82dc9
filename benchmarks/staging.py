"""How long the staging program takes: 126 alike blocks on 512 to 16,384 devices, two types of devices, curves.

    python benchmarks/staging.py             all, as Markdown
    python benchmarks/staging.py --quick     the smallest of each kind

The blocks are synthetic, of about the size of a 405-billion-parameter decoder's layers on devices of 80 GB; seconds
and bytes follow from a few closed forms below, with less efficiency for every doubling of the devices of a stage. Each
row searches numbers of stages x submesh sizes x shapes x recomputing, for every schedule and number of
microbatches.
"""

from __future__ import annotations

import resource
import sys
import time

from cost_models.staging import Pool, StageCost, StagingEstimate, StagingProblem, Submesh, stage
from cost_models.staging.submeshes import alpa_sizes, submeshes

BATCH = 2048
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
MICROBATCHES = (32, 64, 128, 256, 512)
LAYER_FLOPS = 6 * 3.2e9 * 8192  # forward and backward of one sequence of 8,192 tokens
LAYER_PARAMETERS = 3.2e9
ACTIVATION_BYTES = 34 * 8192 * 16384.0  # of one sequence in one layer, all kept
RATES = {"fast": 4.0e14, "slow": 1.2e14}  # flop/s that one device of each type reaches
TENSOR = (1, 2, 4, 8)


def shapes(n_devices: int) -> list[str]:
    """Tensor-parallel degrees inside a node, with and without sharded optimizer state."""
    return [f"{t} {z}" for t in TENSOR if n_devices % t == 0 for z in ("whole", "sharded")]


def problem(n_blocks: int, pools: tuple[Pool, ...], m: int) -> StagingProblem:
    """Alike blocks between an embedding and a head of another class."""
    sequences = BATCH / m

    def cost(first: int, last: int, s: Submesh) -> StageCost | None:
        tensor, state = s.shape.split()
        t = int(tensor)
        data = s.n_devices // t
        local = sequences / data
        if local < 1:
            return None
        layers = sum(0.1 if b in (0, n_blocks - 1) else 1.0 for b in range(first, last + 1))
        compute = layers * LAYER_FLOPS * local / t / RATES[s.device_type] * (1 + 0.04 * (t - 1))
        own = layers * LAYER_PARAMETERS / t
        gathered = 2 * own * (data - 1) / data / 5e10 if data > 1 else 0.0
        whole = state == "whole"
        return StageCost(
            compute / 3,
            compute * 2 / 3,
            step_seconds=2 * gathered if whole else 3 * gathered,
            static_bytes=own * (18 if whole else 6 + 12 / data),
            activation_bytes=layers * ACTIVATION_BYTES * local / t,
            recomputed_bytes=layers * 2 * 8192 * 16384.0 * local / t,
            recompute_seconds=compute / 3,
        )

    def transfer(cut: int, a: Submesh, b: Submesh) -> float:
        return sequences * 2 * 8192 * 16384 / min(a.n_devices, b.n_devices) / 2.5e10

    return StagingProblem(
        n_blocks, pools, submeshes(pools, shapes, alpa_sizes), cost, transfer,
        ["embedding", *["layer"] * (n_blocks - 2), "head"], place=lambda s: (s.device_type, s.n_devices),
        recompute="blocks",
    )  # fmt: skip


def nodes(kind: str, n_devices: int) -> Pool:
    return Pool(kind, (8,) * (n_devices // 8), 72e9 if kind == "fast" else 40e9)


def row(name: str, n_blocks: int, pools: tuple[Pool, ...], schedules: tuple[str, ...] = SCHEDULES) -> None:
    """Prints one line of the table."""
    begin = time.process_time()
    best: StagingEstimate = min(
        (stage(problem(n_blocks, pools, m), m, s)[0] for m in MICROBATCHES for s in schedules), key=lambda c: c.seconds
    )
    spent = time.process_time() - begin
    gap = 1 - best.lower_bound_seconds / best.seconds
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    sizes = sorted({str(s.choice.submesh) for s in best.stages})
    print(
        f"| {name} | {n_blocks} | {spent:.2f} | {memory:.2f} | {best.seconds:.3f} | {gap:.2%} | {best.schedule}, "
        f"{best.n_microbatches} microbatches, {len(best.stages)} stages on {' / '.join(sizes)} |",
        flush=True,
    )


def main() -> None:
    quick = "--quick" in sys.argv
    print("| cluster | blocks | CPU s | peak GB so far | step s | gap | best |\n|---|---|---|---|---|---|---|")
    for n in (512,) if quick else (512, 2048, 16384):
        row(f"{n}", 128, (nodes("fast", n),))
    row("256 + 256", 128, (nodes("fast", 256), nodes("slow", 256)))
    if quick:
        return
    print("\nDepth, on 512 devices:\n")
    for depth in (16, 32, 64, 128, 256):
        row("512", depth, (nodes("fast", 512),))
    print("\nDevices, 128 blocks, 1F1B alone:\n")
    for n in (128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        row(f"{n}", 128, (nodes("fast", n),), ("1f1b",))


if __name__ == "__main__":
    main()
