"""Sparse attention whose cache is in host memory: how coarse may transfers be? ``sparse_attention.py [plot.svg]``

A decoding step attends to a few blocks of the cache of each head, as SparseServe does (arXiv 2509.24626). Blocks that
the device does not hold come over the host link. Coarse blocks bring tokens that nobody needs; fine ones cost a call
each and more bytes of the index that selects them. Gained is the time of reading the whole cache, and its memory.
Devices, links and the seconds of reading memory are autopar's; what is assumed are the constants below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from plotting import Line, Panel, run, write

from cost_models import op_seconds
from hardware_profiles import Device, load_device
from hardware_profiles.load import builtin_links

# --- assumptions -----------------------------------------------------------------------------------------------------

COPY_SECONDS = 16384 / 4e9 - 16384 / 26e9
"""Of each copy by itself: blocks of 16 KB come with less than 4 GB/s over PCIe 4.0 (SparseServe, section 1)."""
KERNEL_FRACTION = 20 / 32
"""Of a link's data sheet, what one kernel that reads all blocks reaches: 20 of 32 GB/s at 4 to 32 tokens (figure 4)."""
COPY_FRACTION = 26 / 32
"""The same of one large copy."""
BUDGET, BUDGET_BLOCK = 2048, 32
"""Tokens in blocks of 32 that attention has to see of each head for 99% of the accuracy (section 4.2)."""
CLUSTER = 16
"""Neighbouring tokens that matter together; a block brings its other tokens for nothing."""
WORKING_SET = 2.0
"""Tokens that twelve steps select, in budgets: what a request needs on the device for its best hit rate (not given)."""
BEST_HITS = 0.98
"""The share of selected blocks that were used in the twelve steps before (figure 8 has no number in its text)."""
KERNELS, SELECTING = 10, 3
"""Kernels of a layer in a captured graph, and of the selection of blocks."""
RESERVED = 0.1
"""The part of a device's memory that neither weights nor caches may have."""
C2C = 450e9
"""Bytes per second of NVLink-C2C in one direction, by its data sheet: not among autopar's links."""

CONTEXTS = (16384, 32768, 131072, 524288)


@dataclass(frozen=True)
class Model:
    """What a step reads; sizes in elements of 2 bytes."""

    name: str
    layers: int
    kv_heads: int
    head_size: int
    weight_bytes: float

    @property
    def token_bytes(self) -> float:
        """Cache of a token."""
        return self.layers * self.head_bytes * self.kv_heads

    @property
    def head_bytes(self) -> float:
        """Cache of a token in one head of one layer: a key and a value."""
        return 2 * self.head_size * 2


LLAMA, LWM = Model("Llama3-8B", 32, 8, 128, 16.06e9), Model("LWM-7B", 32, 32, 128, 13.48e9)


@dataclass(frozen=True)
class Setting:
    """One way to decode. ``link``: bytes per second; ``fused``: one kernel reads all blocks of a layer."""

    model: Model
    device: Device
    link: float
    block: int
    fused: bool = True
    cluster: float = CLUSTER


def read_seconds(device: Device, n_bytes: float) -> float:
    """Return the seconds of reading device memory."""
    return op_seconds(device, "pointwise", 0.0, n_bytes, "bfloat16") if n_bytes else 0.0


def selected(block: int, cluster: float) -> float:
    """Return the tokens of a head to select: c neighbours touch (c + b - 1) / b blocks of b tokens in the mean."""
    return BUDGET * (cluster + block - 1) / (cluster + BUDGET_BLOCK - 1)


def weights_seconds(at: Setting, sparse: bool) -> float:
    """Return the seconds of a step that no request adds to: weights are read once, kernels are started."""
    kernels = at.model.layers * (KERNELS + SELECTING * sparse) * (at.device.kernel_seconds or 0.0)
    return read_seconds(at.device, at.model.weight_bytes) + kernels


def full_seconds(at: Setting, context: float) -> float:
    """Return what a request adds to a step with full attention, its cache on the device, in seconds."""
    return read_seconds(at.device, context * at.model.token_bytes)


def transfer_seconds(at: Setting, misses: float) -> float:
    """Return the seconds of bringing so many tokens of each head in blocks; exposed: a layer's query selects them."""
    n_bytes = misses * at.model.token_bytes
    if at.fused:
        return n_bytes / (KERNEL_FRACTION * at.link)
    copies = misses / at.block * at.model.kv_heads * at.model.layers
    return n_bytes / (COPY_FRACTION * at.link) + copies * COPY_SECONDS


