"""Times of requests that share a worker: against loops that are followed by hand."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from cost_models.serving.queueing import APART_SECONDS, engine_options, serve, serve_disaggregated
from cost_models.serving.work import StepBatch
from hardware_profiles.engines import engine_named

PREFILL, DECODE = 1e-4, 1e-2


def step(batch: StepBatch) -> float:
    """A tenth of a millisecond for a new token of a prompt, ten milliseconds for decodes whatever their number."""
    return PREFILL * sum(p.new for p in batch.prefills) + (DECODE if batch.decodes else 0.0)


def test_one_request_at_a_time() -> None:
    times = serve(step, input_tokens=1000, output_tokens=101, in_flight=1, tokens_per_step=8192)
    assert times.first_token_seconds == pytest.approx(0.1, rel=0.01)
    assert times.token_seconds == pytest.approx(DECODE)
    assert times.requests_per_second == pytest.approx(1 / (0.1 + 100 * DECODE + APART_SECONDS), rel=0.01)
    assert times.tokens_per_second == pytest.approx(101 * times.requests_per_second)


def test_a_prefix_is_not_computed_again() -> None:
    times = serve(step, input_tokens=1000, output_tokens=101, prefix_tokens=900, in_flight=1, tokens_per_step=8192)
    assert times.first_token_seconds == pytest.approx(0.01, rel=0.01)


def test_requests_that_arrive_together_wait_for_each_other() -> None:
    """One wave of eight, a prompt a step: the first waits for one prefill, the last for eight."""
    times = serve(step, input_tokens=1000, output_tokens=1, in_flight=8, tokens_per_step=1000, mixes=False, waves=1,
                  apart_seconds=0.0)  # fmt: skip
    assert times.first_token_seconds == pytest.approx(0.1 * 4.5)


def test_chunks_that_share_a_step_end_together() -> None:
    times = serve(step, input_tokens=1000, output_tokens=2, in_flight=8, tokens_per_step=8000, waves=1,
                  apart_seconds=0.0)  # fmt: skip
    assert times.first_token_seconds == pytest.approx(0.8)
    assert times.token_seconds == pytest.approx(DECODE)


def test_decodes_wait_for_prefills_where_steps_do_not_mix() -> None:
    """Eight prompts, one a step: the first answer stands still for seven prefills, the last for none."""
    options = dict(input_tokens=1000, output_tokens=11, in_flight=8, waves=1, apart_seconds=0.0)
    apart = serve(step, tokens_per_step=1000, mixes=False, **options)
    assert apart.token_seconds == pytest.approx(DECODE + 0.1 * 3.5 / 10)
    mixed = serve(step, tokens_per_step=1007, mixes=True, **options)
    assert mixed.token_seconds < apart.token_seconds + DECODE


def test_the_first_wave_is_a_tenth_of_ten() -> None:
    """With lengths that differ later requests come one at a time; the first wave of 32 waits 16.5 prefills."""
    times = serve(step, input_tokens=1000, output_tokens=1000, in_flight=32, tokens_per_step=1032, spread=0.2)
    assert 0.1 * 0.9 * 16.5 * 0.1 + 0.09 < times.first_token_seconds < 0.1 * 16.5 * 0.1 * 1.2 + 0.09 * 2.5


def test_more_in_flight_never_serves_less() -> None:
    rates = [serve(step, input_tokens=1000, output_tokens=200, in_flight=n, tokens_per_step=2048).tokens_per_second
             for n in (1, 2, 8, 32, 128, 512)]  # fmt: skip
    assert all(more > 0.97 * few for few, more in pairwise(rates))
    assert rates[-1] < 200 / (1000 * PREFILL)  # prefills alone


def test_a_full_cache_makes_requests_wait() -> None:
    options = dict(input_tokens=1000, output_tokens=1000, in_flight=16, tokens_per_step=4096, spread=0.2)
    enough, scarce = serve(step, **options), serve(step, cache_tokens=8000.0, **options)
    assert scarce.first_token_seconds > 2.0 + enough.first_token_seconds
    assert scarce.tokens_per_second < 0.4 * enough.tokens_per_second
    grows = serve(step, cache_tokens=8000.0, kept_output=0.5, **options)
    assert scarce.tokens_per_second < grows.tokens_per_second < enough.tokens_per_second


def test_steps_that_are_scheduled_ahead_delay_the_first_token() -> None:
    options = dict(input_tokens=1000, output_tokens=200, in_flight=16, tokens_per_step=2048, spread=0.1)
    assert serve(step, lookahead=1, **options).first_token_seconds > serve(step, **options).first_token_seconds


def test_an_open_loop_serves_what_arrives_and_waits_more_when_busy() -> None:
    options = dict(input_tokens=1000, output_tokens=100, in_flight=64, tokens_per_step=2048)
    few, many = (serve(step, requests_per_second=rate, **options) for rate in (1.0, 7.0))
    assert few.requests_per_second == pytest.approx(1.0, rel=0.1)
    assert few.first_token_seconds == pytest.approx(0.1, rel=0.3)
    assert many.token_seconds > few.token_seconds
    assert many.requests_per_second <= 7.0 * 1.05


def test_it_is_the_same_every_time_and_quick() -> None:
    options = dict(input_tokens=1024, output_tokens=1024, in_flight=128, tokens_per_step=2048, spread=0.2)
    first = serve(step, **options)
    begin = time.process_time()
    for _ in range(5):
        assert serve(step, **options) == first
    assert (time.process_time() - begin) / 5 < 0.05


def test_many_in_flight_are_taken_together_without_much_change() -> None:
    """64 are followed one by one; 65 as pairs: no jump in between."""
    options = dict(input_tokens=1000, output_tokens=400, tokens_per_step=2048, spread=0.2)
    alone, pairs = serve(step, in_flight=64, **options), serve(step, in_flight=66, **options)
    assert pairs.first_token_seconds == pytest.approx(alone.first_token_seconds, rel=0.15)
    assert pairs.token_seconds == pytest.approx(alone.token_seconds, rel=0.1)


def test_what_an_engine_says_about_its_queue_is_taken() -> None:
    options = engine_options(engine_named("sglang"))
    assert options["mixes"] is False and options["tokens_per_step"] == engine_named("sglang").tokens_per_step
    times = serve(step, input_tokens=1000, output_tokens=10, in_flight=4, **options)
    assert times.first_token_seconds > engine_named("sglang").first_token_seconds


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"in_flight": 0}, "serving with 0 requests in flight"), ({"output_tokens": 0}, "0 output tokens"),
        ({"prefix_tokens": 1000}, "a prefix of 1000 tokens in a prompt of 1000"),
        ({"requests_per_second": 0.0}, "0.0 requests per second"),
    ],
)  # fmt: skip
def test_loads_that_are_refused(wrong: dict[str, float], says: str) -> None:
    options = {"input_tokens": 1000, "output_tokens": 10, "in_flight": 4, "tokens_per_step": 2048} | wrong
    with pytest.raises(ValueError, match=says):
        serve(step, **options)


def slow_when_full(batch: StepBatch) -> float:
    return 5e-3 + 1e-4 * batch.decodes


def test_disaggregated_workers_are_as_fast_as_the_slower_kind() -> None:
    options = dict(input_tokens=1000, output_tokens=101, prefill_batch=1, decode_in_flight=50, transfer_seconds=0.02)
    times = serve_disaggregated(step, slow_when_full, prefill_workers=1, decode_workers=1, **options)
    assert times.requests_per_second == pytest.approx(10.0, rel=0.01)  # prefills: one in 0.1 s
    held = 10.0 * 100 * times.token_seconds
    assert times.token_seconds == pytest.approx(5e-3 + 1e-4 * held, rel=0.02)
    more = serve_disaggregated(step, slow_when_full, prefill_workers=20, decode_workers=1, **options)
    assert more.token_seconds == pytest.approx(10e-3, rel=0.01)  # full: 50 in flight
    assert more.requests_per_second == pytest.approx(50 / (100 * 10e-3), rel=0.01)
    assert more.first_token_seconds < times.first_token_seconds
    assert more.first_token_seconds > 0.1 + 0.02


def test_disaggregated_workers_at_a_low_rate() -> None:
    times = serve_disaggregated(
        step, slow_when_full, input_tokens=1000, output_tokens=101, prefill_workers=1, decode_workers=2,
        prefill_batch=1, decode_in_flight=50, transfer_seconds=0.0, requests_per_second=1.0,
    )  # fmt: skip
    assert times.requests_per_second == pytest.approx(1.0)
    assert times.first_token_seconds == pytest.approx(0.1, rel=0.1)
    assert times.token_seconds == pytest.approx(5.1e-3, rel=0.03)
