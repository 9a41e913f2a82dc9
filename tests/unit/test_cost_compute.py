"""Prices of ops and bytes of training state: monotone in size and in hardware, close to what was measured."""

from __future__ import annotations

import dataclasses
import math

import pytest

from cost_models import op_seconds, optimizer_state_bytes
from hardware_profiles import Device, abstract_cluster, load_device


def test_abstract_compute_is_free():
    device = abstract_cluster({"x": 4}).device(0)
    assert op_seconds(device, "matmul", 1e15, 1e12, "float32", (8, 8, 8)) == 0.0
    assert op_seconds(device, "pointwise", 1e15, 1e12, "bfloat16") == 0.0


@pytest.mark.parametrize(
    ("device", "shape", "measured"),
    [
        ("A100-SXM-80GB", (8192, 65536, 4096), 15287e-6),
        ("A100-SXM-80GB", (8192, 4096, 4096), 1108e-6),
        ("H100-SXM-80GB", (8192, 4096, 4096), 347e-6),
        ("H100-SXM-80GB", (1024, 4096, 4096), 43.1e-6),
        ("B200", (8192, 4096, 4096), 163.4e-6),
        ("L40S", (8192, 1024, 4096), 284e-6),
    ],
)
def test_matmul_is_close_to_measured(device, shape, measured):
    m, n, k = shape
    n_bytes = 2.0 * (m * k + k * n + m * n)
    predicted = op_seconds(load_device(device), "matmul", 2.0 * m * n * k, n_bytes, "bfloat16", shape)
    assert abs(math.log(predicted / measured)) < 0.25


# Compute


def ops() -> list[tuple]:
    rows: list[tuple] = []
    for m, n, k in ((16, 16, 16), (1, 4096, 4096), (1024, 1024, 1024), (8192, 8192, 8192)):
        n_bytes = 2.0 * (m * k + n * k + m * n)
        for dtype in ("float32", "bfloat16"):
            rows.append(("matmul", 2.0 * m * n * k, n_bytes, dtype, (m, n, k)))
            rows.append(("conv", 2.0 * m * n * k, n_bytes, dtype, None))
            rows.append(("attention", 2.0 * m * n * k, n_bytes, dtype, None))
            rows.append(("pointwise", 1.0 * m * n, 6.0 * m * n, dtype, None))
            rows.append(("reduce", 1.0 * m * n, 2.0 * m * n, dtype, None))
    return rows


def better(device: Device, what: str) -> Device:
    if what == "memory":
        return dataclasses.replace(device, memory_bytes_per_second=2 * device.memory_bytes_per_second)
    if what == "launch":
        return dataclasses.replace(device, launch_seconds=device.launch_seconds / 2)
    return dataclasses.replace(device, peak_flops={d: 2 * rate for d, rate in device.peak_flops.items()})


@pytest.mark.parametrize("what", ["memory", "launch", "peak"])
def test_a_better_device_is_never_slower(what):
    for name in ("V100-SXM2-16GB", "H100-SXM-80GB", "cpu-core"):
        device = load_device(name)
        for op in ops():
            assert op_seconds(better(device, what), *op) <= op_seconds(device, *op)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("V100-SXM2-32GB", "A100-SXM-40GB"),
        ("A100-SXM-40GB", "A100-SXM-80GB"),
        ("A100-SXM-80GB", "H100-SXM-80GB"),
        ("H100-SXM-80GB", "H200-SXM-141GB"),
        ("H200-SXM-141GB", "B200"),
        ("L4", "L40S"),
        ("cpu-core", "T4"),
    ],
)
def test_newer_devices_are_not_slower(old, new):
    for op in ops():
        if old == "cpu-core" and op[1] < 1e8:
            continue  # tiny ops are launch bound on a GPU
        assert op_seconds(load_device(new), *op) <= op_seconds(load_device(old), *op) * 1.02, op


def test_a_cut_op_is_never_slower_than_the_whole():
    for name in ("A100-SXM-80GB", "H100-SXM-80GB", "cpu-core"):
        device = load_device(name)
        for m, n, k in ((64, 64, 64), (256, 4096, 1024), (8192, 8192, 8192)):
            whole = op_seconds(device, "matmul", 2.0 * m * n * k, 2.0 * (m * k + n * k + m * n), "bfloat16", (m, n, k))
            for parts in (2, 4, 8, 64):
                for cut in ((m // parts, n, k), (m, n // parts, k), (m, n, k // parts)):
                    a, b, c = cut
                    flops, n_bytes = 2.0 * a * b * c, 2.0 * (a * c + b * c + a * b)
                    assert op_seconds(device, "matmul", flops, n_bytes, "bfloat16", cut) <= whole
        for kind in ("conv", "attention", "pointwise", "reduce", "copy"):
            whole = op_seconds(device, kind, 1e9, 1e8, "float32")
            assert op_seconds(device, kind, 5e8, 5e7, "float32") <= whole


def test_op_details():
    device = load_device("H100-SXM-80GB")
    assert op_seconds(device, "none", 1e9, 1e9, "float32") == 0.0
    with pytest.raises(ValueError, match="unknown op kind 'gemm'"):
        op_seconds(device, "gemm", 1.0, 1.0, "float32")
    assert op_seconds(device, "pointwise", 0.0, 0.0, "int64") >= device.launch_seconds
    half = op_seconds(device, "matmul", 2.0 * 4096**3, 1e8, "bfloat16", (4096,) * 3)
    full = op_seconds(device, "matmul", 2.0 * 4096**3, 2e8, "float32", (4096,) * 3)
    assert full > 5 * half  # float32 runs outside the tensor cores
    batched = op_seconds(device, "matmul", 8 * 2.0 * 4096**3, 8e8, "bfloat16", (4096,) * 3)
    assert batched == pytest.approx(8 * half, rel=0.05)
    assert op_seconds(device, "matmul", 0.0, 0.0, "bfloat16", (0, 16, 16)) == device.launch_seconds
    eight = op_seconds(device, "matmul", 2.0 * 8192**3, 2e8, "float8_e4m3fn", (8192,) * 3)
    assert eight < op_seconds(device, "matmul", 2.0 * 8192**3, 4e8, "bfloat16", (8192,) * 3)


# Memory


def test_state_bytes_match_torch_optim():
    torch = pytest.importorskip("torch")
    parameters = [torch.nn.Parameter(torch.ones(3, 5)), torch.nn.Parameter(torch.ones(7))]
    count = sum(p.numel() for p in parameters)
    for name, optimizer in (
        ("adamw", torch.optim.AdamW(parameters)),
        ("sgd", torch.optim.SGD(parameters, lr=0.1)),
        ("sgd_momentum", torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
    ):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        tensors = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        real = sum(t.numel() * t.element_size() for t in tensors)
        assert optimizer_state_bytes(name, count, 4, n_tensors=2) == real
    assert optimizer_state_bytes("adamw", 10, 2) == 44
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        optimizer_state_bytes("lion", 1, 4)
