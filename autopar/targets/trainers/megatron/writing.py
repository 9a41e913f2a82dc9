"""The folder that a person runs: Megatron-LM's arguments, what a rank runs, overrides for Megatron-Bridge."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Template

from autopar.targets.host_shares import shares_of
from autopar.targets.stages import counts, whole_blocks
from autopar.targets.target import ConfigError, Export, WrittenFiles
from autopar.targets.trainers.megatron.layouts import check_batch, layout_arguments, precision_arguments
from autopar.targets.trainers.megatron.models import Arguments, model_arguments
from hardware_profiles.strict import read_text

RELEASE = "core_v0.19.0"
"""The newest tag of Megatron-LM's repository whose ``pretrain_gpt.py`` has these arguments."""
CONNECTIONS = 'os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # collectives start in the order of launches'
NO_CONNECTIONS = 'os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # Megatron-FSDP asks for more than one'
RANK = Template(read_text(Path(__file__).with_name("pretrain.py.j2")), keep_trailing_newline=True)
"""What every rank runs."""
OPTIMIZERS = {
    "adamw": {"--optimizer": "adam"}, "sgd": {"--optimizer": "sgd", "--sgd-momentum": "0.0"},
    "sgd_momentum": {"--optimizer": "sgd", "--sgd-momentum": "0.9"},
}  # fmt: skip
TO_FILL_IN = {
    "--mock-data": "", "--tokenizer-type": "NullTokenizer", "--train-iters": "100", "--lr": "3e-4", "--min-lr": "3e-5",
    "--lr-decay-style": "cosine", "--lr-warmup-iters": "10", "--clip-grad": "1.0", "--weight-decay": "0.1",
    "--eval-iters": "0", "--log-interval": "1", "--no-create-attention-mask-in-dataloader": "",
}  # fmt: skip
"""What is run without data: random tokens, for a hundred steps."""


def write(export: Export) -> WrittenFiles:
    """Write the files that run a plan in Megatron-LM.

    Raises:
        ConfigError: Megatron-LM cannot divide the batch or the sequence so, or has no such numbers or optimizer.
    """
    check_batch(export)
    sizes = counts(whole_blocks(export, "megatron"))
    layout = export.layout
    if export.optimizer not in OPTIMIZERS:
        raise ConfigError(f"Megatron-LM has no optimizer {export.optimizer}; use {', '.join(OPTIMIZERS)}")
    groups = {
        "model": model_arguments(export.model, export.sequence, layout.sizes["tp"]),
        "layout": layout_arguments(export, sizes),
        "precision": precision_arguments(export.precision, zero=layout.zero),
        "optimizer": OPTIMIZERS[export.optimizer] | _on_host(export),
        "data and steps: yours go here": TO_FILL_IN,
    }
    names = {
        "release": RELEASE, "script": "pretrain_gpt.py",
        "environment": NO_CONNECTIONS if layout.zero == 3 else CONNECTIONS,
    }  # fmt: skip
    return WrittenFiles(
        {
            "arguments.txt": "".join(_section(name, arguments) for name, arguments in groups.items()),
            "pretrain.py": RANK.render(names),
            "bridge_overrides.txt": bridge_overrides(export, groups["layout"] | groups["precision"]),
        },
        argv=("pretrain.py",),
        fill_in=("--data-path and --tokenizer-model in arguments.txt, in place of --mock-data",
                 "MEGATRON_LM: the path of a checkout of Megatron-LM"),
        notes=tuple(_notes(export)),
    )  # fmt: skip


def _on_host(export: Export) -> Arguments:
    """Return the arguments of a share of the optimizer's state and step on the host.

    Raises:
        ConfigError: Megatron-LM keeps state there only of its distributed optimizer.
    """
    share = shares_of(export.priced).steps
    if not share:
        return {}
    if export.layout.zero != 1:
        raise ConfigError(
            f"Megatron-LM keeps state of its distributed optimizer on the host (--optimizer-cpu-offload), which is "
            f"zero=1; the layout has zero={export.layout.zero}"
        )
    return {
        "--optimizer-cpu-offload": "", "--optimizer-offload-fraction": f"{share:.3f}",
        "--overlap-cpu-optimizer-d2h-h2d": "", "--use-precision-aware-optimizer": "",
    }  # fmt: skip


