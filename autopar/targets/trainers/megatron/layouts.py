"""Layouts in Megatron-LM's arguments, and which of them it refuses.

Sources, all of megatron-core 0.19.2: ``validate_args`` is megatron/training/arguments.py, ``TransformerConfig`` is
megatron/core/transformer/transformer_config.py, the schedules are megatron/core/pipeline_parallel/schedules.py.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.planner.layouts.layout_words import FULL, NONE, SELECTIVE, Layout
from autopar.planner.layouts.operator_cuts import RING
from autopar.targets.target import ConfigError, Export, ModelFacts
from autopar.targets.trainers.megatron.models import Arguments, refused_model
from autopar.words.precision import Precision

CONTEXT_WAYS = {RING: "p2p", "allgather": "all_gather", "ulysses": "a2a"}
"""``--cp-comm-type`` of every way of context parallelism (TransformerConfig.cp_comm_type)."""
RECOMPUTED = {
    "mlp": ("mlp", "moe"), "block_sparse_moe": ("moe",), "mlp.shared_expert": ("shared_experts",),
    "mlp.shared_experts": ("shared_experts",),
}  # fmt: skip
"""``--recompute-modules`` of modules of a block (TransformerConfig.recompute_modules)."""
NORMS = ({"input_layernorm", "post_attention_layernorm"}, {"ln_1", "ln_2"})
"""Both norms of a block, which ``layernorm`` recomputes together."""
UP_PROJECTIONS = ({"self_attn.q_b_proj", "self_attn.kv_b_proj"}, {"self_attn.kv_b_proj"})
"""The products that ``mla_up_proj`` recomputes."""
NARROW = {
    "fp8": ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    "fp8-delayed": ("--fp8-format", "hybrid", "--fp8-recipe", "delayed"),
    "mxfp8": ("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"),
    "nvfp4": ("--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"),
}
"""Products in eight and four bits: TransformerConfig.fp8, fp8_recipe, fp4, fp4_recipe."""


def refuses(layout: Layout, model: ModelFacts) -> str:
    """Return why Megatron-LM cannot train a model in a layout, in one sentence with both numbers; empty if it can."""
    reason = refused_model(model)
    for check in (_heads, _experts, _context, _recompute):
        reason = reason or check(layout, model)
    return reason or _pipeline(layout) or _precision(layout)


def _heads(layout: Layout, model: ModelFacts) -> str:
    """Refuse tensor parallelism that heads or features do not divide over (TransformerConfig.__post_init__)."""
    tp = layout.sizes["tp"]
    heads, groups = model.heads or 1, model.key_heads or 1
    if heads % tp:
        return f"tp={tp} does not divide the {heads} heads of attention; use a divisor"
    if groups % tp and tp % groups:
        return f"tp={tp} neither divides the {groups} heads of keys and values nor is a multiple; use a divisor"
    features = model.number("intermediate_size", "n_inner") or 0
    if features % tp:
        return f"tp={tp} does not divide the {features} features of the MLP; use a divisor"
    return ""


def _experts(layout: Layout, model: ModelFacts) -> str:
    tp, experts = layout.sizes["tp"], model.experts
    if experts and tp > 1 and not layout.sequence_parallel:  # MoELayer.forward raises
        return f"experts with tp={tp} need sequence parallelism; add sp"
    ranks = layout.expert_ranks
    if ranks > 1 and not experts:  # validate_args: "num_experts must be non None"
        return f"ep={ranks} needs routed experts, the model has none; leave it out"
    if ranks > 1 and experts % ranks:  # validate_args
        return f"ep={ranks} does not divide the {experts} experts; use a divisor"
    features = model.number("moe_intermediate_size", "intermediate_size") or 0
    if experts and not layout.experts_travel and features % tp:
        return f"tp={tp} does not divide the {features} features of an expert; use a divisor, or etp=1"
    return ""


def _context(layout: Layout, model: ModelFacts) -> str:
    cp, tp = layout.sizes["cp"], layout.sizes["tp"]
    if cp == 1 or layout.way != "ulysses":
        return ""
    few = min(model.heads or 1, model.key_heads or 1) // tp
    if few % cp:  # transformer_engine: heads of a rank are exchanged among the ranks of cp
        return f"cp={cp}:ulysses does not divide the {few} heads of keys and values of a rank; use cp={cp}:ring"
    return ""


def _pipeline(layout: Layout) -> str:
    m, pp = layout.microbatches, layout.groups
    if layout.zero == 3 and pp > 1:
        return f"Megatron-FSDP is written for pp=1, pp={pp} is asked for; use zero=1"
    if layout.chunks > 1 and m is not None and m < pp:  # schedules.py: the group of microbatches has pp or more
        return f"interleaved stages need as many microbatches as pp={pp}, m={m} is asked for; use more, or vp=1"
    return ""


def _recompute(layout: Layout, model: ModelFacts) -> str:
    kind, _, which = layout.recompute.partition(":")
    if kind != SELECTIVE:
        return ""
    try:
        recomputed_modules(which, model)
    except ConfigError as error:
        return str(error)
    return ""


def _precision(layout: Layout) -> str:
    if layout.precision is None:
        return ""
    try:
        precision_arguments(layout.precision, zero=layout.zero)
    except ConfigError as error:
        return str(error)
    return ""


def recomputed_modules(which: str, model: ModelFacts) -> list[str]:
    """Return ``--recompute-modules`` of modules of a block.

    Raises:
        ConfigError: Megatron-LM does not recompute such a module by itself.
    """
    parts = {part.strip() for part in which.split("+")}
    found: list[str] = []
    for both, name in ((NORMS, "layernorm"), (UP_PROJECTIONS, "mla_up_proj")):
        for group in both:
            if group <= parts:
                parts -= group
                found.append(name)
    for part in sorted(parts):
        names = RECOMPUTED.get(part)
        if names is None:
            raise ConfigError(
                f"Megatron-LM recomputes mlp, both norms or shared experts of a block by themselves, recompute="
                f"{SELECTIVE}:{part} is asked for; use one of these or recompute={FULL}"
            )
        mixed = len(names) > 1 and model.experts and not _all_routed(model)
        found += names if mixed else [names[-1] if model.experts else names[0]]
    return list(dict.fromkeys(found))


def _all_routed(model: ModelFacts) -> bool:
    """Return whether every layer has routed experts."""
    return not model.number("first_k_dense_replace") and not model.config.get("mlp_only_layers")


def precision_arguments(policy: Precision | None, *, zero: int) -> Arguments:
    """Return the arguments of a precision policy; ``None``: everything in float32.

    Raises:
        ConfigError: Megatron-LM cannot store or sum numbers so.
    """
    if policy is None:
        return {}
    params, reduce = str(policy.params), str(policy.reduce)
    if params not in ("bfloat16", "float16", "float32") or policy.stochastic_rounding:
        raise ConfigError(f"Megatron-LM has no precision {policy}; use bf16-mixed, 16-mixed or 32-true")
    if params != "float32" and policy.master != "float32":
        raise ConfigError(f"Megatron-LM keeps float32 masters of {params} parameters, {policy} has {policy.master}; "
                          "use bf16-mixed or 16-mixed")  # fmt: skip
    arguments: Arguments = {"bfloat16": {"--bf16": ""}, "float16": {"--fp16": ""}, "float32": {}}[params]
    if params == "bfloat16" and reduce == "bfloat16":
        arguments["--grad-reduce-in-bf16"] = ""
    elif params == "float16" and reduce == "float32":
        arguments["--accumulate-allreduce-grads-in-fp32"] = ""
    elif reduce not in ("float32", params):
        raise ConfigError(f"Megatron-LM sums gradients of {params} in float32 or {params}, {policy} in {reduce}; "
                          "use one of these")  # fmt: skip
    if policy.moments != "float32":
        if zero != 1:  # OptimizerConfig.__post_init__: the precision aware optimizer is the distributed one
            raise ConfigError(f"Megatron-LM stores moments in {policy.moments} with zero=1, zero={zero} is asked for; "
                              "add zero=1")  # fmt: skip
        arguments |= {"--use-precision-aware-optimizer": "", "--exp-avg-dtype": "bf16", "--exp-avg-sq-dtype": "bf16"}
    if policy.products:
        name, value, recipe, kind = NARROW[policy.products]
        arguments |= {name: value, recipe: kind}
        if policy.narrow_gathers:
            arguments["--fp8-param-gather" if "fp8" in name else "--fp4-param-gather"] = ""
    return arguments


def check_batch(export: Export) -> None:
    """Refuse a batch or a sequence that Megatron-LM cannot divide in an export's layout.

    Raises:
        ConfigError: with both numbers.
    """
    layout, m = export.layout, export.microbatches
    cp, tp, pp = layout.sizes["cp"], layout.sizes["tp"], layout.groups
    places = export.sequence or 0
    if cp > 1 and places % (2 * cp):  # validate_args
        raise ConfigError(f"Megatron-LM needs a multiple of 2 x cp = {2 * cp} places in a row, there are {places}; "
                          "use another sequence or cp")  # fmt: skip
    if layout.sequence_parallel and places % (tp * cp):
        raise ConfigError(f"Megatron-LM needs a multiple of tp x cp = {tp * cp} places in a row, there are "
                          f"{places}; use another sequence, or leave sp out")  # fmt: skip
    rounds = max(1, m // pp)
    if layout.chunks > 1 and m >= pp and m % rounds:  # schedules.py: nor may the last group have fewer than pp
        raise ConfigError(f"Megatron-LM runs {m} microbatches of interleaved stages in groups of pp={pp} and more, "
                          f"which have to be equal here; use {m - m % pp} or {m - m % pp + pp}")  # fmt: skip
    if reason := _pipeline(replace(layout, microbatches=m)):
        raise ConfigError(f"Megatron-LM: {reason}")


def layout_arguments(export: Export, sizes: list[int]) -> Arguments:
    """Return the arguments of an export's layout; ``sizes``: layers of every stage, in the order of the model."""
    layout, cp = export.layout, export.layout.sizes["cp"]
    tp = layout.sizes["tp"]
    arguments: Arguments = {
        "--tensor-model-parallel-size": str(tp),
        "--pipeline-model-parallel-size": str(layout.groups),
        "--micro-batch-size": str(export.rows_of_rank),
        "--global-batch-size": str(export.rows),
    }
    if layout.sequence_parallel:
        arguments["--sequence-parallel"] = ""
    if cp > 1:
        arguments |= {"--context-parallel-size": str(cp), "--cp-comm-type": CONTEXT_WAYS[layout.way]}
    if export.model.experts:
        arguments |= {
            "--expert-model-parallel-size": str(layout.expert_ranks),
            "--expert-tensor-parallel-size": "1" if layout.experts_travel else str(tp),
        }
    return {**arguments, **_stage_arguments(export, sizes), **_storage(layout.zero), **_again(export)}


