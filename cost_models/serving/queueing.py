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

from .step_table import StepTable
from .work import StepBatch

WAVES = 10
"""Requests of each place that a benchmark counts, the first one with them."""
MOST_PLACES = 96
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
    first: float = 0.0


def serve(
    step: Callable[[StepBatch], float], *, input_tokens: int, output_tokens: int, prefix_tokens: int = 0,
    in_flight: int, tokens_per_step: int, requests_per_second: float | None = None, mixes: bool = True,
    cache_tokens: float | None = None, waves: int = WAVES, spread: float = 0.0, overhead_seconds: float = 0.0,
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
    """
    together = -(-in_flight // MOST_PLACES)
    loop = _Loop(StepTable(step, in_flight, input_tokens, output_tokens, prefix_tokens, tokens_per_step),
                 input_tokens, output_tokens, prefix_tokens, tokens_per_step, mixes, spread, together)  # fmt: skip
    loop.places = max(1, round(in_flight / together))
    loop.cache_tokens = cache_tokens
    loop.run(waves * loop.places, requests_per_second)
    return loop.times(overhead_seconds)


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
        self.now = 0.0
        self.steps = 0  # decode steps so far: a request that decodes ends at a number of them
        self.waiting: deque[_Request] = deque()
        self.decoding: list[tuple[int, int, _Request]] = []
        self.held = 0.0  # tokens for which cache is kept
        self.begun = 0.0  # sum over decoding requests of (prompt - steps at their start): contexts without counting
        self.made = self.ended = self.pushed = 0
        self.first_sum = self.token_sum = 0.0
        self.tokens = 0.0

    def arrive(self, when: float) -> None:
        """Add a request."""
        scale = 1.0 - self.spread * ((self.made * GOLDEN) % 1.0)
        other = 1.0 - self.spread * (((self.made + 0.5) * GOLDEN * GOLDEN) % 1.0)
        prompt = max(1, round((self.input_tokens - self.prefix) * scale))
        self.waiting.append(_Request(when, prompt + self.prefix, prompt, max(1, round(self.output_tokens * other))))
        self.made += 1

    def run(self, total: int, rate: float | None) -> None:
        """Run until ``total`` requests have ended."""
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
            if self._admitted():
                self._prefill()
            elif self.decoding:
                self._decode(upcoming if self.made < total else None)
            elif upcoming is not None:
                self.now = max(self.now, upcoming)
            self._finish(total, rate is None)

    def _admitted(self) -> bool:
        if not self.waiting:
            return False
        head = self.waiting[0]
        if head.left < head.prompt - self.prefix:  # begun already
            return True
        if len(self.decoding) >= self.places:
            return False
        if self.cache_tokens is None or not self.decoding:
            return True
        return self.held + self.together * (head.prompt + head.output) <= self.cache_tokens

    def _prefill(self) -> None:
        """Run one step with as much of the waiting prompts as goes into it."""
        decodes = len(self.decoding) * self.together if self.mixes else 0
        room = max(1, self.tokens_per_step - decodes)
        done: list[_Request] = []
        chunk, past_work = 0, 0.0
        while room > 0 and self._admitted():
            request = self.waiting[0]
            if request.left == request.prompt - self.prefix:
                self.held += self.together * (request.prompt + request.output)
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
            request.first = self.now
            self.first_sum += self.now - request.arrival
            self.begun += request.prompt - self.steps
            self.pushed += 1  # entries of the heap that end together stay in order
            heapq.heappush(self.decoding, (self.steps + request.output - 1, self.pushed, request))

    def _decode(self, until: float | None) -> None:
        """Run decode steps up to the next end of a request, or the next arrival."""
        count = max(1, self.decoding[0][0] - self.steps)
        decodes = len(self.decoding) * self.together
        seconds = self.table.decode(decodes, self._context() + count / 2)
        if until is not None and until > self.now:
            count = max(1, min(count, int((until - self.now) / seconds) + 1))
        self.steps += count
        self.now += count * seconds

    def _context(self) -> float:
        return self.begun / len(self.decoding) + self.steps if self.decoding else 0.0

    def _finish(self, total: int, closed: bool) -> None:
        while self.decoding and self.decoding[0][0] <= self.steps:
            end, _, request = heapq.heappop(self.decoding)
            self.begun -= request.prompt - (end - request.output + 1)
            self.held -= self.together * (request.prompt + request.output)
            self.ended += 1
            self.tokens += self.together * request.output
            if request.output > 1:
                self.token_sum += (self.now - request.first) / (request.output - 1)
            if closed and self.made < total:
                self.arrive(self.now)

    def times(self, overhead: float) -> ServedTimes:
        """Return the means over all requests."""
        return ServedTimes(
            self.first_sum / self.ended + overhead, self.token_sum / self.ended, self.tokens / self.now,
            self.ended * self.together / self.now,
        )  # fmt: skip
