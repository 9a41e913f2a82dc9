"""The reader of accelerate's yaml and of Trainer arguments."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autopar.targets.target import Config, ConfigError, Source
from autopar.targets.trainers.deepspeed.reading import read_sections
from autopar.targets.trainers.hugging_face.known import known
from autopar.targets.trainers.hugging_face.run_facts import (
    RunFacts,
    arguments_section,
    facts_beside,
    facts_of_arguments,
    merged,
)
from autopar.targets.trainers.hugging_face.section import Section, beside, table_of

HARMLESS = (
    "command_file commands compute_environment debug enable_cpu_affinity gpu_ids machine_rank main_process_ip "
    "main_process_port main_training_function mpirun_config rdzv_backend same_network downcast_bf16 num_machines "
    "tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone fp8_config"
).split()
FSDP_HARMLESS = (
    "transformer_layer_cls_to_wrap state_dict_type cpu_ram_efficient_loading sync_module_states use_orig_params "
    "min_num_params xla xla_fsdp_v2 xla_fsdp_grad_ckpt limit_all_gathers"
).split()
MULTI = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU",
         "MULTI_NEURON")  # fmt: skip


def reads(source: Source) -> bool:
    """Return whether a file is accelerate's yaml or a table of TrainingArguments."""
    with suppress(ConfigError):
        table = table_of(source)
        return "distributed_type" in table or _is_arguments(table)
    return False


def _is_arguments(table: Mapping[str, Any]) -> bool:
    """Return whether most fields are TrainingArguments: recipes of other trainers (torchtune, axolotl) share a few."""
    if not {"output_dir", "per_device_train_batch_size", "per_gpu_train_batch_size"} & set(table):
        return False
    fields = known()["training_arguments"]["fields"]
    return 2 * sum(name in fields for name in table) >= len(table)


def read(source: Source) -> Config:
    """Return what a file of accelerate says.

    Raises:
        ConfigError: a field is unknown, or cannot be honoured.
    """
    if "distributed_type" not in table_of(source):
        return _read_arguments(source)
    title = f"accelerate {known()['version']}"
    top = Section(source, table_of(source))
    top.check_known(known()["fields"], title)
    kind = str(top.get("distributed_type")).upper()
    devices = top.whole("num_processes") or (1 if kind == "NO" else None)
    tables = {name: top.section(name, keys, title) for name, keys in known()["sections"].items()}
    half = (top.word("mixed_precision", ("no", "bf16", "fp16", "fp8")) or ("fp16" if top.flag("fp16") else "no"))
    facts = facts_beside(source)
    unpriced = [*facts.unpriced]
    if half == "fp8":
        unpriced.append("mixed_precision: fp8 is priced as bf16: seconds are an upper bound")
        half = "bf16"
    if top.get("dynamo_backend") not in (None, "NO", "no") or tables["dynamo_config"].values:
        unpriced.append("dynamo_config: compiled kernels are not in the price: seconds are an upper bound")
    if top.flag("use_cpu"):
        unpriced.append("use_cpu: priced on the cluster's devices")
    facts = _with_half(facts, half)
    if kind == "DEEPSPEED":
        return _with_deepspeed(source, tables["deepspeed_config"], facts, devices, unpriced)
    if kind == "MEGATRON_LM":
        raise top.error("distributed_type", "is MEGATRON_LM, whose degrees are Megatron's: give the arguments of "
                        "Megatron itself, such as --tensor-model-parallel-size")  # fmt: skip
    if kind not in ("NO", "FSDP", *MULTI):
        raise top.error("distributed_type", f"is '{kind}', which is not priced; use FSDP, MULTI_GPU, DEEPSPEED or NO")
    fsdp = tables["fsdp_config"] if kind == "FSDP" else None
    words, more = _words(fsdp, tables["parallelism_config"], facts, devices)
    ignored, others = top.rest(HARMLESS)
    unpriced += [*more, *(f"{name}: the price does not know it" for name in others)]
    return _config(words, facts, devices, kind == "FSDP", unpriced, (*facts.ignored, *ignored))


