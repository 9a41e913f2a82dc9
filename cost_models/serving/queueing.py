"""Times of requests that share one worker: steps one after the other, prefills that wait for each other.

A closed loop keeps a number of requests in flight: one starts when another ends, as benchmarks of serving do. At the
start all arrive at once and wait for each other's prefills; that belongs to the mean of the first ``waves`` requests of
each place, which is what such a benchmark prints.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hardware_profiles.engines import Engine

from .step_table import StepTable
from .work import Prefill, StepBatch

APART_SECONDS = 2e-3
"""Seconds between requests that one client sends at once, and between an answer and the next request."""
WAVES = 10
"""Requests of each place that a benchmark counts, the first one with them."""
SIMULATED = 4
"""Waves that are followed step by step: the first, two in the middle that stand for all such, and the last."""
MOST_PLACES = 64
"""More requests in flight than so many are taken together, several to one."""
GOLDEN = 0.6180339887498949
"""Multiples of it fill an interval evenly: lengths without a random number."""


@dataclass(frozen=True)
class ServedTimes:
    """Times of one worker under load.

    Attributes:
        first_token_seconds: mean time to the first token, with queueing.
        token_seconds: mean time per output token after the first.
        tokens_per_second: output tokens of the worker.
        requests_per_second: requests that end.
    """

    first_token_seconds: float
    token_seconds: float
    tokens_per_second: float
    requests_per_second: float


@dataclass
class _Request:
    """A request in the loop: when it came, what is left of its prompt, when its first token came."""

    arrival: float
    prompt: int
    left: int
    output: int
    wave: int
    begun: float = 0.0
    first: float = 0.0


def engine_options(engine: Engine) -> dict[str, Any]:
    """Return what :func:`serve` takes from an engine: how it schedules, and what it adds to the first token."""
    return {
        "tokens_per_step": engine.tokens_per_step, "mixes": engine.mixes, "kept_output": engine.output_reserved,
        "lookahead": engine.lookahead, "apart_seconds": engine.apart_seconds, "spread": engine.drift,
        "overhead_seconds": engine.first_token_seconds,
    }  # fmt: skip


def serve(
    step: Callable[[StepBatch], float], *, input_tokens: int, output_tokens: int, prefix_tokens: int = 0,
    in_flight: int, tokens_per_step: int, requests_per_second: float | None = None, mixes: bool = True,
    cache_tokens: float | None = None, waves: int = WAVES, spread: float = 0.0, overhead_seconds: float = 0.0,
    apart_seconds: float = APART_SECONDS, lookahead: int = 0, kept_output: float = 1.0,
) -> ServedTimes:
    """Return the times of requests of one worker.

    Args:
        step: seconds of a step.
        input_tokens: tokens of a prompt, with the prefix.
        output_tokens: tokens of an answer.
        prefix_tokens: tokens of a prompt that are in the cache already.
        in_flight: requests that the worker holds at once.
        tokens_per_step: most new tokens of a step.
        requests_per_second: arrivals, evenly spaced; None for a closed loop of ``in_flight`` requests.
        mixes: a step holds prefills and decodes; else decodes wait while there are prefills.
        cache_tokens: tokens for which there is cache: requests beyond wait for others to end. None for enough.
        waves: requests of each place that are counted, the first included.
        spread: lengths are even over ``1 - spread`` to 1 times those given; 0 for all alike.
        overhead_seconds: added to the time to the first token: the server and the way to it.
        apart_seconds: least seconds between requests that reach the scheduler.
        lookahead: steps that are scheduled ahead, for which a new request waits.
        kept_output: part of an answer for which a request holds cache from its begin.

    Raises:
        ValueError: no token, no request or no room in a step.
    """
    _check(input_tokens, output_tokens, prefix_tokens, in_flight, tokens_per_step, requests_per_second)
    together = -(-in_flight // MOST_PLACES)
    loop = _Loop(StepTable(step, in_flight, input_tokens, output_tokens, prefix_tokens, tokens_per_step),
                 input_tokens, output_tokens, prefix_tokens, tokens_per_step, mixes, spread, together)  # fmt: skip
    loop.places = max(1, round(in_flight / together))
    loop.cache_tokens = cache_tokens
    loop.apart, loop.lookahead, loop.kept_output = apart_seconds, lookahead, kept_output
    loop.run(min(waves, SIMULATED), requests_per_second)
    return loop.times(waves, overhead_seconds)


def _check(
    input_tokens: int, output_tokens: int, prefix: int, in_flight: int, tokens_per_step: int, rate: float | None
) -> None:
    """Refuse a load that nothing can serve."""
    for name, value in (("input tokens", input_tokens), ("output tokens", output_tokens),
                        ("requests in flight", in_flight), ("tokens of a step", tokens_per_step)):  # fmt: skip
        if value < 1:
            raise ValueError(f"serving with {value} {name}: at least 1 is needed")
    if not 0 <= prefix < input_tokens:
        raise ValueError(f"a prefix of {prefix} tokens in a prompt of {input_tokens}: at least one token must be new")
    if rate is not None and rate <= 0:
        raise ValueError(f"{rate} requests per second: give a number above 0")


class _Loop:
    """The loop over steps; steps that differ in nothing but the length of contexts are taken at once.

    ``together`` requests are one in all queues: they arrive, are prefilled and end at once.
    """

    def __init__(
        self, table: StepTable, input_tokens: int, output_tokens: int, prefix: int, tokens_per_step: int, mixes: bool,
        spread: float, together: int,
    ):  # fmt: skip
        self.table, self.prefix, self.mixes, self.together = table, prefix, mixes, together
        self.input_tokens, self.output_tokens, self.spread = input_tokens, output_tokens, spread
        self.tokens_per_step = tokens_per_step
        self.places = 1
        self.cache_tokens: float | None = None
        self.apart, self.lookahead, self.kept_output = 0.0, 0, 1.0
        self.last_sent = -1.0
        self.starts: deque[float] = deque([0.0] * 4, maxlen=4)  # when the last steps started, the oldest first
        self.now = 0.0
        self.steps = 0  # decode steps so far: a request that decodes ends at a number of them
        self.waiting: deque[_Request] = deque()
        self.decoding: list[tuple[int, int, _Request]] = []
        self.held = 0.0  # tokens for which cache is kept
        self.begun = 0.0  # sum over decoding requests of (prompt - steps at their start): contexts without counting
        self.made = self.ended = self.pushed = 0
        # Of each wave: requests, sums of times to the first token and per token, tokens, the last end.
        self.sums: list[list[float]] = []

    def arrive(self, when: float) -> None:
        """Add a request, at least ``apart`` seconds after the one before."""
        when = self.last_sent = max(when, self.last_sent) + self.apart
        scale = 1.0 - self.spread * ((self.made * GOLDEN) % 1.0)
        other = 1.0 - self.spread * (((self.made + 0.5) * GOLDEN * GOLDEN) % 1.0)
        prompt = max(1, round((self.input_tokens - self.prefix) * scale))
        self.waiting.append(_Request(when, prompt + self.prefix, prompt, max(1, round(self.output_tokens * other)),
                                     self.made // self.places))
        self.made += 1

    def run(self, waves: int, rate: float | None) -> None:
        """Run until all requests of so many waves have ended."""
        total = waves * self.places
        self.sums = [[0.0] * 5 for _ in range(waves)]
        upcoming = None
        if rate is None:
            for _ in range(min(self.places, total)):
                self.arrive(0.0)
        else:
            upcoming = 0.0
        gap = self.together / rate if rate else 0.0
        while self.ended < total:
            while upcoming is not None and upcoming <= self.now and self.made < total:
                self.arrive(upcoming)
                upcoming += gap
            self.starts.append(self.now)
            if self._admitted():
                self._prefill()
            elif self.decoding:
                self._decode(upcoming if self.made < total else None)
            elif self.waiting:
                self.now = max(self.now, self.waiting[0].arrival)
            elif upcoming is not None:
                self.now = max(self.now, upcoming)
            self._finish(total, rate is None)

    def _admitted(self) -> bool:
        if not self.waiting:
            return False
        head = self.waiting[0]
        seen = self.starts[-1 - self.lookahead] if self.decoding else self.now
        if head.arrival > seen:
            return False
        if head.left < head.prompt - self.prefix:  # begun already
            return True
        return not self.decoding or not self._full()

    def _full(self) -> bool:
        """Return True if no waiting request can begin before another ends."""
        head = self.waiting[0]
        if len(self.decoding) >= self.places:
            return True
        needed = self.together * (head.prompt + self.kept_output * head.output)
        return self.cache_tokens is not None and self.held + needed > self.cache_tokens

    def _prefill(self) -> None:
        """Run one step with as much of the waiting prompts as goes into it."""
        decodes = len(self.decoding) * self.together if self.mixes else 0
        room = max(1, self.tokens_per_step - decodes)
        done: list[_Request] = []
        chunk, past_work = 0, 0.0
        while room > 0 and self._admitted():
            request = self.waiting[0]
            if request.left == request.prompt - self.prefix:
                request.begun = self.now
                self.held += self.together * (request.prompt + self.kept_output * request.output)
            new = min(room, request.left * self.together)
            past_work += new * (request.prompt - request.left)
            chunk += new
            room -= new
            request.left -= -(-new // self.together)
            if request.left > 0:
                break
            done.append(self.waiting.popleft())
            if len(self.decoding) + len(done) >= self.places:
                break
        self.now += self.table.mixed(chunk, past_work, decodes, self._context())
        if self.mixes:
            self.steps += 1
        for request in done:
            # Of those that are taken together the first ones have their token earlier.
            request.first = self.now - (self.now - request.begun) * (self.together - 1) / (2 * self.together)
            self.begun += request.prompt - self.steps
            self.pushed += 1  # entries of the heap that end together stay in order
            heapq.heappush(self.decoding, (self.steps + request.output - 1, self.pushed, request))

    def _decode(self, until: float | None) -> None:
        """Run decode steps up to the next end of a request, or the next arrival."""
        count = max(1, self.decoding[0][0] - self.steps)
        decodes = len(self.decoding) * self.together
        seconds = self.table.decode(decodes, self._context() + count / 2)
        if self.waiting and not self._full():
            count = 1
        elif until is not None and until > self.now:
            count = max(1, min(count, int((until - self.now) / seconds) + 1))
        self.steps += count
        self.now += count * seconds

    def _context(self) -> float:
        return self.begun / len(self.decoding) + self.steps if self.decoding else 0.0

    def _finish(self, total: int, closed: bool) -> None:
        while self.decoding and self.decoding[0][0] <= self.steps:
            end, _, request = heapq.heappop(self.decoding)
            self.begun -= request.prompt - (end - request.output + 1)
            self.held -= self.together * (request.prompt + self.kept_output * request.output)
            self.ended += 1
            sums = self.sums[request.wave]
            sums[0] += 1
            sums[1] += request.first - request.arrival
            sums[2] += (self.now - request.first) / max(1, request.output - 1)
            sums[3] += self.together * request.output
            sums[4] = self.now
            if closed and self.made < total:
                self.arrive(self.now)

    def times(self, waves: int, overhead: float) -> ServedTimes:
        """Return means over all waves, of which the middle ones are taken to be alike; rates of the middle ones."""
        first, *middle, last = self.sums if len(self.sums) > 1 else [*self.sums, self.sums[0]]
        weight = (waves - 2) / len(middle) if middle else 0.0
        weighted = [(1.0, first), *((weight, sums) for sums in middle), (1.0, last)]
        requests = sum(w * sums[0] for w, sums in weighted)
        begin, end = (first[4], middle[-1][4]) if middle else (0.0, last[4])
        steady = middle or self.sums
        span = max(end - begin, 1e-12)
        return ServedTimes(
            sum(w * sums[1] for w, sums in weighted) / requests + overhead,
            sum(w * sums[2] for w, sums in weighted) / requests,
            sum(sums[3] for sums in steady) / span, self.together * sum(sums[0] for sums in steady) / span,
        )  # fmt: skip


def serve_disaggregated(
    prefill_step: Callable[[StepBatch], float], decode_step: Callable[[StepBatch], float], *, input_tokens: int,
    output_tokens: int, prefix_tokens: int = 0, prefill_workers: int, decode_workers: int, prefill_batch: int,
    decode_in_flight: int, transfer_seconds: float, requests_per_second: float | None = None, waves: int = WAVES,
    overhead_seconds: float = 0.0,
) -> ServedTimes:
    """Return the times of requests that some workers prefill and others decode; rates are those of all workers.

    Decoding workers hold at most ``decode_in_flight`` requests each. Where prefills are too slow to fill them, or
    fewer requests arrive, they hold fewer, which is faster for each.

    Args:
        prefill_step: seconds of a step of a prefill worker.
        decode_step: seconds of a step of a decode worker.
        input_tokens: tokens of a prompt, with the prefix.
        output_tokens: tokens of an answer.
        prefix_tokens: tokens of a prompt that are in the cache already.
        prefill_workers: workers that prefill.
        decode_workers: workers that decode.
        prefill_batch: prompts of a prefill step.
        decode_in_flight: most requests in one decode worker.
        transfer_seconds: seconds of moving a prompt's cache to the worker that decodes.
        requests_per_second: arrivals; None for as many as are served.
        waves: requests of each place that are counted; at the first one all arrive together.
        overhead_seconds: added to the time to the first token.
    """
    prompts = (Prefill(max(1, input_tokens - prefix_tokens), prefix_tokens),) * prefill_batch
    batch_seconds = prefill_step(StepBatch(prompts))
    most = prefill_workers * prefill_batch / batch_seconds
    context, answered = input_tokens + output_tokens / 2, max(1, output_tokens - 1)

    def rate_at(held: float) -> float:
        """Return the requests that end in a second where each decode worker holds so many."""
        low = max(1, int(held))
        part = min(1.0, max(0.0, held - low))
        few, many = (decode_step(StepBatch((), count, context)) for count in (low, low + 1))
        return decode_workers * held / (answered * (few + part * (many - few)))

    wanted = min(most, rate_at(decode_in_flight), requests_per_second or float("inf"))
    held = _held(rate_at, wanted, decode_in_flight)
    busy = min(wanted / most, 0.95)
    # A batch that comes at random waits for half of the one in work, times as many as are queued behind a busy worker.
    waiting = batch_seconds * busy / (2 * prefill_workers * (1 - busy))
    together = decode_in_flight * decode_workers if requests_per_second is None else 0
    first_wave = max(0.0, (together / (prefill_workers * prefill_batch) - 1) / 2 * batch_seconds)
    first = batch_seconds + waiting * (waves - 1) / waves + first_wave / waves + transfer_seconds + overhead_seconds
    token = held * decode_workers / (wanted * answered)
    return ServedTimes(first, token, wanted * output_tokens, wanted)


def _held(rate_at: Callable[[float], float], wanted: float, most: int) -> float:
    """Return how many requests each decode worker holds for a rate, by halving."""
    low, high = 0.0, float(most)
    for _ in range(20):
        middle = (low + high) / 2
        if rate_at(max(middle, 1e-6)) < wanted:
            low = middle
        else:
            high = middle
    return max(high, 1e-6)
