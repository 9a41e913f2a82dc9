"""The search over deployments: layouts of workers, requests in flight, aggregated or disaggregated.

A worker's times follow from the price of its steps (:func:`cost_models.serving.step_price.step_seconds`) and the loop
of requests (:mod:`cost_models.serving.queueing`). Requests in flight rise by factors of two up to what the memory
holds, and up to where a limit is missed: times only grow with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from autopar.serving.front import PricedDeployment, missed
from autopar.serving.model_work import ModelWork
from autopar.serving.records import BOTH, DECODE, PREFILL, Served, ServingLoad, Worker, WorkerLayout
from autopar.serving.worker_layouts import ModelShape, layout_work, layouts_on
from autopar.serving.worker_memory import memory_of, most_requests
from cost_models.serving.queueing import ServedTimes, engine_options, serve, serve_disaggregated
from cost_models.serving.step_price import StepPrice, step_seconds
from cost_models.serving.work import Prefill, StepBatch, StepWork
from hardware_profiles import Cluster, Device
from hardware_profiles.engines import Engine

IN_FLIGHT = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Requests in flight on an attention data rank that are tried, and the most that fit."""
MOST_IN_FLIGHT = 1024
PREFILL_BATCHES = (1, 2, 4, 8)
CLEARLY = 1.25
"""Factor in every number by which one deployment clearly beats another, though times are known only roughly."""
ENOUGH = 2
"""Numbers in flight that carry the requests that arrive: with more, no more are in flight."""
UTILIZATION = 0.9
"""Part of its rate at which a prefill worker is used, so that its queue stays short."""


@dataclass
class SearchSetting:
    """A search: the model's work, where it is to run, and what is to be served.

    Attributes:
        works: work by tensor parallel ranks.
        shape: what the model allows.
        cluster, devices: where, and how many of its devices.
        engine: what runs it.
        load: what is served.
        cost_per_hour: of a device; None for unknown.
    """

    works: Mapping[int, ModelWork]
    shape: ModelShape
    cluster: Cluster
    devices: int
    engine: Engine
    load: ServingLoad
    cost_per_hour: float | None = None
    closest: dict[str, tuple[float, str]] = field(default_factory=dict)

    @cached_property
    def device(self) -> Device:
        """The slowest device."""
        return self.cluster.slowest(range(self.devices))

    @cached_property
    def domain(self) -> int:
        """Devices of one machine, or joined by its fast links."""
        return max(1, min(self.device.domain, self.devices))

    @property
    def tokens_per_step(self) -> int:
        """Most new tokens of a step."""
        return self.engine.tokens_per_step


