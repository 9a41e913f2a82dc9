"""The files that run a plan under torchtitan: a module with a config function, and what the environment needs."""

from __future__ import annotations

from dataclasses import replace
from pprint import pformat
from typing import Any

from autopar.planner.layouts.stage_starts import sizes_of
from autopar.targets.host_shares import shares_of
from autopar.targets.stages import whole_blocks
from autopar.targets.target import ConfigError, Export, WrittenFiles
from autopar.targets.trainers.torchtitan.layouts import refuses
from autopar.targets.trainers.torchtitan.models import FAMILIES, Family, rope_arguments
from autopar.words.precision import Precision

MODULE, FUNCTION = "torchtitan_plan", "plan"
ARGV = ("-m", "torchtitan.train", "--module", MODULE, "--config", FUNCTION)
SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved-1f1b": "Interleaved1F1B"}
"""Names in ``torch.distributed.pipelining.schedules.get_schedule_class``."""
FILL_IN = (
    "hf_assets_path: the folder of the tokenizer", "dataloader: the data", "the learning rate and the number of steps",
)  # fmt: skip
NOTES = (
    "torchtitan computes the loss in pieces of the sequence (ChunkedLossWrapper), which needs less memory than priced",
)
SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads",
    "num_hidden_layers", "vocab_size", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok",
)  # fmt: skip
"""Fields of the user's config that the file repeats."""


def write(export: Export) -> WrittenFiles:
    """Write a plan's files.

    Raises:
        ConfigError: the precision or the number of microbatches is none that torchtitan has.
    """
    _check(export)
    family = FAMILIES[export.model.family]
    text = _TEMPLATE.format(
        words=export.layout.text, devices=export.layout.n_devices, cluster=export.cluster_name.partition(' as ')[0],
        sizes=_shown({name: export.model.config[name] for name in SIZES if export.model.config.get(name)}),
        names=_imports(export), policy=_policy(export), module=family.module,
        eps=export.model.config.get("rms_norm_eps", 1e-5), **_model(export, family), training=_call(_training(export)),
        parallelism=_call(_parallelism(export)), recompute=_recompute(export), optimizer=_optimizer(export),
    )  # fmt: skip
    files = {f"{MODULE}.py": text, "requirements.txt": "torchtitan==0.3.0\nspmd_types==0.2.3\n"}
    return WrittenFiles(files, ARGV, FILL_IN, NOTES)


def _check(export: Export) -> None:
    """Refuse what only the batch, the sequence and the precision show to be none of torchtitan's."""
    layout = export.layout
    if reason := refuses(replace(layout, microbatches=export.microbatches), export.model):
        raise ConfigError(f"{layout.text}: {reason}")
    cp = layout.sizes["cp"]  # trainer.py: seq_len_divisor
    cut = (layout.sizes["tp"] if layout.sequence_parallel else 1) * (2 * cp if cp > 1 else 1)
    if export.sequence is not None and export.sequence % cut:
        raise ConfigError(
            f"{layout.text}: torchtitan cuts a sequence into {cut} pieces, {export.sequence} places do not divide; "
            "change seq, or leave sp out"
        )
    _formats(export.precision)


def _formats(precision: Precision | None) -> dict[str, str]:
    """Return the fields of the formats, or raise a ConfigError for others than torchtitan's."""
    if precision is None:
        return {"mixed_precision_param": "float32"}
    p = precision
    shown = (p.params, p.master, p.reduce)
    if p.products or p.stochastic_rounding:
        raise ConfigError(f"precision {p}: torchtitan's narrow products need torchao and converters; use bf16-mixed")
    if shown == ("bfloat16", "bfloat16", "float32"):
        return {"dtype": "bfloat16"}
    if shown == ("float32", "float32", "float32"):
        return {"mixed_precision_param": "float32"}
    if shown != ("bfloat16", "float32", "float32"):
        raise ConfigError(
            f"precision {p}: torchtitan computes in bfloat16 or float32 and reduces in float32, this is "
            f"params={p.params}, master={p.master}, reduce={p.reduce}; use bf16-mixed"
        )
    return {}


def _training(export: Export) -> dict[str, Any]:
    each = export.rows_of_rank
    layout = export.layout
    said: dict[str, Any] = {
        "local_batch_size": each * export.microbatches if layout.groups > 1 else each,
        "global_batch_size": export.rows, "seq_len": export.sequence, "steps": 1000, **_formats(export.precision),
    }  # fmt: skip
    if layout.groups > 1 or layout.expert_ranks > 1:  # Trainer.Config refuses CUDA graphs there
        said["disable_cuda_graphs"] = True
    shares = shares_of(export.priced)
    if 0 < shares.parameters < 1:
        raise ConfigError(
            "torchtitan keeps all parameters on the host or none (training.enable_cpu_offload), the plan keeps "
            f"{shares.parameters:.0%} there; use offload parameters=1"
        )
    if shares.parameters:
        said["enable_cpu_offload"] = True
    return {name: value for name, value in said.items() if value is not None}


def _parallelism(export: Export) -> dict[str, Any]:
    layout = export.layout
    dp = layout.sizes["dp"]
    shards = 1 if layout.zero == 0 else layout.shards if layout.shards > 1 else dp
    said: dict[str, Any] = {
        "data_parallel_replicate_degree": dp // shards, "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "never" if layout.zero == 1 else "always",
        "tensor_parallel_degree": layout.sizes["tp"], "enable_sequence_parallel": layout.sequence_parallel,
        "context_parallel_degree": layout.sizes["cp"], "expert_parallel_degree": layout.expert_ranks,
    }  # fmt: skip
    if layout.sizes["cp"] > 1:
        said["context_parallel_load_balancer"] = "ptrr"  # of FlexAttention's masks
    if layout.groups > 1:
        said |= {
            "pipeline_parallel_degree": layout.groups,
            "pipeline_parallel_schedule": SCHEDULES[layout.schedule.partition(":")[0]],
            "pipeline_parallel_microbatch_size": export.rows_of_rank, "module_fqns_per_model_part": stages_of(export),
        }  # fmt: skip
    return said


