"""Check prices of serving on measured rows: errors by model, GPU, engine, precision and lengths.

    python benchmarks/serving.py serving_silicon.csv
"""

from __future__ import annotations

import csv
import functools
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from serving_work import config_of, work_of

from cost_models.serving.queueing import ServedTimes, serve
from cost_models.serving.step_price import step_seconds
from cost_models.serving.work import StepWork
from hardware_profiles import Cluster, load_cluster
from hardware_profiles.engines import Engine, engine_named

CLUSTERS = {"h100_sxm": "dgx-h100", "h200_sxm": "dgx-h200", "b200_sxm": "dgx-b200", "gb200": "nvl72-gb200"}
ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm"}
MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b", "Qwen/Qwen3-32B": "qwen3-32b", "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "openai/gpt-oss-120b": "gpt-oss-120b", "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
}  # fmt: skip
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
    return found


def _suspect(row: dict[str, str], counted: bool) -> str:
    """Say why a row contradicts others or itself; empty for one that does not."""
    if not counted:
        return "requests in flight are not recorded"
    if row["system"] == "gb200" and row["backend_version"] == "1.3.0rc1":
        return "time per token jumps up and down with the requests in flight: 8, 42, 28, 42, 29 ms"
    if row["system"] == "h100_sxm" and row["backend"] == "vllm" and row["batch_size"] == "512":
        return "512 in flight, with the time per token of 4 to 16 and a wait of minutes: the engine held a few"
    if "235B" in row["model_path"] and row["system"] == "h200_sxm" and row["backend"] == "vllm":
        return "two to three times SGLang's time per token in the same layout: no tuned kernels"
    if "0.5.8" in row["backend_version"]:
        return "16 in flight, 7 to 89 s to the first token: the engine held a few"
    if "Llama" in row["model_path"] and row["backend"] == "trtllm" and row["isl"] == row["osl"] and row["tp_size"] != "8":
        return "first token later than with longer answers, by 20 tokens: answers are sent 20 tokens at a time"
    return ""


def _whole(text: str) -> int:
    return max(1, int(text or 1))


@functools.cache
def cluster_named(system: str) -> Cluster:
    """Return the cluster of a system."""
    return load_cluster(CLUSTERS[system])


@functools.cache
def work_for(model: str, precision: str, own: bool, engine: str, tensor: int, data: int, expert: int) -> StepWork:
    """Return the work of a case."""
    form = {"fp8": "fp8", "fp4": "nvfp4", "": "bf16"}[precision]
    cache = "fp8" if (own or engine == "trtllm") and precision else "bf16"
    if model == "gpt-oss-120b":
        return work_of(config_of(model), weights="bf16", cache=cache, tensor=tensor, attention_data=data,
                       expert=expert, expert_weights="mxfp4")  # fmt: skip
    return work_of(config_of(model), weights=form, cache=cache, tensor=tensor, attention_data=data, expert=expert)


def price(case: Case, engine: Engine | None = None) -> ServedTimes:
    """Return the predicted times of a case."""
    engine = engine or engine_named(ENGINES[case.engine])
    cluster = cluster_named(case.system)
    work = work_for(case.model, case.precision, case.own, case.engine, case.tensor, case.data, case.expert)
    device = cluster.device(0)
    cache = (device.memory_bytes * engine.memory_share - work.weight_bytes - 3e9) / work.cache_bytes_per_token
    return serve(
        lambda batch: step_seconds(work, batch, cluster, engine).seconds,
        input_tokens=case.input_tokens, output_tokens=case.output_tokens, in_flight=case.batch,
        tokens_per_step=engine.tokens_per_step, mixes=engine.mixes, cache_tokens=max(cache, 1.0),
        kept_output=engine.output_reserved, lookahead=engine.lookahead, spread=0.2 if case.own else 0.03, overhead_seconds=engine.first_token_seconds,
    )  # fmt: skip


def errors(cases: list[Case]) -> list[tuple[Case, ServedTimes]]:
    """Price all cases."""
    return [(case, price(case)) for case in cases]


def table(priced: list[tuple[Case, ServedTimes]]) -> None:
    """Print a line for each group."""
    groups = defaultdict(list)
    for case, times in priced:
        groups[case.group].append((case, times))
    print("group | rows | TPOT mean | bias | TTFT mean | bias")
    for group, rows in sorted(groups.items()):
        token = [t.token_seconds / c.token - 1 for c, t in rows]
        first = [t.first_token_seconds / c.first - 1 for c, t in rows]
        print(f"{' '.join(group):60s} {len(rows):4d} {mean(map(abs, token)):6.1%} {mean(token):+6.1%} "
              f"{mean(map(abs, first)):6.1%} {mean(first):+6.1%}")  # fmt: skip
    for said, rows in (("dense", [r for r in priced if not r[0].mixture]), ("mixture", [r for r in priced if r[0].mixture])):
        if rows:
            print(said, len(rows), f"TPOT {mean(abs(t.token_seconds / c.token - 1) for c, t in rows):.1%}",
                  f"TTFT {mean(abs(t.first_token_seconds / c.first - 1) for c, t in rows):.1%}")  # fmt: skip


def main(path: str) -> None:
    """Print the tables."""
    table(errors(read_cases(path)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(Path("serving_silicon.csv")))
