"""Seconds of attention of a step: decodes read the cache, prefills compute."""

from __future__ import annotations

from hardware_profiles import Device
from hardware_profiles.small_rates import SmallRates

from .work import FORMAT_BYTES, Attention, Prefill, StepBatch

CACHES = ("bf16", "fp16", "fp8", "nvfp4")
"""Formats of a cache."""
DECODE_PEAK = 0.4
"""Part of the 16-bit peak that decode attention reaches where many heads share one key (latent attention)."""


def decode_attention_seconds(device: Device, small: SmallRates, attention: Attention, batch: StepBatch) -> float:
    """Return the seconds of all decodes of a step in one attention, without start and end of its kernels.

    Bytes of the cache over what reading it reaches, at least ``attention_seconds``: long contexts are cut into parts
    that many cores read at once (split-k), and a second kernel joins them.

    Raises:
        ValueError: the format of the cache is unknown.
    """
    if not batch.decodes:
        return 0.0
    seen = batch.context if attention.window is None else min(batch.context, attention.window)
    size = attention.key_size + attention.value_size
    if attention.cache not in CACHES:
        raise ValueError(f"unknown format '{attention.cache}' of a cache, known: {', '.join(CACHES)}")
    n_bytes = batch.decodes * seen * attention.kv_heads * size * FORMAT_BYTES[attention.cache]
    flops = 2.0 * batch.decodes * seen * attention.heads * attention.decode_width
    memory = n_bytes / (device.memory_bytes_per_second * small.cache_fraction)
    compute = flops / (device.peak_flops.get("bfloat16", device.peak_flops["float32"]) * DECODE_PEAK)
    return small.attention_seconds + max(memory, compute)


def prefill_attention_seconds(device: Device, attention: Attention, prefill: Prefill) -> float:
    """Return the seconds of one request's new tokens in one attention, by the device's curve of attention."""
    seen = _seen(attention.window, prefill)
    if seen <= 0:
        return 0.0
    size = attention.prefill_width / 2
    curve = device.efficiency["attention"]
    peak = device.peak_flops.get("bfloat16", device.peak_flops["float32"])
    work = ((prefill.new + curve.half_m) * (seen + curve.half_n) + curve.half_mn) * (size + curve.half_k)
    return 4.0 * attention.heads * work / (peak * curve.fraction)


def _seen(window: int | None, prefill: Prefill) -> float:
    """Return the mean number of tokens that a new one sees."""
    if not prefill.new:
        return 0.0
    if window is None:
        return prefill.past + (prefill.new + 1) / 2
    growing = max(0, min(prefill.new, window - prefill.past))  # tokens that see all earlier ones
    total = growing * (prefill.past + (growing + 1) / 2) + (prefill.new - growing) * window
    return total / prefill.new
