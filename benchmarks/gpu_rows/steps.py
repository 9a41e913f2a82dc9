"""Seconds of a training step on one device: eager mode, ``torch.compile`` and autopar, with memory and kinds of ops."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from autopar.profiling.by_kind import beside, measured, predicted
from gpu_rows.models import make
from gpu_rows.ranks import FREE_CALLS, alone
from gpu_rows.table import Result

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "bf16-mixed": torch.float32, "float64": torch.float64}


OURS = ("autopar", "step", "compiled", "recorded")
"""Ways of a parallel module: as it is; as an explicit step; that compiled; and recorded as a CUDA graph."""


def _loss(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def _stepper(
    run: Any, batch: dict[str, torch.Tensor], autocast: bool, device: str, recorded: bool = False
) -> Callable[[], None]:
    import autopar

    on_gpu = device != "cpu"
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-5, **({"fused": True} if on_gpu else {"foreach": True}))
    if recorded:
        forward_and_backward = autopar.GraphedStep(run, **batch)

        def replay() -> None:
            forward_and_backward(**batch)
            optimizer.step()
            optimizer.zero_grad()

        return replay

    def step() -> None:
        with torch.autocast(device, torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = _loss(run(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _timed(step: Callable[[], None], device: str, steps: int) -> dict[str, float]:
    """Median seconds of a step, and of the host alone until it has launched all of a step."""
    whole, host = [], []
    for number in range(FREE_CALLS + 1 + steps):
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        launched = time.perf_counter()
        if device != "cpu":
            torch.cuda.synchronize()
        if number > FREE_CALLS:
            whole.append(time.perf_counter() - began)
            host.append(launched - began)
    return {"seconds": median(whole), "host_seconds": median(host), "fastest": min(whole), "slowest": max(whole)}


def _peak(device: str) -> dict[str, int]:
    if device == "cpu":
        return {}
    peak = {"max_allocated": torch.cuda.max_memory_allocated(), "max_reserved": torch.cuda.max_memory_reserved()}
    free, total = torch.cuda.mem_get_info()
    return {**peak, "device_used": total - free}


def _measure(name: str, way: str, precision: str, device: str, quick: bool, options: dict[str, Any]) -> dict[str, Any]:
    """One model in one way: seconds, memory, and for eager mode and autopar kinds of operators."""
    import autopar

    on_gpu = device != "cpu"
    before = 0
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    model, batch = make(name, device, quick, DTYPES[precision], **options)
    numbers: dict[str, Any] = {"way": way, "precision": precision, "left_before": before}
    began = time.perf_counter()
    graph, run, autocast = None, model, precision == "bf16-mixed"
    if way in OURS:
        run = autopar.parallelize(model, 1, batch, precision="bf16-mixed" if autocast else None)
        autocast = False
        graph = run._autopar.captured.graph
        numbers |= {"predicted_seconds": run.plan.seconds, "predicted_bytes": run.plan.memory_bytes,
                    "predicted_state": run.plan.only().price.stored_bytes, "cluster": run.plan.cluster}  # fmt: skip
        if way in ("step", "recorded"):
            run.compile(backend="eager")
        elif way == "compiled":
            run.compile()
        del model
    elif way == "compile":
        run = torch.compile(model)
    step = _stepper(run, batch, autocast, device, way == "recorded")
    step()
    numbers["seconds_until_first_step"] = time.perf_counter() - began
    if on_gpu:
        torch.cuda.synchronize()
    step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    numbers |= _timed(step, device, 4 if quick else 10)
    numbers |= _peak(device)
    if way in ("eager", "autopar"):
        kinds, longest = measured(step, device)
        numbers |= {"kinds": kinds, "longest": longest, "device_seconds": sum(kinds.values())}
        if graph is not None:
            numbers["predicted_kinds"] = predicted(graph, run.plan)[0]
    return numbers


def steps(
    name: str, ways: tuple[str, ...], precision: str, device: str, quick: bool, options: dict[str, Any]
) -> Result:
    """A step of a model in several ways, one after the other in this process."""
    with alone(device):
        rows: dict[str, Any] = {}
        for way in ways:
            try:
                rows[way] = _measure(name, way, precision, device, quick, options)
            except Exception as error:
                first = (str(error).splitlines() or [""])[0][:200]
                rows[way] = {"error": f"{type(error).__name__}: {first}"}
            if way in ("compile", "compiled"):
                torch.compiler.reset()
    said = ", ".join(_said(way, row, rows.get("eager", {})) for way, row in rows.items())
    ok = False if "error" in rows.get("autopar", {}) else None
    return Result(said, ok, {"model": name, "options": options, "ways": rows})


def _said(way: str, row: dict[str, Any], eager: dict[str, Any]) -> str:
    if "error" in row:
        return f"{way} {row['error']}"
    said = f"{way} {1e3 * row['seconds']:.2f} ms (host {1e3 * row['host_seconds']:.2f})"
    if way != "eager" and "seconds" in eager:
        said += f" = {row['seconds'] / eager['seconds']:.3f} x eager"
    if "predicted_seconds" in row:
        said += f", predicted {1e3 * row['predicted_seconds']:.2f}"
    if "max_allocated" in row:
        said += f", {row['max_allocated'] / 2**30:.2f} GiB"
        if "predicted_bytes" in row:
            said += f" (predicted {row['predicted_bytes'] / 2**30:.2f})"
    if "predicted_kinds" in row:
        said += f"; ms by kind: {beside(row['kinds'], row['predicted_kinds'])}"
    return said


__all__ = ["steps"]
