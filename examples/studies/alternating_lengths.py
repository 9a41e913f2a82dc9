"""Lengths that alternate: one layout, a layout for each length, or parameters that move. ``alternating_lengths.py``

Steps of a trace have short or long sequences and equally many tokens; ByteScale (arXiv 2502.21231) is about such mixed
lengths. Every layout of tensor, context and data parallelism is priced by autopar for both lengths on 8 to 1,024
devices, and so is each move of parameters and optimizer state from one layout to another. Three ways to train:

    fixed       all steps on one mesh, cut alike
    buckets     each length on its own mesh, over one stored layout: nothing moves
    re-planned  each length in its own layout: parameters and optimizer state move at each change of length

``alternating_lengths.py [plot.svg]``. Assumptions are the constants below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import torch
from plotting import Line, Panel, run, write
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.planner.layouts.pricing import PricedLayout, PricedLayouts
from autopar.plans.clusters import get_cluster
from autopar.plans.moving import stored_parameters
from autopar.plans.moving_cost import ParameterMove, move
from hardware_profiles import Cluster

# --- assumptions -----------------------------------------------------------------------------------------------------

SHORT, LONG = 512, 16384
TOKENS = 1 << 20
"""Tokens of a step, of either length."""
SHARE = 0.5
"""The part of steps that have long sequences."""
ROUNDS = (16384, 8192, 4096, 2048)
"""Tokens that a group of tensor and context parallel ranks takes at once: a long sequence; up to 32 short ones."""
CLUSTERS = {8: "dgx-h100", 64: "dgx-h100-x8", 256: "dgx-h100-x32", 1024: "dgx-h100-x128"}
TENSOR, CONTEXT = (1, 2, 4, 8), (1, 2, 4, 8, 16)
"""Sizes that are tried: those whose product is a machine or less, or what as many rows as there are need."""
KEEPING = ("zero=1", "zero=1,recompute=full", "zero=3,recompute=full")
"""Ways to have the memory, the fastest first; of the first that fits, the most tokens at once. All store alike."""
MOMENTS = 2
"""Tensors of the optimizer (AdamW) that move with each parameter."""
LLAMA = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": LONG}  # fmt: skip
"""Llama-3-8B."""

Mesh = tuple[int, int]
"""Ranks of tensor and of context parallelism; the rest is data parallelism."""


@dataclass
class Lengths:
    """Prices of one model at two lengths.

    Attributes:
        layouts: autopar's prices by length.
        rows: sequences of a step by length.
    """

    layouts: Mapping[int, PricedLayouts]
    rows: Mapping[int, int]

    @classmethod
    def of(cls, sizes: Mapping[str, int], lengths: Sequence[int], tokens: int) -> Lengths:
        """Capture a Llama of some sizes for each length."""
        config = LlamaConfig(**sizes, use_cache=False, attn_implementation="sdpa")
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
            batches = {n: torch.zeros(tokens // n, n, dtype=torch.long) for n in lengths}
        return cls(
            {n: autopar.layouts(model, {"input_ids": x, "labels": x}, precision="bf16-mixed")
             for n, x in batches.items()}, {n: len(x) for n, x in batches.items()},
        )  # fmt: skip

    def price(self, cluster: Cluster, length: int, mesh: Mesh) -> PricedLayout | None:
        """Price steps of a length on a mesh; None where they cannot be cut so, or do not fit."""
        tensor, context = mesh
        data = cluster.n_devices // (tensor * context)
        if data == 0 or self.rows[length] % data:
            return None
        most = self.rows[length] // data
        sizes = dict.fromkeys(min(most, n // length) for n in ROUNDS if n >= length)
        words = f"dp={data},cp={context},tp={tensor}{',sp' if tensor > 1 else ''}"
        for keeping in KEEPING:
            for rows in sizes:
                row = self.layouts[length].price(cluster, f"{words},mbs={rows},{keeping}")
                if row.fits:
                    return row
        return None


@dataclass(frozen=True)
class Way:
    """One way to train on the trace: the meshes of both lengths, seconds of a step in the mean, of these for moves."""

    meshes: Mapping[int, Mesh]
    seconds: float
    moving_seconds: float = 0.0


@dataclass
class Study:
    """The ways on one cluster.

    Attributes:
        priced: layouts by length and mesh.
        moves: moves that were priced, by the sizes of tensor parallelism: these alone decide how parameters are stored.
            A move back takes as long.
    """

    cluster: Cluster
    priced: Mapping[int, Mapping[Mesh, PricedLayout]]
    moves: dict[tuple[int, int], ParameterMove] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: Lengths, cluster: Cluster, meshes: Iterable[Mesh]) -> Study:
        """Price all meshes for both lengths."""
        found = {n: {mesh: lengths.price(cluster, n, mesh) for mesh in meshes} for n in lengths.rows}
        return cls(cluster, {n: {mesh: row for mesh, row in of.items() if row} for n, of in found.items()})

    def mean(self, short: Mesh, long: Mesh, share: float) -> float:
        """Return the seconds of a step in the mean, without moves."""
        few, many = sorted(self.priced)
        return (1 - share) * self.priced[few][short].seconds + share * self.priced[many][long].seconds

    def move(self, short: Mesh, long: Mesh) -> ParameterMove:
        """Return the price of moving parameters and moments from the layout of short steps to that of long ones."""
        key = short[0], long[0]
        if key not in self.moves:
            sides = [
                stored_parameters(row.plan, row.captured.graph, range(self.cluster.n_devices), n_moments=MOMENTS)
                for row in (self.priced[n][mesh] for n, mesh in zip(sorted(self.priced), (short, long)))
            ]
            self.moves[key] = move(*sides, self.cluster)
        return self.moves[key]

    def fixed(self, share: float) -> Way | None:
        """Return the best single mesh."""
        few, many = sorted(self.priced)
        both = [mesh for mesh in self.priced[few] if mesh in self.priced[many]]
        return self._best(((mesh, mesh) for mesh in both), share)

    def buckets(self, share: float) -> Way | None:
        """Return the best pair of meshes that store parameters alike: of one size of tensor parallelism."""
        few, many = sorted(self.priced)
        return self._best(((a, b) for a in self.priced[few] for b in self.priced[many] if a[0] == b[0]), share)

    def replanned(self, share: float, turn: int = 1) -> Way | None:
        """Return the best pair of meshes with its moves, two for each `turn` long steps and the short ones beside them.

        Pairs come in the order of their seconds without moves; those behind the best one so far need no price of moves.
        """
        few, many = sorted(self.priced)
        pairs = sorted((self.mean(a, b, share), a, b) for a in self.priced[few] for b in self.priced[many])
        best = None
        for seconds, a, b in pairs:
            if best is not None and seconds >= best.seconds:
                break
            moving = 0.0 if a[0] == b[0] else 2 * self.move(a, b).seconds * share / turn
            if best is None or seconds + moving < best.seconds:
                best = Way({few: a, many: b}, seconds + moving, moving)
        return best

    def _best(self, pairs: Iterable[tuple[Mesh, Mesh]], share: float) -> Way | None:
        few, many = sorted(self.priced)
        ways = [Way({few: a, many: b}, self.mean(a, b, share)) for a, b in pairs]
        return min(ways, key=lambda way: way.seconds, default=None)

    def ways(self, share: float) -> dict[str, Way | None]:
        """Return all ways by name."""
        return {"fixed": self.fixed(share), "buckets": self.buckets(share), "re-planned": self.replanned(share)}


def meshes(devices: int) -> list[Mesh]:
    """Return the meshes that are tried on so many devices."""
    most = max(8, devices // (TOKENS // LONG))
    return [(t, c) for t in TENSOR for c in CONTEXT if t * c <= most]


def shown(study: Study, way: Way, length: int) -> str:
    """Return a mesh in words: ``dp8 cp4 tp2 mbs=1,zero=1``."""
    tensor, context = way.meshes[length]
    keeping = study.priced[length][tensor, context].layout.text.partition("mbs")
    return f"dp{study.cluster.n_devices // (tensor * context)} cp{context} tp{tensor} {keeping[1]}{keeping[2]}"


def main(plot: Path | None = None) -> dict[int, dict[str, Way | None]]:
    """Print the tables of the page, and draw its plot; return the ways by number of devices."""
    lengths = Lengths.of(LLAMA, (SHORT, LONG), TOKENS)
    studies, found = {}, {}
    for n, name in CLUSTERS.items():
        study = studies[n] = Study.of(lengths, get_cluster(name), meshes(n))
        found[n] = study.ways(SHARE)
        print(f"{n} devices")
        for name, way in found[n].items():
            assert way is not None, f"no layout fits on {n} devices"
            print(f"  {name:10} {TOKENS / way.seconds:12,.0f} tokens/s; short {shown(study, way, SHORT)}, long "
                  f"{shown(study, way, LONG)}; {1e3 * way.moving_seconds:.1f} ms of {1e3 * way.seconds:.1f} moving")
        study.move(*found[n]["buckets"].meshes.values())
        for (a, b), one in study.moves.items():
            print(f"  a move tp{a} to tp{b}: {1e3 * one.seconds:.1f} ms, {one.n_bytes / 1e9:.1f} GB, at most "
                  f"{one.peak_bytes / 1e9:.1f} GB of a device; one by one {1e3 * one.one_by_one_seconds:.0f} ms")
    print("Gain over the fixed layout, by the part of steps that is long")
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        print(f"  {share:4.0%}" + "".join(f"   {n}: {gains(study, share)}" for n, study in studies.items()))
    if plot is not None:
        draw(plot, studies, found)
    return found


def gains(study: Study, share: float) -> str:
    """Return how much faster buckets and re-planned layouts are than a fixed one."""
    seconds = [way.seconds if way else inf for way in study.ways(share).values()]
    return f"{seconds[0] / seconds[1]:.2f} {seconds[0] / seconds[2]:.2f}"


def draw(plot: Path, studies: Mapping[int, Study], found: Mapping[int, Mapping[str, Any]]) -> None:
    """Draw tokens per second of a device, and gains by the share of long steps."""
    each = [
        Line(name, [(n, TOKENS / ways[name].seconds / n) for n, ways in found.items()])
        for name in ("fixed", "buckets", "re-planned")
    ]
    shares = [k / 20 for k in range(1, 20)]
    by_share = [
        Line(f"re-planned, {n} devices", [(s, study.fixed(s).seconds / study.replanned(s).seconds) for s in shares])
        for n, study in studies.items() if n in (8, 128, 1024)
    ]  # fmt: skip
    write(plot, [
        Panel("half of the steps long", "devices", "tokens/s of a device", each, log_x=True),
        Panel("gain by the part of long steps", "part of steps with 16k tokens", "times the fixed layout", by_share),
    ])  # fmt: skip


if __name__ == "__main__":
    run(main)
