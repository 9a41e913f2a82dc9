"""Answer of ``plan --mode inference``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from autopar.cli.schemas.registry import answer


@dataclass(frozen=True, kw_only=True)
class ServingWorkers:
    """Workers of one kind."""

    phase: Annotated[str, "both, prefill or decode"]
    layout: Annotated[str, "words of the layout: tp, pp, dp (attention data), cp, ep, etp"]
    replicas: Annotated[int, "how many workers"]
    requests: Annotated[int, "requests in flight in one worker"]
    memory_bytes: Annotated[float, "bytes on the fullest device"]
    limit_bytes: Annotated[float, "bytes that the engine may fill there"]


@dataclass(frozen=True, kw_only=True)
class ServingRow:
    """A deployment and what it serves."""

    workers: Annotated[list[ServingWorkers], "one kind, or prefill and decode workers"]
    devices: Annotated[int, "devices that are used"]
    first_token_seconds: Annotated[float, "mean time to the first token, with queueing"]
    token_seconds: Annotated[float, "mean time per output token after the first"]
    tokens_per_second_per_device: Annotated[float, "output tokens a second over all devices"]
    tokens_per_second_per_user: Annotated[float, "1 / token_seconds"]
    requests_per_second: Annotated[float, "requests that the whole cluster serves"]
    cost_per_million_tokens: Annotated[float | None, "of output tokens; null without --cost-per-hour"]
    binding: Annotated[str, "which limit binds, or the memory; empty if none does"]
    parts_seconds: Annotated[dict[str, float], "seconds of a decode step by part"]
    transfer_seconds: Annotated[float, "seconds of moving a prompt's cache between workers; 0 if one kind"]


@dataclass(frozen=True, kw_only=True)
class ServingLike(ServingRow):
    """A deployment of ``--like``, as given."""

    words: Annotated[str, "the words of the layout"]


@answer("serving", "autopar plan --mode inference")
@dataclass(frozen=True, kw_only=True)
class ServingAnswer:
    """A plan for serving, other layouts that keep the limits, and the front."""

    plan: Annotated[dict[str, Any], "the plan file, as -o writes it"]
    ranked: Annotated[list[ServingRow], "the best of each layout under the limits, best first, --top of them"]
    front: Annotated[list[ServingRow], "deployments that none beats in tokens/s per device and per user"]
    like: Annotated[list[ServingLike], "layouts of --like, as given"]
