"""A row of a table of published runs: what ran, and what was measured.

The columns are those of ``published_throughput.csv`` and ``published_memory.csv``: an empty cell was not published.
What a row leaves out and a price needs is taken from what the row's software does by default; :attr:`Run.assumed` names
it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

GIB = 2**30


class UnpricedError(Exception):
    """A row that cannot be priced, and why."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; ``family`` says how it is built."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq: int
    experts: int = 0
    topk: int = 0
    moe_ffn: int = 0
    is_tied: bool = False

    @property
    def without_length(self) -> Shape:
        """The same model at any length of a sequence."""
        return replace(self, seq=0)


@dataclass(frozen=True)
class Sizes:
    """A parallel layout; ``batch`` is the rows of a step, ``zero`` and ``recompute`` are None where not published."""

    tp: int
    pp: int
    vp: int
    cp: int
    ep: int
    etp: int
    dp: int
    zero: int | None
    is_sequence_parallel: bool
    micro: int
    batch: int
    recompute: str | None
    modules: str

    @property
    def microbatches(self) -> int:
        """Of a step."""
        return max(1, self.batch // (self.dp * self.micro))


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        seconds: of a step as measured; None where only memory was.
        gib: the measured peak of memory of a device, in GiB; None where not published.
        is_reserved: ``gib`` is what the allocator held, or what the driver shows, not what was allocated.
        is_out_of_memory: the run ended for want of memory.
        assumed: what the row does not say and was filled in.
    """

    id: str
    source: str
    model: str
    gpu: str
    n_gpus: int
    per_node: int
    intra: str
    inter: str
    precision: str
    software: str
    shape: Shape
    sizes: Sizes
    notes: str
    date: str
    optimizer: str
    offload: str
    seconds: float | None
    gib: float | None
    is_reserved: bool
    is_out_of_memory: bool
    quality: str
    assumed: tuple[str, ...] = field(default=())


def read(paths: Iterable[str | Path]) -> list[dict[str, str]]:
    """All rows of some files, each with a column ``file`` and an ``id``.

    A memory row that repeats a run of another of these files, which it names in its notes, is one row with that.
    """
    rows: list[dict[str, str]] = []
    for path in paths:
        with open(path, encoding="utf-8", newline="") as file:
            for n, row in enumerate(csv.DictReader(file), 2):
                cells = {key: (value or "").strip() for key, value in row.items() if key}
                cells["file"] = Path(path).stem
                cells.setdefault("id", "")
                cells["id"] = cells["id"] or f"{Path(path).stem}:{n}"
                rows.append(cells)
    by_id = {row["id"]: row for row in rows}
    return [row for row in rows if not _is_told_again(row, by_id)]


def _is_told_again(row: Mapping[str, str], by_id: Mapping[str, dict[str, str]]) -> bool:
    """Whether a memory row repeats a run of another file, which then gets its memory, if it has none."""
    twin = by_id.get(found[1]) if (found := _REFERENCE.search(row.get("notes", ""))) else None
    if twin is None or twin is row:
        return False
    if not any(twin.get(name) for name in ("peak_mem_gb", "peak_mem_gib", "gib")):
        twin["gib"], twin["quantity"] = row.get("gib", ""), row.get("quantity", "")
    return True


_REFERENCE = re.compile(r"id ([\w.-]+)")


def run_of(row: Mapping[str, str]) -> Run:
    """What a row says.

    Raises:
        UnpricedError: something that a price needs is not said, and has no default.
    """
    cells = dict(row)
    if (moved := cells.get("offload", "").lower()) and "none" not in moved and " 0 gb" not in moved:
        raise UnpricedError("offload to the host has no price")
    assumed: list[str] = []
    software = software_of(cells)
    shape = _shape(cells, assumed, software)
    sizes, n_gpus = _sizes(cells, assumed, software)
    gib, is_reserved = _memory(cells)
    seconds = _number(cells, "step_time_s")
    if seconds is None and cells.get("tokens_per_s_per_gpu"):
        seconds = sizes.batch * shape.seq / (float(cells["tokens_per_s_per_gpu"]) * n_gpus)
    is_oom = cells.get("oom", "").lower() == "yes" or "OOM" in cells.get("quantity", "")
    if seconds is None and gib is None and not is_oom:
        raise UnpricedError("neither seconds nor memory was published")
    return Run(
        cells["id"], cells.get("source", ""), cells.get("model", ""), cells.get("gpu", ""), n_gpus,
        _count(cells, "gpus_per_node") or 0, cells.get("intra_node_link", ""), cells.get("inter_node_link", ""),
        cells.get("precision", ""), software, shape, sizes, cells.get("notes", ""), cells.get("date", ""),
        cells.get("optimizer", ""), cells.get("offload", ""), None if is_oom else seconds, gib, is_reserved, is_oom,
        cells.get("quality", ""), tuple(assumed),
    )  # fmt: skip


def _number(cells: Mapping[str, str], name: str) -> float | None:
    text = cells.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise UnpricedError(f"{name} is no number") from None


def _count(cells: Mapping[str, str], name: str) -> int | None:
    number = _number(cells, name)
    return None if number is None else int(number)


def _memory(cells: Mapping[str, str]) -> tuple[float | None, bool]:
    """The measured peak in GiB, and whether it is more than what was allocated.

    Allocated bytes are taken before reserved ones. Cells in GB of 1e9 bytes are converted: those of Megatron-Bridge.
    """
    if gib := _number(cells, "peak_mem_gib"):
        return gib, "reserved" in cells.get("mem_kind", "")
    gib, quantity = _number(cells, "gib"), cells.get("quantity", "").lower()
    if gib is None:
        gib = _number(cells, "peak_mem_gb")
    if gib is None:
        return None, False
    if cells.get("source", "").startswith("Megatron-Bridge"):
        gib *= 1e9 / GIB
    return gib, "gpu memory" in quantity or "reserved" in quantity


# --- software --------------------------------------------------------------------------------------------------------

SOFTWARE: tuple[tuple[str, str], ...] = (
    ("megatron-bridge", "nemo"),
    ("mlperf", "mlperf"),
    ("nemo", "nemo"),
    ("nanotron", "nanotron"),
    ("ultrascale", "nanotron"),
    ("mosaicml", "llm-foundry"),
    ("llm-foundry", "llm-foundry"),
    ("llm foundry", "llm-foundry"),
    ("fms-fsdp", "fms-fsdp"),
    ("torchtitan", "torchtitan"),
    ("amp neurips", "megatron-deepspeed-2020"),
    ("vtrain", "megatron-deepspeed-2022"),
    ("bloom", "megatron-deepspeed-2022"),
    ("deepspeed pr", "deepspeed"),
    ("accelerate fsdp", "accelerate"),
    ("deepspeed zero-3 in eager mode", "deepspeed-eager"),
    ("deepcompile benchmark: deepcompile", "deepspeed"),
    ("simumax", "megatron-2023-plain"),
    ("zero bubble", "megatron-2021"),
    ("megatron-lm 2020", "megatron-2021"),
    ("megatron-lm 2021", "megatron-2021"),
    ("megatron-lm sc21", "megatron-2021"),
    ("narayanan", "megatron-2021"),
    ("korthikanti", "megatron-2021"),
    ("megatron-deepspeed", "megatron-deepspeed-2022"),
    ("megatron", "megatron-2023"),
    ("deepspeed", "deepspeed"),
)
"""Words of a source, and the record of data/software.toml that its runs are priced with; the first that is found."""
OWN = "autopar"


def software_of(cells: Mapping[str, str]) -> str:
    """The record of a row's software; ``autopar`` where it is not known."""
    source = cells.get("source", "").lower()
    for words, name in SOFTWARE:
        if words in source:
            if name == "nanotron" and cells.get("zero_stage") == "0":
                return "nanotron-ddp"
            if name == "megatron-2023" and _year(cells) and _year(cells) < 2023:
                return "megatron-2021"
            return name
    return OWN


def _year(cells: Mapping[str, str]) -> int:
    match = re.match(r"(20\d\d)", cells.get("date", ""))
    return int(match[1]) if match else 0


# --- the model -------------------------------------------------------------------------------------------------------

FAMILIES: tuple[tuple[str, str], ...] = (
    ("deepseek", "deepseek"), ("kimi", "deepseek"), ("moonlight", "deepseek"), ("gpt-oss", "gpt-oss"),
    ("gpt oss", "gpt-oss"), ("gpt_oss", "gpt-oss"), ("mixtral", "mixtral"), ("qwen", "qwen3"), ("llama", "llama"),
    ("mistral", "llama"), ("codellama", "llama"), ("internlm", "llama"), ("nemotron", "nemotron"), ("gpt", "gpt"),
    ("mpt", "gpt"), ("bloom", "gpt"), ("opt", "gpt"), ("megatron", "gpt"), ("turing", "gpt"),
)  # fmt: skip
OTHERS = (
    "nemotron 3", "nemotron-h", "nemotron nano", "gemma", "mamba", "t5", "bert", "vit", "resnet", "gshard", "glam",
    "stable", "diffusion", "flux", "swin", "moe-lightning", "qwen3.8", "qwen3-next", "qwen3_next", "qwen3-vl",
    "deepseek-v4", "deepseek_v4", "whisper",
)  # fmt: skip
"""Models of other kinds than those that are built here."""
LLAMA_FFN = {2048: 8192, 3072: 8192, 4096: 14336, 8192: 28672, 16384: 53248, 5120: 13824}
"""The width of the feed-forward of models named Llama, by their hidden size, where a row does not say it."""


def _shape(cells: Mapping[str, str], assumed: list[str], software: str) -> Shape:
    name = cells.get("model", "").lower()
    if task := next((t for t in ("lora", "peft") if t in name or t in cells.get("task", "").lower()), None):
        raise UnpricedError(f"{task}: only training of all parameters is priced")
    if other := next((o for o in OTHERS if o in name), None):
        raise UnpricedError(f"no model of the kind '{other}' is built here")
    experts = _count(cells, "experts") or 0
    family = next((f for words, f in FAMILIES if words in name), "mixtral" if experts else "llama")
    if family == "qwen3" and experts:
        family = "qwen3-moe"
    if family in ("llama", "gpt", "nemotron") and experts:
        family = "mixtral"
    numbers = {n: _count(cells, n) for n in ("n_layers", "hidden", "heads", "seq_len")}
    missing = [n for n, value in numbers.items() if not value]
    if missing:
        raise UnpricedError(f"{', '.join(missing)} not published")
    layers, hidden, heads, seq = (int(n or 0) for n in numbers.values())
    if family == "llama" and cells.get("kv_heads") == "" and cells.get("ffn_hidden") == "":
        assumed.append("feed-forward and key-value heads of Llama")
    ffn = _count(cells, "ffn_hidden") or (LLAMA_FFN.get(hidden, 0) if family in ("llama", "qwen3") else 4 * hidden)
    if not ffn:
        raise UnpricedError("ffn_hidden not published")
    kv_heads = _count(cells, "kv_heads") or (8 if family == "llama" and "3" in name and "like" not in name else heads)
    vocab = _count(cells, "vocab") or (51200 if family == "gpt" else 128256 if family == "llama" else 0)
    if not vocab:
        raise UnpricedError("vocab not published")
    if not cells.get("vocab"):
        assumed.append("vocab")
    if hidden % heads and not _count(cells, "head_dim"):
        raise UnpricedError(f"hidden {hidden} does not divide by {heads} heads")
    if family == "gpt-oss":
        assumed.append("GPT-OSS without its attention sinks and windows")
    shape = Shape(
        family, layers, hidden, ffn, heads, kv_heads, _count(cells, "head_dim") or hidden // heads, vocab, seq, experts,
        _count(cells, "topk") or (2 if experts else 0), _count(cells, "moe_ffn_hidden") or 0, family == "gpt",
    )  # fmt: skip
    if (
        family == "deepseek"
        and "w/o mtp" not in name
        and "moonlight" not in name
        and "kimi" not in name
        and software in ("nemo", "mlperf")
    ):
        shape = replace(shape, layers=layers + 1)
        assumed.append("multi-token prediction as one more layer")
    params = _number(cells, "params_b")
    if family == "llama" and params:
        table = vocab * hidden / 1e9
        return replace(shape, is_tied=abs(_dense(shape) + table - params) < abs(_dense(shape) + 2 * table - params))
    return shape


def _dense(shape: Shape) -> float:
    """Billions of parameters of a Llama-like model's blocks."""
    attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
    return shape.layers * (attention + 3 * shape.hidden * shape.ffn) / 1e9


# --- the layout ------------------------------------------------------------------------------------------------------

UNSAID_RECOMPUTE = {"megatron-deepspeed-2020": "full"}
"""What a trainer's example scripts recompute, where a row does not say it; else nothing."""


def _sizes(cells: Mapping[str, str], assumed: list[str], software: str) -> tuple[Sizes, int]:
    said = {n: _count(cells, n) for n in ("tp", "pp", "vp", "cp", "ep", "etp", "dp")}
    for name in ("tp", "pp"):
        if said[name] is None:
            assumed.append(f"{name}=1")
    one = {name: value or 1 for name, value in said.items()}
    n_gpus = _count(cells, "n_gpus")
    if n_gpus is None and said["dp"] is None:
        raise UnpricedError("n_gpus not published")
    n_gpus = n_gpus or one["tp"] * one["pp"] * one["cp"] * one["dp"]
    each = one["tp"] * one["pp"] * one["cp"]
    if said["dp"] is None:
        one["dp"] = max(1, n_gpus // each)
    if each * one["dp"] != n_gpus:
        words = " x ".join(f"{name} {one[name]}" for name in ("tp", "pp", "cp", "dp"))
        raise UnpricedError(f"{words} are {each * one['dp']} GPUs, the row has {n_gpus}")
    micro = _count(cells, "micro_batch")
    if not micro:
        raise UnpricedError("micro_batch not published")
    batch = _count(cells, "global_batch")
    if not batch:  # memory rows do not say it: so many microbatches that gradients add up and every stage fills
        batch = one["dp"] * micro * 4 * one["pp"]
        assumed.append("global_batch")
    if batch % (one["dp"] * micro):
        raise UnpricedError(f"a batch of {batch} does not divide by dp={one['dp']} with {micro} rows each")
    recompute = cells.get("recompute", "") or None
    if recompute is None:
        recompute = UNSAID_RECOMPUTE.get(software, "none")
        assumed.append(f"recompute={recompute}")
    zero = _count(cells, "zero_stage")
    if zero is None:
        zero = 1 if software in ("nemo", "mlperf") else 0
        assumed.append(f"zero={zero}")
    if zero == 2 and batch > one["dp"] * micro:
        zero = 1  # with several microbatches gradients are whole until the last one, as under ZeRO-1
        assumed.append("zero=1 for 2")
    sp = cells.get("sp", "")
    if not sp and one["tp"] > 1:
        assumed.append("sp")
    is_sp = one["tp"] > 1 and (sp == "yes" or (not sp and software in ("nemo", "mlperf", "torchtitan")))
    if software.startswith("nanotron"):  # its tensor parallelism was REDUCE_SCATTER in all rows
        is_sp = one["tp"] > 1
    return Sizes(
        one["tp"], one["pp"], one["vp"], one["cp"], one["ep"], one["etp"], one["dp"], zero, is_sp, micro, batch,
        recompute, cells.get("recompute_modules", ""),
    ), n_gpus  # fmt: skip


MOST_APART = 0.15
"""By how much what was measured may differ between rows that say the same, before they are not compared."""


def alike_but_apart(runs: Sequence[Run]) -> dict[str, str]:
    """Rows that say the same as others and measured something else: what differed is in no column. The reason by id."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        same = replace(run, id="", notes="", seconds=None, gib=None, quality="", assumed=())
        groups.setdefault(same, []).append(run)
    apart: dict[str, str] = {}
    for group in groups.values():
        for what, values in (("seconds", [r.seconds for r in group if r.seconds]),
                             ("memory", [r.gib for r in group if r.gib])):  # fmt: skip
            if len(values) > 1 and max(values) > (1 + MOST_APART) * min(values):
                text = f"rows that say the same measured {what} {max(values) / min(values):.2f} times apart"
                apart.update({r.id: text for r in group})
    return apart


__all__ = ["GIB", "OWN", "Run", "Shape", "Sizes", "UnpricedError", "alike_but_apart", "read", "run_of", "software_of"]