def _read_arguments(source: Source) -> Config:
    """Return what TrainingArguments say."""
    section = arguments_section(source)
    run = facts_beside(source)
    facts = merged(section, run, facts_of_arguments(section), "run.json")
    if section.get("deepspeed"):
        return _arguments_with_deepspeed(source, section, facts)
    fsdp_on = section.get("fsdp")
    title = "TrainingArguments"
    fsdp = section.section("fsdp_config", known()["training_arguments"]["fsdp_config"], title)
    on = bool(fsdp_on) and fsdp_on not in ("", [], "false")
    if (isinstance(fsdp_on, str) and fsdp_on not in ("true", "True", "")) or isinstance(fsdp_on, list):
        fsdp = _legacy(fsdp, fsdp_on if isinstance(fsdp_on, list) else str(fsdp_on).split())
    if on and "version" not in fsdp.values and "fsdp_version" not in fsdp.values:
        fsdp = Section(source, {**fsdp.values, "version": 2}, fsdp.path)  # the default of transformers 5
    mesh = section.get("parallelism_config")
    parallel = Section(source, mesh if isinstance(mesh, Mapping) else {}, "parallelism_config")
    beginning = "parallelism_config_"
    parallel = Section(source, {k if k.startswith(beginning) else beginning + k: v
                                for k, v in parallel.values.items()}, parallel.path)  # fmt: skip
    parallel.check_known(known()["sections"]["parallelism_config"], "parallelism_config")
    words, more = _words(fsdp if on else None, parallel, facts, None)
    return _config(words, facts, None, on, [*facts.unpriced, *more], facts.ignored)


def _legacy(fsdp: Section, words: list[Any]) -> Section:
    """Return FSDP's table with what the older spelling ``fsdp="full_shard auto_wrap offload"`` says."""
    said = {str(word) for word in words}
    strategies = {"full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard"}
    unknown = said - strategies - {"auto_wrap", "offload"}
    if unknown:
        raise fsdp.source.error("fsdp", f"has '{min(unknown)}'; known: {', '.join(sorted(strategies))}, auto_wrap, "
                                "offload")  # fmt: skip
    values = dict(fsdp.values)
    if "offload" in said:
        values["offload_params"] = True
    strategy = next(iter(said & strategies), "full_shard")
    version = Section(fsdp.source, values, fsdp.path).whole("version", "fsdp_version") or 2
    values |= {"sharding_strategy": strategy} if version == 1 else {
        "reshard_after_forward": strategy in ("full_shard", "hybrid_shard")}  # fmt: skip
    if "hybrid" in strategy:
        raise fsdp.source.error("fsdp", f"is {strategy}: how many ranks share parameters depends on the machine; "
                                "write parallelism_config in accelerate's yaml")  # fmt: skip
    return Section(fsdp.source, values, fsdp.path)


def _with_half(facts: RunFacts, half: str) -> RunFacts:
    """Return the facts with the format of accelerate's yaml, which wins over the Trainer's where that says none."""
    return replace(facts, half=half if half != "no" or facts.half is None else facts.half)


def _words(
    fsdp: Section | None, mesh: Section, facts: RunFacts, devices: int | None
) -> tuple[dict[str, str], list[str]]:
    """Return the words of a layout, and what is not priced."""
    size = {name: mesh.whole(f"parallelism_config_{name}_size") or 1 for name in
            ("dp_replicate", "dp_shard", "tp", "cp", "sp")}  # fmt: skip
    words: dict[str, str] = {}
    unpriced: list[str] = []
    if size["sp"] > 1:
        raise mesh.error("parallelism_config_sp_size", f"is {size['sp']}: Ulysses there needs distributed_type "
                         "DEEPSPEED; use parallelism_config_cp_size")  # fmt: skip
    if size["tp"] > 1:
        words["tp"] = str(size["tp"])
    if size["cp"] > 1:
        way = mesh.word("parallelism_config_cp_comm_strategy", ("allgather", "alltoall")) or "allgather"
        words["cp"] = f"{size['cp']}:{'ring' if way == 'alltoall' else way}"
    total = size["dp_replicate"] * size["dp_shard"] * size["tp"] * size["cp"]
    given = any(mesh.values.get(f"parallelism_config_{n}_size") for n in ("dp_replicate", "dp_shard"))
    if devices is not None and mesh.values and total not in (1, devices):
        raise mesh.error("parallelism_config_dp_shard_size", f"with the other sizes makes {total} ranks, num_processes "
                         f"is {devices}; change one of them")  # fmt: skip
    if given and size["dp_replicate"] * size["dp_shard"] > 1:
        words["dp"] = str(size["dp_replicate"] * size["dp_shard"])
    elif total > 1:
        words["dp"] = "1"
    if fsdp is not None:
        more = fsdp_words(fsdp, facts, size["dp_shard"] if size["dp_replicate"] > 1 else 0)
        words |= more[0]
        unpriced += more[1]
    elif size["cp"] > 1:
        raise mesh.error("parallelism_config_cp_size", f"is {size['cp']}: context parallelism needs distributed_type "
                         "FSDP with fsdp_version 2")  # fmt: skip
    else:
        words["zero"] = "0"
    if facts.recompute == "full":
        words["recompute"] = "full"
    if facts.rows is not None:
        words["mbs"] = str(facts.rows)
    elif facts.microbatches is not None:
        words["m"] = str(facts.microbatches)
    return words, unpriced


