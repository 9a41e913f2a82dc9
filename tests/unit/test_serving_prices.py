"""Seconds of an engine's step: against closed forms, and what more work, devices and narrower formats do."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cost_models.serving.decode_attention import decode_attention_seconds, prefill_attention_seconds
from cost_models.serving.expert_hits import UNEVEN, experts_hit, pairs_on_busiest
from cost_models.serving.small_collectives import exchange_seconds
from cost_models.serving.step_price import step_seconds
from cost_models.serving.thin_products import product_rate, product_seconds
from cost_models.serving.work import (
    REQUESTS,
    Attention,
    Experts,
    MatrixProduct,
    Prefill,
    RowWork,
    StepBatch,
    StepExchange,
    StepWork,
)
from hardware_profiles import ProfileError, load_cluster
from hardware_profiles.engines import Engine, engine_named, engines
from hardware_profiles.small_rates import small_rates, small_rates_of

H100 = load_cluster("dgx-h100")
B200 = load_cluster("dgx-b200")
DEVICE = H100.device(0)
PLAIN = Engine("plain", host_seconds=0.0)
LAYERS = 32


def block(tensor: int = 1, form: str = "bf16", cache: str = "bf16") -> StepWork:
    """A Llama-like model: 4,096 wide, 32 heads over 8 of keys, 14,336 in the middle."""
    products = (
        MatrixProduct(6144 // tensor, 4096, form, form, LAYERS),
        MatrixProduct(4096, 4096 // tensor, form, form, LAYERS),
        MatrixProduct(28672 // tensor, 4096, form, form, LAYERS),
        MatrixProduct(4096, 14336 // tensor, form, form, LAYERS),
        MatrixProduct(128256 // tensor, 4096, "bf16", "bf16", 1, REQUESTS),
    )  # fmt: skip
    attention = Attention(32 // tensor, 8 // tensor, 128, 128, None, cache, True, LAYERS)
    exchanges = (StepExchange("all_reduce", 8192.0, tensor, 1, 2 * LAYERS),) if tensor > 1 else ()
    return StepWork(products, (attention,), (), RowWork(2.0 * LAYERS * 80000, 5 * LAYERS), exchanges, LAYERS,
                    vocabulary=128256 // tensor)  # fmt: skip


def seconds(work: StepWork, batch: StepBatch, engine: Engine = PLAIN) -> float:
    return step_seconds(work, batch, H100, engine).seconds


def test_a_thin_product_takes_the_time_to_read_its_weight() -> None:
    rate = product_rate(DEVICE, "bf16", "bf16")
    read = 2.0 * 8192 * 8192 / (DEVICE.memory_bytes_per_second * small_rates_of(DEVICE).weight_fraction)
    assert product_seconds(rate, 1, 8192, 8192) == pytest.approx(read, rel=0.02)
    assert product_seconds(rate, 16, 8192, 8192) == pytest.approx(read, rel=0.1)


def test_a_tall_product_takes_the_time_to_compute() -> None:
    took = product_seconds(product_rate(DEVICE, "bf16", "bf16"), 8192, 8192, 8192)
    reached = 2.0 * 8192**3 / took / DEVICE.peak_flops["bfloat16"]
    assert 0.45 < reached < 0.8


def test_products_never_get_faster_with_rows() -> None:
    for form in ("bf16", "fp8", "int4"):
        rate = product_rate(DEVICE, form, "bf16" if form == "int4" else form)
        times = [product_seconds(rate, rows, 4096, 4096) for rows in (1, 2, 8, 32, 100, 128, 129, 512, 4096)]
        assert times == sorted(times)


def test_narrow_weights_are_read_faster_but_not_by_all_of_their_bytes() -> None:
    wide, eight, four = (product_seconds(product_rate(DEVICE, form, "bf16"), 1, 8192, 8192)
                         for form in ("bf16", "fp8", "int4"))  # fmt: skip
    assert eight == pytest.approx(wide / 2, rel=0.05)
    assert wide / 3.5 < four < eight


def test_four_bits_compute_faster_where_the_device_has_them() -> None:
    device = B200.device(0)
    eight, four = (product_seconds(product_rate(device, form, form), 8192, 8192, 8192) for form in ("fp8", "nvfp4"))
    assert four < 0.7 * eight
    assert product_seconds(product_rate(DEVICE, "nvfp4", "nvfp4"), 8192, 8192, 8192) >= product_seconds(
        product_rate(DEVICE, "fp8", "fp8"), 8192, 8192, 8192
    )


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown format 'fp5' of a product, known: bf16"):
        product_rate(DEVICE, "fp5", "bf16")
    bad = StepWork(attentions=(Attention(8, 8, 64, 64, None, "fp5"),))
    with pytest.raises(ValueError, match="unknown format 'fp5' of a cache, known: bf16"):
        step_seconds(bad, StepBatch((), 4, 100.0), H100, PLAIN)


def test_decode_attention_reads_the_cache() -> None:
    small, layer = small_rates_of(DEVICE), Attention(32, 8, 128, 128, None, "bf16")
    took = decode_attention_seconds(DEVICE, small, layer, StepBatch((), 64, 8192.0)) - small.attention_seconds
    read = 64 * 8192 * 8 * 256 * 2.0 / (DEVICE.memory_bytes_per_second * small.cache_fraction)
    assert took == pytest.approx(read)
    half = decode_attention_seconds(DEVICE, small, replace(layer, cache="fp8"), StepBatch((), 64, 8192.0))
    assert half - small.attention_seconds == pytest.approx(read / 2)
    window = decode_attention_seconds(DEVICE, small, replace(layer, window=128), StepBatch((), 64, 8192.0))
    assert window - small.attention_seconds == pytest.approx(read / 64)
    assert decode_attention_seconds(DEVICE, small, layer, StepBatch((Prefill(10),))) == 0.0


def test_latent_attention_of_many_heads_computes_longer_than_it_reads() -> None:
    small, batch = small_rates_of(DEVICE), StepBatch((), 64, 8192.0)
    few, many = (decode_attention_seconds(DEVICE, small, Attention(heads, 1, 512, 64, None, "bf16"), batch)
                 for heads in (8, 512))  # fmt: skip
    assert many > 1.5 * few


def test_latent_attention_scores_the_whole_cache_in_decodes_and_is_expanded_in_prefills() -> None:
    layer = Attention(128, 1, 64, 512, None, "bf16", expanded=(192, 128))  # DeepSeek-V3
    assert (layer.decode_width, layer.prefill_width) == (576 + 512, 192 + 128)
    small, batch = small_rates_of(DEVICE), StepBatch((), 512, 8192.0)
    seconds = decode_attention_seconds(DEVICE, small, layer, batch) - small.attention_seconds
    assert seconds >= 2.0 * 512 * 8192 * 128 * (576 + 512) / DEVICE.peak_flops["bfloat16"]
    wide, expanded = (prefill_attention_seconds(DEVICE, each, Prefill(8192))
                      for each in (replace(layer, expanded=None), layer))  # fmt: skip
    assert 0.5 < expanded / wide < 0.7  # 320 of 576


def test_prefill_attention_grows_with_the_square_and_the_past() -> None:
    layer = Attention(32, 8, 128, 128, None, "bf16")
    short, long = (prefill_attention_seconds(DEVICE, layer, Prefill(new)) for new in (8192, 16384))
    assert 3.5 < long / short < 4.0
    behind = prefill_attention_seconds(DEVICE, layer, Prefill(8192, 8192))
    assert behind == pytest.approx(long - short, rel=0.05)  # the second half of the long prompt
    windowed = prefill_attention_seconds(DEVICE, replace(layer, window=128), Prefill(8192))
    assert windowed < short / 8


def test_experts_that_a_step_hits() -> None:
    layer = Experts(128, 128, 4, ((2880, 2880),), "mxfp4", "bf16")
    assert experts_hit(layer, 1) == pytest.approx(4, rel=0.03)
    hits = [experts_hit(layer, tokens) for tokens in (1, 4, 16, 64, 256, 4096)]
    assert hits == sorted(hits) and hits[-1] == pytest.approx(128, rel=0.001)
    even = 128 * (1 - (1 - 4 / 128) ** 64)
    assert UNEVEN > 0 and hits[3] < even  # some are chosen often, so fewer different ones
    ranked = replace(layer, local=16)
    assert experts_hit(ranked, 64) == pytest.approx(hits[3] / 8)


def test_the_busiest_rank_gets_more_than_its_share_and_never_all() -> None:
    layer = Experts(16, 128, 4, ((2880, 2880),), "mxfp4", "bf16", spread=8)
    for tokens in (1, 16, 256, 8192):
        mean = tokens * 4 * 16 / 128
        assert mean < pairs_on_busiest(layer, tokens) <= tokens * 4
    assert pairs_on_busiest(layer, 8192) < 2 * 8192 / 2
    assert pairs_on_busiest(replace(layer, local=128), 100) == 400


def test_small_all_reduces_are_pushed_and_large_ones_are_the_librarys() -> None:
    small, exchange = small_rates_of(DEVICE), StepExchange("all_reduce", 8192.0, 8)
    pushed, library = (exchange_seconds(H100, DEVICE, small, exchange, 8192.0, pushes=way) for way in (True, False))
    assert pushed == pytest.approx(small.push_seconds + 8 * small.push_step_seconds
                                   + 7 * 8192 / (450e9 * small.push_fraction))  # fmt: skip
    assert pushed < library
    large = [exchange_seconds(H100, DEVICE, small, exchange, 64e6, pushes=pushes) for pushes in (True, False)]
    assert large[0] == large[1] == pytest.approx(325e-6, rel=0.15)  # NCCL on 8 H100: 325 us measured
    assert exchange_seconds(H100, DEVICE, small, replace(exchange, group=1), 8192.0, pushes=True) == 0.0


def test_an_exchange_between_machines_is_never_pushed() -> None:
    two, small = load_cluster("dgx-h100-x2"), small_rates_of(DEVICE)
    far = StepExchange("all_reduce", 8192.0, 2, 8)
    times = [exchange_seconds(two, DEVICE, small, far, 8192.0, pushes=pushes) for pushes in (True, False)]
    assert times[0] == times[1]
    assert times[0] > exchange_seconds(two, DEVICE, small, replace(far, stride=1), 8192.0, pushes=True)


def test_parts_sum_up() -> None:
    price = step_seconds(block(), StepBatch((Prefill(512),), 7, 900.0), H100, engine_named("vllm"))
    assert price.seconds == pytest.approx(math.fsum(price.parts.values()))
    assert set(price.parts) == {"products", "attention", "experts", "exchanges", "rows", "launches", "host", "sampling"}
    assert all(value >= 0 for value in price.parts.values())


def test_a_decode_of_8_billion_parameters() -> None:
    """Weights of 15 GB take 5.6 ms at 80% of 3.35 TB/s; a step is little longer."""
    took = seconds(block(), StepBatch((), 1, 1000.0))
    assert 5.6e-3 < took < 7.5e-3
    assert seconds(block(), StepBatch((), 32, 1000.0)) < 1.5 * took


def test_more_devices_and_narrower_formats_are_faster() -> None:
    batch = StepBatch((), 16, 2000.0)
    times = [seconds(block(tensor), batch) for tensor in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True) and times[3] > times[0] / 8
    assert seconds(block(form="fp8"), batch) < times[0]
    assert seconds(block(cache="fp8"), StepBatch((), 64, 8000.0)) < seconds(block(), StepBatch((), 64, 8000.0))


def test_an_engine_that_widens_the_cache_reads_it_no_faster() -> None:
    widens, batch = replace(PLAIN, widens_cache=(DEVICE.name,)), StepBatch((), 64, 8000.0)
    assert seconds(block(cache="fp8"), batch, widens) == pytest.approx(seconds(block(), batch, widens))


def test_an_engine_without_graphs_waits_for_its_host() -> None:
    eager = replace(PLAIN, graph_requests=0, launch_seconds=8e-6)
    kernels = 4 * LAYERS + 1 + 4 * LAYERS + 2 * LAYERS + 6
    assert seconds(block(8), StepBatch((), 1, 100.0), eager) >= kernels * 8e-6 - 1e-9
    long = StepBatch((Prefill(8192),))
    assert seconds(block(), long, eager) == pytest.approx(seconds(block(), long), rel=0.05)


def test_stages_pass_parts_of_a_batch_one_after_the_other() -> None:
    work = block()
    half = replace(work, products=tuple(replace(p, count=max(1, p.count // 2)) for p in work.products), stages=2)
    whole = seconds(replace(half, stages=1), StepBatch((), 16, 500.0))
    assert seconds(half, StepBatch((), 32, 500.0)) == pytest.approx(2 * whole)


def test_factors_of_a_step_with_and_without_prefills() -> None:
    twice = replace(PLAIN, factors={DEVICE.name: 2.0}, prefill_factors={DEVICE.name: 3.0})
    decode, prefill = StepBatch((), 4, 100.0), StepBatch((Prefill(100),))
    assert seconds(block(), decode, twice) == pytest.approx(2 * seconds(block(), decode))
    assert seconds(block(), prefill, twice) == pytest.approx(3 * seconds(block(), prefill))


def test_slow_experts_of_one_gpu() -> None:
    layer = Experts(128, 128, 4, ((5760, 2880), (2880, 2880)), "mxfp4", "bf16", count=36)
    work, batch = StepWork(experts=(layer,)), StepBatch((), 16, 100.0)
    slow = replace(PLAIN, expert_factors={f"mxfp4 on {DEVICE.name}": 3.0, "mxfp4": 9.0})
    price, slower = (step_seconds(work, batch, H100, engine).parts for engine in (PLAIN, slow))
    assert slower["experts"] == pytest.approx(3 * price["experts"], rel=1e-4)
    assert slower["launches"] == price["launches"]
    many = StepBatch((Prefill(65536),))
    price, slower = (step_seconds(work, many, H100, engine).parts for engine in (PLAIN, slow))
    assert slower["experts"] < 1.1 * price["experts"]  # computing takes as long, reading weights alone is slow
    more = replace(PLAIN, expert_kernels_on={DEVICE.name: 2 * PLAIN.expert_kernels})
    assert step_seconds(work, batch, H100, more).parts["launches"] == pytest.approx(2 * price["launches"])
    elsewhere = replace(PLAIN, expert_factors={"mxfp4 on B200": 3.0})
    assert seconds(work, batch, elsewhere) == seconds(work, batch)


def test_experts_that_the_host_starts_one_by_one_bound_a_prefill_and_no_graph() -> None:
    layer = Experts(128, 128, 4, ((5760, 2880), (2880, 2880)), "mxfp4", "bf16", count=36)
    work, started = StepWork(experts=(layer,)), replace(PLAIN, expert_host_on={DEVICE.name: 1e-2})
    assert seconds(work, StepBatch((), 16, 100.0), started) == seconds(work, StepBatch((), 16, 100.0))
    assert seconds(work, StepBatch((Prefill(1024),)), started) == pytest.approx(
        36 * (1e-2 + PLAIN.expert_kernels * PLAIN.launch_seconds) + 0.0, rel=0.01
    )
    assert seconds(work, StepBatch((Prefill(262144),)), started) == pytest.approx(
        seconds(work, StepBatch((Prefill(262144),)))
    )


def test_narrow_experts_fill_their_tiles_in_part() -> None:
    grouped, plain = (product_rate(DEVICE, "mxfp4", "bf16", grouped=both) for both in (True, False))
    half = small_rates_of(DEVICE).grouped_half
    assert half > 0 and (grouped.half_n - plain.half_n, grouped.half_k - plain.half_k) == (half, half)
    whole, parts = product_seconds(grouped, 8192, 2880, 2880), product_seconds(grouped, 8192, 360, 2880)
    assert parts > 1.3 * whole / 8


def test_engines_say_where_their_factor_comes_from() -> None:
    assert set(engines()) == {"vllm", "sglang", "tensorrt-llm", "autopar"}
    vllm = engine_named("vllm")
    assert vllm.factor("B200") == vllm.factors["B200"]
    assert "fitted on" in vllm.factor_note("B200")
    assert vllm.factor("L40S") == vllm.general_factor
    assert "not measured on L40S" in vllm.factor_note("L40S")
    with pytest.raises(ProfileError, match="unknown engine 'vlm': did you mean 'vllm'"):
        engine_named("vlm")


def test_rates_of_devices_without_a_family_are_the_general_ones() -> None:
    assert small_rates_of(load_cluster("pcie-l40s").device(0)).name == "general"
    assert set(small_rates()) == {"general", "hopper", "blackwell"}
