"""Planning of a deployment: from a model, a cluster and a load to a plan for serving.

:func:`plan_serving` is behind ``autopar plan --mode inference`` and ``autopar.plan(..., mode="inference")``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from autopar.errors import ClusterError, InfeasibleError, PlanError
from autopar.plans.plan import StagePlan
from autopar.serving.attention_calls import attention_calls, seen_tokens
from autopar.serving.forward_capture import Forward, captured_forward, most_positions
from autopar.serving.front import PricedDeployment, front, missed, order, ranked
from autopar.serving.layout_words import layout_in
from autopar.serving.model_work import ModelWork, WorkFinder
from autopar.serving.number_formats import formats_of, note_on_formats
from autopar.serving.product_facts import expert_matrices
from autopar.serving.records import BOTH, DEFAULT_ENGINE, Formats, ServingLoad, ServingPlan
from autopar.serving.search import (
    LaidOut,
    SearchSetting,
    aggregated,
    at_count,
    disaggregated,
    powers_of_two,
    worker_sizes,
)
from autopar.serving.weight_cuts import CutsImpossible, weight_cuts
from autopar.serving.worker_layouts import ModelShape
from autopar.serving.worker_memory import limit_of
from autopar.words.texts import show_bytes, show_seconds
from cost_models.mesh_links import mesh_axes
from cost_models.serving.work import REQUESTS
from hardware_profiles import Cluster
from hardware_profiles.engines import engine_named

MOST_TOKENS_SEEN = 8192
"""Tokens of the prompt by which windows of attention are seen: masks are computed for it."""


@dataclass(frozen=True)
class Answer:
    """Result of a search.

    Attributes:
        plan: the deployment with most tokens/s per device under the limits.
        ranked: the best of each layout under the limits, best first.
        front: deployments that no other one beats in tokens/s per device and per user.
        like: deployments of given layouts, priced as they are.
    """

    plan: ServingPlan
    ranked: tuple[PricedDeployment, ...]
    front: tuple[PricedDeployment, ...]
    like: tuple[PricedDeployment, ...] = ()


def plan_serving(  # noqa: PLR0913  (what a user may say)
    model: torch.nn.Module, cluster: Cluster, inputs: tuple[Sequence[Any], Mapping[str, Any]], load: ServingLoad, *,
    engine: str = DEFAULT_ENGINE, precision: str = "bf16", cache_precision: str = "bf16", devices: int | None = None,
    cost_per_hour: float | None = None, like: Sequence[str] = (), named: str = "", cluster_name: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> Answer:  # fmt: skip
    """Plan a deployment.

    Args:
        model: any module that makes scores of the next token from tokens; on the meta device nothing is allocated.
        cluster: where it is served.
        inputs: an example call, ``(args, kwargs)``, with a prompt ``[batch, length]`` of integers.
        load: the requests, and limits on their times.
        engine: ``vllm``, ``sglang``, ``tensorrt-llm`` or ``autopar``: what the prices are for.
        precision, cache_precision: formats of weights and cache.
        devices: how many devices of the cluster to use; None for all.
        cost_per_hour: of one device, in any currency.
        like: layouts to price as they are, such as ``tp=4,ep=4,batch=32``.
        named, cluster_name: how the plan calls model and cluster.
        say: is called with what is done next.

    Raises:
        PlanError: the model or an argument cannot be planned for serving.
        InfeasibleError: nothing fits, or no deployment keeps the limits; it says by how much the nearest misses.
    """
    check_load(load)
    n = cluster.n_devices if devices is None else devices
    if not 1 <= n <= cluster.n_devices:
        raise ClusterError(f"--devices {n}: cluster {cluster.name} has {cluster.n_devices} devices")
    formats, kind = formats_of(precision, cache_precision), engine_named(engine)
    args, kwargs = inputs
    say("capturing the forward")
    forward = captured_forward(model, args, kwargs)
    _check_positions(model, forward, load)
    windows = _windows(forward, model, inputs, load)
    finder = WorkFinder(forward, windows, formats, kind.fuses)
    shape = shape_of(finder)
    say("cutting weights")
    plans, works, refused = _works(finder, cluster, shape, n)
    setting = SearchSetting(works, shape, cluster, n, kind, load, cost_per_hour)
    given = tuple(_priced(setting, words, refused) for words in like)
    say("layouts and requests in flight")
    found = list(aggregated(setting, worker_sizes(n)))
    found += disaggregated(setting, worker_sizes(n), lambda n_bytes: _moved(cluster, n, n_bytes))
    notes = _notes(forward, setting, formats, refused)
    best = ranked(found, load)
    if not best:
        if like and given:
            best = [given[0]]
        else:
            raise _infeasible(setting, found)
    plan = ServingPlan(
        named or type(model).__name__, cluster_name or cluster.name, engine, load, formats, best[0].workers,
        best[0].served, best[0].devices, load.longest,
        cuts_of_block(finder, plans[best[0].workers[-1].layout.tensor]), tuple(notes),
    )  # fmt: skip
    return Answer(plan, tuple(best), tuple(front(found)), given)


def check_load(load: ServingLoad) -> None:
    """Refuse a load that cannot be."""
    for name, value, least in (("--isl", load.input_tokens, 1), ("--osl", load.output_tokens, 1),
                               ("--prefix", load.prefix_tokens, 0)):  # fmt: skip
        if value < least:
            raise PlanError(f"{name} is {value}; give {least} or more tokens")
    if load.prefix_tokens >= load.input_tokens:
        raise PlanError(
            f"--prefix {load.prefix_tokens} is not shorter than --isl {load.input_tokens}: the prefix is a part of the "
            "prompt, and at least one token of it is new"
        )
    for name, limit in (("--ttft", load.first_token_seconds), ("--tpot", load.token_seconds),
                        ("--rate", load.requests_per_second)):  # fmt: skip
        if limit is not None and not 0 < limit < float("inf"):
            raise PlanError(f"{name} is {limit}; give a positive number")


# --- the model --------------------------------------------------------------------------------------------------------


def _check_positions(model: torch.nn.Module, forward: Forward, load: ServingLoad) -> None:
    """Refuse requests that are longer than the model has positions."""
    longest = load.longest
    said = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tables = most_positions(forward)
    most = min((n for n in (said, tables) if isinstance(n, int)), default=longest)
    if longest > most:
        raise PlanError(
            f"--isl {load.input_tokens} and --osl {load.output_tokens} are {longest:,} tokens, and the model has "
            f"{most:,} positions; give shorter requests, or a model for longer ones"
        )


def _windows(
    forward: Forward, model: torch.nn.Module, inputs: tuple[Sequence[Any], Mapping[str, Any]], load: ServingLoad
) -> list[int | None]:
    """Return how far back each attention looks, seen on a prompt as long as requests are.

    Raises:
        PlanError: the model has no attention, or some of it looks at later tokens.
    """
    calls = attention_calls(forward.graph)
    if not calls:
        raise PlanError(
            "the model has no attention over earlier tokens, so no cache of keys and values: serving is planned for "
            "models that have; plan others without mode inference"
        )
    longest = min(load.longest, MOST_TOKENS_SEEN)
    long = captured_forward(model, *inputs, longest)
    found = attention_calls(long.graph)
    one = {(call.mask, call.causal): call for call in found}  # layers share masks, which are large
    masks = {key: seen_tokens(long.graph, call, long.constants) for key, call in one.items()}
    seen = [masks[call.mask, call.causal] for call in found]
    if len(seen) != len(calls):
        raise PlanError(
            f"the model has {len(calls)} attentions with a prompt of {forward.tokens} tokens and {len(seen)} with one "
            f"of {longest}: serving is planned for models that compute the same at any length"
        )
    for call, (causal, _) in zip(calls, seen, strict=True):
        if not causal:
            node = forward.graph.nodes[call.node]
            raise PlanError(
                f"attention {node.where} looks at later tokens, or at an encoder's: serving is planned for decoders, "
                "whose tokens look at earlier ones alone"
            )
    return [window for _, window in seen]


def shape_of(finder: WorkFinder) -> ModelShape:
    """Return the numbers that layouts must divide."""
    graph, tokens = finder.graph, finder.forward.tokens
    heads = kv_heads = blocks = 0
    for call in finder.calls:
        query = graph.spec(call.query)
        of_call = query.n_elements // (query.shape[-1] * tokens)
        width = sum(graph.spec(ref).n_elements for ref in call.kept) // tokens
        kv = of_call if call.latent else round(width / (query.shape[-1] + graph.spec(call.value).shape[-1]))
        heads, kv_heads = gcd(heads, of_call), gcd(kv_heads, max(1, kv))
        blocks += finder.forward.times_of(graph.nodes[call.node].module)
    experts = features = 0
    for i in finder.experts:
        matrices = expert_matrices(graph, i)
        experts, features = gcd(experts, matrices[0][0]), gcd(features, matrices[-1][1])
    return ModelShape(heads, kv_heads, blocks, experts, features)


def _works(
    finder: WorkFinder, cluster: Cluster, shape: ModelShape, devices: int
) -> tuple[dict[int, StagePlan], dict[int, ModelWork], dict[int, str]]:
    """Return cuts and work by tensor parallel ranks, and why some numbers cannot be."""
    plans: dict[int, StagePlan] = {}
    works: dict[int, ModelWork] = {}
    refused: dict[int, str] = {}
    most = min(devices, max(8, cluster.device(0).domain))
    for tensor in powers_of_two(most):
        try:
            plans[tensor] = weight_cuts(finder, cluster, tensor, shape.kv_heads)
            works[tensor] = finder.of(plans[tensor])
        except CutsImpossible as error:
            refused[tensor] = str(error)
    return plans, works, refused


def cuts_of_block(finder: WorkFinder, plan: StagePlan) -> dict[str, str]:
    """Return the cuts of products, attention and experts of one block, and of the head, by module."""
    last = finder.graph.nodes[finder.calls[-1].node].module.rsplit(".", 1)[0]
    chosen = [p.node for p in finder.products] + [c.node for c in finder.calls] + list(finder.experts)
    cuts = {}
    for i in sorted(chosen):
        node = finder.graph.nodes[i]
        if node.module.startswith(last) or any(p.node == i and p.rows == REQUESTS for p in finder.products):
            options = plan.ops.get(node.name, ())
            said = ",".join(f"{axis}={o}" for (axis, size), o in zip(plan.mesh, options, strict=True) if size > 1)
            name = node.module if any(p.node == i for p in finder.products) else f"{node.module}:{node.name}"
            cuts[name] = said or "whole"
    return cuts


# --- answers ----------------------------------------------------------------------------------------------------------


def _priced(setting: SearchSetting, words: str, refused: Mapping[int, str]) -> PricedDeployment:
    """Return the deployment of a layout in words."""
    layout, batch = layout_in(words, setting.shape)
    if layout.devices > setting.devices:
        raise PlanError(f"--like {words} has {layout.devices} devices, and {setting.devices} are used")
    if layout.tensor not in setting.works:
        why = refused.get(layout.tensor, f"tp={layout.tensor} is not a power of two, or not on one machine")
        raise PlanError(f"--like {words}: {why}")
    laid = LaidOut(setting, layout, BOTH)
    return at_count(laid, batch or max(1, min(laid.most, 64)), max(1, setting.devices // layout.devices))


def _moved(cluster: Cluster, devices: int, n_bytes: float) -> float:
    """Return the seconds in which the first device sends bytes to the last one, which is of another worker."""
    if devices < 2:
        return 0.0
    return mesh_axes(cluster, {"pair": 2}, [0, devices - 1])["pair"].seconds("send_recv", n_bytes)


def _notes(
    forward: Forward, setting: SearchSetting, formats: Formats, refused: Mapping[int, str]
) -> list[str]:
    notes = [setting.engine.factor_note(setting.device.name)]
    notes.append(note_on_formats(formats, setting.device))
    skipped = sum(times - 1 for times in forward.times.values())
    if skipped:
        notes.append(f"{skipped} blocks do what others do, and were not traced")
    notes += [f"tp={tensor}: {why}" for tensor, why in refused.items()]
    notes += _not_priced(setting)
    return [note for note in notes if note]


def _not_priced(setting: SearchSetting) -> Iterator[str]:
    """Yield what is not in the price of these requests."""
    load = setting.load
    longest = load.longest
    if longest > MOST_TOKENS_SEEN:
        yield (
            f"windows of attention are looked for in the first {MOST_TOKENS_SEEN:,} of {longest:,} tokens: a longer "
            "window is priced as none"
        )
    attentions = next(iter(setting.works.values())).blocks.attentions
    if load.prefix_tokens and any(a.expanded for a in attentions):
        yield "the products that expand the latent cache of the prefix for a prefill are not in the price"
    if load.requests_per_second is not None:
        yield "requests are taken to arrive evenly; ones that come together wait longer for their first token"


def _infeasible(setting: SearchSetting, found: Sequence[PricedDeployment]) -> InfeasibleError:
    """Return the error of a load that nothing serves: the nearest, and both numbers."""
    load = setting.load
    if not found:
        total, words = setting.closest.get("memory", (0.0, "tp=1"))
        limit = limit_of(setting.device, setting.engine)
        return InfeasibleError(
            f"no layout on {setting.devices} x {setting.device.name} holds one request of "
            f"{load.longest:,} tokens: the nearest, {words}, needs {show_bytes(total)} of "
            f"{show_bytes(limit)} per device; give more devices, narrower weights (--precision fp8) or shorter requests"
        )

    def by_how_much(each: PricedDeployment) -> float:
        served, over = each.served, 1.0
        for value, limit in ((served.first_token_seconds, load.first_token_seconds),
                             (served.token_seconds, load.token_seconds)):  # fmt: skip
            over *= max(1.0, value / limit) if limit is not None else 1.0
        rate = load.requests_per_second
        return over * (max(1.0, rate / max(served.requests_per_second, 1e-9)) if rate is not None else 1.0)

    nearest = min(found, key=lambda each: (by_how_much(each), order(each)))
    worker = nearest.workers[-1]
    said = "; ".join(missed(nearest.served, load))
    return InfeasibleError(
        f"no deployment on {setting.devices} x {setting.device.name} keeps the limits: the nearest, "
        f"{worker.layout.words} with {worker.requests} requests in flight, misses {said} "
        f"(time to the first token {show_seconds(nearest.served.first_token_seconds)}, per output token "
        f"{show_seconds(nearest.served.token_seconds)}); give more devices, narrower formats or wider limits"
    )


__all__ = ["Answer", "check_load", "cuts_of_block", "plan_serving", "shape_of"]
