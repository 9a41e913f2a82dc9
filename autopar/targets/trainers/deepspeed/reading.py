"""The reader of DeepSpeed's config, alone, beside Trainer arguments or named by an accelerate yaml."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from autopar.targets.field_lists import field_list
from autopar.targets.target import Config, ConfigError, Source
from autopar.targets.trainers.hugging_face.run_facts import ARGUMENTS, RunFacts, facts_beside
from autopar.targets.trainers.hugging_face.section import AUTO, Section, table_of

HARMLESS = (
    "aio autotuning checkpoint comet comms_logger csv_monitor data_efficiency dataloader_drop_last datastates_ckpt "
    "disable_python_gc dump_state flops_profiler gradient_allreduce_op gradient_clipping gradient_predivide_factor "
    "log_level memory_breakdown prescale_gradients scheduler seq_parallel_communication_data_type steps_per_print "
    "tensorboard timers use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer managed_gradient_accumulation"
).split()
ZERO_HARMLESS = (
    "allgather_bucket_size allgather_partitions contiguous_gradients elastic_checkpoint enable_sanity_checks "
    "gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights "
    "log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear "
    "model_persistence_threshold module_granularity_threshold overlap_comm override_module_apply "
    "param_persistence_threshold parameter_alignment pipeline_loading_checkpoint prefetch_bucket_size "
    "reduce_bucket_size reduce_scatter round_robin_gradients stage3_allgather_sequential "
    "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters "
    "stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold "
    "stage3_param_persistence_threshold stage3_prefetch_bucket_size sub_group_size compute_grad_norm "
    "cpu_offload_use_pin_memory use_multi_rank_bucket_allreduce allgather_sequential"
).split()
ZERO_UNPRICED = {
    "zero_hpz_partition_size": "a second copy of parameters in every node is not priced: memory is a lower bound, "
                               "seconds an upper one",
    "zero_quantized_weights": "parameters are gathered in 8 bits, priced in 16: seconds are an upper bound",
    "zero_quantized_nontrainable_weights": "priced in 16 bits: seconds are an upper bound",
    "zero_quantized_gradients": "gradients are summed in 4 bits, priced in the format of sums: an upper bound",
    "zenflow": "updates on the host beside the next steps are not priced",
}  # fmt: skip
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def fields() -> dict[str, Any]:
    """Return the fields of a DeepSpeed config, from its own code (tests/targets/own_code/deepspeed/fields.py)."""
    return field_list(__package__)


def reads(source: Source) -> bool:
    """Return whether a file is a config of DeepSpeed."""
    with suppress(ConfigError):
        table = table_of(source)
        if "distributed_type" in table or "output_dir" in table:
            return False
        return "zero_optimization" in table or any(size in table for size in SIZES[:2]) or (
            SIZES[2] in table and bool({"bf16", "fp16", "optimizer", "tensor_parallel"} & set(table)))  # fmt: skip
    return False


def read(source: Source) -> Config:
    """Return what a config of DeepSpeed says, with the files beside it.

    Raises:
        ConfigError: a field is unknown, or cannot be honoured.
    """
    return read_sections(source, table_of(source), facts_beside(source), None, [])


def read_sections(
    source: Source, values: Mapping[str, Any], facts: RunFacts, devices: int | None, unpriced: list[str]
) -> Config:
    """Return what the table of a DeepSpeed config says.

    Args:
        source: the file that it stands in.
        values: the table.
        facts: what other files say of the run; it fills in what is ``auto``.
        devices: the number of devices, if the file says it.
        unpriced: what other files say that is not priced.
    """
    top = _checked(source, values)
    title = f"DeepSpeed {fields()['version']}"
    part = {name: top.section(name, known, title) for name, known in fields()["sections"].items() if "." not in name}
    if "bf16" not in top.values and "bfloat16" in top.values:
        part["bf16"] = top.section("bfloat16", fields()["sections"]["bf16"], title)
    words: dict[str, str] = {}
    notes = [*unpriced, *(note for note in facts.unpriced if note not in unpriced)]
    _parallel(top, part, words, notes)
    each = int(words.get("tp", "1")) * int(words.get("cp", "1").partition(":")[0])
    batch = _sizes(top, facts, devices // each if devices else None, words)
    whole = int(words.get("m", facts.microbatches or 0))
    _zero(part["zero_optimization"], title, words, whole, notes)
    _recompute(top, facts, words, notes)
    compiled = part["compile"].flag("deepcompile")
    precision, optimizer = _precision(top, part, facts, notes), _optimizer(part["optimizer"], facts, notes)
    top.read.update(fields()["sections"])
    ignored, others = top.rest(HARMLESS)
    notes += [f"{name}: the price does not know it" for name in others]
    if "mbs" in words and batch is not None:
        words.pop("m", None)  # else the batch follows from both and the data ranks
    return Config(
        words, batch, facts.sequence, devices, precision, optimizer,
        software="deepspeed" if compiled else "deepspeed-eager", unpriced=tuple(notes),
        ignored=(*facts.ignored, *ignored),
    )  # fmt: skip


def _checked(source: Source, values: Mapping[str, Any]) -> Section:
    """Return the table of a config without unknown or removed fields."""
    top = Section(source, values)
    removed, zero = set(fields()["removed"]), values.get("zero_optimization")
    inner = [f"zero_optimization.{name}" for name in zero] if isinstance(zero, Mapping) else []
    for name in [*values, *inner]:
        if name in removed:
            raise top.error(name, f"has been removed from DeepSpeed, which {fields()['version']} refuses; leave it out")
    top.check_known(fields()["fields"], f"DeepSpeed {fields()['version']}")
    return top


def _parallel(top: Section, part: Mapping[str, Section], words: dict[str, str], notes: list[str]) -> None:
    """Read the degrees of tensor, sequence and expert parallelism."""
    tensor, experts = part["tensor_parallel"], part["expert_parallel"]
    tp = tensor.whole("autotp_size", least=0) or 1
    if tp > 1:
        words["tp"] = str(tp)
        for name in ("partition_config", "tp_overlap_comm", "preset_model", "vocab_parallel_lm_head"):
            if tensor.get(name):
                notes.append(f"{tensor.named(name)}: layers are priced as the model's plan cuts them, by columns and "
                             "then rows, nothing overlapped")  # fmt: skip
    cp = top.whole("sequence_parallel_size") or 1
    if cp > 1:
        words["cp"] = f"{cp}:ulysses"
    ep = experts.whole("autoep_size") or 1
    if experts.flag("enabled") and ep > 1:
        words["ep"] = str(ep)
        if (experts.whole("expert_tensor_parallel_size") or 1) > 1:
            raise experts.error("expert_tensor_parallel_size", f"is {experts.get('expert_tensor_parallel_size')}: "
                                "DeepSpeed reserves it and takes 1 only; write 1")  # fmt: skip
        if tp > 1:
            words["etp"] = "1"
    if top.get("pipeline"):
        notes.append("pipeline: the stages are those of the model's PipelineModule, which the file does not have; "
                     "priced without a pipeline")  # fmt: skip
    if top.get("hybrid_engine"):
        notes.append("hybrid_engine: generation between steps is not priced")
    if top.get("weight_quantization"):
        notes.append("weight_quantization: priced without")


def _sizes(top: Section, facts: RunFacts, ranks: int | None, words: dict[str, str]) -> int | None:
    """Read the three sizes of a batch, of which DeepSpeed makes the third from two; return the rows of a step."""
    given = {name: top.whole(name) for name in SIZES}
    given[SIZES[1]] = _agreed(top, SIZES[1], given[SIZES[1]], facts.rows, "per_device_train_batch_size")
    given[SIZES[2]] = _agreed(top, SIZES[2], given[SIZES[2]], facts.microbatches, "gradient_accumulation_steps")
    batch, rows, m = given.values()
    for name, value in given.items():
        if top.is_auto(name) and value is None and not (name == SIZES[0] and rows):
            raise top.error(name, f"is 'auto', which Trainer arguments fill in; write the number, or put {ARGUMENTS} "
                            f"beside {top.source.path.name}")  # fmt: skip
    batch = _of_data_ranks(top, batch, int(words.get("tp", "1"))) or facts.batch
    if m is None and (batch is None) != (rows is None):
        m = 1  # runtime/config.py, _set_batch_related_parameters
    if rows is not None and m is not None:
        made = rows * m * (ranks or 1)
        if batch is not None and (batch % made or (ranks is not None and batch != made)):
            over = f" x {ranks} ranks" if ranks is not None else ""
            raise top.error(SIZES[0], f"is {batch}, {rows} rows x {m} microbatches{over} are {made}; change one of "
                            "them")  # fmt: skip
        batch = made if ranks is not None else batch
        if batch is not None:
            words["dp"] = str(batch // rows // m)
    if m is not None:
        words["m"] = str(m)
    if rows is not None:
        words["mbs"] = str(rows)
    return batch


def _of_data_ranks(top: Section, batch: int | None, tp: int) -> int | None:
    """Return the rows of a step: DeepSpeed counts ranks of AutoTP as if they had rows of their own."""
    if batch is None or tp == 1:
        return batch
    if batch % tp:
        raise top.error(SIZES[0], f"is {batch} and counts the {tp} ranks of autotp_size, which do not divide it; leave "
                        "it out")  # fmt: skip
    return batch // tp


def _agreed(top: Section, name: str, own: int | None, other: int | None, its: str) -> int | None:
    """Return a size that the config and the Trainer's arguments say alike, or one of them."""
    if own is not None and other is not None and own != other:
        raise top.error(name, f"is {own}, {its} of the Trainer's arguments is {other}; write the same, or auto")
    return other if own is None else own


