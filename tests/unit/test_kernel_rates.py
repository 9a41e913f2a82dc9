"""Rates of operators beside what one H200 measured, and what the software that trains makes of them."""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.planner.inter_op.estimating.block_costs import ALONE
from autopar.planner.intra_op.building.price import pricer
from autopar.planner.intra_op.building.space import strategies
from autopar.rules.operator_work import through_memory
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from cost_models import Roofline, op_seconds
from cost_models.costs import OpWork, StageWork, costs_of
from cost_models.operator_cost import sustained_fraction
from hardware_profiles import Cluster, load_cluster, load_device, software_named
from hardware_profiles.software import OWN

ROOT = Path(__file__).resolve().parents[2]
H200 = "H200-SXM-141GB"


@cache
def distilled() -> Any:
    """The script that reads the measured times."""
    path = ROOT / "benchmarks" / "distill_kernels.py"
    spec = importlib.util.spec_from_file_location("distill_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["distill_kernels"] = module
    spec.loader.exec_module(module)
    return module


@cache
def errors() -> dict[str, np.ndarray]:
    """Logarithms of predicted over measured seconds by curve, launches apart."""
    device = replace(load_device(H200), launch_seconds=0.0)
    found = defaultdict(list)
    for time in distilled().times():
        found[time.curve].append(np.log(distilled().predicted(device, time) / time.seconds))
    return {name: np.array(values) for name, values in found.items()}


@pytest.mark.parametrize("kind", [
    "attention", "attention_backward", "broadcast", "conv", "lookup", "loss", "loss_backward", "narrow", "norm",
    "norm_backward", "optimizer", "pointwise", "pointwise_backward", "reduce", "rms_norm", "rms_norm_backward",
    "softmax_backward", "widen",
])  # fmt: skip
def test_curves_are_close_to_the_times_of_an_h200(kind: str) -> None:
    assert np.median(np.abs(errors()[kind])) < 0.17
    assert abs(np.median(errors()[kind])) < 0.12


@pytest.mark.parametrize("kind", ["softmax", "batch_norm", "batch_norm_backward"])
def test_kinds_whose_kernels_differ_most_are_within_half(kind: str) -> None:
    """torch takes other kernels by type, width and layout."""
    assert np.median(np.abs(errors()[kind])) < 0.5


def products() -> list[tuple[tuple[int, int, int], float]]:
    """``(m, n, k)`` and seconds of bfloat16 products that are longer than a launch."""
    module = distilled()
    first = (module.MEASURED / "first_hour.json").read_text(encoding="utf-8")
    rows = next(r["data"]["table"] for r in module.json.loads(first)["rows"] if r["name"] == "kernels")
    return [(tuple(s), t) for name, dtype, s, t in rows if (name, dtype) == ("matmul", "bfloat16") and t > 20e-6]


def linear(m: int, n: int, k: int, aligned: bool = True) -> float:
    n_bytes = 2.0 * (m * k + n * k + m * n)
    return op_seconds(load_device(H200), "matmul", 2.0 * m * n * k, n_bytes, "bfloat16", (m, n, k), aligned=aligned)


def test_products_are_close_to_the_times_of_an_h200() -> None:
    measured = np.array([seconds for _, seconds in products()])
    off = np.log(np.array([linear(*shape) for shape, _ in products()]) / measured)
    assert len(off) > 30 and np.median(np.abs(off)) < 0.12 and np.abs(off).max() < 0.35


def test_an_odd_vocabulary_costs_many_times_an_even_one() -> None:
    """8,192 tokens of GPT-2: 7.2 and 0.9 ms forward, 16.2 and 2.5 with the backward."""
    assert linear(8192, 50257, 768, aligned=False) == pytest.approx(16.2e-3 / 3, rel=0.2)
    assert linear(8192, 50264, 768) == pytest.approx(0.89e-3, rel=0.1)


# Power


def test_what_is_sustained_follows_watts_for_each_flop() -> None:
    h100, a100 = load_device("H100-SXM-80GB"), load_device("A100-SXM-80GB")
    assert sustained_fraction(load_device(H200)) == pytest.approx(0.72)
    slower = sustained_fraction(load_device("A100-PCIe-80GB")) / sustained_fraction(a100)
    assert slower == pytest.approx(252.9 / 271.2, abs=0.01)  # measured, at 300 and 400 W
    assert sustained_fraction(replace(h100, power_watts=500.0)) < 0.95 * sustained_fraction(h100)
    assert sustained_fraction(replace(h100, power_watts=None)) == 1.0
    assert sustained_fraction(replace(h100, power_watts=1e5)) == 1.0


def test_large_products_reach_no_more_than_is_sustained() -> None:
    rate = 2.0 * 16384**3 / linear(16384, 16384, 16384) / 989e12
    assert rate == pytest.approx(sustained_fraction(load_device(H200)), rel=0.01)


# Attention


def attention(length: int, causal: bool, head: int = 128, backward: bool = False) -> float:
    keys = length // 2 if causal else length
    flops = 4.0 * 32 * (32768 // length) * length * keys * head * (2.5 if backward else 1)
    return op_seconds(load_device(H200), "attention", flops, 0.0, "bfloat16", (length, keys, head), backward=backward)


def test_causal_attention_is_half_where_it_is_long() -> None:
    assert attention(32768, True) / attention(32768, False) == pytest.approx(0.5, abs=0.02)
    assert 0.55 < attention(512, True) / attention(512, False) < 0.8


def test_small_heads_and_backwards_are_slower() -> None:
    assert attention(4096, True, 64) > 0.6 * attention(4096, True, 128)
    assert 2.7 < attention(4096, True, backward=True) / attention(4096, True) < 3.7


# Launches


def test_an_operator_takes_the_longer_of_launch_and_kernel() -> None:
    device = load_device(H200)
    assert device.kernel_seconds is not None and device.kernel_seconds < device.launch_seconds
    assert op_seconds(device, "pointwise", 0.0, 100.0, "bfloat16") == device.launch_seconds
    free = op_seconds(replace(device, launch_seconds=0.0), "pointwise", 0.0, 1e9, "bfloat16")
    assert op_seconds(device, "pointwise", 0.0, 1e9, "bfloat16") == free
    core = load_device("cpu-core")  # which computes itself: both add up
    without = op_seconds(replace(core, launch_seconds=0.0), "pointwise", 0.0, 1e9, "float32")
    assert op_seconds(core, "pointwise", 0.0, 1e9, "float32") == pytest.approx(without + core.launch_seconds)


# What the software makes of it


def work(kind: str, curve: str = "", **rest: Any) -> OpWork:
    sizes: dict[str, Any] = {"backward_bytes": 3e8, "gradients": 0, "weight_gradients": 0, **rest}
    return OpWork(kind, 1e9, 2e8, "float32", None, True, key=lambda: None, curve=curve, **sizes)


def with_software(name: str, **changes: Any) -> Cluster:
    cluster = load_cluster(name)
    return replace(cluster, software=replace(software_named(OWN), **changes))


def test_the_factor_multiplies_all_seconds() -> None:
    plain, twice = Roofline(load_cluster("dgx-h100")), Roofline(with_software("dgx-h100", factor=2.0))
    device = load_device("H100-SXM-80GB")
    for each in (work("pointwise"), work("reduce", "norm"), work("attention"), work("matmul", gradients=2)):
        assert twice.op(device, each) == pytest.approx(tuple(2 * s for s in plain.op(device, each)))
    assert twice.copy(device, 1e9, "bfloat16") == pytest.approx(2 * plain.copy(device, 1e9, "bfloat16"))
    assert twice.transfer(0, 1, 1e6) == pytest.approx(2 * plain.transfer(0, 1, 1e6))
    for kind in ("all_reduce", "all_gather"):
        once, doubled = (costs.axes({"x": 8}, range(8))["x"].seconds(kind, 1e8) for costs in (plain, twice))
        assert doubled == pytest.approx(2 * once)
    stages = [costs.stage(lambda: StageWork(((1, 1e8),), ((1e8, 2e8),), 3, 4, "adamw")) for costs in (plain, twice)]
    one, two = stages
    assert one is not None and two is not None
    assert (two.step, two.summed) == pytest.approx((2 * one.step, 2 * one.summed))


def test_a_step_without_parameters_takes_nothing_more() -> None:
    stage = Roofline(load_cluster("dgx-h100")).stage(lambda: StageWork((), (), 0, 1, "adamw"))
    assert stage is not None and stage.step < 1e-6 and stage.backward < 1e-6


def test_launches_of_the_software_are_those_of_gpus() -> None:
    small = OpWork("pointwise", 0.0, 10, "float32", None, False, 0, 0, lambda: None)
    gpu = Roofline(with_software("dgx-h100", launch_seconds=1e-4))
    assert gpu.op(load_device("H100-SXM-80GB"), small).forward == 1e-4
    core = load_device("cpu-core")
    assert Roofline(with_software("local-x2", launch_seconds=1e-4)).op(core, small).forward < 1e-5


def test_a_device_without_curves_of_backwards_moves_the_bytes_of_the_forward_again() -> None:
    costs, core = Roofline(load_cluster("local-x2")), load_device("cpu-core")
    for kind, curve, times in (("pointwise", "", 2.0), ("reduce", "norm", 2.0), ("attention", "", 3.5)):
        spent = costs.op(core, work(kind, curve))
        assert spent.total == pytest.approx(times * spent.forward)
    assert costs.stage(lambda: StageWork((), ((1e8, 1e8),), 1, 1, "adamw")) is None


def test_a_step_of_the_optimizer_moves_its_tensors_once() -> None:
    """335 million parameters in float32 take 2.75 ms on an H200, in bfloat16 1.80."""
    costs = Roofline(load_cluster("dgx-h200"))
    for item, seconds in ((4, 2.75e-3), (2, 1.80e-3)):
        moved = StageWork((), ((0.0, item * 20 * 2.0**24),), 1, 1, "adamw")
        stage = costs.stage(partial(StageWork, *moved))
        assert stage is not None and stage.step == pytest.approx(seconds, rel=0.25)


def graph_of(model: nn.Module, *sizes: int) -> Graph:
    with torch.device("meta"):
        return capture(model, (torch.zeros(*sizes),), loss_fn=lambda y: y.square().mean()).graph


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y + self.down(torch.nn.functional.gelu(self.up(self.norm(y))))


def test_a_kernel_of_several_operators_reads_and_writes_at_its_ends() -> None:
    graph = graph_of(Residual(64).to("meta"), 32, 64)
    by_target = {node.target: through_memory(graph, node) for _, node in graph.of_kind("op")}
    assert by_target["aten.mul.Tensor"] == (True, True)  # read again behind the products
    assert by_target["aten.layer_norm.default"][0] is False  # of what was multiplied, in one kernel
    assert by_target["aten.layer_norm.default"][-1] is True  # for a product
    assert by_target["aten.gelu.default"] == (True, True)  # between products


def test_fused_software_pays_for_fewer_bytes() -> None:
    graph = graph_of(Residual(4096).to("meta"), 8192, 4096)

    def seconds(cluster: Cluster) -> dict[str, float]:
        prices, rules = pricer(cluster, ALONE, (0,)), rules_of(graph)
        return {
            n.target: prices.compute(graph, n, rule, strategies(graph, n, rule, ALONE)[0]).total
            for i, n in graph.of_kind("op") if (rule := rules[i]) is not None
        }  # fmt: skip

    eager, fused = seconds(with_software("dgx-h100")), seconds(with_software("dgx-h100", fused=True))
    assert fused["aten.layer_norm.default"] < 0.8 * eager["aten.layer_norm.default"]
    assert fused["aten.linear.default"] == eager["aten.linear.default"]
    assert all(fused[target] <= eager[target] for target in eager)


def test_profiles_are_priced_without_software() -> None:
    """What was measured is the software's already."""
    assert costs_of(load_cluster("local-x2")).fuses is False
