"""The search over deployments: fronts, limits, memory, and the command."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise

import pytest
import torch
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.cli.common import UsageError
from autopar.errors import ClusterError, InfeasibleError, PlanError
from autopar.serving import search
from autopar.serving.front import front
from autopar.serving.layout_words import layout_in
from autopar.serving.planning import check_load, plan_serving
from autopar.serving.records import DECODE, PREFILL, ServingLoad
from autopar.serving.worker_layouts import ModelShape, layouts_on
from cost_models.serving.queueing import APART_SECONDS, engine_options, serve
from hardware_profiles import load_cluster
from hardware_profiles.engines import engine_named

transformers = pytest.importorskip("transformers")
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 32000,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
LOAD = ServingLoad(1000, 100)


@cache
def model():
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{
            k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type", "torch_dtype")
        }))  # fmt: skip


@cache
def answer(load=LOAD, devices=8, **options):
    inputs = (), {"input_ids": torch.zeros(1, 32, dtype=torch.int64, device="meta")}
    return plan_serving(model(), load_cluster("dgx-h100"), inputs, load, engine="vllm", devices=devices, **options)


def test_a_front_is_one():
    points = [(d.served.tokens_per_second_per_user, d.served.tokens_per_second_per_device) for d in answer().front]
    assert len(points) > 3
    assert points == sorted(points) and [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert front(answer().front) == list(answer().front)


def test_plans_keep_limits():
    limited = ServingLoad(1000, 100, first_token_seconds=0.5, token_seconds=0.012)
    found = answer(limited)
    assert found.ranked and all(d.meets(limited) for d in found.ranked)
    best = max(d.served.tokens_per_second_per_device for d in found.ranked)
    assert found.plan.served.tokens_per_second_per_device == pytest.approx(best, abs=1e-2)
    assert best <= max(d.served.tokens_per_second_per_device for d in answer().ranked) + 1e-2


def test_no_deployment_keeps_impossible_limits():
    with pytest.raises(InfeasibleError, match=r"keeps the limits: the nearest, .* misses time per output token: .* of"):
        answer(ServingLoad(1000, 100, token_seconds=1e-4))


def test_memory_binds():
    for each in answer(ServingLoad(8000, 100)).ranked:
        for worker in each.workers:
            assert worker.memory.total <= worker.memory.limit
    with pytest.raises(InfeasibleError, match=r"no layout on 1 x .* holds one request .* needs .* of"):
        _too_large()


def _too_large():
    big = transformers.LlamaConfig(hidden_size=16384, num_hidden_layers=48, num_attention_heads=128,
                                   num_key_value_heads=8, intermediate_size=53248, vocab_size=32000)  # fmt: skip
    with torch.device("meta"):
        whole = transformers.LlamaForCausalLM(big)
    inputs = (), {"input_ids": torch.zeros(1, 32, dtype=torch.int64, device="meta")}
    plan_serving(whole, load_cluster("dgx-h100"), inputs, LOAD, engine="vllm", devices=1)


def test_more_devices_serve_no_less():
    rates = [answer(devices=n).plan.served.requests_per_second for n in (1, 2, 4, 8)]
    assert all(b >= a * (1 - 1e-6) for a, b in pairwise(rates)), rates


def test_narrow_weights_serve_more():
    assert answer(precision="fp8").plan.served.requests_per_second > answer().plan.served.requests_per_second


def test_prefill_and_decode_apart():
    found = [d for d in (*answer().ranked, *answer().front) if d.disaggregated]
    assert found
    for each in found:
        prefill, decode = each.workers
        assert (prefill.phase, decode.phase) == (PREFILL, DECODE)
        used = sum(w.replicas * w.layout.devices for w in each.workers)
        assert used == each.devices <= 8 and each.served.transfer_seconds > 0


def test_a_cached_prefix_comes_sooner():
    cached = answer(ServingLoad(1000, 100, prefix_tokens=900), like=("tp=1,batch=8",)).like[0]
    whole = answer(like=("tp=1,batch=8",)).like[0]
    assert cached.served.first_token_seconds < whole.served.first_token_seconds
    assert cached.workers[0].memory == whole.workers[0].memory


def test_more_in_flight_takes_longer():
    few, many = (answer(like=(f"tp=2,batch={n}",)).like[0] for n in (2, 64))
    assert few.served.token_seconds < many.served.token_seconds
    assert few.served.tokens_per_second_per_device < many.served.tokens_per_second_per_device
    assert few.workers[0].memory.cache < many.workers[0].memory.cache


def test_a_worker_queues_as_its_engine_does(monkeypatch):
    engine, seen = engine_named("vllm"), []
    monkeypatch.setattr(search, "serve", lambda step, **given: seen.append(given) or serve(step, **given))
    inputs = (), {"input_ids": torch.zeros(1, 32, dtype=torch.int64, device="meta")}
    plan_serving(model(), load_cluster("dgx-h100"), inputs, LOAD, engine="vllm", devices=1, like=("tp=1,batch=8",))
    assert engine.apart_seconds != APART_SECONDS
    assert seen and all(given.items() >= engine_options(engine).items() for given in seen)


def test_an_engine_takes_its_share_of_what_the_driver_reports():
    memory = answer(like=("tp=1,batch=8",)).like[0].workers[0].memory
    assert memory.limit == pytest.approx(0.9 * 79.1 * 2**30)


def test_what_is_left_out_early_is_on_no_front(monkeypatch):
    followed = []
    times = search.LaidOut.times
    monkeypatch.setattr(search.LaidOut, "times", lambda self, *n: followed.append(n) or times(self, *n))
    quick, few = answer.__wrapped__(), len(followed)
    monkeypatch.setattr(search, "CLEARLY", 1e9)
    whole = answer.__wrapped__()
    assert few < len(followed) - few
    assert quick.front == whole.front and quick.ranked[:3] == whole.ranked[:3]


def test_times_are_those_of_the_requests_that_arrive():
    full = answer(devices=2).plan.served
    calm, busy = (answer(ServingLoad(1000, 100, requests_per_second=part * full.requests_per_second), devices=2)
                  for part in (0.1, 0.7))  # fmt: skip
    for found, part in ((calm, 0.1), (busy, 0.7)):
        served = found.plan.served
        assert served.requests_per_second == pytest.approx(part * full.requests_per_second)
        assert served.tokens_per_second_per_device == pytest.approx(100 * served.requests_per_second / 2)
        assert found.plan.load.requests_per_second == pytest.approx(served.requests_per_second)
    assert calm.plan.served.token_seconds < busy.plan.served.token_seconds < full.token_seconds
    with pytest.raises(InfeasibleError, match=r"misses requests: .* of .* a second"):
        answer(ServingLoad(1000, 100, requests_per_second=2 * full.requests_per_second), devices=2)


def test_times_wait_as_an_engine_is_said_to():
    found = answer(like=("tp=1,batch=1",)).like[0]
    engine = engine_named("vllm")
    assert engine.apart_seconds > 0.005
    alone = found.served.first_token_seconds - engine.first_token_seconds - engine.apart_seconds
    with_nothing = 1000 * 2 * 6.7e9 / load_cluster("dgx-h100").device(0).peak_flops["bfloat16"]
    assert alone > 0.9 * with_nothing


def test_cost_follows_rate():
    served = answer(cost_per_hour=3.6).plan.served
    assert served.cost_per_million_tokens == pytest.approx(3.6 / 3600 / served.tokens_per_second_per_device * 1e6)


@pytest.mark.parametrize(("load", "said"), [
    (ServingLoad(0, 10), "--isl is 0"), (ServingLoad(10, 0), "--osl is 0"), (ServingLoad(10, 5, -1), "--prefix is -1"),
    (ServingLoad(10, 5, 10), "--prefix 10 is not shorter than --isl 10"),
    (ServingLoad(10, 5, 0, float("nan")), "--ttft is nan"), (ServingLoad(10, 5, 0, None, -1.0), "--tpot is -1.0"),
])  # fmt: skip
def test_strange_loads(load, said):
    with pytest.raises(PlanError, match=said):
        check_load(load)


def test_strange_arguments():
    with pytest.raises(ClusterError, match="--devices 9: cluster dgx-h100 has 8 devices"):
        answer(devices=9)
    with pytest.raises(PlanError, match="'fp9' is no format of weights"):
        answer(precision="fp9")
    with pytest.raises(PlanError, match="9,000 tokens, and the model has 8,192 positions"):
        answer(ServingLoad(8900, 100))


def test_the_function():
    inputs = {"input_ids": torch.zeros(1, 32, dtype=torch.int64, device="meta")}
    asked = {"mode": "inference", "input_tokens": 1000, "output_tokens": 100, "devices": 2}
    found = autopar.plan(model(), "dgx-h100", inputs, engine="vllm", like="tp=2,batch=4", **asked)
    (worker,) = found.workers
    assert (worker.layout.tensor, worker.requests, found.cluster) == (2, 4, "dgx-h100")
    assert autopar.plan(model(), "dgx-h100", inputs, like="tp=2,batch=4", **asked) == found  # as the command's default
    for others, said in (
        ({"input_token": 1}, "has no argument input_token; did you mean 'input_tokens'"),
        ({"cost_per_hour": "1"}, "cost_per_hour is '1'; give a number"),
        ({"stages": 2}, "stages is for training plans"),
        ({"mode": "training"}, "is for serving; add mode='inference'"), ({"mode": "serve"}, "mode is 'serve'"),
        ({"output_tokens": None}, "needs output_tokens"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=said):
            autopar.plan(model(), "dgx-h100", inputs, **{**asked, **others})


DENSE, ROUTED = ModelShape(32, 8, 32, 0, 0), ModelShape(32, 4, 32, 64, 1536)


@pytest.mark.parametrize(("words", "shape", "said"), [
    ("tp=3", DENSE, "32 heads do not divide over tp=3"), ("dp=2", DENSE, "has no experts"),
    ("xp=2", DENSE, "'xp' is no word"), ("tp", DENSE, "'tp' is no tp=number"), ("tp=2,tp=4", DENSE, "says tp twice"),
    ("tp=4,ep=8", ROUTED, "ep \\* etp is 0, and must be"), ("pp=64", DENSE, "pp=64, and the model has 32 blocks"),
])  # fmt: skip
def test_strange_layouts(words, shape, said):
    with pytest.raises(PlanError, match=said):
        layout_in(words, shape)


def test_layouts_fill_their_devices():
    for shape in (DENSE, ROUTED):
        for devices in (1, 2, 6, 8, 16):
            found = list(layouts_on(shape, devices, 8, prefill_only=True))
            assert found and len(found) == len(set(found))
            assert all(each.devices == devices and each.tensor <= 8 for each in found)
            for each in found if shape.experts else ():
                assert each.expert * each.expert_tensor == each.tensor * each.attention_data * each.context


def run(*words: str):
    return CliRunner().invoke(app, ["plan", *words])


def test_the_command(tmp_path):
    from autopar.cli.schemas.loading import load_answer
    from autopar.serving.plan_file import loads

    config, plan, plot = tmp_path / "config.json", tmp_path / "plan.json", tmp_path / "front.svg"
    config.write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))
    asked = (f"hf:{config}", "-c", "dgx-h100", "--mode", "inference", "--isl", "500", "--osl", "50", "--devices", "2")
    done = run(*asked, "-o", str(plan), "--plot", str(plot), "--top", "3", "--like", "tp=2,batch=4", "--tpot", "30ms")
    assert done.exit_code == 0, done.output
    assert "requests/s" in done.stdout and "as given, tp=2,batch=4" in done.stdout and "front:" in done.stdout
    read = loads(plan.read_text())
    assert read.load == ServingLoad(500, 50, token_seconds=0.03) and read.devices == 2 and read.cuts
    assert plot.read_text().startswith("<svg") and "tokens/s per user" in plot.read_text()
    printed = run(*asked, "--json", "--like", "tp=1,batch=4")
    assert printed.exit_code == 0, printed.output
    document = load_answer(printed.stdout)
    assert document.like[0].words == "tp=1,batch=4" and document.front and len(document.ranked) == 1


@pytest.mark.parametrize(("words", "said"), [
    (("--isl", "5"), "--isl is for serving; add --mode inference"), (("--mode", "infer"), "--mode is 'infer'"),
    (("--mode", "inference", "--isl", "5"), "needs --isl and --osl"),
    (("--mode", "inference", "--isl", "5", "--osl", "5", "--stages", "2"), "--stages is for training plans"),
    (("--mode", "inference", "--isl", "5", "--osl", "5", "--batch", "2"), "--batch is for training plans"),
    (("--mode", "inference", "--isl", "5", "--osl", "5", "--ttft", "fast"), "--ttft is 'fast'; give a time"),
    (("--mode", "inference", "--isl", "5", "--osl", "5", "--rate", "20/d"), "--rate is '20/d'"),
])  # fmt: skip
def test_options_that_mean_nothing(words, said):
    done = run("hf:none.json", "-c", "dgx-h100", *words)
    assert isinstance(done.exception, UsageError) and said in str(done.exception), done.output
