"""Check prices of serving on measured rows: errors by model, GPU, engine, precision and lengths.

python benchmarks/serving.py serving_silicon.csv
"""

from __future__ import annotations

import argparse
import csv
import functools
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import mean, median

from serving_work import config_of, work_of

from cost_models.serving.queueing import ServedTimes, engine_options, serve
from cost_models.serving.step_price import step_seconds
from cost_models.serving.work import StepWork
from hardware_profiles import Cluster, load_cluster
from hardware_profiles.engines import Engine, engine_named
from hardware_profiles.usable_memory import driver_bytes

CLUSTERS = {"h100_sxm": "dgx-h100", "h200_sxm": "dgx-h200", "b200_sxm": "dgx-b200", "gb200": "nvl72-gb200"}
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm"}
MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b", "Qwen/Qwen3-32B": "qwen3-32b", "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "openai/gpt-oss-120b": "gpt-oss-120b", "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
}  # fmt: skip
LENGTHS = 0.2
"""InferenceMAX draws lengths from 80% to all of those that it names; the others send them as they are."""
FEW = 8
"""Requests in flight that count as few."""
UNCOUNTED = "requests in flight are not recorded"
DIFFERENT = "a setting of this series was measured twice, and its times per token differ by more than half"
IMPOSSIBLE = "less time per token than reading the weights and the cache takes at the data sheet's bandwidth"
LATE = "the first token comes more than 12 tokens later than in the same setting with longer answers"
TWICE = 1.5
LATE_TOKENS = 12
SHORTEST = 0.8
"""Part of the named lengths that the shortest requests may have."""
MIXTURES = ("gpt-oss-120b", "qwen3-235b-a22b")


@dataclass(frozen=True)
class Case:
    """One measured row of one kind of worker."""

    name: str
    model: str
    system: str
    engine: str
    version: str
    precision: str
    input_tokens: int
    output_tokens: int
    tensor: int
    data: int
    expert: int
    batch: int
    first: float
    token: float
    own: bool
    suspect: str

    @property
    def group(self) -> tuple[str, ...]:
        """What a table has a line for."""
        lengths = f"{self.input_tokens}x{self.output_tokens}"
        return self.model, self.system, self.engine, self.version, self.precision, lengths

    @property
    def layout(self) -> tuple[int, int, int]:
        """Tensor ranks, attention data ranks, expert ranks."""
        return self.tensor, self.data, self.expert

    @property
    def mixture(self) -> bool:
        """True for a model with experts."""
        return self.model in MIXTURES


