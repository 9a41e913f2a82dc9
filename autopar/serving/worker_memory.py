"""Memory of a device of a worker: weights, cache of the requests in flight, workspace."""

from __future__ import annotations

from autopar.serving.records import ServingLoad, WorkerLayout, WorkerMemory
from cost_models.serving.work import StepWork
from hardware_profiles import Device
from hardware_profiles.engines import Engine
from hardware_profiles.usable_memory import CONTEXT_BYTES, driver_bytes

CACHE_BLOCK = 16
"""Tokens of a block of the cache: a request has whole blocks."""
GRAPH_BYTES = 1.0e9
"""Bytes of an engine's recorded graphs, and of the buffers of its collectives."""
ROW_COPIES = 4
"""Rows of the widest product that a step holds at once: what it takes, gives, and the residual."""


def memory_of(
    work: StepWork, layout: WorkerLayout, load: ServingLoad, requests: int, tokens_per_step: int, device: Device,
    engine: Engine, *, prefill_only: bool = False,
) -> WorkerMemory:  # fmt: skip
    """Return the memory of the fullest device.

    Args:
        work: of one stage.
        layout: of the worker.
        load: lengths of the requests.
        requests: in flight on one attention data rank.
        tokens_per_step: most new tokens of a step.
        device: what it runs on.
        engine: whose share of the device it is.
        prefill_only: the worker keeps prompts alone.
    """
    longest = load.input_tokens + 1 if prefill_only else load.longest
    tokens = -(-longest // CACHE_BLOCK) * CACHE_BLOCK
    cache = requests * (tokens * work.cache_bytes_per_token / layout.context + work.window_cache_bytes)
    return WorkerMemory(
        work.weight_bytes, cache, workspace_bytes(work, layout, requests, tokens_per_step),
        limit_of(device, engine),
    )  # fmt: skip


def limit_of(device: Device, engine: Engine) -> float:
    """Return the bytes of a device that an engine takes: its share of what the driver reports."""
    return engine.memory_share * driver_bytes(device)


def workspace_bytes(work: StepWork, layout: WorkerLayout, requests: int, tokens_per_step: int) -> float:
    """Return bytes of a step beside weights and cache: rows, logits, graphs, the context of the process."""
    widest = max((p.n + p.k for p in work.products if p.rows == "tokens"), default=0)
    routed = max((e.top_k * e.spread * (n + k) for e in work.experts for n, k in e.shapes), default=0)
    rows = 2.0 * tokens_per_step / layout.context * (ROW_COPIES / 2 * widest + routed)
    return CONTEXT_BYTES + GRAPH_BYTES + rows + 8.0 * requests * work.vocabulary


def most_requests(
    work: StepWork, layout: WorkerLayout, load: ServingLoad, tokens_per_step: int, device: Device, engine: Engine, *,
    prefill_only: bool = False,
) -> int:  # fmt: skip
    """Return how many requests fit at most on an attention data rank; 0 where not even one does."""
    one, two = (
        memory_of(work, layout, load, n, tokens_per_step, device, engine, prefill_only=prefill_only) for n in (1, 2)
    )
    each = two.total - one.total
    if one.total > one.limit:
        return 0
    return 1 + int((one.limit - one.total) / each) if each > 0 else 2**20
