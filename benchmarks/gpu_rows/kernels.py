"""A raw table of kernel times: matmul, attention, norms, pointwise, embedding and copies, over shapes and dtypes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from gpu_rows.table import Result

Case = tuple[str, str, tuple[int, ...], Callable[[], Any]]
"""Operator, dtype, shape, and a call of it."""


def _matmuls(device: str, quick: bool) -> Iterator[Case]:
    shapes = [(64, 64, 64)] if quick else [
        (m, n, k)
        for n, k in ((768, 768), (3072, 768), (2048, 2048), (8192, 2048), (4096, 4096), (14336, 4096), (128256, 2048))
        for m in (1, 16, 64, 256, 1024, 4096, 8192, 16384)
    ] + [(8192, 8192, 8192), (16384, 16384, 16384)]  # fmt: skip
    for dtype in (torch.bfloat16, torch.float32):
        for m, n, k in shapes:
            if dtype == torch.float32 and m * n * k > 2**38:
                continue
            a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
            yield "matmul", str(dtype)[6:], (m, n, k), lambda a=a, b=b: F.linear(a, b)


def _attentions(device: str, quick: bool) -> Iterator[Case]:
    shapes = [(1, 2, 64, 16)] if quick else [
        (max(1, 32768 // s), h, s, d)
        for h, d in ((16, 64), (32, 64), (32, 128))
        for s in (512, 1024, 2048, 4096, 8192, 16384, 32768)
    ]  # fmt: skip
    for b, h, s, d in shapes:
        q = torch.randn(b, h, s, d, device=device, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.randn_like(q, requires_grad=True) for _ in range(2))
        for causal in (True, False):
            name = f"attention{' causal' if causal else ''}"
            forward = lambda q=q, k=k, v=v, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c)  # noqa: E731
            yield name, "bfloat16", (b, h, s, d), forward
            y = forward()
            g = torch.randn_like(y)
            backward = lambda y=y, g=g, q=q, k=k, v=v: torch.autograd.grad(y, (q, k, v), g, retain_graph=True)  # noqa: E731
            yield f"{name} backward", "bfloat16", (b, h, s, d), backward


def _memory_bound(device: str, quick: bool) -> Iterator[Case]:
    rows = (64,) if quick else (256, 1024, 4096, 16384, 65536)
    for dtype in (torch.bfloat16, torch.float32):
        for width in (64,) if quick else (768, 2048, 4096, 8192):
            for n in rows:
                x, y = (torch.randn(n, width, device=device, dtype=dtype) for _ in range(2))
                w = torch.ones(width, device=device, dtype=dtype)
                ids = torch.randint(0, 32000, (n,), device=device)
                table = torch.randn(32000, width, device=device, dtype=dtype)
                cases: list[tuple[str, Callable[[], Any]]] = [
                    ("layer_norm", lambda x=x, w=w: F.layer_norm(x, w.shape, w, w)),
                    ("rms_norm", lambda x=x, w=w: F.rms_norm(x, w.shape, w)),
                    ("add", lambda x=x, y=y: x + y),
                    ("gelu", lambda x=x: F.gelu(x)),
                    ("silu_mul", lambda x=x, y=y: F.silu(x) * y),
                    ("softmax", lambda x=x: F.softmax(x, -1)),
                    ("sum", lambda x=x: x.sum(0)),
                    ("copy", lambda x=x: x.clone()),
                    ("transpose_copy", lambda x=x: x.t().contiguous()),
                    ("cast", lambda x=x: x.to(torch.float32 if x.dtype == torch.bfloat16 else torch.bfloat16)),
                    ("embedding", lambda ids=ids, t=table: F.embedding(ids, t)),
                ]
                for name, call in cases:
                    yield name, str(dtype)[6:], (n, width), call


def _convolutions(device: str, quick: bool) -> Iterator[Case]:
    for c_in, c_out, size, kernel in ((3, 8, 16, 3),) if quick else (
        (3, 64, 224, 7), (64, 64, 56, 1), (64, 64, 56, 3), (128, 128, 28, 3), (256, 256, 14, 3), (512, 512, 7, 3),
        (1024, 256, 14, 1), (512, 2048, 7, 1),
    ):  # fmt: skip
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(2 if quick else 64, c_in, size, size, device=device, dtype=dtype)
            w = torch.randn(c_out, c_in, kernel, kernel, device=device, dtype=dtype)
            call = lambda x=x, w=w, k=kernel: F.conv2d(x, w, padding=k // 2)  # noqa: E731
            yield "conv2d", str(dtype)[6:], (*x.shape, c_out, kernel), call


def seconds_of(call: Callable[[], Any], device: str) -> float:
    """Seconds of one call: the median of a few groups of calls, by events of the stream or by the host's clock."""
    for _ in range(2):
        call()
    if device == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    once = max(begin.elapsed_time(end) * 1e-3, 5e-6)
    times = max(3, min(50, int(0.004 / once)))
    groups = []
    for _ in range(3):
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        groups.append(begin.elapsed_time(end) * 1e-3 / times)
    return sorted(groups)[1]


def kernels(device: str, quick: bool, budget: float) -> Result:
    """Times of all cases, as far as the budget of seconds goes; each family gets its share of it."""
    families = (_matmuls, _attentions, _memory_bound, _convolutions)
    shares = (0.35, 0.25, 0.3, 0.1)
    table: list[list[Any]] = []
    left_out: dict[str, str] = {}
    for family, share in zip(families, shares, strict=True):
        until = time.perf_counter() + budget * share
        for name, dtype, shape, call in family(device, quick):
            if time.perf_counter() > until:
                left_out[family.__name__] = f"from {name} {dtype} {list(shape)} on"
                break
            try:
                table.append([name, dtype, list(shape), seconds_of(call, device)])
            except RuntimeError as error:
                left_out[f"{name} {dtype} {list(shape)}"] = str(error).splitlines()[0][:120]
    matmuls = [(shape, t) for name, dtype, shape, t in table if name == "matmul" and dtype == "bfloat16"]
    best = max((2 * m * n * k / t / 1e12 for (m, n, k), t in matmuls), default=0.0)
    said = f"{len(table)} times of {len({row[0] for row in table})} operators; fastest bf16 matmul {best:.0f} TFLOP/s"
    return Result(said, None, {"columns": ["operator", "dtype", "shape", "seconds"], "table": table,
                               "left_out": left_out})  # fmt: skip


__all__ = ["kernels", "seconds_of"]