def sparse_seconds(at: Setting, context: float, hits: float) -> float:
    """Return what a request adds to a step with sparse attention: index, selected blocks, and those that miss."""
    tokens = min(selected(at.block, at.cluster), context)
    index = context / at.block * at.model.token_bytes  # two vectors for each block and head, as of one token
    return read_seconds(at.device, index + tokens * at.model.token_bytes) + transfer_seconds(at, (1 - hits) * tokens)


def break_even_hits(at: Setting, context: float) -> float | None:
    """Return the hit rate from which sparse attention is no slower than full attention; None if no rate will do."""
    room = full_seconds(at, context) - sparse_seconds(at, context, 1.0)
    if room < 0:
        return None  # not even if all blocks are there
    return max(0.0, 1 - room / (sparse_seconds(at, context, 0.0) - sparse_seconds(at, context, 1.0)))


def break_even_blocks(at: Setting, context: float, hits: float) -> tuple[int, int] | None:
    """Return the finest and the coarsest block (powers of two) that are no slower than full attention."""
    blocks = [2**k for k in range(15) if 2**k <= context]
    fine = [b for b in blocks if sparse_seconds(replace(at, block=b), context, hits) <= full_seconds(at, context)]
    return (fine[0], fine[-1]) if fine else None


def memory_left(at: Setting) -> float:
    """Return the bytes of the device for caches."""
    return (1 - RESERVED) * at.device.memory_bytes - at.model.weight_bytes


def hits_at(at: Setting, context: float, batch: int) -> float:
    """Return the hit rate of a batch: the best while all working sets fit, then in proportion to what fits of one."""
    index = context / at.block * at.model.token_bytes
    tokens = memory_left(at) / batch - index
    wanted = min(WORKING_SET * selected(at.block, at.cluster), context)
    return BEST_HITS * max(0.0, min(1.0, tokens / at.model.token_bytes / wanted))


def throughput(at: Setting, context: float, batch: int, way: str) -> float | None:
    """Return tokens per second of a batch; None if caches do not fit. ``way``: full, sparse (on the device), host."""
    if way != "host" and batch * context * at.model.token_bytes > memory_left(at):
        return None
    if way == "full":
        each = full_seconds(at, context)
    else:
        each = sparse_seconds(at, context, 1.0 if way == "sparse" else hits_at(at, context, batch))
    return batch / (weights_seconds(at, way != "full") + batch * each)


def best(at: Setting, context: float, way: str, largest: int = 256) -> tuple[float, int]:
    """Return the most tokens per second, and the batch; (0, 0) where not even one request fits."""
    found = [(throughput(at, context, batch, way) or 0.0, batch) for batch in range(1, largest + 1)]
    return max(found, key=lambda pair: pair[0]) if found[0][0] else (0.0, 0)


def main(plot: Path | None = None) -> dict[str, float]:
    """Print the tables of the page, and draw its plot; return the numbers that are compared with SparseServe's."""
    links = {name: link.bandwidth_bytes_per_second for name, link in builtin_links().items()}
    h100, gh200, a100 = (load_device(name) for name in ("H100-SXM-80GB", "GH200-96GB", "A100-SXM-40GB"))
    ways = {
        "PCIe 4, copies": Setting(LLAMA, h100, links["pcie4"], 32, fused=False),
        "PCIe 4, one kernel": Setting(LLAMA, h100, links["pcie4"], 32),
        "PCIe 5, copies": Setting(LLAMA, h100, links["pcie5"], 32, fused=False),
        "PCIe 5, one kernel": Setting(LLAMA, h100, links["pcie5"], 32),
        "C2C, one kernel": Setting(LLAMA, gh200, C2C, 32),
    }
    print("Blocks (tokens) that are no slower than full attention, Llama3-8B; any batch")
    for hits in (0.8, 0.9, 0.95, 0.99):
        for name, at in ways.items():
            spans = [break_even_blocks(at, context, hits) for context in CONTEXTS]
            row = "".join(f"{f'{span[0]}-{span[1]}' if span else 'none':>11}" for span in spans)
            print(f"  hits {hits:4.0%} {name:20}{row}")
    print("Hit rate of break-even at 32 tokens a block, contexts of 16k, 32k, 128k, 512k")
    for name, at in ways.items():
        rates = [break_even_hits(at, context) for context in CONTEXTS]
        print(f"  {name:20}" + "".join("   never" if rate is None else f"{rate:8.1%}" for rate in rates))
    for cluster in (1, 4, 16, 64):
        span = break_even_blocks(replace(ways["PCIe 5, one kernel"], cluster=cluster), 32768, 0.95)
        print(f"Blocks at 32k tokens, 95% hits, PCIe 5, one kernel, {cluster} tokens that matter together: {span}")
    print("Best tokens/s (batch) of an H100 with PCIe 5, Llama3-8B")
    for context in (16384, 32768, 131072):
        at = ways["PCIe 5, one kernel"]
        found = [best(at, context, way) for way in ("full", "sparse", "host")]
        print(f"  {context:7}" + "".join(f"{rate:9,.0f} ({batch})" for rate, batch in found))
    if plot is not None:
        draw(plot, ways, a100, links["pcie4"])
    return compared(a100, links["pcie4"])


