"""What torchtitan's fields mean in the words of layouts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.errors import closest
from autopar.planner.layouts.stage_starts import described, sizes_of
from autopar.targets.target import Config, Source
from autopar.targets.trainers.torchtitan.fields import SaidFields
from autopar.targets.trainers.torchtitan.writing import SCHEDULES, recomputed_blocks

P = "parallelism."
NAMES = {
    **{name.lower(): own for own, name in SCHEDULES.items()}, "zbvzerobubble": "zb-v", "dualpipev": "dualpipe-v",
    "interleavedzerobubble": "zb-h1",
}  # fmt: skip
"""Schedules by torch's names, which it takes in any case."""
OPTIMIZERS = {"adamw": "adamw", "adam": "adamw"}
"""Adam's step takes the time and the memory of AdamW's."""
READ = frozenset(
    {
        "training.local_batch_size", "training.global_batch_size", "training.seq_len", "training.dtype",
        "training.mixed_precision_param", "training.mixed_precision_reduce", "training.enable_cpu_offload",
        "activation_checkpoint", "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option",
        "activation_checkpoint.blocks", "activation_checkpoint.memory_budget", "compile.enable", "compile.components",
        "optimizer.name", "optimizer.implementation", "model.name", "model.flavor", "model.converters", "hf_model",
        *(P + name for name in (
            "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
            "tensor_parallel_degree", "enable_sequence_parallel", "pipeline_parallel_degree",
            "module_fqns_per_model_part", "pipeline_parallel_first_stage_less_layers",
            "pipeline_parallel_last_stage_less_layers", "pipeline_parallel_layers_per_stage",
            "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size",
            "pipeline_parallel_split_points", "pipeline_parallel_microbatches", "context_parallel_degree",
            "context_parallel_rotate_method",
            "expert_parallel_degree", "expert_tensor_parallel_degree", "spmd_backend",
        )),
    }
)  # fmt: skip
"""Fields whose meaning is below."""
NOTHING = (
    "job.", "profiling.", "profiler.", "metrics.", "checkpoint.", "lr_scheduler.", "comm.", "validation.", "validator.",
    "debug.", "experimental.", "float8.", "mx.", "quantize.", "hf_transformers.", "training.data_parallel_type",
    "training.checkpoint_", "training.fp8_linear", "dataloader.", "tokenizer.", "loss.", "override.",
    "memory_estimation.", "hf_assets_path",
    "dump_folder", "training.dataset", "training.dataset_path", "training.dataloader.", "training.max_norm",
    "training.steps", "training.gc_", "training.seed", "training.deterministic", "training.warmup_steps",
    "training.disable_cuda_graphs", "optimizer.", "activation_checkpoint.", "model.tokenizer_path", "model.norm_type",
    "model.hf_assets_path", "model.print_after_conversion", "compile.backend",
    P + "context_parallel_load_balancer", P + "context_parallel_ptrr_mask_key", P + "enable_compiled_autograd",
)  # fmt: skip
"""Fields, by how their names begin, that change neither time nor memory of a step."""
REASONS = {
    P + "enable_async_tensor_parallel": "collectives of tp overlap with products; priced as one after the other",
    P + "enable_fsdp_symm_mem": "gathers by copy engines; priced as NCCL's",
    P + "disable_loss_parallel": "logits are whole on every rank of tp; priced as cut over the vocabulary",
    P + "expert_parallel_comm_backend": "another exchange of rows; priced as all-to-all",
    P + "pipeline_parallel_expert_parallel_overlap": "exchanges of experts overlap; priced as one after the other",
    "optimizer.early_step_in_backward": "the optimizer steps within the backward; priced as after it",
}  # fmt: skip
"""Why a field that changes time or memory is not priced."""


@dataclass
class Reading:
    """A config on its way: the words, and what the price does not know."""

    source: Source
    said: SaidFields
    words: dict[str, str] = field(default_factory=dict)
    unpriced: list[str] = field(default_factory=list)

    def number(self, name: str, otherwise: int = 1) -> int:
        """Return a field that is a whole number.

        Raises:
            ConfigError: it is something else, or less than 1 (-1 is ``what is left``).
        """
        value = self.said.get(name, otherwise)
        value = otherwise if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            raise self.source.error(name, f"is {value!r}; give a whole number of 1 or more")
        return value