def _stage_arguments(export: Export, sizes: list[int]) -> Arguments:
    layout = export.layout
    arguments: Arguments = {}
    if layout.groups == 1:
        return arguments
    if len(set(sizes)) > 1:
        arguments["--pipeline-model-parallel-layout"] = layout_text(sizes)
    elif layout.chunks > 1:
        arguments["--num-virtual-stages-per-pipeline-rank"] = str(layout.chunks)
    if layout.chunks > 1:
        m, pp = export.microbatches, layout.groups
        group = m // max(1, m // pp)  # microbatches that run on a stage before the next one: equal rounds
        if group != pp:
            arguments["--microbatch-group-size-per-virtual-pipeline-stage"] = str(group)
    return arguments


def layout_text(sizes: list[int]) -> str:
    """Return ``--pipeline-model-parallel-layout``: the embedding and the first layers, ..., the last ones and the loss.

    The grammar is that of PipelineParallelLayerLayout.parse_str_to_list: ``E``, ``t`` and ``L`` with ``*n`` for
    repetition, stages parted by ``|``.
    """
    layers = [f"t*{n}" if n > 1 else "t" * n for n in sizes]
    middle = layers[1:-1]
    runs: list[tuple[str, int]] = []
    for text in middle:
        if runs and runs[-1][0] == text:
            runs[-1] = text, runs[-1][1] + 1
        else:
            runs.append((text, 1))
    written = "".join(f"({text}|)*{n}" if n > 1 else f"{text}|" for text, n in runs)
    return f"E{layers[0]}|{written}{layers[-1]}L"


def _storage(zero: int) -> Arguments:
    """Return the arguments of what is stored in shards, with the overlaps that the price assumes."""
    if zero == 3:  # validate_args: Megatron-FSDP requires this checkpoint format
        return {
            "--use-megatron-fsdp": "", "--use-distributed-optimizer": "",
            "--data-parallel-sharding-strategy": "optim_grads_params", "--ckpt-format": "fsdp_dtensor",
            "--overlap-grad-reduce": "", "--overlap-param-gather": "", "--no-gradient-accumulation-fusion": "",
        }  # fmt: skip
    if zero == 1:
        return {"--use-distributed-optimizer": "", "--overlap-grad-reduce": "", "--overlap-param-gather": ""}
    return {"--overlap-grad-reduce": ""}


def _again(export: Export) -> Arguments:
    """Return the arguments of recomputation."""
    kind, _, which = export.layout.recompute.partition(":")
    if kind == NONE:
        return {}
    if kind == SELECTIVE:
        names = " ".join(recomputed_modules(which, export.model))
        return {"--recompute-granularity": "selective", "--recompute-modules": names}
    method, number = ("block", which) if which else ("uniform", "1")
    return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": number}
