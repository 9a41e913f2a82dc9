"""Rates under load: products in a row for seconds, backwards, norms, losses, the optimizer and launches.

What :mod:`gpu_rows.kernels` leaves out of what a training step does. Each number is ``[what, dtype, shape, pass,
seconds]`` with the pass ``forward``, ``backward`` (of all gradients that the operator has) or ``step``.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gpu_rows.kernels import seconds_of
from gpu_rows.table import Result

Case = tuple[str, str, tuple[int, ...], Callable[[], Any], tuple[torch.Tensor, ...]]
"""What, dtype, shape, the forward, and what its backward gives gradients of (none: no backward)."""


def _normal(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(grad)


def _linears(device: str, quick: bool) -> Iterator[Case]:
    """Linear layers as training has them, forward and both products of the backward."""
    shapes = [(64, 64, 64)] if quick else [
        (m, n, k)
        for n, k in ((2304, 768), (3072, 768), (768, 3072), (2048, 2048), (8192, 2048), (4096, 4096), (14336, 4096),
                     (4096, 14336), (8192, 8192), (28672, 8192), (1280, 8192), (3584, 8192))
        for m in (2048, 8192, 32768)
    ] + [(8192, n, 768) for n in (50257, 50264, 50304, 32000)] + [(4096, 128256, 2048)]  # fmt: skip
    for m, n, k in shapes:
        x, w = _normal(m, k, device=device), _normal(n, k, device=device)
        yield "linear", "bfloat16", (m, n, k), lambda x=x, w=w: F.linear(x, w), (x, w)


def _losses(device: str, quick: bool) -> Iterator[Case]:
    for rows, vocab in ((64, 128),) if quick else ((8192, 50257), (8192, 32000), (8192, 128256), (1024, 1000)):
        labels = torch.randint(0, vocab, (rows,), device=device)
        for dtype in (torch.bfloat16, torch.float32):
            x = _normal(rows, vocab, device=device, dtype=dtype)
            name = str(dtype)[6:]
            yield "cross_entropy", name, (rows, vocab), lambda x=x, y=labels: F.cross_entropy(x, y), (x,)
            yield "log_softmax", name, (rows, vocab), lambda x=x: F.log_softmax(x, -1), (x,)


def _norms(device: str, quick: bool) -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype)[6:]
        for rows, width in ((64, 64),) if quick else (
            (2048, 768), (8192, 768), (32768, 768), (8192, 2048), (8192, 4096), (32768, 4096), (8192, 8192),
        ):  # fmt: skip
            x, y, w, b = (_normal(*s, device=device, dtype=dtype) for s in ((rows, width),) * 2 + ((width,),) * 2)
            shape = (rows, width)
            yield "layer_norm", name, shape, lambda x=x, w=w, b=b: F.layer_norm(x, w.shape, w, b), (x, w, b)
            yield "rms_norm", name, shape, lambda x=x, w=w: F.rms_norm(x, w.shape, w), (x, w)
            yield "gelu", name, shape, lambda x=x: F.gelu(x), (x,)
            yield "silu", name, shape, lambda x=x: F.silu(x), (x,)
            yield "mul", name, shape, lambda x=x, y=y: x * y, (x, y)
            yield "add", name, shape, lambda x=x, y=y: x + y, ()
            yield "dropout", name, shape, lambda x=x: F.dropout(x, 0.1), (x,)
            yield "softmax", name, shape, lambda x=x: F.softmax(x, -1), (x,)
            yield "mean_square", name, shape, lambda x=x: x.pow(2).mean(-1), (x,)
            yield "add bias", name, shape, lambda x=x, b=b: x + b, (x, b)
            yield "cat", name, shape, lambda x=x, y=y: torch.cat([x, y], -1), (x, y)
            yield "half", name, shape, lambda x=x: x[:, : x.shape[1] // 2].contiguous(), (x,)
            other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
            yield "cast", name, shape, lambda x=x, o=other: x.to(o), (x,)
            yield "clone", name, shape, lambda x=x: x.clone(), ()
            yield "fill", name, shape, lambda x=x: torch.zeros_like(x), ()
    for rows, table, width in (
        ((64, 100, 64),) if quick else ((8192, 50257, 768), (8192, 128256, 4096), (32768, 32000, 4096))
    ):
        w = _normal(table, width, device=device)
        ids = torch.randint(0, table, (rows,), device=device)
        yield "embedding", "bfloat16", (rows, table, width), lambda i=ids, w=w: F.embedding(i, w), (w,)
    for b, s, h, d in ((2, 64, 2, 16),) if quick else ((4, 2048, 32, 128), (8, 1024, 12, 64)):
        x = _normal(b, s, h * d, device=device)
        yield (
            "heads",
            "bfloat16",
            (b, s, h, d),
            lambda x=x, h=h, d=d: x.view(*x.shape[:2], h, d).transpose(1, 2).contiguous(),
            (x,),
        )


def _images(device: str, quick: bool) -> Iterator[Case]:
    shapes = ((2, 8, 16),) if quick else ((64, 64, 112), (64, 256, 56), (64, 512, 28), (64, 1024, 14), (64, 2048, 7))
    for b, c, size in shapes:
        for dtype in (torch.bfloat16, torch.float32):
            for last in (False, True):
                x = torch.randn(b, c, size, size, device=device, dtype=dtype)
                x = (x.contiguous(memory_format=torch.channels_last) if last else x).requires_grad_()
                w, bias = (torch.ones(c, device=device, requires_grad=True) for _ in range(2))
                mean, var = torch.zeros(c, device=device), torch.ones(c, device=device)
                name = f"batch_norm{' channels last' if last else ''}"
                call = lambda x=x, w=w, b=bias, m=mean, v=var: F.batch_norm(x, m, v, w, b, True)  # noqa: E731
                yield name, str(dtype)[6:], (b, c, size, size), call, (x, w, bias)
    for c_in, c_out, size, kernel in ((3, 8, 16, 3),) if quick else (
        (3, 64, 224, 7), (64, 64, 56, 1), (64, 64, 56, 3), (256, 64, 56, 1), (128, 128, 28, 3), (512, 128, 28, 1),
        (256, 256, 14, 3), (1024, 256, 14, 1), (512, 512, 7, 3), (512, 2048, 7, 1),
    ):  # fmt: skip
        for last in (False, True):
            x = torch.randn(2 if quick else 64, c_in, size, size, device=device, dtype=torch.bfloat16)
            w = torch.randn(c_out, c_in, kernel, kernel, device=device, dtype=torch.bfloat16)
            x, w = ((t.contiguous(memory_format=torch.channels_last) if last else t).requires_grad_() for t in (x, w))
            name = f"conv2d{' channels last' if last else ''}"
            yield (
                name,
                "bfloat16",
                (*x.shape, c_out, kernel),
                lambda x=x, w=w, k=kernel: F.conv2d(x, w, padding=k // 2),
                (x, w),
            )


def _attentions(device: str, quick: bool) -> Iterator[Case]:
    for b, h, kv, s, d in ((1, 2, 2, 64, 16),) if quick else (
        (8, 12, 12, 1024, 64), (4, 32, 8, 2048, 128), (1, 32, 8, 8192, 128), (1, 64, 8, 4096, 128),
        (16, 16, 16, 577, 64), (8, 16, 16, 512, 64), (2, 32, 32, 2048, 80), (2, 16, 16, 2048, 256),
    ):  # fmt: skip
        q, k, v = (_normal(b, n, s, d, device=device) for n in (h, kv, kv))
        for causal in (True, False):
            call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=kv != h)
            yield f"attention{' causal' if causal else ''}", "bfloat16", (b, h, kv, s, d), call, (q, k, v)


def _steps(device: str, quick: bool) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], Any]]]:
    """Steps of optimizers over ``n`` tensors of ``size`` elements."""
    for n, size in ((4, 64),) if quick else ((100, 2**20), (20, 2**24)):
        for dtype in (torch.bfloat16, torch.float32):
            for name, options in (("adamw fused", {"fused": True}), ("adamw foreach", {"foreach": True})):
                parameters = [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(n)]
                for p in parameters:
                    p.grad = torch.randn_like(p)
                yield name, str(dtype)[6:], (n, size), torch.optim.AdamW(parameters, lr=1e-6, **options).step


def _state(device: str) -> dict[str, str]:
    """Clocks and power, as the driver says them."""
    if device == "cpu":
        return {}
    asked = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(zip(asked.split(","), said.stdout.strip().split(", "), strict=False))


def _sustained(device: str, quick: bool) -> list[dict[str, Any]]:
    """FLOP/s of one product again and again, over half a second each, with clocks and power."""
    found = []
    for m, n, k, seconds in ((64, 64, 64, 0.05),) if quick else (
        (8192, 8192, 8192, 4.0), (8192, 14336, 4096, 3.0), (8192, 4096, 4096, 2.0), (8192, 3072, 768, 2.0),
    ):  # fmt: skip
        x, w = _normal(m, k, device=device, grad=False), _normal(n, k, device=device, grad=False)
        series, began = [], time.perf_counter()
        times = 2 if quick else max(10, int(0.25 * 6e14 / (2 * m * n * k)))
        while time.perf_counter() - began < seconds:
            start = time.perf_counter()
            if device == "cuda":
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
            for _ in range(times):
                torch.mm(x, w.t())
            spent = time.perf_counter() - start
            state = {}
            if device == "cuda":
                last.record()
                state = _state(device)  # read while the queue still runs
                last.synchronize()
                spent = first.elapsed_time(last) * 1e-3
            series.append([round(2 * m * n * k * times / spent / 1e12, 1), state])
        found.append({"shape": [m, n, k], "TFLOP/s and state": series})
    return found


def _launches(device: str, quick: bool) -> dict[str, float]:
    """Host's and device's seconds of one small operator, forward alone and with autograd."""
    x = torch.ones(64, 64, device=device)
    y = torch.ones(64, 64, device=device, requires_grad=True)
    n = 100 if quick else 3000
    found: dict[str, float] = {}
    cases: dict[str, Callable[[], Any]] = {
        "add": lambda: x + x, "add with autograd": lambda: y + x, "mm": lambda: x @ x, "linear": lambda: F.linear(x, y),
        "layer_norm": lambda: F.layer_norm(y, (64,)),
    }  # fmt: skip
    for name, call in cases.items():
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(n):
            call()
        found[f"{name}, host"] = (time.perf_counter() - began) / n
        if device == "cuda":
            torch.cuda.synchronize()
        found[f"{name}, until done"] = (time.perf_counter() - began) / n
    began = time.perf_counter()
    for _ in range(n // 10):
        z = y
        for _ in range(10):
            z = z + x
        z.backward(x)
    if device == "cuda":
        torch.cuda.synchronize()
    found["add, forward and backward"] = (time.perf_counter() - began) / (n // 10 * 10)
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(1000):
                x.add_(1.0)
        graph.replay()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        found["add in a graph"] = (time.perf_counter() - began) / 5000
    return found


def rates(device: str, quick: bool, budget: float) -> Result:
    """All of these, as far as the budget of seconds goes; each family gets its share of it."""
    data: dict[str, Any] = {"columns": ["operator", "dtype", "shape", "pass", "seconds"], "left_out": {}}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        data["device bytes used before anything"] = total - free
    data["launches"] = _launches(device, quick)
    data["sustained"] = _sustained(device, quick)
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        data["device bytes beside the allocator's"] = total - free - torch.cuda.memory_reserved()
        data["usable bytes"] = torch.cuda.get_device_properties(0).total_memory
    table: list[list[Any]] = []
    families = ((_linears, 0.3), (_losses, 0.1), (_norms, 0.3), (_images, 0.15), (_attentions, 0.15))
    for family, share in families:
        until = time.perf_counter() + budget * share
        for what, dtype, shape, call, leaves in family(device, quick):
            if time.perf_counter() > until:
                data["left_out"][family.__name__] = f"from {what} {dtype} {list(shape)} on"
                break
            try:
                table.append([what, dtype, list(shape), "forward", seconds_of(call, device)])
                if leaves:
                    y = call()
                    g = torch.randn_like(y)
                    back = lambda y=y, g=g, of=leaves: torch.autograd.grad(y, of, g, retain_graph=True)  # noqa: E731
                    table.append([what, dtype, list(shape), "backward", seconds_of(back, device)])
            except RuntimeError as error:
                data["left_out"][f"{what} {dtype} {list(shape)}"] = str(error).splitlines()[0][:120]
    for what, dtype, shape, step in _steps(device, quick):
        table.append([what, dtype, list(shape), "step", seconds_of(step, device)])
    data["table"] = table
    best = max((each[0] for row in data["sustained"] for each in row["TFLOP/s and state"]), default=0.0)
    last = data["sustained"][0]["TFLOP/s and state"][-1]
    return Result(
        f"{len(table)} times; products in a row: fastest {best:.0f} TFLOP/s, after seconds {last}", None, data
    )


__all__ = ["rates"]