def config_of(source: Source, said: SaidFields) -> Config:
    """Return what a file's fields mean.

    Raises:
        ConfigError: a value is none that torchtitan takes, or cannot be said in words of layouts.
    """
    r = Reading(source, said)
    tp, cp, pp = (r.number(f"{P}{kind}_parallel_degree") for kind in ("tensor", "context", "pipeline"))
    replicas, shards, devices = _ranks(r, tp * cp * pp)
    dp = None if shards == -1 else replicas * shards
    r.words |= {word: str(size) for word, size in (("dp", dp), ("tp", tp), ("pp", pp)) if size}
    if tp > 1 and bool(said.get(P + "enable_sequence_parallel", True)):
        r.words["sp"] = ""
    if cp > 1:
        gathers = said.get(P + "context_parallel_rotate_method", "allgather") == "allgather"
        r.words["cp"] = f"{cp}:{'allgather' if gathers else 'ring'}"
    batch = _batch(r, dp, pp)
    _experts(r, tp, cp, replicas, shards)
    _storage(r, replicas, shards, cp, pp, batch)
    stages = _pipeline(r, pp)
    _recompute(r, stages)
    _speed(r)
    given = [name for name in said.values if name not in READ]
    ignored = tuple(name for name in given if name.startswith(NOTHING) and name not in REASONS)
    for name in sorted(set(given) - {*ignored}):
        if said.values[name] != said.defaults.get(name):
            why = REASONS.get(name, "changes time or memory, which the price does not know")
            r.unpriced.append(f"{name}={said.values[name]}: {why}")
    return Config(
        r.words, batch, r.number("training.seq_len", 2048), devices, _precision(r), _optimizer(r), dict(said.sizes),
        unpriced=tuple(r.unpriced), ignored=ignored,
    )  # fmt: skip


def _ranks(r: Reading, others: int) -> tuple[int, int, int | None]:
    """Return the replicas and shards of data parallelism, -1 where the number of devices alone says it, and devices."""
    replicas = r.number(P + "data_parallel_replicate_degree")
    shards = r.number(P + "data_parallel_shard_degree", -1)
    devices = r.said.devices
    if replicas < 1:
        raise r.source.error(P + "data_parallel_replicate_degree", f"is {replicas}; only shards can be -1")
    if shards == -1 and devices is not None:
        if devices % (replicas * others):
            raise r.source.error(
                P + "data_parallel_shard_degree",
                f"-1 leaves {devices} devices / {replicas * others} of the other axes, which do not divide; change one",
            )
        shards = devices // (replicas * others)
    if shards == -1 and replicas > 1:
        raise r.source.error(
            P + "data_parallel_shard_degree",
            f"is -1 beside {replicas} replicas, so that the number of devices says it; write the number",
        )
    product = None if shards == -1 else replicas * shards * others
    if devices is not None and product != devices:
        what = f"its degrees make {product} ranks, the command starts {devices}; change one"
        raise r.source.error("parallelism", what)
    return replicas, shards, product