def stages_of(export: Export) -> list[list[str]]:
    """Return the modules of every stage by torchtitan's names, in the order of the model.

    Raises:
        ConfigError: a stage begins or ends inside a block.
    """
    names, done = [], 0
    for stage in whole_blocks(export, "torchtitan"):
        blocks = [f"layers.{n}" for n in range(done, done + len(stage.blocks))]
        done += len(blocks)
        names.append([*["tok_embeddings"] * stage.is_first, *blocks, *["norm", "lm_head"] * stage.is_last])
    return names


def recomputed_blocks(text: str, blocks: int, stages: int) -> list[int]:
    """Return the numbers of the blocks that ``every:N`` and ``full:N`` recompute."""
    kind, _, which = text.partition(":")
    if kind == "every":
        return list(range(int(which) - 1, blocks, int(which)))
    found: list[int] = []
    done = 0
    for size in sizes_of(blocks, stages):
        found += range(done, done + min(size, int(which)))
        done += size
    return found


def _recompute(export: Export) -> str:
    text = export.layout.recompute
    if text == "none":
        return "None"
    if text == "full":
        return "FullAC.Config()"
    stages = export.layout.groups * export.layout.chunks
    return f"BlocksAC.Config(blocks={recomputed_blocks(text, export.model.blocks, stages)})"


def _policy(export: Export) -> str:
    return _BLOCKS if ":" in export.layout.recompute else ""


def _optimizer(export: Export) -> str:
    narrow = export.precision is not None and export.precision.moments == "bfloat16" != export.precision.master
    made = "default_adamw(lr=3e-4)"
    return f'replace({made}, implementation="fused_opt_states_bf16")' if narrow else made


def _imports(export: Export) -> str:
    return "dataclass, field, replace" if _policy(export) else "replace"


def _model(export: Export, family: Family) -> dict[str, str]:
    config: dict[str, Any] = dict(export.model.config)
    places = int(config.get("max_position_embeddings") or export.sequence or 2048)
    rope = {**rope_arguments(family, config), "max_seq_len": max(places, export.sequence or 0)}
    tied = bool(config.get("tie_word_embeddings"))
    return {
        "family": family.layers, "arguments": _lines(family.arguments(config), 12), "rope_class": family.rope,
        "rope": ", ".join(f"{name}={value!r}" for name, value in rope.items()), "tied": repr(tied),
        "embedding": "_EMBEDDING_SKIP_INIT" if tied else "_EMBEDDING_INIT", "head": family.head,
        "dim": repr(config["hidden_size"]), "vocab": repr(config["vocab_size"]),
    }  # fmt: skip


def _shown(values: dict[str, Any]) -> str:
    return pformat(values, width=110, sort_dicts=False)


def _lines(values: dict[str, Any], indent: int) -> str:
    return "\n".join(f"{' ' * indent}{name}={value!r}," for name, value in values.items())


def _call(values: dict[str, Any]) -> str:
    shown = {name: pformat(value, width=90, compact=True) for name, value in values.items()}
    return "\n".join(f"            {name}={value}," for name, value in shown.items())


_BLOCKS = '''

class BlocksAC(FullAC):
    """Activation checkpointing of the blocks with these numbers, whole."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        blocks: list[int] = field(default_factory=list)

    def _wrap_block(self, module, *, base_fqn=None):
        number = int(base_fqn.rpartition(".")[2])
        return FullAC._wrap_block(self, module, base_fqn=base_fqn) if number in self.config.blocks else module
'''
_TEMPLATE = '''"""A plan of autopar for torchtitan 0.3.0: {words}, on {devices} devices ({cluster}).

Every rank runs, in this folder: python -m torchtitan.train --module torchtitan_plan --config plan
Fill in the tokenizer's folder, the data, the learning rate and the number of steps; all else is the plan.
"""

from dataclasses import {names}

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models import {module} as family
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.common.rope import {rope_class}
from torchtitan.trainer import Trainer

MODEL = {sizes}
"""Sizes of the model that the plan is for, by the names of its Hugging Face config."""
{policy}

def model():
    """The model in torchtitan's own code: a flavor with the sizes of the Hugging Face config."""
    spec = family.model_registry("debugmodel")
    dim, vocab = {dim}, {vocab}
    spec.flavor = "planned"
    spec.model = replace(
        spec.model,
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying={tied},
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab, embedding_dim=dim, param_init=family.{embedding}
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=family._NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=family.{head}),
        layers=family.{family}(
{arguments}
            attn_backend="flex",
            rope={rope_class}.Config({rope}),
        ),
    )
    for _, norm, _, _ in spec.model.traverse(RMSNorm.Config):
        norm.eps = {eps}
    return spec


def plan() -> Trainer.Config:
    spec = model()
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
        ),
        hf_assets_path="./assets/hf/tokenizer",
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        optimizer={optimizer},
        training=TrainingConfig(
{training}
        ),
        parallelism=ParallelismConfig(
{parallelism}
        ),
        activation_checkpoint={recompute},
        compile=CompileConfig(enable=True, components=["model", "loss"]),
    )
'''
