"""From a model and a cluster to a profile file: processes measure, this one fits and writes."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from autopar.profiling.ops import LocalOp, Passes, passes_of
from autopar.runtime.ranks.launch import backend_of, run_local
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from cost_models.measured import fit_correction
from hardware_profiles import Cluster
from hardware_profiles.measurements import KEY, OTHER, VERSION
from hardware_profiles.strict import Unreadable, parse_json, read_text

if TYPE_CHECKING:
    from autopar.profiling.measure import Round

Values: TypeAlias = dict[str, Any]
"""Values of a profile by name, as its JSON has them."""
PROCESSOR = torch.device("cpu")
MOST_OPS = 4000
MOST_BYTES = 2e9
"""Most bytes of one sequence of ops on a process."""


@dataclass(frozen=True)
class ProfilingOptions:
    """Options of a measurement.

    Attributes:
        seconds: seconds for everything once the processes run, within a fifth.
        processes: the processes that measure at the same time.
        meshes: the meshes whose strategies are measured, in addition to unsharded ops.
        device: ``cpu``, or ``cuda``, where each process takes its own GPU.
        partial: file (plus the rank's number) of each rank's rounds, from which an interrupted measurement resumes.
    """

    seconds: float = 60.0
    processes: int = 2
    meshes: tuple[Mesh, ...] = ()
    most_ops: int = MOST_OPS
    most_bytes: float = MOST_BYTES
    timeout: float = 1800.0
    device: str = "cpu"
    partial: Path | None = None


def profile(graph: Graph, cluster: Cluster, name: str, model: str, request: ProfilingOptions) -> Values:
    """Measure ``graph`` on this machine and return the profile's document.

    ``name`` is the cluster as the profile names it (a name, or a file next to it); ``model`` describes what was
    profiled.
    """
    passes = passes_of(graph, cluster, request.meshes, request.most_ops, request.most_bytes)
    before = os.getloadavg()[0]
    ranks = run_local(
        measure_rank, request.processes, passes, request.seconds, cluster, request.device, request.partial,
        timeout=request.timeout, backend=backend_of(request.device),
    )  # fmt: skip
    on_all_ranks = set.intersection(*(set(rank["ops"]) for rank in ranks))
    ops = {op.key: op for one in passes.passes for op in one if op.key in on_all_ranks}
    left_out = [*passes.left_out, *(f"{key}: {why}" for key, why in sorted(ranks[0]["failed"].items()))]
    seconds = {
        key: tuple(mean(rank["ops"][key][i] for rank in ranks) for i in range(4)) for key in ops
    }  # fmt: skip
    if request.partial is not None:
        for rank in range(request.processes):
            request.partial.with_name(f"{request.partial.name}.{rank}").unlink(missing_ok=True)
    around = ranks[0]["around"]
    document: Values = {
        KEY: VERSION, "cluster": name,
        "provenance": {
            "date": datetime.date.today().isoformat(), "torch": torch.__version__, "processor": ranks[0]["processor"],
            "threads": 1, "processes": request.processes, "rounds": min(ranks[0]["rounds"], default=0),
            "load": round(before, 2), "others": ranks[0]["others"], "model": model,
            "meshes": [mesh.text for mesh in request.meshes],
            "left_out": left_out,
        },
        "corrections": _corrections(ops, seconds),
        "overheads": _overheads(ranks),
        **{k: _mean_points([r["around"][k] for r in ranks]) for k in ("accumulate", "accumulate_new")},
        "transfers": around["transfers"], "optimizers": _optimizers(ranks),
        "ops": {
            key: {"kind": op.kind, **dict(zip(
                ("forward_seconds", "backward_seconds", "input_seconds", "weight_seconds"), seconds[key], strict=True))}
            for key, op in sorted(ops.items())
        },
    }  # fmt: skip
    return document


def measure_rank(
    passes: Passes, seconds: float, cluster: Cluster, device_type: str, interrupted: Path | None = None
) -> Values:
    """Measure on one rank, on the current device of type ``device_type``.

    ``interrupted`` is ``partial`` of :class:`ProfilingOptions`.
    """
    import torch.distributed as dist

    from autopar.profiling import transfers_and_collectives
    from autopar.profiling.clock import Clock
    from autopar.profiling.measure import measure_pass
    from autopar.profiling.quiet import CpuWatch, until_quiet

    warnings.filterwarnings("ignore", category=FutureWarning)  # newer names of the same collectives
    torch.manual_seed(0)
    began, patience = CpuWatch(), seconds / 20
    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, torch.get_device_module(device_type).current_device())
    clock = Clock(device)
    until_quiet(patience)
    beside_ops: Values = {"optimizers": transfers_and_collectives.optimizer_seconds(clock)}
    beside_ops["accumulate"] = transfers_and_collectives.accumulate_points(clock, in_place=True)
    beside_ops["accumulate_new"] = transfers_and_collectives.accumulate_points(clock, in_place=False)
    beside_ops["transfers"] = transfers_and_collectives.collective_points(clock) if dist.get_world_size() > 1 else {}
    until_quiet(patience)
    if dist.get_world_size() > 1:
        beside_ops["transfers"]["send_recv"] = transfers_and_collectives.send_points(clock)
    if dist.get_world_size() == 2:
        until_quiet(patience)
        beside_ops["spans"] = {
            f"{schedule} {layers}": transfers_and_collectives.executor_spans(cluster, layers, schedule, device)
            for schedule in ("1f1b", "zb-h1") for layers in (1, 9)
        }  # fmt: skip
    ops: Values = {}
    failed: dict[str, str] = {}
    rounds: list[int] = []
    others: list[float] = []
    resumed = Resumed(interrupted, dist.get_rank(), passes)
    costs = [sum(sum(op.seconds) + 5e-5 for op in one) for one in passes.passes]
    for number, (one, cost) in enumerate(zip(passes.passes, costs, strict=True)):
        left = max(seconds / 3, seconds - began.others()[1]) * cost / sum(costs[number:])
        taken, busy = measure_pass(one, left, failed, clock, resumed.before(number), partial(resumed.note, number))
        others.append(busy)
        rounds.append(min((len(t.forward) for t in taken.values()), default=0))
        for key, value in taken.items():
            ops.setdefault(key, value.medians())
    return {"ops": ops, "failed": failed, "rounds": rounds, "others": max(others, default=0.0), "around": beside_ops,
            "processor": processor(device)}  # fmt: skip


class Resumed:
    """The rounds that a rank has measured of every pass, in a file, so that an interrupted measurement resumes.

    A file of another model, other sizes or another torch is overwritten.
    """

    def __init__(self, partial: Path | None, rank: int, passes: Passes) -> None:
        self.path = None if partial is None else partial.with_name(f"{partial.name}.{rank}")
        content = repr((torch.__version__, [[op.key for op in one] for one in passes.passes]))
        self.of = hashlib.sha256(content.encode()).hexdigest()
        self.rounds: dict[int, list[Any]] = {}
        if self.path is None or not self.path.exists():
            return
        try:
            document = parse_json(read_text(self.path))
            if document["of"] == self.of:
                self.rounds = {int(number): rounds for number, rounds in document["rounds"].items()}
        except (Unreadable, KeyError, TypeError, ValueError, AttributeError):
            return  # written while it was interrupted

    def before(self, number: int) -> list[Round]:
        """Return the rounds of a pass that all ranks have."""
        import torch.distributed as dist

        from autopar.profiling.measure import Taken

        rounds = self.rounds.get(number, [])
        n = torch.tensor([len(rounds)])
        dist.all_reduce(n, dist.ReduceOp.MIN)
        return [
            (split, others, {key: Taken(*rows) for key, rows in of_round.items()})
            for split, others, of_round in rounds[: int(n)]
        ]

    def note(self, number: int, rounds: Sequence[Round]) -> None:
        """Write the rounds of a pass so far."""
        if self.path is None:
            return
        self.rounds[number] = [
            (split, others, {key: (t.forward, t.backward, t.inputs, t.weights) for key, t in of_round.items()})
            for split, others, of_round in rounds
        ]
        written = self.path.with_name(f"{self.path.name}.new")
        written.write_text(json.dumps({"of": self.of, "rounds": self.rounds}), encoding="utf-8")
        written.replace(self.path)


def _corrections(ops: Mapping[str, LocalOp], seconds: Mapping[str, tuple[float, ...]]) -> Values:
    """Return lines from computed to measured seconds, by kind of op."""
    lines: Values = {}
    for kind in [*sorted({op.kind for op in ops.values()}), OTHER]:
        of_kind = [(op.seconds, seconds[key]) for key, op in ops.items() if kind in (op.kind, OTHER)]
        with_grad = [(c, m) for c, m in of_kind if m[1] > 0]
        lines[kind] = {
            "forward": list(fit_correction([c[0] for c, _ in of_kind], [m[0] for _, m in of_kind])),
            "backward": list(fit_correction([c[1] for c, _ in with_grad], [m[1] for _, m in with_grad])),
        }  # fmt: skip
    return lines


def _overheads(ranks: Sequence[Values]) -> dict[str, float]:
    """Return the executor's own seconds, from tiny models of two depths.

    The intercept is the cost of an action, the slope that of an op in a split backward.
    """
    if "spans" not in ranks[0]["around"]:
        return dict.fromkeys(("forward_seconds", "backward_seconds", "input_seconds", "weight_seconds",
                              "input_op_seconds", "weight_op_seconds", "step_seconds"), 0.0)  # fmt: skip
    first, last = (rank["around"]["spans"] for rank in (ranks[0], ranks[-1]))

    def line(spans: Values, schedule: str, kind: str) -> tuple[float, float]:
        few, many = (spans[f"{schedule} {layers}"][kind] for layers in (1, 9))
        slope = max(0.0, (many - few) / 8)
        return max(0.0, few - slope), slope

    forward, _ = line(first, "1f1b", "F")
    backward, each = line(last, "1f1b", "B")
    inputs, each_input = line(last, "zb-h1", "I")
    weights, each_weight = line(last, "zb-h1", "W")
    return {
        "forward_seconds": forward, "backward_seconds": backward, "input_seconds": inputs, "weight_seconds": weights,
        "input_op_seconds": max(0.0, each_input - each / 2), "weight_op_seconds": max(0.0, each_weight - each / 2),
        "step_seconds": first["1f1b 1"]["step"],
    }  # fmt: skip


def _optimizers(ranks: Sequence[Values]) -> dict[str, dict[str, float]]:
    names = ranks[0]["around"]["optimizers"]
    costs = {}
    for name in sorted(names):
        tensor, byte = (mean(r["around"]["optimizers"][name][i] for r in ranks) for i in (0, 1))
        costs[name] = {"tensor_seconds": tensor, "byte_seconds": byte}
    return costs


def _mean_points(rows: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    return [[points[0][0], mean(p[1] for p in points)] for points in zip(*rows, strict=True)]


def processor(device: torch.device = PROCESSOR) -> str:
    """Return the name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())


def dumps(document: Values) -> str:
    """Return the text of a profile, an op per line; the same document gives the same bytes."""
    rounded = _rounded(document)
    lines = []
    for key, value in rounded.items():
        if key in ("ops", "corrections", "transfers", "optimizers") and value:
            rows = [f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in sorted(value.items())]
            lines.append(f'"{key}": {{\n' + ",\n".join(rows) + "\n}")
        else:
            lines.append(f'"{key}": {json.dumps(value, allow_nan=False)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return value