def _zero(zero: Section, title: str, words: dict[str, str], m: int, notes: list[str]) -> None:
    """Read the stage of ZeRO, and what is kept on the host."""
    stage = zero.whole("stage", least=0) or 0
    if stage > 3:
        raise zero.error("stage", f"is {stage}; give 0, 1, 2 or 3")
    words["zero"] = str(stage)
    if stage == 2 and m != 1:
        words["zero"] = "1"
        notes.append(f"{zero.named('stage')}: 2: gradients are summed in each of {m or 'several'} microbatches and "
                     "kept in shards; priced once a step and whole, as stage 1: memory is an upper bound, seconds a "
                     "lower one")  # fmt: skip
    known = fields()["sections"]
    for kind, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_param")):
        name = f"offload_{kind}"
        section = zero.section(name, known[f"zero_optimization.{name}"], title) if not zero.is_auto(name) else None
        device = str(section.get("device") or "none").lower() if section is not None else "none"
        if section is not None and device not in ("none", "cpu", "nvme"):
            raise section.error("device", f"is '{device}'; give none, cpu or nvme")
        if device != "none" or zero.flag(old):
            what = "optimizer state is" if kind == "optimizer" else "parameters are"
            notes.append(f"{zero.named(name)}: {what} kept on the host, which is not priced: memory of a device is an "
                         "upper bound, seconds a lower one")  # fmt: skip
    for name, why in ZERO_UNPRICED.items():
        value = zero.get(name)
        if value and value != AUTO and not (name == "zero_hpz_partition_size" and value == 1):
            notes.append(f"{zero.named(name)}: {why}")
    _, others = zero.rest(ZERO_HARMLESS)
    notes += [f"{name}: the price does not know it" for name in others]