@dataclass
class LaidOut:
    """A layout of a worker with its work."""

    setting: SearchSetting
    layout: WorkerLayout
    phase: str = BOTH
    _known: dict[StepBatch, float] = field(default_factory=dict, repr=False)

    @cached_property
    def work(self) -> StepWork:
        """The work of a step."""
        return layout_work(self.setting.works, self.layout)

    @cached_property
    def most(self) -> int:
        """Most requests in flight on an attention data rank."""
        s = self.setting
        return min(MOST_IN_FLIGHT, most_requests(
            self.work, self.layout, s.load, s.tokens_per_step, s.device, s.engine, prefill_only=self.phase == PREFILL
        ))  # fmt: skip

    @cached_property
    def prefill_seconds(self) -> float:
        """Seconds of the prefill of one prompt by itself."""
        load = self.setting.load
        return _chunked(self, load.new_tokens, load.prefix_tokens, 1)

    def price(self, batch: StepBatch) -> StepPrice:
        """Return the price of a step."""
        share = self.layout.context
        if share > 1:
            parts = tuple(Prefill(-(-p.new // share), p.past + p.new // 2) for p in batch.prefills)
            batch = replace(batch, prefills=parts)
        return step_seconds(self.work, batch, self.setting.cluster, self.setting.engine)

    def seconds(self, batch: StepBatch) -> float:
        """Return the seconds of a step, of which many are asked for again with other requests in flight."""
        found = self._known.get(batch)
        if found is None:
            found = self._known[batch] = self.price(batch).seconds
        return found

    def worker(self, replicas: int, requests: int, tokens_per_step: int | None = None) -> Worker:
        """Return the record; ``requests`` are those of an attention data rank."""
        s = self.setting
        tokens = tokens_per_step or s.tokens_per_step
        memory = memory_of(
            self.work, self.layout, s.load, requests, tokens, s.device, s.engine, prefill_only=self.phase == PREFILL
        )
        return Worker(self.phase, self.layout, replicas, requests * self.layout.attention_data, tokens, memory)

    def times(self, in_flight: int, replicas: int = 1) -> ServedTimes:
        """Return the times of one attention data rank with at most so many requests in flight.

        Where the load says how many requests arrive and the replicas serve more when full, they are those of the
        rank's share of the arrivals.
        """
        load = self.setting.load
        full = self._times(in_flight, None)
        if load.requests_per_second is None:
            return full
        share = load.requests_per_second / (replicas * self.layout.attention_data)
        return self._times(in_flight, share) if share <= full.requests_per_second else full

    def _times(self, in_flight: int, rate: float | None) -> ServedTimes:
        load = self.setting.load
        found = serve(
            self.seconds, input_tokens=load.input_tokens, output_tokens=load.output_tokens,
            prefix_tokens=load.prefix_tokens, in_flight=in_flight, requests_per_second=rate,
            **engine_options(self.setting.engine),
        )  # fmt: skip
        if rate is None:
            return found
        return replace(found, requests_per_second=rate, tokens_per_second=rate * load.output_tokens)


def counts_up_to(most: int) -> list[int]:
    """Return the requests in flight to try, the most that fit with them."""
    return sorted({n for n in IN_FLIGHT if n <= most} | ({most} if most else set()))


def aggregated(setting: SearchSetting, sizes: Sequence[int]) -> Iterator[PricedDeployment]:
    """Yield deployments of workers that prefill and decode, as many as the devices hold."""
    laid = [
        LaidOut(setting, layout) for size in sizes for layout in layouts_on(setting.shape, size, setting.domain)
        if layout.tensor in setting.works
    ]  # fmt: skip
    promising = near_the_front(laid)
    for each, counts in promising:
        yield from deployed(each, setting.devices // each.layout.devices, counts)
    if not promising:
        for each in laid:
            _note(setting, each)


def near_the_front(laid: Sequence[LaidOut]) -> list[tuple[LaidOut, list[int]]]:
    """Return the layouts and numbers in flight that may be the best of something, by few prices of each.

    The loop of requests is followed for these alone. Those are left out that another one clearly beats, by
    :data:`CLEARLY`, in seconds of a token, requests a second and seconds of a prefill.
    """
    rough = [(each, n, *_roughly(each, n)) for each in laid if each.most for n in counts_up_to(each.most)]
    found: dict[int, tuple[LaidOut, list[int]]] = {}
    for each, n, token, prefill, rate in rough:
        if not any(token > CLEARLY * t and prefill > CLEARLY * p and rate * CLEARLY < r for _, _, t, p, r in rough):
            found.setdefault(id(each), (each, []))[1].append(n)
    return list(found.values())


def _roughly(laid: LaidOut, n: int) -> tuple[float, float, float]:
    """Return about the seconds of a token and of a prompt's prefill, and requests a second of all devices."""
    load = laid.setting.load
    steps = max(1, load.output_tokens - 1)
    prefill = laid.prefill_seconds
    decode = laid.seconds(StepBatch((), n, load.mean_context))
    whole = n * prefill + steps * decode
    ranks = laid.setting.devices // laid.layout.devices * laid.layout.attention_data
    return whole / steps, prefill, n * ranks / whole


def deployed(laid: LaidOut, replicas: int, counts: Sequence[int]) -> Iterator[PricedDeployment]:
    """Yield deployments of one layout, by requests in flight on an attention data rank."""
    setting = laid.setting
    carried = 0
    for n in counts:
        found = at_count(laid, n, replicas)
        yield found
        load = setting.load
        if load.requests_per_second is not None and found.served.requests_per_second >= load.requests_per_second:
            carried += 1
            if carried == ENOUGH:
                break
        if load.token_seconds is not None and found.served.token_seconds > load.token_seconds:
            break
        if load.first_token_seconds is not None and found.served.first_token_seconds > 2 * load.first_token_seconds:
            break


def at_count(laid: LaidOut, n: int, replicas: int) -> PricedDeployment:
    """Return a deployment with ``n`` requests in flight on every attention data rank."""
    setting, layout, times = laid.setting, laid.layout, laid.times(n, replicas)
    devices = replicas * layout.devices
    ranks = replicas * layout.attention_data
    load = setting.load
    step = laid.price(StepBatch((), n, load.mean_context))
    served = _served(setting, times, ranks, step.parts, 0.0, "cache" if n == laid.most else "")
    return PricedDeployment((laid.worker(replicas, n),), devices, served)


def _served(
    setting: SearchSetting, times: ServedTimes, ranks: float, parts: Mapping[str, float], transfer: float,
    full: str,
) -> Served:  # fmt: skip
    rate, tokens = times.requests_per_second * ranks, times.tokens_per_second * ranks
    cost = None
    if setting.cost_per_hour is not None and tokens:
        cost = setting.cost_per_hour * setting.devices / (tokens * 3600) * 1e6
    served = Served(
        times.first_token_seconds, times.token_seconds, tokens / setting.devices,
        1.0 / times.token_seconds if times.token_seconds else 0.0, rate, cost, "", dict(parts), transfer,
    )  # fmt: skip
    over = list(missed(served, setting.load))
    if over:
        return replace(served, binding=over[0])
    return replace(served, binding="memory: no more requests fit" if full else "")


def _note(setting: SearchSetting, laid: LaidOut) -> None:
    """Remember the layout that comes nearest to the memory of a device."""
    memory = laid.worker(1, 1).memory
    known = setting.closest.get("memory")
    if known is None or memory.total < known[0]:
        setting.closest["memory"] = memory.total, laid.layout.words


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to a number of at least 1."""
    return [2**k for k in range(most.bit_length())]


def worker_sizes(devices: int) -> list[int]:
    """Return the devices of one worker to try: powers of two, and all."""
    return sorted({*powers_of_two(devices), devices})


# --- prefill and decode apart -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prefill:
    """A way to prefill: requests a second of one worker, seconds of a batch."""

    laid: LaidOut
    batch: int
    seconds: float
    rate: float


@dataclass(frozen=True)
class _Decode:
    """A way to decode: requests a second of one worker, seconds of a token."""

    laid: LaidOut
    requests: int
    seconds: float
    rate: float


Way = TypeVar("Way", _Prefill, _Decode)


def disaggregated(
    setting: SearchSetting, sizes: Sequence[int], transfer: Callable[[float], float]
) -> Iterator[PricedDeployment]:
    """Yield deployments with prefill workers and decode workers.

    Of each kind, only ways with the most requests a second per device for their time are combined. The workers are
    divided so that neither kind waits: decode workers get what prefill workers can give.

    Args:
        setting: what is searched.
        sizes: devices of one worker.
        transfer: seconds to move so many bytes from one worker to another.
    """
    prefills, decodes = _prefills(setting, sizes), _decodes(setting, sizes)
    for p in prefills:
        for d in decodes:
            yield from _combined(setting, p, d, transfer)


def _prefills(setting: SearchSetting, sizes: Sequence[int]) -> list[_Prefill]:
    load, found = setting.load, list[_Prefill]()
    new = load.new_tokens
    for size in sizes:
        if size >= setting.devices:
            continue
        for layout in layouts_on(setting.shape, size, setting.domain, prefill_only=True):
            laid = LaidOut(setting, layout, PREFILL)
            if layout.tensor not in setting.works or not laid.most:
                continue
            for batch in PREFILL_BATCHES:
                if batch > laid.most or (batch > 1 and batch * new > 4 * setting.tokens_per_step):
                    continue
                seconds = _chunked(laid, new, load.prefix_tokens, batch)
                found.append(_Prefill(laid, batch, seconds, batch * layout.attention_data / seconds))
    return _best(found, lambda p: (p.seconds, p.rate / p.laid.layout.devices))


def _chunked(laid: LaidOut, new: int, past: int, batch: int) -> float:
    """Return the seconds of prefilling a batch, in steps of as many tokens as are allowed."""
    most, done, seconds = max(1, laid.setting.tokens_per_step // batch), 0, 0.0
    while done < new:
        now = min(most, new - done)
        seconds += laid.seconds(StepBatch((Prefill(now, past + done),) * batch))
        done += now
    return seconds


def _decodes(setting: SearchSetting, sizes: Sequence[int]) -> list[_Decode]:
    load, found = setting.load, list[_Decode]()
    context = load.mean_context
    for size in sizes:
        if size >= setting.devices:
            continue
        for layout in layouts_on(setting.shape, size, setting.domain):
            laid = LaidOut(setting, layout, DECODE)
            if layout.tensor not in setting.works:
                continue
            for n in counts_up_to(laid.most):
                seconds = laid.seconds(StepBatch((), n, context))
                if load.token_seconds is not None and seconds > load.token_seconds:
                    break
                rate = n * layout.attention_data / (seconds * max(1, load.output_tokens - 1))
                found.append(_Decode(laid, n, seconds, rate))
    return _best(found, lambda d: (d.seconds, d.rate / d.laid.layout.devices))


def _best(found: Iterable[Way], key: Callable[[Way], tuple[float, float]]) -> list[Way]:
    """Return those that no other one beats in both seconds and rate, at most :data:`MOST_WAYS`, spread evenly."""
    kept: list[Way] = []
    for each in sorted(found, key=key):
        if not kept or key(each)[1] > key(kept[-1])[1]:
            kept.append(each)
    step = max(1, -(-len(kept) // MOST_WAYS))
    return kept[::-1][::step]


MOST_WAYS = 24


def _combined(
    setting: SearchSetting, p: _Prefill, d: _Decode, transfer: Callable[[float], float]
) -> Iterator[PricedDeployment]:
    """Yield the best number of workers of both kinds on the devices."""
    size_p, size_d = p.laid.layout.devices, d.laid.layout.devices
    load = setting.load
    best: tuple[float, int, int] | None = None
    for x in range(1, (setting.devices - size_d) // size_p + 1):
        y = (setting.devices - x * size_p) // size_d
        rate = min(UTILIZATION * x * p.rate, y * d.rate)
        if best is None or rate > best[0] * (1 + 1e-9):
            best = rate, x, y
    if best is None:
        return
    rate, x, y = best
    rate = min(rate, load.requests_per_second or rate)
    work = p.laid.work
    prompt = load.input_tokens * work.cache_bytes_per_token + work.window_cache_bytes
    moved = transfer(prompt) if prompt else 0.0
    ranks = y * d.laid.layout.attention_data
    times = serve_disaggregated(
        lambda _: p.seconds, d.laid.seconds, input_tokens=load.input_tokens, output_tokens=load.output_tokens,
        prefix_tokens=load.prefix_tokens, prefill_workers=x * p.laid.layout.attention_data, decode_workers=ranks,
        prefill_batch=p.batch, decode_in_flight=d.requests, transfer_seconds=moved, requests_per_second=rate,
        overhead_seconds=setting.engine.first_token_seconds,
    )  # fmt: skip
    held = times.requests_per_second * max(1, load.output_tokens - 1) * times.token_seconds / ranks
    requests = min(d.requests, max(1, round(held)))
    step = d.laid.price(StepBatch((), requests, load.mean_context))
    devices = x * size_p + y * size_d
    full = "cache" if requests == d.laid.most else ""
    served = _served(setting, times, 1, step.parts, moved, full)
    workers = p.laid.worker(x, p.batch), d.laid.worker(y, requests)
    yield PricedDeployment(workers, devices, served)