def fsdp_words(fsdp: Section, facts: RunFacts, shards: int) -> tuple[dict[str, str], list[str]]:
    """Return the words of FSDP's table, and what is not priced; `shards` are those of a hybrid mesh, 0 for none."""
    unpriced: list[str] = []
    spelled = {name.removeprefix("fsdp_"): value for name, value in fsdp.values.items()}
    inner = Section(fsdp.source, spelled, fsdp.path)
    version = inner.whole("version") or 1
    resharded = _resharded(inner, version)
    if any(inner.flag(name) for name in ("offload_params", "cpu_offload")):
        unpriced.append(f"{fsdp.named('fsdp_offload_params')}: parameters and optimizer state are kept on the host, "
                        "which is not priced: memory of a device is an upper bound, seconds a lower one")  # fmt: skip
    if inner.flag("activation_checkpointing_offload"):
        unpriced.append(f"{fsdp.named('fsdp_activation_checkpointing_offload')}: kept on the host, which is not priced")
    policy = str(inner.get("auto_wrap_policy") or "NO_WRAP").upper()
    if policy == "NO_WRAP" and "transformer_layer_cls_to_wrap" not in spelled:
        unpriced.append(f"{fsdp.named('fsdp_auto_wrap_policy')}: NO_WRAP gathers all parameters at once; priced as "
                        "block by block")  # fmt: skip
    prefetch = str(inner.get("backward_prefetch") or "").upper()
    if version == 1 and prefetch in ("", "NO_PREFETCH") and resharded == "":
        unpriced.append(f"{fsdp.named('fsdp_backward_prefetch')}: gathers are not prefetched; priced as overlapped")
    inner.read.add("forward_prefetch")
    inner.read.add("ignored_modules")
    if inner.values.get("ignored_modules"):
        unpriced.append(f"{fsdp.named('fsdp_ignored_modules')}: priced as sharded")
    m = facts.microbatches or 1
    words: dict[str, str] = {}
    if resharded == "none":
        words["zero"] = "0"
    elif resharded == "keep" and m > 1:
        words["zero"] = "1"
        unpriced.append(f"{fsdp.named('fsdp_reshard_after_forward')}: parameters are gathered in each of {m} "
                        "microbatches, priced once a step: seconds are a lower bound")  # fmt: skip
    else:
        words["fsdp"] = str(shards) if shards else "keep" if resharded == "keep" else ""
        if shards and resharded == "keep":
            unpriced.append(f"{fsdp.named('fsdp_reshard_after_forward')}: false in a hybrid mesh is priced as true")
    if m > 1 and not facts.each_synced and words.get("fsdp") is not None:
        unpriced.append(f"gradients of {m} microbatches are kept whole until the step ends (no sync_each_batch); "
                        "priced as summed in every microbatch: memory is a lower bound by their size, seconds an upper "
                        "one")  # fmt: skip
    again = inner.flag("activation_checkpointing")
    if again is False and facts.exported and facts.recompute == "full":
        raise fsdp.error("fsdp_activation_checkpointing", "is false, and run.json says recompute full: train.py would "
                         "not recompute; change both")  # fmt: skip
    if again:
        words["recompute"] = "full"
    _, others = inner.rest(FSDP_HARMLESS)
    return words, [*unpriced, *(f"{name}: the price does not know it" for name in others)]


def _resharded(fsdp: Section, version: int) -> str:
    """Return what is kept after the forward: ``""`` for nothing, ``keep``, or ``none`` where nothing is sharded."""
    strategies = {"1": "", "full_shard": "", "2": "keep", "shard_grad_op": "keep", "3": "none", "no_shard": "none"}
    if version == 2:
        fsdp.read.add("sharding_strategy")
        return "keep" if fsdp.flag("reshard_after_forward") is False else ""
    value = fsdp.get("sharding_strategy")
    value = fsdp.get("reshard_after_forward") if value is None else value
    text = str("full_shard" if value is None else value).lower()
    if "hybrid" in text or text in ("4", "5"):
        raise fsdp.error("fsdp_sharding_strategy", f"is {value}: how many ranks share parameters depends on the "
                         "machine there; use fsdp_version 2 with parallelism_config_dp_shard_size")  # fmt: skip
    if text in ("true", "false"):
        return "" if text == "true" else "keep"
    if text not in strategies:
        raise fsdp.error("fsdp_sharding_strategy", f"is '{value}'; give FULL_SHARD, SHARD_GRAD_OP or NO_SHARD")
    return strategies[text]


