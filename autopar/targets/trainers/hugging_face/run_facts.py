"""What a run has beside a trainer's own config: ``run.json``, which train.py reads, and Trainer arguments.

A config of DeepSpeed does not say whether blocks are recomputed or how long sequences are, one of accelerate not even
the batch. An export's ``run.json`` has just that; ``training_arguments.json`` has it for who uses the Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from autopar.targets.target import Source
from autopar.targets.trainers.hugging_face.known import known
from autopar.targets.trainers.hugging_face.section import Section, beside, table_of

RUN, ARGUMENTS = "run.json", "training_arguments.json"
RUN_FIELDS = (
    "model", "batch", "sequence", "rows", "microbatches", "optimizer", "recompute", "recompute_classes", "master",
    "reduce", "inputs",
)  # fmt: skip
ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
HARMLESS = (  # of TrainingArguments: they change neither the seconds nor the bytes of a step
    "accelerator_config activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon batch_eval_metrics "
    "average_tokens_across_devices bf16_full_eval data_seed dataloader_drop_last dataloader_in_order "
    "dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory "
    "dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters "
    "ddp_static_graph ddp_timeout debug disable_tqdm do_eval do_predict do_train enable_jit_checkpoint "
    "eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy "
    "eval_use_gather_object fp16_full_eval full_determinism gradient_checkpointing_kwargs greater_is_better "
    "hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip "
    "include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor learning_rate "
    "length_column_name load_best_model_at_end local_rank log_level log_level_replica log_on_each_node "
    "logging_first_step logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type "
    "max_grad_norm max_steps metric_for_best_model neftune_noise_alpha num_train_epochs optim_args output_dir "
    "per_device_eval_batch_size prediction_loss_only project push_to_hub remove_unused_columns report_to "
    "restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node save_only_model "
    "save_steps save_strategy save_total_limit seed skip_memory_metrics tf32 torch_compile_backend "
    "torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id use_cache "
    "train_sampling_strategy use_cpu warmup_steps weight_decay"
).split()  # fmt: skip


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run; None where no file says it.

    Attributes:
        rows: rows of a microbatch on every data rank; ``microbatches``: how many of them make a step.
        sequence: places of a row.
        optimizer: ``adamw``, ``sgd`` or ``sgd_momentum``.
        recompute: ``none`` or ``full``.
        half: ``bf16``, ``fp16`` or ``no``: what is computed in.
        master, reduce: formats of parameters between steps, and of the sums of gradients.
        each_synced: gradients are summed over ranks in every microbatch; else once a step.
        batch: rows of a step over all ranks.
        exported: the facts are those of an export's own ``train.py``.
        unpriced, ignored: as of :class:`~autopar.targets.target.Config`.
    """

    rows: int | None = None
    microbatches: int | None = None
    sequence: int | None = None
    optimizer: str | None = None
    recompute: str | None = None
    half: str | None = None
    master: str | None = None
    reduce: str | None = None
    each_synced: bool | None = None
    batch: int | None = None
    unpriced: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    exported: bool | None = None


def facts_beside(source: Source) -> RunFacts:
    """Return what ``run.json`` and ``training_arguments.json`` in the folder of a config say.

    Raises:
        ConfigError: they are not readable, have an unknown field, or contradict each other.
    """
    run, arguments = beside(source, RUN), beside(source, ARGUMENTS)
    found = RunFacts() if run is None else facts_of_run(run)
    if arguments is None or arguments.path == source.path:
        return found
    section = arguments_section(arguments)
    return merged(section, found, facts_of_arguments(section), RUN)


def facts_of_run(source: Source) -> RunFacts:
    """Return what ``run.json`` of an export says."""
    section = Section(source, table_of(source))
    section.check_known(RUN_FIELDS, "run.json of an export")
    formats = ("float32", "bfloat16", "float16", "own")
    return RunFacts(
        section.whole("rows"), section.whole("microbatches"), section.whole("sequence"),
        section.word("optimizer", ("adamw", "sgd", "sgd_momentum")), section.word("recompute", ("none", "full")),
        None, section.word("master", formats), section.word("reduce", formats), True,
        section.whole("batch"), exported=True,
    )  # fmt: skip


def arguments_section(source: Source) -> Section:
    """Return the table of a file of TrainingArguments, with no unknown field."""
    section = Section(source, table_of(source))
    section.check_known(known()["training_arguments"]["fields"], f"TrainingArguments of transformers "
                                                                 f"{known()['transformers']}")  # fmt: skip
    return section


def facts_of_arguments(section: Section) -> RunFacts:
    """Return what TrainingArguments say of a run; what they leave out has the defaults of transformers."""
    unpriced: list[str] = []
    if section.flag("auto_find_batch_size"):
        raise section.error("auto_find_batch_size", "is true: the batch is only known when it runs; write "
                            "per_device_train_batch_size and leave it out")  # fmt: skip
    optim = section.get("optim")
    optimizer = "sgd" if optim == "sgd" else "adamw"
    if optim is not None and optim not in (*ADAMW, "sgd"):
        unpriced.append(f"optim: '{optim}' is priced as adamw: its state may be smaller")
    for name in ("torch_compile", "use_liger_kernel", "liger_kernel_config"):
        if section.get(name):
            unpriced.append(f"{name}: fused kernels are not in the price: seconds and activations are upper bounds")
    fsdp = section.get("fsdp_config")
    wanted = [section.flag("gradient_checkpointing"), section.flag("activation_checkpointing")]
    if isinstance(fsdp, Mapping):
        inner = Section(section.source, fsdp, "fsdp_config")
        wanted += [inner.flag("activation_checkpointing"), inner.flag("fsdp_activation_checkpointing")]
    half = "bf16" if section.flag("bf16") else "fp16" if section.flag("fp16") else "no"
    accelerator = section.section("accelerator_config", known()["training_arguments"]["accelerator_config"],
                                  "TrainingArguments")  # fmt: skip
    kwargs = accelerator.get("gradient_accumulation_kwargs") or {}
    synced = bool(kwargs.get("sync_each_batch")) if isinstance(kwargs, dict) else False
    if accelerator.flag("split_batches"):
        raise accelerator.error("split_batches", "is true: then rows are those of all ranks; leave it out")
    rows, m = section.whole("per_device_train_batch_size") or 8, section.whole("gradient_accumulation_steps") or 1
    section.read.update(("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "bf16", "fp16"))
    ignored, others = section.rest(HARMLESS)
    unpriced += [f"{name}: the price does not know it" for name in others]
    return RunFacts(
        rows, m, None, optimizer, "full" if any(wanted) else "none", half, None, None, synced, None, tuple(unpriced),
        tuple(ignored),
    )  # fmt: skip


def merged(section: Section, first: RunFacts, second: RunFacts, name: str) -> RunFacts:
    """Return what two files say together; `section` is that of the second, `name` that of the first one.

    Raises:
        ConfigError: they say different things.
    """
    said: dict[str, Any] = {}
    for each in fields(RunFacts):
        one, other = getattr(first, each.name), getattr(second, each.name)
        if isinstance(one, tuple):
            said[each.name] = one + other
        elif one is None or other is None or each.name == "each_synced":
            said[each.name] = other if one is None else one
        elif one != other:
            raise section.error(LONG.get(each.name, each.name), f"is {other}, {name} says {one}; write the same")
        else:
            said[each.name] = one
    return replace(first, **said)


LONG = {
    "rows": "per_device_train_batch_size", "microbatches": "gradient_accumulation_steps", "optimizer": "optim",
    "recompute": "gradient_checkpointing",
}  # fmt: skip
"""Names in TrainingArguments."""
