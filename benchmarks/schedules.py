"""Bubble fractions of textbook and searched schedules, and how fast they are simulated and found.

    python benchmarks/schedules.py             the tables, as Markdown
    python benchmarks/schedules.py --quick     stages 4 and 8, microbatches 8 and 16

"stages" are ranks here: ZB-V cuts each into two halves of half the time and half the memory. Two fractions a cell:
idle share of the whole step (`bubble_fraction`; the optimizer waits for all ranks) / idle share within the ranks' own
spans (`span_bubble_fraction`; the zero-bubble paper's rate, for ranks that go on to the next step on their own).
Searched schedules have the first as their objective, and where the table says so, the second.
"""

from __future__ import annotations

import sys
import time

from cost_models.schedules import Times, build, search, simulate, times, v_placement

CASES = {
    # name: (forward, input gradient, weight gradient, transfer seconds) of each stage
    "equal times (F = I = W = 1, no transfers)": lambda n: ([1.0] * n, [1.0] * n, [1.0] * n, 0.0),
    "F 1, I 1.2, W 0.5, transfers 0.1": lambda n: ([1.0] * n, [1.2] * n, [0.5] * n, 0.1),
    "uneven stages (every third takes 1.3, the last 1.5), transfers 0.1": lambda n: (
        *([k * (1.5 if s == n - 1 else 1.3 if s % 3 == 0 else 1.0) for s in range(n)] for k in (1.0, 1.1, 0.8)),
        0.1,
    ),
}
COLUMNS = (
    "1f1b",
    "zb-h1",
    "zb-v",
    "searched, 1F1B's memory",
    "V searched, 1F1B's memory",
    "searched, twice",
    "twice, spans",
    "any memory, spans",
)


def halves(values: list[float]) -> list[float]:
    """Of stages folded into a V: each rank holds two halves of its stage, and the same work in all."""
    return [v / 2 for v in values + values[::-1]]


def cells(n: int, m: int, case: str) -> list[str]:
    forward, back, weight, transfer = CASES[case](n)
    plain = times(n, forward, back, weight, transfer_seconds=transfer)
    folded = times(
        2 * n, halves(forward), halves(back), halves(weight), transfer_seconds=transfer, activation_bytes=0.5
    )
    v = v_placement(2 * n, n)

    def timed(name: str, t: Times) -> str:
        return cell(simulate(build(name, t.n_stages, n, m), t))

    def cell(timeline) -> str:  # type: ignore[no-untyped-def]
        return f"{timeline.bubble_fraction * 100:.1f} / {timeline.span_bubble_fraction * 100:.1f}"

    return [
        timed("1f1b", plain), timed("zb-h1", plain), timed("zb-v", folded),
        cell(search(plain, m, limit_bytes=n).timeline),
        cell(search(folded, m, v, limit_bytes=n).timeline),
        cell(search(plain, m, limit_bytes=2 * n).timeline),
        cell(search(plain, m, limit_bytes=2 * n, objective="span").timeline),
        cell(search(plain, m, objective="span").timeline),
    ]  # fmt: skip


def main() -> None:
    quick = "--quick" in sys.argv
    for case in CASES:
        print(f"\n{case}: bubble % of the step / of the spans\n")
        print("| stages | microbatches | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 2))
        for n in (4, 8) if quick else (4, 8, 16):
            for m in (8, 16) if quick else (8, 16, 32, 64):
                print(f"| {n} | {m} | " + " | ".join(cells(n, m, case)) + " |", flush=True)
    print("\nCPU-seconds:\n\n| stages | microbatches | simulate 1f1b | search at 1F1B's memory |\n|---|---|---|---|")
    for n, m in ((8, 32), (16, 64)) if quick else ((8, 32), (16, 64), (64, 128)):
        schedule, t = build("1f1b", n, n, m), times(n, 1.0, 1.2, 0.5, transfer_seconds=0.1)
        begin = time.process_time()
        simulate(schedule, t)
        middle = time.process_time()
        search(t, m, limit_bytes=n)
        print(f"| {n} | {m} | {middle - begin:.4f} | {time.process_time() - middle:.2f} |", flush=True)


if __name__ == "__main__":
    main()
