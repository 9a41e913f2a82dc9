"""Deployments that were priced, and the front among them: tokens/s per device against tokens/s per user."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.serving.records import PREFILL, Served, ServingLoad, Worker
from autopar.words.texts import show_seconds


@dataclass(frozen=True)
class PricedDeployment:
    """Workers on the devices of a cluster, and what they serve.

    Attributes:
        workers: one kind, or prefill and decode workers.
        devices: that are used.
        served: predicted times.
    """

    workers: tuple[Worker, ...]
    devices: int
    served: Served

    @property
    def disaggregated(self) -> bool:
        """True if prefill and decode run on workers of their own."""
        return any(worker.phase == PREFILL for worker in self.workers)

    def meets(self, load: ServingLoad) -> bool:
        """Return whether the load's limits are kept."""
        return not list(missed(self.served, load))


def missed(served: Served, load: ServingLoad) -> Iterable[str]:
    """Yield the limits that times do not keep, in words with both numbers."""
    if load.first_token_seconds is not None and served.first_token_seconds > load.first_token_seconds:
        yield f"time to the first token: {_both(served.first_token_seconds, load.first_token_seconds)}"
    if load.token_seconds is not None and served.token_seconds > load.token_seconds:
        yield f"time per output token: {_both(served.token_seconds, load.token_seconds)}"
    if load.requests_per_second is not None and served.requests_per_second < load.requests_per_second * (1 - 1e-9):
        yield f"requests: {served.requests_per_second:.3g} of {load.requests_per_second:.3g} a second"


def _both(seconds: float, limit: float) -> str:
    return f"{show_seconds(seconds)} of {show_seconds(limit)}"


def front(deployments: Iterable[PricedDeployment]) -> list[PricedDeployment]:
    """Return those that no other one beats in both, with rising tokens/s per user."""
    ordered = sorted(
        deployments, key=lambda d: (-d.served.tokens_per_second_per_user, -d.served.tokens_per_second_per_device)
    )
    found: list[PricedDeployment] = []
    for each in ordered:
        if not found or each.served.tokens_per_second_per_device > found[-1].served.tokens_per_second_per_device:
            found.append(each)
    return found[::-1]


def ranked(deployments: Iterable[PricedDeployment], load: ServingLoad) -> list[PricedDeployment]:
    """Return one deployment for each layout that keeps the limits, the one with most tokens/s per device, best first.

    Among equal ones fewer devices come first, then shorter times.
    """
    best: dict[object, PricedDeployment] = {}
    for each in deployments:
        if each.meets(load):
            key = tuple((w.phase, w.layout) for w in each.workers)
            if key not in best or order(each) < order(best[key]):
                best[key] = each
    return sorted(best.values(), key=order)


def order(each: PricedDeployment) -> tuple[float, ...]:
    """Return a sort key: most tokens/s of the cluster first, then shorter times, fewer devices in a worker."""
    served = each.served
    return (
        -round(served.tokens_per_second_per_device, 3), served.token_seconds, served.first_token_seconds,
        sum(w.layout.devices for w in each.workers),
    )  # fmt: skip