def _section(name: str, arguments: Arguments) -> str:
    lines = [f"# {name}", *(f"{option} {_quoted(value)}".strip() for option, value in arguments.items())]
    return "\n".join(lines) + "\n\n"


def _quoted(value: str) -> str:
    return f'"{value}"' if any(sign in value for sign in "()|*[]") else value


def _notes(export: Export) -> list[str]:
    notes = [
        "random tokens are trained on until --mock-data is replaced by --data-path",
        "bridge_overrides.txt is not validated: Megatron-Bridge cannot be imported without GPU packages",
    ]
    layout, model = export.layout, export.model
    tp, vocabulary = layout.sizes["tp"], model.number("vocab_size") or 0
    if vocabulary % tp:
        notes.append(f"the vocabulary of {vocabulary} is padded to {-(-vocabulary // tp) * tp}, a multiple of tp={tp}")
    if layout.sizes["cp"] > 1 and layout.experts > 1:
        notes.append("experts are shared by neighbouring ranks, those of cp first; the price takes ranks of dp")
    if model.number("num_nextn_predict_layers"):
        notes.append("layers that predict further tokens (MTP) are left out, as in the model that was planned")
    return notes


SECTIONS = {
    "--micro-batch-size": "train.micro_batch_size", "--global-batch-size": "train.global_batch_size",
    "--use-distributed-optimizer": "ddp.use_distributed_optimizer", "--overlap-grad-reduce": "ddp.overlap_grad_reduce",
    "--overlap-param-gather": "ddp.overlap_param_gather", "--use-megatron-fsdp": "ddp.use_megatron_fsdp",
    "--data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy",
    "--num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size",
    "--microbatch-group-size-per-virtual-pipeline-stage": "model.microbatch_group_size_per_vp_stage",
    "--fp8-format": "model.fp8", "--fp4-format": "model.fp4", "--fp8-param-gather": "model.fp8_param",
    "--fp4-param-gather": "model.fp4_param", "--ckpt-format": "checkpoint.ckpt_format",
    "--no-gradient-accumulation-fusion": "",
    "--use-precision-aware-optimizer": "optimizer.use_precision_aware_optimizer",
    "--exp-avg-dtype": "optimizer.exp_avg_dtype", "--exp-avg-sq-dtype": "optimizer.exp_avg_sq_dtype",
    "--bf16": "", "--fp16": "", "--grad-reduce-in-bf16": "", "--accumulate-allreduce-grads-in-fp32": "",
}  # fmt: skip
"""Fields of Megatron-Bridge's ConfigContainer where they are not ``model.`` and the argument's own name."""


def bridge_overrides(export: Export, arguments: Arguments) -> str:
    """Return overrides of a Megatron-Bridge recipe, one a line: ``model.tensor_model_parallel_size=4``."""
    policy = export.precision
    params = (
        "fp32" if policy is None else {"bfloat16": "bf16_mixed", "float16": "fp16_mixed"}.get(str(policy.params), "")
    )
    lines = [
        "# Overrides of a Megatron-Bridge recipe of the same model; NOT VALIDATED: Megatron-Bridge cannot be imported",
        "# without GPU packages. Behind a recipe's script: $(grep -v '^#' bridge_overrides.txt)",
        f"dataset.seq_length={export.sequence}", f"model.seq_length={export.sequence}",
    ]  # fmt: skip
    if params.endswith("mixed"):
        lines.append(f"mixed_precision={params}")
    for option, value in arguments.items():
        name = SECTIONS.get(option, f"model.{option[2:].replace('-', '_')}")
        if name:
            lines.append(f"{name}={_hydra(option, value)}")
    return "\n".join(lines) + "\n"


def _hydra(option: str, value: str) -> str:
    if option in ("--recompute-modules",):
        return f"[{','.join(value.split())}]"
    if any(sign in value for sign in "()|*,"):
        return f"'{value}'"
    return value or "true"
