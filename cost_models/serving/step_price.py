"""The seconds of a step of an engine: its work on one device, one price for each kind of work.

    seconds = factor * (products + attention + experts + exchanges + rows + sampling + launches) + host

``launches`` are starts and ends of kernels in a graph; outside a graph the step takes at least what the host needs to
launch them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hardware_profiles import Cluster, Device
from hardware_profiles.engines import Engine
from hardware_profiles.small_rates import SmallRates, small_rates_of

from .decode_attention import decode_attention_seconds, prefill_attention_seconds
from .expert_hits import experts_hit, pairs_on_busiest
from .small_collectives import exchange_seconds
from .thin_products import product_rate, product_seconds
from .work import FORMAT_BYTES, TOKENS, Experts, Prefill, StepBatch, StepWork

ATTENTION_KERNELS = 2
"""Kernels of attention: the write to the cache, attention itself; the join of its parts is in its least seconds."""
SAMPLING_PASSES = 4
"""Times that sampling reads or writes the logits in 32 bits."""
SAMPLING_KERNELS = 6
ROW_BYTES = 2.0
"""Bytes of an element of rows between operators: 16-bit."""


@dataclass(frozen=True)
class StepPrice:
    """The price of a step.

    Attributes:
        seconds: all of it.
        parts: seconds by part: products, attention, experts, exchanges, rows, launches, host, sampling.
    """

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)


def step_seconds(work: StepWork, batch: StepBatch, cluster: Cluster, engine: Engine) -> StepPrice:
    """Return the seconds of a step in which all requests of a batch advance.

    A worker of several stages advances as many parts of the batch at once: each of ``stages`` parts passes all stages.

    Args:
        work: work of the busiest device of a stage.
        batch: what the step advances.
        cluster: where it runs; the first ranks are the worker's.
        engine: what runs it.
    """
    if work.stages > 1:
        price = step_seconds(replace(work, stages=1), _part(batch, work.stages), cluster, engine)
        parts = {name: work.stages * seconds for name, seconds in price.parts.items()}
        parts["host"] = price.parts["host"]
        return StepPrice(sum(parts.values()), parts)
    device = cluster.device(0)
    small = small_rates_of(device)
    parts = {
        "products": _products(work, batch, device),
        "attention": _attention(work, batch, device, small, engine),
        "experts": sum(e.count * _experts(e, batch, device, engine) for e in work.experts),
        "exchanges": _exchanges(work, batch, cluster, device, small, engine),
        "rows": _rows(work, batch, device, small, engine),
        "sampling": _sampling(work, batch, device, small),
    }
    kernels = _kernels(work, engine, device)
    if batch.new_tokens <= engine.graph_requests:
        parts["launches"] = kernels * small.kernel_seconds
    else:
        layers = sum(e.count for e in work.experts)
        launched = kernels * engine.launch_seconds + layers * engine.expert_host_on.get(device.name, 0.0)
        parts["launches"] = max(kernels * small.kernel_seconds, launched - sum(parts.values()))
    factor = engine.factor(device.name, bool(batch.prefills))
    parts = {name: factor * seconds for name, seconds in parts.items()}
    parts["host"] = engine.host_seconds + engine.request_seconds * batch.requests
    return StepPrice(sum(parts.values()), parts)


def _part(batch: StepBatch, stages: int) -> StepBatch:
    """Return one of several parts of a batch that pass the stages one after the other."""
    if len(batch.prefills) >= stages:
        prefills = batch.prefills[: -(-len(batch.prefills) // stages)]
    else:
        prefills = tuple(Prefill(-(-p.new // stages), p.past + p.new // 2) for p in batch.prefills)
    return StepBatch(prefills, -(-batch.decodes // stages), batch.context)


def _products(work: StepWork, batch: StepBatch, device: Device) -> float:
    total = 0.0
    for product in work.products:
        rows = batch.new_tokens if product.rows == TOKENS else batch.requests
        rate = product_rate(device, product.weights, product.activations)
        total += product.count * product_seconds(rate, rows, product.n, product.k)
    return total


def _attention(work: StepWork, batch: StepBatch, device: Device, small: SmallRates, engine: Engine) -> float:
    total = 0.0
    for attention in work.attentions:
        if device.name in engine.widens_cache:
            attention = replace(attention, cache="bf16")
        each = decode_attention_seconds(device, small, attention, batch)
        for prefill in batch.prefills:
            each += prefill_attention_seconds(device, attention, prefill)
        total += attention.count * each
    return total


def _experts(experts: Experts, batch: StepBatch, device: Device, engine: Engine) -> float:
    tokens = batch.new_tokens * experts.spread
    hit, pairs = experts_hit(experts, tokens), pairs_on_busiest(experts, tokens)
    rate = product_rate(device, experts.weights, experts.activations, grouped=True)
    slow = engine.expert_factor(experts.weights, device.name)  # at reading weights, not at computing
    rate = rate._replace(per_byte=rate.per_byte * slow)
    return sum(product_seconds(rate, pairs, n, k, weights_read=hit) for n, k in experts.shapes)


def _exchanges(
    work: StepWork, batch: StepBatch, cluster: Cluster, device: Device, small: SmallRates, engine: Engine
) -> float:
    total = 0.0
    for exchange in work.exchanges:
        rows = batch.new_tokens if exchange.rows == TOKENS else batch.requests
        n_bytes = exchange.bytes_per_token * rows
        total += exchange.count * exchange_seconds(cluster, device, small, exchange, n_bytes, pushes=engine.pushes)
    return total


def _rows(work: StepWork, batch: StepBatch, device: Device, small: SmallRates, engine: Engine) -> float:
    """Price work on rows; an engine that fuses reads and writes them once between two products."""
    n_bytes = work.rows.bytes_per_token
    if engine.fuses:
        between = sum(p.count * (p.n + p.k) for p in work.products if p.rows == TOKENS) * ROW_BYTES
        between += sum(e.count * e.top_k * (n + k) for e in work.experts for n, k in e.shapes) * ROW_BYTES
        n_bytes = min(n_bytes, between) if n_bytes else between
    return batch.new_tokens * n_bytes / (device.memory_bytes_per_second * small.cache_fraction)


def _sampling(work: StepWork, batch: StepBatch, device: Device, small: SmallRates) -> float:
    if not work.vocabulary:
        return 0.0
    n_bytes = 4.0 * SAMPLING_PASSES * work.vocabulary * batch.requests
    return n_bytes / (device.memory_bytes_per_second * small.cache_fraction)


def _kernels(work: StepWork, engine: Engine, device: Device) -> float:
    """Count the kernels of a step."""
    products = sum(p.count for p in work.products)
    between = sum(p.count for p in work.products if p.rows == TOKENS)
    casts = sum(p.count for p in work.products if FORMAT_BYTES[p.activations] < 2) if not engine.fuses_casts else 0
    rows = min(work.rows.kernels, between) if engine.fuses else work.rows.kernels
    attention = sum(a.count for a in work.attentions) * ATTENTION_KERNELS
    experts = sum(e.count for e in work.experts) * engine.expert_kernels_on.get(device.name, engine.expert_kernels)
    exchanges = sum(e.count for e in work.exchanges)
    return products + casts + rows + attention + experts + exchanges + (SAMPLING_KERNELS if work.vocabulary else 0)
