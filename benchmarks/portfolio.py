"""The default search beside a portfolio of pinned layouts: no pinned one should take less than the search's plan.

    python benchmarks/portfolio.py gpt2-8                 200 layouts, made by hand and at random; see layouts.CASES
    python benchmarks/portfolio.py --count 400 resnet-50-8
    python benchmarks/portfolio.py --precision bf16-mixed llama-8b-64    under a policy; else in bfloat16 throughout

A layout is written in the words of ``autopar plan --like``, and is priced exactly as these say. The row that is printed
says how many fit, and has the best price of those.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

COUNT = 200
"""Layouts of a model on a cluster, unless another number is asked for."""
ROUNDS = 200
"""Draws for every layout that is wanted, of which many are the same."""


@dataclass
class Prices:
    """What became of the layouts.

    Attributes:
        seconds: of a step of those that fit.
        refused: the others, with the error: they do not fit, or cannot be.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> tuple[str, float] | None:
        """The layout that takes the least, with its seconds."""
        return min(self.seconds.items(), key=lambda f: f[1]) if self.seconds else None


def price(
    layouts: Sequence[str], graph_of: Callable[[int], Any], cluster: Any, rows: int, seconds: float,
    say: Callable[[str], None] = lambda _: None, n_devices: int | None = None,
) -> Prices:  # fmt: skip
    """Price layouts beside a plan that takes so many seconds a step.

    Args:
        graph_of: the graph of a microbatch, by the number of microbatches in a step of so many rows.
        say: told what becomes of each.
        n_devices: the first so many of the cluster; None for all.
    """
    from autopar.errors import AutoparError
    from autopar.planner.layouts.pricing import pinned_layout

    prices = Prices()
    for words in layouts:
        try:
            plan = pinned_layout(graph_of, cluster, words, rows, n_devices=n_devices)
            if not plan.fits:
                prices.refused[words] = f"needs {plan.memory_bytes / 2**30:.1f} GiB"
                continue
            prices.seconds[words] = plan.seconds
            say(f"{plan.seconds:.6g}  {plan.seconds / seconds:.4f}  {words}")
        except (AutoparError, ValueError) as error:
            prices.refused[words] = str(error).splitlines()[0][:80]
            say(f"{prices.refused[words]}  {words}")
    return prices


def by_hand(n: int, rows: int) -> list[str]:
    """What people try first: one kind of parallelism, or tensor 8 in nodes and stages across them, few and many
    microbatches, each with the schedules that are written about."""
    layouts = [f"dp={n},m={m}" for m in (1, 2, 4) if rows % m == 0 and rows // m >= n]
    shapes = ((min(8, n), 1), (min(8, n // 2), 2), (min(4, n // 4), 4), (min(8, n // 8), 8), (1, min(n, 8)))
    for tensor, groups in shapes:
        if tensor < 1 or n % (tensor * groups):
            continue
        data = n // tensor // groups
        counts = [m for m in (rows // data, rows // data // 4) if m >= 1 and rows % m == 0 and (rows // m) % data == 0]
        for m in dict.fromkeys(counts):
            words = f"tp={tensor},pp={groups},dp={data},m={m}"
            names = ("1f1b", "zb-h1", "zb-v") if groups > 1 else ("1f1b",)
            layouts += [f"{words},schedule={name}" for name in names]
            layouts += [f"{words},vp=2"] if groups > 1 else []
    return list(dict.fromkeys(layouts))


def at_random(count: int, n: int, rows: int, seed: int = 0) -> list[str]:
    """So many different layouts of ``n`` devices, or as many as there are."""
    rng = random.Random(seed)
    layouts: dict[str, None] = {}
    sizes = [k for k in range(1, n + 1) if n % k == 0]
    for _ in range(ROUNDS * count):
        if len(layouts) >= count:
            break
        tensor = rng.choice([k for k in sizes if k <= 8])
        groups = rng.choice([k for k in sizes if (n // tensor) % k == 0])
        data = n // tensor // groups
        counts = [m for m in range(1, rows + 1) if rows % m == 0 and (rows // m) % data == 0]
        if not counts:
            continue
        words = f"tp={tensor},pp={groups},dp={data},m={rng.choice(counts)}"
        if groups > 1:
            deep = rng.choice([1, 1, 2, 3, 4, 8])
            words += f",vp={deep},schedule={rng.choice(['zb-h1', 'interleaved-1f1b'] if deep > 1 else SINGLE)}"
        words += rng.choice(["", ",sp"]) if tensor > 1 else ""
        words += rng.choice(["", ",zero=1", ",zero=3"]) if data > 1 else ""
        layouts[words + rng.choice(["", ",recompute=none", ",recompute=full"])] = None
    return list(layouts)


SINGLE = ["1f1b", "zb-h1", "zb-v"]
"""Schedules that say themselves how many stages a group has."""


def portfolio(count: int, n: int, rows: int) -> list[str]:
    """So many layouts, if there are: those that people try first, and random ones."""
    hand = by_hand(n, rows)
    drawn = (words for words in at_random(count, n, rows) if words not in hand)
    return [*hand, *drawn][: max(count, len(hand))]


def measure(case: str, count: int, precision: str | None = None) -> dict[str, Any]:
    """One case in this process."""
    warnings.simplefilter("ignore")
    import layouts

    import autopar.rules  # noqa: F401
    from autopar.capture.microbatches import numbers_of_parts
    from autopar.planner.inter_op.stage_search import PipelineOptions, plan_pipeline
    from hardware_profiles import load_cluster

    *_, cluster, rows, _, _, _ = layouts.CASES[case]
    hardware, graph_of = load_cluster(cluster), layouts.graphs_of(case, precision)
    start = time.process_time()
    graphs = {m: graph_of(m) for m in numbers_of_parts(rows)}
    best = plan_pipeline(graphs, hardware, hardware.n_devices, PipelineOptions(1))
    searched = time.process_time()
    words = portfolio(count, hardware.n_devices, rows)
    prices = price(words, graph_of, hardware, rows, best.plan.seconds, say=lambda text: print(text, file=sys.stderr))
    row: dict[str, Any] = {
        "case": case, "precision": precision or "as the model is",
        "search s": best.plan.seconds, "plan": best.tried[0][0], "layouts": len(words),
        "fit": len(prices.seconds),
        "do not fit, or cannot be": len(prices.refused), "search CPU s": round(searched - start, 1),
        "layouts CPU s": round(time.process_time() - searched, 1),
    }  # fmt: skip
    if prices.best is not None:
        row |= {"best pinned": prices.best[0], "search / pinned": round(best.plan.seconds / prices.best[1], 4)}
    return row


def main() -> None:
    """Print a line for every case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--precision")
    options = parser.parse_args()
    for case in options.cases:
        print(json.dumps(measure(case, options.count, options.precision)), flush=True)


if __name__ == "__main__":
    main()
