"""Random serving plans, from a seed: the same seed gives the same plan."""

from __future__ import annotations

import random
from dataclasses import replace

from autopar.serving.records import (
    BOTH,
    DECODE,
    PREFILL,
    Formats,
    Served,
    ServingLoad,
    ServingPlan,
    Worker,
    WorkerLayout,
    WorkerMemory,
)
from hardware_profiles import load_cluster

FORMATS = (
    Formats(), Formats("fp8", "fp8", "fp8"), Formats("fp8", "fp8", "bf16"), Formats("nvfp4", "nvfp4", "fp8"),
    Formats("int4", "bf16", "bf16"), Formats("mxfp4", "bf16", "bf16"), Formats(cache="fp8"),
)  # fmt: skip
CLUSTER = "dgx-h100-x8"


def random_layout(draw: random.Random, experts: bool, context: bool = True) -> WorkerLayout:
    """Draw a layout of at most 64 devices."""
    tensor, data = draw.choice([1, 2, 4, 8]), draw.choice([1, 1, 2, 8]) if experts else 1
    cut = draw.choice([1, 1, 2]) if context else 1
    ranks = tensor * data * cut
    expert = draw.choice([1, ranks]) if experts else 1
    return WorkerLayout(
        tensor=tensor, stages=draw.choice([1, 1, 2]) if ranks <= 32 else 1, attention_data=data, context=cut,
        expert=expert, expert_tensor=ranks // expert if experts else 1,
        kv_replicas=draw.choice([k for k in (1, 2, 4, 8) if tensor % k == 0]),
    )  # fmt: skip


def random_worker(draw: random.Random, phase: str, experts: bool, context: bool = True) -> Worker:
    """Draw a worker whose memory fits."""
    layout = random_layout(draw, experts, context and phase != DECODE)
    limit = load_cluster(CLUSTER).device(0).memory_bytes * draw.choice([0.8, 0.9, 0.95])
    weights, cache = limit * draw.uniform(0.1, 0.5), limit * draw.uniform(0.1, 0.3)
    requests = draw.randint(1, 64) * layout.attention_data
    return Worker(
        phase, layout, draw.randint(1, 4), requests, draw.choice([2048, 8192, 16384]),
        WorkerMemory(weights, cache, limit * 0.05, limit),
    )  # fmt: skip


def random_plan(seed: int, engine: str = "vllm", context: bool = True) -> ServingPlan:
    """Draw a serving plan: together or apart, with or without experts."""
    draw = random.Random(seed)
    experts = draw.random() < 0.5
    phases = draw.choice([(BOTH,), (PREFILL, DECODE)])
    workers = tuple(random_worker(draw, phase, experts, context) for phase in phases)
    load = ServingLoad(
        draw.randint(100, 8000), draw.randint(1, 1000), draw.randint(0, 50), draw.choice([None, 1.0]),
        draw.choice([None, 0.03]), draw.choice([None, 20.0]),
    )  # fmt: skip
    token = draw.uniform(0.005, 0.1)
    served = Served(
        draw.uniform(0.05, 3), token, draw.uniform(10, 3000), 1 / token, draw.uniform(0.1, 100),
        draw.choice([None, 0.37]), draw.choice(["", "time per output token: 29.4 of 30 ms"]),
        {"products": token / 2, "attention": token / 3}, draw.choice([0.0, 0.01]) if len(phases) > 1 else 0.0,
    )  # fmt: skip
    return ServingPlan(
        "hf:llama/config.json", CLUSTER, engine, load, draw.choice(FORMATS), workers, served,
        sum(worker.replicas * worker.layout.devices for worker in workers),
        load.input_tokens + load.output_tokens + draw.randint(0, 100),
        draw.choice([{}, {"attention.q": "n"}]), draw.choice([(), ("a note: \"ü\"",)]),
    )  # fmt: skip


def with_layout(plan: ServingPlan, **changes: int) -> ServingPlan:
    """Return a plan of one worker with a changed layout, whose number of devices is right."""
    (worker,) = plan.workers
    changed = replace(worker, layout=replace(worker.layout, **changes))
    return replace(plan, workers=(changed,), devices=changed.replicas * changed.layout.devices)
