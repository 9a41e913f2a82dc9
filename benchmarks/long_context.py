"""Where the ways to cut attention along a sequence cross: one attention of Llama-3-8B, 4k to 1M tokens, on H100.

Prices of one causal attention with its projections, forward and backward, in bfloat16, one row, cut along the sequence
before and after, on the roofline's numbers:

    python benchmarks/long_context.py                                   # the table of docs/measurements/long-context.md
    python benchmarks/long_context.py --plot docs/measurements/long_context.svg    # drawn (needs matplotlib)

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
COLORS = dict(zip(("g", "q", "ring", "g q", "g ring", "q ring"), ("C0", "C1", "C2", "C3", "C4", "C5"), strict=True))


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


def draw(seconds: dict[int, dict[str, dict[int, float]]], file: str) -> None:
    """Write the ways' seconds as curves over the length, one panel for each number of devices.

    Args:
        seconds: by number of devices, way, and length in 1,024 tokens.
    """
    from matplotlib import pyplot  # only for this picture; no requirement of the project

    figure, panels = pyplot.subplots(1, len(seconds), figsize=(4 * len(seconds) + 1.2, 3.6), sharey=True, squeeze=False)
    shown = {}
    for panel, (n, of_ways) in zip(panels[0], seconds.items(), strict=True):
        for name, of_lengths in of_ways.items():
            lengths = [1024 * thousands for thousands in of_lengths]
            (shown[name],) = panel.loglog(lengths, [1e3 * s for s in of_lengths.values()], "o-", color=COLORS[name])
        panel.set(title=f"{n} H100", xlabel="tokens")
        ticks = sorted({thousands for of_lengths in of_ways.values() for thousands in of_lengths})
        panel.set_xticks([1024 * t for t in ticks], [f"{t}k" if t < 1024 else f"{t // 1024}M" for t in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("ms, forward and backward")
    names = [name for name in COLORS if name in shown]
    figure.legend([shown[name] for name in names], names, loc="center right")
    figure.tight_layout(rect=(0, 0, 1 - 1.1 / figure.get_figwidth(), 1))
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="in 1,024 tokens")
    parser.add_argument("--devices", type=int, nargs="*", default=tuple(CLUSTERS), choices=tuple(CLUSTERS))
    parser.add_argument("--plot", metavar="FILE", help="draw the table too; needs matplotlib")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model = Attention().to(torch.bfloat16)
    drawn: dict[int, dict[str, dict[int, float]]] = {n: {name: {} for name in ways(n)} for n in asked.devices}
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
            for name, spent in seconds.items():
                drawn[n][name][thousands] = spent
            best = min(seconds, key=lambda name: seconds[name])
            each = ", ".join(f"{name} {spent * 1e3:.3g}" for name, spent in seconds.items())
            print(f"| {thousands}k | {n} | {best} | {each} |", flush=True)
    if asked.plot:
        draw(drawn, asked.plot)


if __name__ == "__main__":
    main()