def _config(
    words: dict[str, str], facts: RunFacts, devices: int | None, fsdp: bool, unpriced: list[str],
    ignored: tuple[str, ...],
) -> Config:  # fmt: skip
    batch = facts.batch
    if devices is not None and facts.rows is not None and facts.microbatches is not None:
        each = int(words.get("tp", "1")) * int(words.get("cp", "1").partition(":")[0])
        made = facts.rows * facts.microbatches * (devices // each)
        if batch not in (None, made):
            raise ConfigError(f"run.json: batch: is {batch}, {facts.rows} rows x {facts.microbatches} microbatches x "
                              f"{devices // each} data ranks are {made}; change one of them")  # fmt: skip
        batch = made
    if batch is not None and facts.rows is not None and facts.microbatches is not None:
        words.setdefault("dp", str(max(1, batch // facts.rows // facts.microbatches)))
    elif batch is None and facts.rows is not None and facts.microbatches is not None:
        words["m"] = str(facts.microbatches)  # the batch follows from these and the data ranks
    elif facts.rows is None and batch is None:
        unpriced.append("rows of a microbatch and of a step are not in accelerate's yaml: give --batch, or Trainer "
                        "arguments (training_arguments.json) beside it")  # fmt: skip
    return Config(
        words, batch, facts.sequence, devices, _precision(facts, fsdp, unpriced), facts.optimizer,
        unpriced=tuple(unpriced), ignored=ignored,
    )  # fmt: skip


def _precision(facts: RunFacts, fsdp: bool, unpriced: list[str]) -> str:
    """Return the policy: run.json's formats where there are some, else what accelerate does by itself."""
    low = {"bf16": "bfloat16", "fp16": "float16"}.get(facts.half or "no")
    if facts.master == "own":
        return f"params=own,reduce={facts.reduce}"
    if facts.master is not None:
        params = low or facts.master
        return f"params={params},master={facts.master},moments={facts.master},reduce={facts.reduce}"
    if low is None:
        unpriced.append("mixed_precision: no: priced in float32; a model that is loaded in bfloat16 takes half")
        return "32-true"
    return f"params={low},reduce={low if fsdp else 'float32'}"  # FSDP sums in the format that it computes in


def _with_deepspeed(
    source: Source, section: Section, facts: RunFacts, devices: int | None, unpriced: list[str]
) -> Config:
    """Return what ``deepspeed_config`` says: a file of DeepSpeed's own, or a few fields of it."""
    file = section.get("deepspeed_config_file")
    if file:
        inner = beside(source, str(file)) or beside(source, str(file).rpartition("/")[2])
        if inner is None:
            raise section.error("deepspeed_config_file", f"is '{file}', which is not beside {source.path.name}; put it "
                                "there")  # fmt: skip
        return read_sections(inner, table_of(inner), facts, devices, unpriced)
    stage = section.whole("zero_stage", least=0)
    values: dict[str, Any] = {"zero_optimization": {"stage": 2 if stage is None else stage}}  # the plugin's default
    for kind in ("optimizer", "param"):
        where = section.get(f"offload_{kind}_device")
        if where is not None and str(where).lower() != "none":
            values["zero_optimization"][f"offload_{kind}"] = {"device": str(where).lower()}
    m = section.whole("gradient_accumulation_steps") if not section.is_auto("gradient_accumulation_steps") else None
    if m is not None:
        values["gradient_accumulation_steps"] = m
    if facts.half in ("bf16", "fp16"):
        values[facts.half] = {"enabled": True}
    return read_sections(source, values, facts, devices, unpriced)


def _arguments_with_deepspeed(source: Source, section: Section, facts: RunFacts) -> Config:
    """Return what TrainingArguments with a config of DeepSpeed say."""
    value = section.get("deepspeed")
    if isinstance(value, Mapping):
        return read_sections(source, value, facts, None, [*facts.unpriced])
    inner = beside(source, str(value)) or beside(source, str(value).rpartition("/")[2])
    if inner is None:
        raise section.error("deepspeed", f"is '{value}', which is not beside {source.path.name}; put it there")
    return read_sections(inner, table_of(inner), facts, None, [*facts.unpriced])
