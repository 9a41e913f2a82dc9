"""Parallel streams over shared parameters against more parameters or more samples. ``parallel_streams.py [plot.svg]``

ParScale (arXiv 2505.10475) runs P streams of one model, each with learned tokens in front of its input, and weighs
their outputs by a small network; its fit says that this is worth ``k ln P + 1`` times the parameters. Here a module
with P streams, models of as many parameters, and the model itself on more samples are priced by autopar: a training
step on 1 to 64 devices with its memory, the forward, and a decoding step. Assumptions are the constants below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from plotting import Line, Panel, run, write
from torch import nn
from torch.nn import functional as F

import autopar
from cost_models import op_seconds
from hardware_profiles import load_device

# --- assumptions -----------------------------------------------------------------------------------------------------

WORTH = 0.39
"""ParScale's k, fitted on code; on the Pile it was 0.33."""
CHINCHILLA = 406.4, 0.34, 410.7, 0.28
"""Loss over parameters and tokens, A / N^a + B / D^b (arXiv 2203.15556): what more training samples are worth."""
TRAINED_TOKENS = 1e12
SECOND_STAGE = 0.02
"""Tokens of ParScale's second stage, in which alone streams are trained, over those of the first."""
LEARNED = 48
"""Learned tokens of each stream. ParScale learns keys and values of so many in each layer: about as much work."""
ROWS, LENGTH = 512, 2048
"""The batch of a step."""
DEVICES = {1: "dgx-h100@0", 4: "dgx-h100@0-3", 16: "dgx-h100-x2", 64: "dgx-h100-x8"}
MENU = ("mbs=8", "mbs=4", "mbs=2", "mbs=1", "mbs=1,recompute=full")
"""Microbatches on each data rank, the fastest first; the first that fits is taken."""
HEAD = 128


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; those of ParScale's model of 1.8B parameters."""

    dim: int = 2048
    kv_heads: int = 2
    inner: int = 11008
    layers: int = 24
    words: int = 151936
    streams: int = 1

    @property
    def products(self) -> list[tuple[int, int]]:
        """The matrices (n, k) of a layer."""
        kv = self.kv_heads * HEAD
        return [(self.dim + 2 * kv, self.dim), (self.dim, self.dim), (2 * self.inner, self.dim), (self.dim, self.inner)]

    @property
    def parameters(self) -> int:
        """Parameters of all layers, which ParScale's law counts."""
        return self.layers * sum(n * k for n, k in self.products)

    @property
    def stored(self) -> int:
        """All parameters: embedding, head, and what streams add, too."""
        added = self.streams * (LEARNED + self.dim) * self.dim if self.streams > 1 else 0
        return self.parameters + 2 * self.words * self.dim + added

    @property
    def cache_bytes(self) -> int:
        """Cache of a token of one stream."""
        return self.layers * 2 * self.kv_heads * HEAD * 2

    def wider(self, factor: float) -> Shape:
        """Return a shape with so many times the parameters, and as many layers."""
        dim = HEAD * round(self.dim / HEAD * math.sqrt(factor))
        rest = factor * self.parameters / self.layers - 2 * dim * dim - 2 * dim * self.kv_heads * HEAD
        return replace(self, dim=dim, inner=64 * round(rest / (3 * dim) / 64))


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        sizes = (shape.dim, shape.kv_heads * HEAD, shape.kv_heads * HEAD)
        self.q, self.k, self.v = (nn.Linear(shape.dim, n, bias=False) for n in sizes)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.gate, self.up = (nn.Linear(shape.dim, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Streams(nn.Module):
    """A decoder that runs P streams over the same parameters, and its loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.streams = shape.streams
        self.words = nn.Embedding(shape.words, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.dim), nn.Linear(shape.dim, shape.words, bias=False)
        if self.streams > 1:
            self.learned = nn.Parameter(torch.randn(self.streams, LEARNED, shape.dim))
            self.mix = nn.Linear(self.streams * shape.dim, shape.dim, bias=False)
            self.weigh = nn.Linear(shape.dim, self.streams)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # [b s], [b s] -> []
        h = self.words(x)
        if self.streams > 1:
            copies = h[:, None].expand(-1, self.streams, -1, -1)
            h = torch.cat([self.learned[None].expand(len(x), -1, -1, -1), copies], 2).flatten(0, 1)
        for block in self.blocks:
            h = block(h)
        if self.streams > 1:
            h = h.unflatten(0, (-1, self.streams))[:, :, LEARNED:]
            weights = self.weigh(F.silu(self.mix(h.transpose(1, 2).flatten(2)))).softmax(-1)
            h = torch.einsum("bpsd,bsp->bsd", h, weights)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class Step:
    """A training step by autopar's price: seconds, of these in forwards, bytes of a device, the layout."""

    seconds: float
    forward_seconds: float
    memory_bytes: float
    layout: str

    @property
    def words(self) -> str:
        """The step in words."""
        return (f"{self.seconds:7.2f} s, forward {self.forward_seconds:6.2f} s, {self.memory_bytes / 1e9:5.1f} GB, "
                f"{self.layout}")  # fmt: skip


def trained(shape: Shape, devices: dict[int, str], rows: int = ROWS, length: int = LENGTH) -> dict[int, Step | None]:
    """Price a training step by the number of devices: the first layout of MENU that fits; None where none does."""
    with torch.device("meta"):
        model, ids = Streams(shape), torch.zeros(rows, length, dtype=torch.long)
    layouts = autopar.layouts(model, (ids, ids), precision="bf16-mixed")
    found: dict[int, Step | None] = {}
    for n, cluster in devices.items():
        found[n] = None
        for words in MENU:
            if rows % (n * int(words[4])):
                continue
            row = layouts.price(cluster, f"dp={n},zero=1,{words}" if n > 1 else f"dp=1,{words}")
            if row.fits:
                times, turns = row.timeline.times, rows // (n * int(words[4]))
                found[n] = Step(row.seconds, turns * times.forward_seconds[0], row.memory_bytes, words)
                break
    return found


def decoding(shape: Shape, requests: int, context: int, samples: int = 1) -> tuple[float, float]:
    """Return seconds and bytes of a decoding step on an H100 in bfloat16; ``samples`` of a request share its prompt."""
    device, rows = load_device("H100-SXM-80GB"), requests * shape.streams * samples
    seconds, kernels = 0.0, shape.layers * 10 * (device.kernel_seconds or 0.0)
    for n, k in (*shape.products * shape.layers, (shape.words, shape.dim)):
        m = requests * samples if n == shape.words else rows  # the head is behind the aggregation
        moved = 2.0 * (n * k + m * (n + k))
        seconds += max(op_seconds(device, "matmul", 2.0 * m * n * k, moved, "bfloat16"),
                       op_seconds(device, "pointwise", 0.0, moved, "bfloat16"))  # fmt: skip
    held = context + (LEARNED if shape.streams > 1 else 0)
    cache = float(requests * shape.streams * held * shape.cache_bytes)
    seconds += op_seconds(device, "pointwise", 0.0, cache * samples, "bfloat16")
    return seconds + kernels, 2.0 * shape.stored + cache


def more_tokens(parameters: float, factor: float) -> float | None:
    """Return how many times the tokens lower the loss as so many times the parameters do; None if none do."""
    a, alpha, b, beta = CHINCHILLA
    left = b / TRAINED_TOKENS**beta - a / parameters**alpha * (1 - factor**-alpha)
    return (b / TRAINED_TOKENS**beta / left) ** (1 / beta) if left > 0 else None


def decoding_break_even(streams: Shape, wide: Shape, context: int, largest: int = 512) -> int:
    """Return the most requests at which a step of streams is no slower than one of more parameters; 0: none."""
    fast = [b for b in range(1, largest + 1) if decoding(streams, b, context)[0] <= decoding(wide, b, context)[0]]
    return max(fast, default=0)


def main(plot: Path | None = None) -> None:
    """Print the tables of the page, and draw its plot."""
    base = Shape()
    ways = {"the model": base}
    for p in (2, 4, 8):
        ways[f"{p} streams"] = replace(base, streams=p)
        ways[f"{WORTH * math.log(p) + 1:.2f}x parameters"] = base.wider(WORTH * math.log(p) + 1)
    steps = {name: trained(shape, DEVICES) for name, shape in ways.items()}
    for name, shape in ways.items():
        print(f"{name:18} {shape.parameters / 1e9:.2f}B of {shape.stored / 1e9:.2f}B")
        for n, step in steps[name].items():
            print(f"    on {n:3}: " + (step.words if step else "does not fit"))
    for p in (2, 4, 8):
        factor = WORTH * math.log(p) + 1
        names = f"{p} streams", f"{factor:.2f}x parameters"
        streams, wide = (ways[name] for name in names)
        costs = [steps[name][64].seconds / steps["the model"][64].seconds for name in names]
        tokens = more_tokens(base.parameters, factor)
        print(f"P={p}: training costs {costs[0]:.2f} by streams, {1 + SECOND_STAGE * costs[0]:.2f} in two stages, "
              f"{costs[1]:.2f} by parameters, {tokens or math.inf:.2f} by tokens, times the model's")  # fmt: skip
        for context in (512, 4096, 32768):
            rows = [decoding(shape, 1, context) for shape in (base, streams, wide)]
            more = [[row[k] - rows[0][k] for row in rows[1:]] for k in (0, 1)]
            print(f"  {context:6} tokens: streams decode no slower up to {decoding_break_even(streams, wide, context)} "
                  f"requests; one request: {rows[0][0] * 1e3:.2f} ms, streams {rows[1][0] * 1e3:.2f}, parameters "
                  f"{rows[2][0] * 1e3:.2f}, {p} samples {decoding(base, 1, context, p)[0] * 1e3:.2f}; streams add "
                  f"1/{more[0][1] / more[0][0]:.1f} of the time, 1/{more[1][1] / more[1][0]:.1f} of the memory")
    if plot is not None:
        draw(plot, ways, steps)


def draw(plot: Path, ways: dict[str, Shape], steps: dict[str, dict[int, Step | None]]) -> None:
    """Draw training and memory by devices, and decoding by requests, of the model and of what is worth 8 streams."""
    names = [name for name in ways if name == "the model" or name in list(ways)[-4:]]
    requests = [2**k for k in range(9)]
    tokens = ROWS * LENGTH
    write(plot, [
        Panel("training", "devices", "tokens/s of a device", [
            Line(name, [(n, s and tokens / s.seconds / n) for n, s in steps[name].items()]) for name in names
        ], log_x=True),
        Panel("training", "devices", "GB of a device", [
            Line(name, [(n, s and s.memory_bytes / 1e9) for n, s in steps[name].items()]) for name in names
        ], log_x=True),
        Panel("decoding, 4k tokens, one H100", "requests", "ms of a step", [
            Line(name, [(b, 1e3 * decoding(ways[name], b, 4096)[0]) for b in requests]) for name in names
        ], True, True),
    ])  # fmt: skip


if __name__ == "__main__":
    run(main)