def _batch(r: Reading, dp: int | None, pp: int) -> int | None:
    """Put the rows of a microbatch into the words; return those of a step."""
    local, total = r.number("training.local_batch_size", 8), r.number("training.global_batch_size", -1)
    each = local
    if pp > 1 and P + "pipeline_parallel_microbatches" in r.said.values:
        each = max(1, local // r.number(P + "pipeline_parallel_microbatches"))
    elif pp > 1:
        each = r.number(P + "pipeline_parallel_microbatch_size")
    if local % each:
        raise r.source.error(
            "training.local_batch_size",
            f"is {local}, no multiple of pipeline_parallel_microbatch_size={each}; change one",
        )
    r.words["mbs"] = str(each)
    if dp is None:
        if total == -1:
            r.words["m"] = str(local // each)
        return None if total == -1 else total
    if total == -1:
        return local * dp
    if total % (local * dp):
        raise r.source.error(
            "training.global_batch_size",
            f"is {total}, no multiple of local_batch_size={local} x {dp} data ranks; change one",
        )
    times = total // (local * dp)
    if pp > 1 and times > 1:
        r.unpriced.append(
            f"training.global_batch_size={total}: the pipeline fills and empties {times} times a step; priced as once"
        )
    return total


def _experts(r: Reading, tp: int, cp: int, replicas: int, shards: int) -> None:
    ep = r.number(P + "expert_parallel_degree")
    if ep == 1:
        return
    name = P + "expert_parallel_degree"
    etp = r.number(P + "expert_tensor_parallel_degree")
    if cp > 1:
        what = f"is {ep} beside context_parallel_degree={cp}: rows travel over both, not priced; set one to 1"
        raise r.source.error(name, what)
    if replicas > 1 and shards * tp > 1:
        raise r.source.error(
            name,
            f"is {ep} beside {replicas} replicas of shards, not priced; set data_parallel_replicate_degree=1",
        )
    travels = tp > 1 and etp == 1
    if travels and ep % tp:
        raise r.source.error(name, f"is {ep} and spreads over tensor_parallel_degree={tp} first; use a multiple")
    ranks = shards * (tp if travels else 1)
    if shards != -1 and ranks % ep:
        raise r.source.error(name, f"is {ep}, no divisor of the {ranks} ranks that share parameters; use one")
    r.words["ep"] = str(ep)
    if travels:
        r.words["etp"] = "1"


def _storage(r: Reading, replicas: int, shards: int, cp: int, pp: int, batch: int | None) -> None:
    """Put into the words how parameters are stored."""
    name = P + "fsdp_reshard_after_forward"
    policy = r.said.get(name, "default")
    if policy not in ("default", "always", "never"):
        raise r.source.error(name, f"is {policy!r}; use default, always or never")
    if shards == 1 and cp == 1:
        return  # whole on every rank
    keeps = policy == "never" or (policy == "default" and pp > 1)
    if replicas > 1:
        r.words["fsdp"] = str(shards)
        if keeps:
            r.unpriced.append(f"{name}={policy}: gathered parameters are kept; priced as gathered for every use")
        if shards == 1:
            raise r.source.error(
                P + "data_parallel_shard_degree", f"is 1 beside cp={cp} and {replicas} replicas, which cannot be priced"
            )
    elif not keeps:
        r.words["fsdp"] = ""
    elif pp > 1:
        r.words["zero"] = "1"  # gathered by the first microbatch, reduced by the last: set_is_last_backward
    elif batch is None or batch == int(r.words["mbs"]) * int(r.words.get("dp", batch)):
        r.words["fsdp"] = "keep"
    else:
        r.words["zero"] = "1"
        r.unpriced.append(f"{name}=never: every microbatch gathers and reduces parameters; priced as once a step")


def _pipeline(r: Reading, pp: int) -> int:
    """Put the schedule and its stages into the words; return the number of stages."""
    if pp == 1:
        return 1
    name = P + "pipeline_parallel_schedule"
    if r.said.get(P + "pipeline_parallel_schedule_csv"):
        what = "is a file of steps, which cannot be priced; name a schedule"
        raise r.source.error(P + "pipeline_parallel_schedule_csv", what)
    schedule = NAMES.get(str(r.said.get(name)).lower())
    if schedule is None:
        hint = closest(str(r.said.get(name)).lower(), NAMES)
        raise r.source.error(name, f"is {r.said.get(name)}, which cannot be priced; {hint}")
    single = schedule in ("1f1b", "gpipe")
    parts, n_layers = _parts(r, pp, single)
    stages = len(parts) if isinstance(parts, list) else parts
    if stages % pp or (stages == pp) != single:
        wants = "1 stage" if single else "2 stages or more"
        what = f"{r.said.get(name)} puts {wants} on a rank, {stages} stages are on {pp} ranks; change one"
        raise r.source.error(name, what)
    if schedule != "1f1b":
        r.words["schedule"] = schedule
    if stages > pp and schedule not in ("zb-v", "dualpipe-v"):
        r.words["vp"] = str(stages // pp)
    even = sizes_of(n_layers, stages)
    if isinstance(parts, list) and n_layers and parts != even:
        r.unpriced.append(f"stages: {described(parts) or parts[0]}; priced as {described(even) or f'{even[0]} each'}")
    return stages


def _parts(r: Reading, pp: int, single: bool) -> tuple[list[int] | int, int]:
    """Return the blocks of every stage, or only the number of stages, and the number of blocks."""
    said = r.said
    n_layers = int(said.sizes.get("num_hidden_layers", 0))
    listed = said.get(P + "module_fqns_per_model_part")
    if listed:
        sizes = [sum(str(part).startswith("layers.") for part in stage) for stage in listed]
        return sizes, sum(sizes)
    points = said.values.get(P + "pipeline_parallel_split_points")
    points = points.split(",") if isinstance(points, str) and points else points
    if points:
        return len(points) + 1, n_layers
    each = said.get(P + "pipeline_parallel_layers_per_stage")
    before = r.number(P + "pipeline_parallel_first_stage_less_layers")
    behind = r.number(P + "pipeline_parallel_last_stage_less_layers")
    stages = pp * (1 if single else 2)
    if each:
        if not n_layers:
            what = f"is {each} of a model whose layers are not known here; write module_fqns_per_model_part"
            raise r.source.error(P + "pipeline_parallel_layers_per_stage", what)
        stages = math.ceil((n_layers + before + behind) / int(each))
    if not n_layers:
        return stages, 0
    all_ = n_layers + before + behind  # pipeline_parallel.py, _generate_llm_fqn_per_model_part
    sizes = [all_ // stages + (k < all_ % stages) for k in range(stages)]
    sizes[0] -= before
    sizes[-1] -= behind
    return sizes, n_layers


def _recompute(r: Reading, stages: int) -> None:
    """Put the recomputation into the words."""
    said = r.said
    mode = str(said.get("activation_checkpoint.mode" if said.is_old else "activation_checkpoint", "selective"))
    mode = mode.replace("_", "-")
    option = str(said.get("activation_checkpoint.selective_ac_option", "op")) if said.is_old else "op"
    if mode == "full":
        r.words["recompute"] = "full"
    elif mode == "selective" and option.isdecimal() and int(option) > 0:
        r.words["recompute"] = f"every:{option}"
    elif mode == "selective" and option == "op":
        r.words["recompute"] = "every:2"
        r.unpriced.append(
            "activation_checkpoint=selective: every second product and what is cheap runs again; "
            "priced as every second block"
        )
    elif mode == "blocks":
        r.words["recompute"] = _of_blocks(r, stages)
    elif mode == "memory-budget":
        share = said.get("activation_checkpoint.memory_budget", 0.5)
        what = f"activation_checkpoint=memory-budget {share}: the compiler chooses; priced with nothing recomputed"
        r.unpriced.append(what)
    elif mode not in ("none", "None"):
        what = f"is {mode} with option {option}; use none, full or selective"
        raise r.source.error("activation_checkpoint.mode", what)


def _of_blocks(r: Reading, stages: int) -> str:
    """Return the words of a list of blocks that are recomputed."""
    blocks = list(r.said.get("activation_checkpoint.blocks", ()))
    n = int(r.said.sizes.get("num_hidden_layers", 0))
    for text in [*(f"full:{k}" for k in range(1, n + 1)), *(f"every:{k}" for k in range(1, n + 1))]:
        if recomputed_blocks(text, n, stages) == blocks:
            return text
    what = f"is {blocks}, neither every N-th block nor the first N of each stage; use one of these"
    raise r.source.error("activation_checkpoint.blocks", what)


def _speed(r: Reading) -> None:
    """Note what the software's record takes for given, and refuse what it cannot be priced without."""
    if r.said.get("training.enable_cpu_offload"):
        raise r.source.error("training.enable_cpu_offload", "nothing is priced on the host; set it to false")
    parts = r.said.get("compile.components", ["model"])
    if not r.said.get("compile.enable") or "model" not in parts:
        r.unpriced.append("compile.enable=false: kernels are not fused; priced with torch.compile of every block")


def _precision(r: Reading) -> str:
    said = r.said
    formats = {
        name: str(said.get(f"training.{name}", default)) for name, default in
        (("mixed_precision_param", "bfloat16"), ("dtype", "float32"), ("mixed_precision_reduce", "float32"))
    }  # fmt: skip
    for name, value in formats.items():
        if value not in ("bfloat16", "float32"):
            raise r.source.error(f"training.{name}", f"is {value}; use bfloat16 or float32")
    low, stored, summed = formats.values()
    if stored == "bfloat16":
        return "bf16-true" if summed == "bfloat16" else "master=bfloat16,moments=bfloat16"
    if low == "float32":
        return "32-true"
    products = _products(r)
    parts = [f"products={products}"] if products else []
    gathers = ("float8.", "quantize.linear.float8.", "quantize.dense.float8.")
    if products == "fp8" and any(said.values.get(f"{where}enable_fsdp_float8_all_gather") for where in gathers):
        parts.append("narrow_gathers=true")
    if said.get("optimizer.implementation") == "fused_opt_states_bf16":
        parts.append("moments=bfloat16")
    if summed == "bfloat16":
        parts.append("reduce=bfloat16")
    return f"{products}-mixed" if parts == [f"products={products}"] else ",".join(parts) or "bf16-mixed"


def _products(r: Reading) -> str:
    """Return the format of linear layers' products that converters make; empty for that of the parameters."""
    converters = r.said.get("model.converters") or ()
    names = [converters] if isinstance(converters, str) else [str(each) for each in converters]
    found = "fp8" if r.said.values.get("float8.enable_float8_linear") else ""
    for each in names:
        kind = "mxfp8" if "mx" in each else "fp8" if "float8" in each else ""
        if kind and "grouped_mm" not in each:
            found = kind
        else:
            r.unpriced.append(f"model.converters: {each}; priced in bfloat16")
    return found


def _optimizer(r: Reading) -> str:
    name = str(r.said.get("optimizer.name", "AdamW"))
    if name.lower() not in OPTIMIZERS:
        hint = closest(name.lower(), OPTIMIZERS)
        raise r.source.error("optimizer.name", f"is {name}, whose state and time are not known; {hint}")
    return OPTIMIZERS[name.lower()]
