"""What torchtitan 0.3.0 can run, from its code: words of layouts, and what it refuses of them."""

from __future__ import annotations

from autopar.planner.layouts.layout_words import Layout
from autopar.targets.target import ModelFacts
from autopar.targets.trainers.torchtitan.models import why_not

WORDS: dict[str, tuple[str, ...] | None] = {
    "dp": None, "tp": None, "sp": ("",), "pp": None, "vp": None, "ep": None, "etp": ("1",),
    # parallelism.fsdp_reshard_after_forward: with a pipeline kept by default (distributed/fsdp.py), which is zero=1
    "zero": ("0", "1", "3"), "fsdp": ("", "keep", "*"),
    # FlexAttention gathers keys and values (distributed/context_parallel); 0.3.0 has no rotate method any more
    "cp": ("1", "*:allgather"),
    # torch.distributed.pipelining refuses to split the backward under torch.compile, on which its speed rests:
    # no zero bubbles (_check_torch_compile_compatibility)
    "schedule": ("1f1b", "gpipe", "interleaved-1f1b"),
    # activation_checkpoint: none and FullAC; full:N and every:N by a policy of the written file
    "recompute": ("none", "full", "full:*", "every:*"),
    "optimizer": ("adamw",),  # optimizer factories of 0.3.0: Adam, AdamW, Muon
}  # fmt: skip


def refuses(layout: Layout, model: ModelFacts) -> str:
    """Return why torchtitan cannot train a model in a layout, in one sentence; empty if it can."""
    return (
        why_not(model) or _heads(layout, model) or _storage(layout) or _pipeline(layout, model)
        or _experts(layout, model)
    )  # fmt: skip


def _heads(layout: Layout, model: ModelFacts) -> str:
    """Refuse what ``Decoder.Config.update_from_config`` does of tensor parallelism."""
    tp = layout.sizes["tp"]
    for name, heads in (("num_attention_heads", model.heads), ("num_key_value_heads", model.key_heads)):
        if heads and heads % tp:
            return f"torchtitan cuts heads by tp, which is {tp} and does not divide {name}={heads}; use a divisor"
    if layout.sizes["cp"] > 1 and layout.way != "allgather":
        cp = layout.sizes["cp"]
        return f"torchtitan gathers keys and values over cp, {layout.way} is asked for; write cp={cp}:allgather"
    return ""


def _storage(layout: Layout) -> str:
    """Refuse ways to store parameters that FSDP2 has not there."""
    dp, cp, m = layout.sizes["dp"], layout.sizes["cp"], layout.microbatches
    if layout.zero == 0 and cp > 1:
        # parallel_dims.build_mesh: the mesh of fully_shard is dp_shard x cp
        return f"torchtitan shards parameters over cp, which is {cp}, zero=0 keeps them whole; write fsdp or zero=1"
    if layout.zero == 0 and layout.experts > 1:
        return (
            f"torchtitan takes ep={layout.experts} ranks for experts out of those that shard parameters, of which "
            f"zero=0 has 1; write fsdp or zero=1"
        )
    if layout.zero == 1 and layout.groups == 1 and not layout.keeps and dp * cp > 1 and m != 1:
        # trainer.py, train_step: every microbatch of gradient accumulation gathers and reduces
        return (
            "torchtitan without a pipeline gathers parameters for every microbatch, zero=1 once a step; write fsdp, "
            "or fsdp=keep with one microbatch"
        )
    return ""


def _pipeline(layout: Layout, model: ModelFacts) -> str:
    """Refuse what its pipelines cannot hold."""
    pp, vp = layout.groups, layout.chunks
    if pp > 1 and model.config.get("tie_word_embeddings"):
        # Decoder.Config.update_from_config: NotImplementedError
        return f"torchtitan has no pipeline for a model with tied embeddings, pp is {pp}; write pp=1"
    name = layout.schedule.partition(":")[0]
    m = layout.microbatches
    if pp > 1 and name == "1f1b" and m is not None and m < pp:
        # torch.distributed.pipelining.Schedule1F1B
        return f"torch's 1F1B needs as many microbatches as stages, {pp}, m is {m}; use more, or schedule=gpipe"
    if pp > 1 and vp > 1 and m is not None and m % max(1, m // pp):
        # Schedule Interleaved1F1B: number_of_rounds = m // pp
        return f"torch's Interleaved1F1B runs {m} microbatches in {m // pp} rounds, which do not divide them; change m"
    return ""


def _experts(layout: Layout, model: ModelFacts) -> str:
    """Refuse cuts of experts that its sparse mesh has not."""
    tp, cp = layout.sizes["tp"], layout.sizes["cp"]
    spread = layout.expert_ranks
    if not layout.routed or not model.experts:
        return ""
    if layout.experts > 1 and tp > 1 and not layout.experts_travel:
        # models/common/moe_sharding.py: with ep experts are whole; without it cut by tp
        return f"torchtitan spreads experts over tp, too, etp={tp} cuts them; write etp=1,ep={layout.experts * tp}"
    if spread > 1 and cp > 1:
        # parallel_dims.build_mesh: ep is the innermost of dp_shard x cp x tp
        return f"torchtitan spreads experts over cp before dp, which cp={cp} beside ep={spread} cannot say; use one"
    if layout.experts_travel and spread == 1:
        return ""
    if model.experts % spread:
        return f"torchtitan gives every rank equally many experts, ep={spread} does not divide {model.experts}"
    return ""