def read_cases(path: str) -> list[Case]:
    """Read the rows of one kind of worker."""
    found = []
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["mode"] != "agg":
                continue
            source = row["silicon_data_source"]
            own = "source_file=2026-" in source
            tensor, data, batch = (_whole(row[key]) for key in ("tp_size", "attention_dp_size", "batch_size"))
            expert, beside = _whole(row["moe_ep_size"]), _whole(row["moe_tp_size"])
            if own and expert == beside > 1 and tensor * data == expert * beside and 1 in (tensor, data):
                batch = batch * (data // expert) if data > 1 else batch
                tensor, data = (expert, 1) if data == 1 else (1, expert)  # recorded as their square
            together = re.search(r"silicon_concurrency=(\d+)", source)
            if tensor > 1 and not row["attention_dp_size"] and together and int(together[1]) == batch * tensor:
                tensor, data = 1, tensor  # requests in flight are split over the ranks
            if MODELS[row["model_path"]] in MIXTURES and 1 in (expert, beside) and expert * beside > tensor * data:
                data = expert * beside // tensor  # not recorded, but its experts lie on so many devices
            found.append(Case(
                row["id"], MODELS[row["model_path"]], row["system"], row["backend"], row["backend_version"],
                row["precision"], int(row["isl"]), int(row["osl"]), tensor, data, expert, batch,
                float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3, own,
                _suspect(row, bool(together)),
            ))  # fmt: skip
    return contradicting(found)


def _suspect(row: dict[str, str], counted: bool) -> str:
    """Say what a row leaves out, so that it cannot be priced; empty for one that is complete."""
    return "" if counted else UNCOUNTED


def contradicting(cases: list[Case]) -> list[Case]:
    """Mark rows that contradict others or their own bytes. Measured values alone decide, never a price."""
    series: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    for case in cases:
        series[*case.group, *case.layout].append(case)
    said: dict[str, str] = {case.name: IMPOSSIBLE for case in cases if case.token < least_token_seconds(case)}
    for of in series.values():
        if any(a.batch == b.batch and a.token > TWICE * b.token for a in of for b in of):
            said |= {case.name: DIFFERENT for case in of}
        elif _late_tokens(of, series) > LATE_TOKENS:
            said |= {case.name: LATE for case in of}
    return [replace(case, suspect=case.suspect or said.get(case.name, "")) for case in cases]


def _late_tokens(of: list[Case], series: dict[tuple[object, ...], list[Case]]) -> float:
    """Return how many tokens later the first one comes than with longer answers, the median over few in flight."""
    found = []
    for key, others in series.items():
        first, other = of[0], others[0]
        alike = key[:5] == first.group[:5] and first.layout == other.layout and first.input_tokens == other.input_tokens
        if alike and other.output_tokens > first.output_tokens:
            found += [(a.first - b.first) / a.token for a in of for b in others if a.batch == b.batch <= FEW]
    return median(found) if found else 0.0


def least_token_seconds(case: Case) -> float:
    """Return the seconds of reading all weights that a step needs, and the cache in 8 bits, at the data sheet's rate.

    The cache counts where it fits, since fewer requests decode at once where it does not; experts where every one is
    hit on average eight times or more.
    """
    work = work_for(case.model, case.precision, case.own, case.engine, case.system, case.tensor, case.data, case.expert)
    few = sum(e.count for e in work.experts if case.batch * case.data * e.top_k < 8 * e.total)
    if few or case.precision == "":
        return 0.0
    device = cluster_named(case.system).device(0)
    width = 2.0 if work.attentions[0].cache == "bf16" else 1.0
    cache = case.batch * (case.input_tokens + case.output_tokens / 2) * work.cache_bytes_per_token / width * SHORTEST
    if cache + work.weight_bytes > driver_bytes(device):
        cache = 0.0
    read = work.weight_bytes - 2.0 * config_of(case.model)["vocab_size"] * config_of(case.model)["hidden_size"]
    return (read + cache) / device.memory_bytes_per_second


def _whole(text: str) -> int:
    return max(1, int(text or 1))


@functools.cache
def cluster_named(system: str) -> Cluster:
    """Return the cluster of a system."""
    return load_cluster(CLUSTERS[system])


@functools.cache
def work_for(
    model: str, precision: str, own: bool, engine: str, system: str, tensor: int, data: int, expert: int
) -> StepWork:
    """Return the work of a case."""
    form = {"fp8": "fp8", "fp4": "nvfp4", "": "bf16"}[precision]
    cache = "fp8" if (own or engine == "trtllm") and precision else "bf16"
    if model == "gpt-oss-120b":
        activations = "fp8" if system in ("b200_sxm", "gb200") else "bf16"  # B200 multiplies MXFP4 by MXFP8
        return work_of(config_of(model), weights="bf16", cache=cache, tensor=tensor, attention_data=data,
                       expert=expert, expert_weights="mxfp4", expert_activations=activations)  # fmt: skip
    return work_of(config_of(model), weights=form, cache=cache, tensor=tensor, attention_data=data, expert=expert)


def price(case: Case, engine: Engine | None = None) -> ServedTimes:
    """Return the predicted times of a case."""
    engine = engine or engine_named(ENGINES[case.engine])
    cluster = cluster_named(case.system)
    work = work_for(case.model, case.precision, case.own, case.engine, case.system, case.tensor, case.data, case.expert)
    device = cluster.device(0)
    cache = (driver_bytes(device) * engine.memory_share - work.weight_bytes - 3e9) / work.cache_bytes_per_token
    options = engine_options(engine)
    if case.own:
        options["spread"] = LENGTHS
    return serve(
        lambda batch: step_seconds(work, batch, cluster, engine).seconds, input_tokens=case.input_tokens,
        output_tokens=case.output_tokens, in_flight=case.batch, cache_tokens=max(cache, 1.0), **options,
    )  # fmt: skip


def fitted(case: Case) -> bool:
    """True for the half on which numbers were fitted: workers of 2 and 8 devices; others are held out."""
    return case.tensor * case.data in (2, 8)


Priced = tuple[Case, ServedTimes]


def off(rows: list[Priced], first: bool = False, signed: bool = False) -> float:
    """Return the mean error of the time per token, or to the first one, relative to what was measured."""
    ratios = [t.first_token_seconds / c.first - 1 if first else t.token_seconds / c.token - 1 for c, t in rows]
    return mean(ratios if signed else map(abs, ratios)) if ratios else float("nan")


def rank(rows: list[Priced]) -> tuple[float, int]:
    """Return the mean rank correlation of layouts by time per token, and over how many groups.

    A group has rows of one model, GPU, engine, version, lengths and number in flight, with three layouts or more.
    """
    groups = defaultdict(dict)
    for case, times in rows:
        groups[*case.group, case.batch * case.data][case.layout] = (case.token, times.token_seconds)
    found = [spearman(list(of.values())) for of in groups.values() if len(of) >= 3]
    return mean(found), len(found)


def spearman(pairs: list[tuple[float, float]]) -> float:
    """Return the rank correlation of pairs of numbers that have no ties."""
    orders = [sorted(range(len(pairs)), key=lambda i, side=side: pairs[i][side]) for side in (0, 1)]
    places = [{index: place for place, index in enumerate(order)} for order in orders]
    n = len(pairs)
    return 1 - 6 * sum((places[0][i] - places[1][i]) ** 2 for i in range(n)) / (n * (n * n - 1))


def line(name: str, rows: list[Priced]) -> str:
    """Return a line of a table."""
    few = [row for row in rows if row[0].batch * row[0].data <= FEW]
    return (f"| {name} | {len(rows)} | {off(rows):.1%} | {off(rows, signed=True):+.1%} | {off(rows, True):.1%} | "
            f"{off(rows, True, True):+.1%} | {off(few, True):.1%} |")  # fmt: skip


HEAD = """| rows | number | time per token | bias | to the first token | bias | at 8 or fewer in flight |
|---|---|---|---|---|---|---|"""


def summary(rows: list[Priced]) -> None:
    """Print errors of all rows, of both halves, and without rows that contradict others."""
    print(HEAD)
    for kind, mixture in (("dense", False), ("experts", True)):
        of_kind = [row for row in rows if row[0].mixture == mixture]
        sound = [row for row in of_kind if not row[0].suspect]
        print(line(f"{kind}, all", of_kind))
        print(line(f"{kind}, without the suspect ones", sound))
        print(line(f"{kind}, fitted half (2 and 8 devices)", [row for row in sound if fitted(row[0])]))
        print(line(f"{kind}, held out (1, 4 and more devices)", [row for row in sound if not fitted(row[0])]))
        print(f"\nrank of layouts by time per token, {kind}: {rank(sound)[0]:.3f} over {rank(sound)[1]} groups\n")


def by_group(rows: list[Priced]) -> None:
    """Print a line for each model, GPU, engine, precision and lengths."""
    groups = defaultdict(list)
    for row in rows:
        groups[row[0].group].append(row)
    print(HEAD)
    for group, of in sorted(groups.items()):
        print(line(" ".join(filter(None, group)), of))


def suspects(rows: list[Priced]) -> None:
    """Print why rows are suspect, how many, and their errors."""
    groups = defaultdict(list)
    for row in rows:
        groups[row[0].suspect].append(row)
    print(HEAD)
    for said, of in sorted(groups.items()):
        if said:
            print(line(said, of))


def beside(rows: list[Priced], path: str) -> None:
    """Print errors on the rows that another tool priced (id, milliseconds to the first token and per token)."""
    with open(path, newline="", encoding="utf-8") as file:
        theirs = {row["id"]: row for row in csv.DictReader(file) if row["ttft_ms"]}
    both = [(case, times) for case, times in rows if case.name in theirs]
    other = [(case, ServedTimes(float(theirs[case.name]["ttft_ms"]) / 1e3, float(theirs[case.name]["tpot_ms"]) / 1e3,
                                0.0, 0.0)) for case, _ in both]  # fmt: skip
    print(HEAD)
    for kind, mixture in (("dense", False), ("experts", True)):
        for name, priced in (("autopar", both), ("the other", other)):
            chosen = [row for row in priced if row[0].mixture == mixture and not row[0].suspect]
            if chosen:
                print(line(f"{kind}: {name}", chosen))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", help="a file of measured rows")
    parser.add_argument("--beside", help="a file of another tool's prices of some of them: id, ttft_ms, tpot_ms")
    options = parser.parse_args()
    priced = [(case, price(case)) for case in read_cases(options.rows)]
    summary(priced)
    by_group(priced)
    print()
    suspects(priced)
    if options.beside:
        print()
        beside(priced, options.beside)


if __name__ == "__main__":
    main()
