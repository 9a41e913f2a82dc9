"""Every rule's samples in all strategies on the device, many ranks in one process.

In float64 the whole operator is compared with the CPU's and every strategy with the whole operator. In float32 and
bfloat16 every strategy is compared with the whole operator in the same dtype on the same device.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import traceback
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

import autopar.rules  # noqa: F401  (registers the rules)
from autopar.rules.proving.proof import Case, RuleIsWrong, prove, strategies_of
from autopar.rules.registry import SAMPLES
from autopar.words.meshes import Mesh
from gpu_rows.table import Result

ONE, TWO = Mesh.of(data=2), Mesh.of(data=2, tensor=2)
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2}
LIKE_THE_CPU = 1e-9
"""Largest difference from the CPU in float64, as a share of the largest value."""


def _apart(mine: list[Any], cpus: list[Any]) -> float:
    """The largest difference between tensors of two devices, as a share of the largest value of each."""
    worst = 0.0
    for a, b in zip(mine, cpus, strict=True):
        if a is not None and b is not None and b.numel():
            a, b = a.cpu().double(), b.cpu().double()
            if a.shape != b.shape:
                return float("inf")
            same = (a == b) | (a.isnan() & b.isnan())
            gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(float("inf")).max()
            worst = max(worst, float(gap) / max(1.0, float(b.nan_to_num(0.0, 0.0, 0.0).abs().max())))
    return worst


def _one(target: str, number: int, device: str, quick: bool) -> dict[str, Any]:
    """Prove one sample in three dtypes."""
    sample = SAMPLES[target][number]
    name = f"{target.removeprefix('aten.').removesuffix('.default')}-{number}"
    row: dict[str, Any] = {"name": name, "strategies": 0, "wrong": [], "errors": [], "no_kernel": [], "from_cpu": 0.0}
    cpus = Case(target, sample) if device != "cpu" else None
    floats = any(t.dtype == torch.float64 for t in (cpus or Case(target, sample)).tensors)
    dtypes = ("float64", "float32", "bfloat16") if floats and not (quick and number % 4) else ("float64",)
    for dtype in dtypes:
        try:
            case = Case(target, sample, device=device, dtype=dtype)
        except NotImplementedError as error:
            if dtype == "float64" and device == "cpu":
                raise
            row["no_kernel"].append(f"{dtype}: {str(error).splitlines()[0][:120]}")
            continue
        except Exception as error:
            row["errors"].append(f"{dtype}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        if dtype == "float64" and cpus is not None:
            row["from_cpu"] = _apart([*case.outs, *case.gradients], [*cpus.outs, *cpus.gradients])
        picks = [(picked, ONE) for picked in strategies_of(case, ONE)]
        if dtype == "float64" and not quick:
            pairs = [p for p in strategies_of(case, TWO) if all(o.name not in ("I", "R") for o in p)]
            picks += [(p, TWO) for p in random.Random(number).sample(pairs, min(2, len(pairs)))]
        for picked, mesh in picks[-2:] if quick else picks:
            row["strategies"] += 1
            try:
                prove(case, picked, mesh, TOLERANCE[dtype])
            except RuleIsWrong as error:
                row["wrong"].append(f"{dtype}: {str(error)[-300:]}")
            except Exception as error:
                names = ",".join(o.name for o in picked)
                row["errors"].append(f"{dtype}: {names}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
                row["trace"] = row.get("trace") or traceback.format_exc()[-2500:]
    return row


def _share(k: int, n: int, device: str, quick: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # float32 is compared digit by digit
    every = [(target, i) for target in sorted(SAMPLES) for i in range(len(SAMPLES[target]))]
    rows = []
    for target, number in every[k::n]:
        try:
            rows.append(_one(target, number, device, quick))
        except Exception as error:  # a poisoned device: say where, and stop
            rows.append({"name": f"{target}-{number}", "strategies": 0, "wrong": [], "no_kernel": [], "from_cpu": 0.0,
                         "errors": [f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"]})  # fmt: skip
            if "CUDA" in str(error):
                break
    return rows


def rules(device: str, quick: bool) -> Result:
    """Prove all rules, in several processes at once."""
    n = max(1, min(10, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(n, mp_context=multiprocessing.get_context("spawn")) as pool:
        shares = list(pool.map(_share, range(n), [n] * n, [device] * n, [quick] * n))
    rows = [row for share in shares for row in share]
    expected = sum(map(len, SAMPLES.values()))
    wrong = {row["name"]: row["wrong"] for row in rows if row["wrong"]}
    errors = {row["name"]: row["errors"] for row in rows if row["errors"]}
    far = {row["name"]: row["from_cpu"] for row in rows if row["from_cpu"] > LIKE_THE_CPU}
    without = {row["name"]: row["no_kernel"] for row in rows if row["no_kernel"]}
    tried = sum(row["strategies"] for row in rows)
    said = f"{len(rows)} of {expected} samples, {tried} strategies in float64, float32, bfloat16"
    for what, names in (("wrong", wrong), ("errors in", errors), ("other than the CPU's in float64", far)):
        if names:
            said += f"; {what}: {', '.join(list(names)[:6])}{f' and {len(names) - 6} more' if len(names) > 6 else ''}"
    ok = not any(x.startswith("float64") for found in (wrong, errors) for of in found.values() for x in of)
    traces = {row["name"]: row["trace"] for row in rows if "trace" in row}
    data = {"wrong": wrong, "errors": errors, "from_cpu": far, "no_kernel": without, "traces": traces}
    return Result(said, ok and len(rows) == expected, data)


__all__ = ["rules"]
