"""Layouts of a worker, and the work of a step under each, from the work under tensor parallel cuts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import TypeVar

from autopar.serving.model_work import ModelWork
from autopar.serving.records import WorkerLayout
from cost_models.serving.work import FORMAT_BYTES, Attention, Experts, MatrixProduct, StepExchange, StepWork

Counted = TypeVar("Counted", MatrixProduct, Attention, Experts, StepExchange)
"""Work that a step has a number of times."""


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a model that layouts must divide.

    Attributes:
        heads: heads of queries, in every attention; their greatest common divisor.
        kv_heads: heads of keys and values; all heads where these are latent.
        blocks: layers with attention.
        experts: routed experts of a layer; 0 for none.
        expert_features: features between the products of an expert.
    """

    heads: int
    kv_heads: int
    blocks: int
    experts: int
    expert_features: int


def layouts_on(shape: ModelShape, devices: int, domain: int, *, prefill_only: bool = False) -> Iterator[WorkerLayout]:
    """Yield the layouts of a worker of exactly so many devices.

    Args:
        shape: what the model allows.
        devices: devices of the worker.
        domain: devices that are joined by the fast links: tensor parallel ranks stay among them.
        prefill_only: the worker makes no tokens: prompts may be cut over ranks (context parallel).
    """
    for stages in _divisors(devices):
        if stages > shape.blocks:
            continue
        of_stage = devices // stages
        for tensor in _divisors(of_stage):
            if tensor > domain or shape.heads % tensor or not _divides(shape.kv_heads, tensor):
                continue
            rest = of_stage // tensor
            copies = max(1, tensor // shape.kv_heads)
            for data in {rest, 1} if prefill_only else {rest}:
                context = rest // data
                if data > 1 and not shape.experts:
                    continue  # without experts that all share, these are workers of their own
                if context > 1 and context > domain // tensor:
                    continue
                for expert, expert_tensor in _experts_on(shape, of_stage):
                    yield WorkerLayout(tensor, stages, data, context, expert, expert_tensor, copies)


def _experts_on(shape: ModelShape, ranks: int) -> Iterator[tuple[int, int]]:
    if not shape.experts:
        yield 1, 1
        return
    for expert in {ranks, 1}:
        if shape.experts % expert == 0 and shape.expert_features % (ranks // expert) == 0:
            yield expert, ranks // expert


def _divides(kv_heads: int, tensor: int) -> bool:
    return kv_heads % tensor == 0 or tensor % kv_heads == 0


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def layout_work(works: Mapping[int, ModelWork], layout: WorkerLayout) -> StepWork:
    """Return the work of a step on the busiest device of a stage.

    Args:
        works: work under tensor parallel cuts, by the number of ranks.
        layout: the layout; a step's batch is that of one attention data rank, or the whole prompt cut over ranks.
    """
    work = works[layout.tensor]
    blocks, once = work.blocks, work.once
    per_stage = ceil(blocks.blocks / layout.stages) / blocks.blocks
    experts, exchanges = tuple(_local(e, layout) for e in work.experts), list(blocks.exchanges)
    if layout.attention_data > 1 and work.experts:
        exchanges += _shared_by_all(work, layout)
    else:
        exchanges += [replace(e, group=layout.tensor) for e in work.combined]
        if not work.combined and work.experts and layout.tensor > 1:
            exchanges += [_all_reduced(e, layout) for e in work.experts]
    share = 1.0 / layout.context
    if layout.context > 1:
        exchanges += _context_exchanges(blocks, layout)
    if layout.stages > 1:
        row = _row_bytes(work)
        exchanges.append(StepExchange("send", row, 2, layout.tensor * layout.attention_data * layout.context))
    scaled = _scaled(replace(blocks, experts=experts, exchanges=tuple(exchanges)), per_stage)
    expert_bytes = work.expert_bytes / (layout.expert * layout.expert_tensor)
    return replace(
        scaled, products=scaled.products + once.products, exchanges=scaled.exchanges + once.exchanges,
        rows=replace(scaled.rows, bytes_per_token=(scaled.rows.bytes_per_token + once.rows.bytes_per_token) * share,
                     kernels=scaled.rows.kernels + once.rows.kernels),
        weight_bytes=per_stage * (blocks.weight_bytes + expert_bytes) + once.weight_bytes, vocabulary=once.vocabulary,
        blocks=ceil(blocks.blocks / layout.stages), stages=layout.stages,
    )  # fmt: skip


def _local(experts: Experts, layout: WorkerLayout) -> Experts:
    """Return one device's part of a layer of experts."""
    ways = layout.expert_tensor
    shapes = tuple([
        (ceil(n / ways), k) if i < len(experts.shapes) - 1 else (n, ceil(k / ways))
        for i, (n, k) in enumerate(experts.shapes)
    ])  # fmt: skip
    return replace(
        experts, local=experts.total // layout.expert, shapes=shapes, spread=layout.attention_data,
    )  # fmt: skip


def _shared_by_all(work: ModelWork, layout: WorkerLayout) -> list[StepExchange]:
    """Return how rows of ranks with requests of their own come to all experts, and results back."""
    found = []
    for experts in work.experts:
        row = experts.shapes[0][1] * FORMAT_BYTES["bf16"] * layout.attention_data
        group, stride = layout.attention_data, layout.tensor
        found += [StepExchange(kind, row, group, stride, experts.count) for kind in ("all_gather", "reduce_scatter")]
    return found


def _all_reduced(experts: Experts, layout: WorkerLayout) -> StepExchange:
    return StepExchange("all_reduce", experts.shapes[0][1] * FORMAT_BYTES["bf16"], layout.tensor, 1, experts.count)


def _context_exchanges(blocks: StepWork, layout: WorkerLayout) -> list[StepExchange]:
    """Return how ranks that have parts of a prompt get the keys and values of the others."""
    return [
        StepExchange("all_gather", a.kv_heads * (a.key_size + a.value_size) * FORMAT_BYTES[a.cache], layout.context,
                     layout.tensor, a.count)
        for a in blocks.attentions
    ]  # fmt: skip


def _row_bytes(work: ModelWork) -> float:
    """Return the bytes of the row that stages send: as wide as what the head takes."""
    heads = [p for p in work.once.products if p.n]
    return (heads[-1].k if heads else 0) * FORMAT_BYTES["bf16"]


def _scaled(work: StepWork, share: float) -> StepWork:
    """Return a stage's share of the work in blocks: counts are rounded up to whole ones."""
    if share == 1.0:
        return work

    def part(items: Iterable[Counted]) -> tuple[Counted, ...]:
        return tuple(replace(item, count=max(1, ceil(item.count * share - 1e-9))) for item in items)

    sends = tuple(e for e in work.exchanges if e.kind == "send")
    return replace(
        work, products=part(work.products), attentions=part(work.attentions), experts=part(work.experts),
        exchanges=(*part(e for e in work.exchanges if e.kind != "send"), *sends),
        rows=replace(work.rows, bytes_per_token=work.rows.bytes_per_token * share,
                     kernels=ceil(work.rows.kernels * share)),
        cache_bytes_per_token=work.cache_bytes_per_token * share, window_cache_bytes=work.window_cache_bytes * share,
    )  # fmt: skip
