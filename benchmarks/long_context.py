"""Where the ways to cut attention along a sequence cross: one attention of Llama-3-8B, 4k to 1M tokens, on H100.

Prices of one causal attention with its projections, forward and backward, in bfloat16, one row, cut along the sequence
before and after, on the roofline's numbers:

    python benchmarks/long_context.py            # prints the table of docs/measurements.md

``g`` is heads (Ulysses), ``q`` queries with keys and values gathered, ``ring`` keys and values that travel; two names
are two axes, the first of them inside of a node.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from torch import nn

import autopar
from autopar.errors import AutoparError

HIDDEN, HEADS, SHARED, WIDTH = 4096, 32, 8, 128
CLUSTERS = {8: "dgx-h100", 64: "dgx-h100-x8", 512: "dgx-h100-x64"}
LENGTHS = (4, 16, 64, 256, 1024)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * WIDTH, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, SHARED * WIDTH, bias=False) for _ in range(2))
        self.o = nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b s c] -> []
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2)).sum()


def ways(n: int) -> dict[str, tuple[str, dict[str, str]]]:
    """Meshes, and what cuts the attention on each of their axes."""
    alone = {way: (f"seq={n}", {"seq": way}) for way in (("g", "q", "ring") if n <= SHARED else ("q", "ring"))}
    if n <= SHARED:
        return alone
    mesh = f"seq={n // 8},node=8"
    return alone | {f"{a} {b}": (mesh, {"node": a, "seq": b}) for a, b in (("g", "q"), ("g", "ring"), ("q", "ring"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="in 1,024 tokens")
    parser.add_argument("--devices", type=int, nargs="*", default=tuple(CLUSTERS), choices=tuple(CLUSTERS))
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model = Attention().to(torch.bfloat16)
    print("| tokens | H100 | fastest | ms by way |\n|---|---|---|---|")
    for thousands in asked.lengths:
        x = torch.empty(1, thousands * 1024, HIDDEN, dtype=torch.bfloat16, device="meta")
        captured = autopar.capture(model, (x,))
        for n in asked.devices:
            cluster, seconds = CLUSTERS[n], dict[str, float]()
            for name, (mesh, cut) in ways(n).items():
                rows = dict.fromkeys(cut, "s")
                pins = {":scaled_dot_product_attention": cut} | {f"{f}:linear": rows for f in "qkvo"}
                try:
                    plan = autopar.plan(model, cluster, (x,), mesh=mesh, constraints=pins, captured=captured)
                except AutoparError as error:
                    print(f"<!-- {thousands}k, {n}, {name}: {str(error).splitlines()[0]} -->")
                    continue
                seconds[name] = plan.price.compute_seconds + plan.price.activation_seconds
            best = min(seconds, key=lambda name: seconds[name])
            each = ", ".join(f"{name} {spent * 1e3:.3g}" for name, spent in seconds.items())
            print(f"| {thousands}k | {n} | {best} | {each} |", flush=True)


if __name__ == "__main__":
    main()