def _recompute(top: Section, facts: RunFacts, words: dict[str, str], notes: list[str]) -> None:
    """Read whether blocks are recomputed, which is the model's business here."""
    section = top.section("activation_checkpointing", fields()["sections"]["activation_checkpointing"], "DeepSpeed")
    if facts.recompute == "full":
        words["recompute"] = "full"
    if facts.recompute is None:
        notes.append("a config of DeepSpeed does not say whether blocks are recomputed: priced without; put "
                     f"{ARGUMENTS} with gradient_checkpointing beside it where they are")  # fmt: skip
    for name in ("cpu_checkpointing", "partition_activations"):
        if section.flag(name):
            notes.append(f"{section.named(name)}: priced as kept whole on the device: memory is an upper bound")


def _precision(top: Section, part: Mapping[str, Section], facts: RunFacts, notes: list[str]) -> str:
    """Return the policy of number formats."""
    bf16, fp16, cast = part["bf16"], part["fp16"], part["torch_autocast"]
    for section in (bf16, fp16):
        if section.is_auto("enabled") and facts.half is None:
            raise section.error("enabled", f"is 'auto', which Trainer arguments fill in; write true or false, or put "
                                f"{ARGUMENTS} beside {top.source.path.name}")  # fmt: skip
    on = {name: facts.half == name if section.is_auto("enabled") else bool(section.flag("enabled"))
          for name, section in (("bf16", bf16), ("fp16", fp16))}  # fmt: skip
    if all(on.values()):
        raise top.error("bf16.enabled", "is true, and so is fp16.enabled; turn one of them off")
    long = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    told = top.word("communication_data_type", tuple(long))
    half = next((name for name, is_on in on.items() if is_on), None)
    if half is None:
        if cast.flag("enabled"):
            dtype = str(cast.get("dtype") or "bfloat16").lower().removeprefix("torch.")
            return f"params={long.get(dtype, dtype)},reduce={long[told or 'fp32']}"
        if facts.master == "own":
            return f"params=own,reduce={long[told or 'fp32']}"
        return "32-true"
    kept = str(part["data_types"].get("grad_accum_dtype") or half).lower()
    if kept not in long:
        raise part["data_types"].error("grad_accum_dtype", f"is '{kept}'; give fp32, bf16 or fp16")
    reduce = told or kept
    if (bf16 if half == "bf16" else fp16).flag(f"{half}_master_weights_and_grads"):
        if half == "fp16" or not bf16.flag("bf16_optimizer_states"):
            notes.append(f"{half}_master_weights_and_grads: moments are priced in {long[half]}, too")
        return f"params={long[half]},master={long[half]},moments={long[half]},reduce={long[reduce]}"
    if kept != reduce:
        notes.append(f"data_types.grad_accum_dtype: {kept}: priced as {reduce}, in which ranks sum")
    return f"params={long[half]},reduce={long[reduce]}"


def _optimizer(section: Section, facts: RunFacts, notes: list[str]) -> str | None:
    """Return the optimizer."""
    name = section.get("type")
    if name is None:
        return facts.optimizer
    params = section.get("params")
    text = str(name).lower()
    if text in ("adam", "adamw", "fusedadam", "onebitadam", "zerooneadam", "muadam", "muadamw", "cpuadam"):
        if "bit" in text or "zeroone" in text:
            notes.append(f"optimizer.type: {name} sends fewer bits; priced as AdamW")
        return "adamw"
    if text in ("sgd", "musgd"):
        momentum = isinstance(params, Mapping) and params.get("momentum")
        return "sgd_momentum" if momentum and momentum != AUTO else "sgd"
    notes.append(f"optimizer.type: {name} is priced as AdamW; its state may be smaller or larger")
    return "adamw"