def compared(a100: Device, link: float) -> dict[str, float]:
    """Print what SparseServe measured (A100 of 40 GB, PCIe 4.0) beside this account of it."""
    print("Beside SparseServe's measurements: A100 of 40 GB, PCIe 4.0, blocks of 32 tokens")
    numbers = {}
    for model, context, published in ((LWM, 16384, (2.93, 2.23, 2.96)), (LLAMA, 32768, (3.14, 2.03, 4.24))):
        host = Setting(model, a100, link, 32)
        rates = [best(host, context, way) for way in ("full", "sparse", "host")]
        rates.append(best(replace(host, fused=False), context, "host"))
        for name, other, value in zip(("full", "sparse", "copies"), (rates[0], rates[1], rates[3]), published):
            numbers[f"{model.name} over {name}"] = rates[2][0] / other[0]
            print(f"  {model.name} at {context}: {rates[2][0] / other[0]:.2f} times {name} (batches {rates[2][1]} and "
                  f"{other[1]}); measured: up to {value}")  # fmt: skip
    host = Setting(LWM, a100, link, 32)
    for name, at in (("copies", replace(host, fused=False)), ("one kernel", host)):
        rate = {batch: throughput(at, 16384, batch, "host") or 0.0 for batch in (2, 6, 12)}
        numbers[f"2 to 6, {name}"], numbers[f"6 to 12, {name}"] = rate[6] / rate[2], rate[12] / rate[6]
        print(f"  batch 2 to 6: {rate[6] / rate[2]:.2f}, 6 to 12: {rate[12] / rate[6]:.2f} by {name}; measured 2.07, "
              f"{1 / 1.73:.2f}")  # fmt: skip
    misses = {batch: batch * (1 - hits_at(host, 16384, batch)) for batch in (6, 12)}
    numbers["loads"] = misses[12] / misses[6]
    print(f"  blocks loaded, batch 6 to 12: {misses[12] / misses[6]:.1f} times; measured 21.36")
    slower = transfer_seconds(replace(host, fused=False), 1024) / transfer_seconds(host, 1024)
    print(f"  loading by copies takes {slower:.1f} times as long as by one kernel; measured: up to 9.97")
    return numbers


def draw(plot: Path, ways: dict[str, Setting], a100: Device, link: float) -> None:
    """Draw step times by block size, hit rates of break-even, and throughput by batch."""
    blocks = [2**k for k in range(1, 11)]
    times = [
        Line(name, [(b, sparse_seconds(replace(at, block=b), 32768, 0.95) / full_seconds(at, 32768)) for b in blocks])
        for name, at in ways.items()
    ]
    even = Line("full attention on the device", [(blocks[0], 1.0), (blocks[-1], 1.0)], dashed=True)
    contexts = [4096 * 2**k for k in range(8)]
    rates = [Line(name, [(c, break_even_hits(at, c)) for c in contexts]) for name, at in ways.items()]
    host = Setting(LWM, a100, link, 32)
    batches = range(1, 17)
    by_batch = [
        Line("PCIe 4, copies", [(b, throughput(replace(host, fused=False), 16384, b, "host")) for b in batches]),
        Line("PCIe 4, one kernel", [(b, throughput(host, 16384, b, "host")) for b in batches]),
        Line("full attention on the device", [(b, throughput(host, 16384, b, "full")) for b in batches], dashed=True),
        Line("sparse attention on the device", [(b, throughput(host, 16384, b, "sparse")) for b in batches]),
    ]
    write(plot, [
        Panel("32k tokens, 95% hits", "tokens of a block", "time of attention / full", [*times, even], True, True),
        Panel("break-even at 32 tokens a block", "tokens of context", "hit rate", rates, log_x=True),
        Panel("LWM-7B, 16k tokens, A100 40 GB", "requests", "tokens/s", by_batch),
    ])  # fmt: skip


if __name__ == "__main__":
    run(main)
