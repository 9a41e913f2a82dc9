"""DeepSpeed 0.19.8: ZeRO, automatic tensor parallelism (AutoTP), expert parallelism (AutoEP), Ulysses.

=============== =======================================================================================================
:mod:`.reading` the reader of DeepSpeed's config, alone, beside Trainer arguments or named by an accelerate yaml
:mod:`.writing` the files of DeepSpeed: ds_config.json, and what a person runs
=============== =======================================================================================================
"""

from __future__ import annotations

from autopar.planner.layouts.layout_words import Layout
from autopar.targets.target import ModelFacts, Target
from autopar.targets.trainers.deepspeed.reading import read, reads
from autopar.targets.trainers.deepspeed.writing import PRESETS, write
from autopar.targets.trainers.hugging_face.known import is_causal, refuses_tensor

WORDS: dict[str, tuple[str, ...] | None] = {
    "dp": None,
    "tp": None,  # runtime/tensor_parallel/config.py: autotp_size
    "cp": ("*:ulysses",),  # runtime/sequence_parallel/ulysses_sp.py: sequence_parallel_size
    "ep": None,  # module_inject/auto_ep_config.py: autoep_size
    "etp": ("1",),  # auto_ep_folding.py: expert_tensor_parallel_size other than 1 is reserved
    "zero": ("0", "1", "2", "3"),  # runtime/zero/config.py: stage
    "fsdp": ("",),  # stage 3; mics_shard_size, which shared among some ranks, has been removed
    "mbs": None,
    "m": None,  # gradient_accumulation_steps
    "recompute": ("none", "full"),  # the model's own gradient checkpointing, which train.py turns on
    "optimizer": ("adamw", "sgd", "sgd_momentum"),
}


def refuses(layout: Layout, model: ModelFacts) -> str:
    """Return why DeepSpeed cannot train a model in a layout, in one sentence; empty if it can."""
    cp, tp = layout.sizes["cp"], layout.sizes["tp"]
    if cp > 1:
        why = _refuses_sequence(layout, model)
        if why:
            return why
    ep = layout.expert_ranks
    if ep > 1:
        if model.family not in PRESETS:
            return f"ep={ep}: AutoEP knows {', '.join(PRESETS)}, this model is '{model.family or 'one of its own'}'"
        if model.experts % ep:  # auto_ep_config.py, validate_autoep_post_detection
            return f"ep={ep} does not divide the {model.experts} experts"
        if tp > 1 and not layout.experts_travel:
            return f"ep={ep} with tp={tp} cuts experts over tp: expert_tensor_parallel_size is 1 there; write etp=1"
        if layout.zero == 3 and cp > 1:  # engine.py, _validate_zero3_moe_compatibility
            return f"ep={ep} with zero=3 and cp={cp}: AutoEP with ZeRO-3 has no sequence parallelism; write zero=2"
    elif model.experts and tp > 1:  # auto_ep_folding.py, validate_folding_global; AutoTP alone leaves experts whole
        return f"tp={tp} with ep=1: AutoTP cuts routed experts with AutoEP only; write ep={tp},etp=1"
    return refuses_tensor(model, tp)


def _refuses_sequence(layout: Layout, model: ModelFacts) -> str:
    cp, tp = layout.sizes["cp"], layout.sizes["tp"]
    if layout.way != "ulysses":
        return f"cp={cp}:{layout.way}: DeepSpeed exchanges heads for places; write cp={cp}:ulysses"
    if tp > 1:  # engine.py, _configure_tensor_parallel_states: AutoTP's groups take the place of Ulysses'
        return f"cp={cp} with tp={tp}: AutoTP and Ulysses each bring groups of their own; use one of them"
    if not is_causal(model):
        return f"cp={cp}: train.py cuts the sequence of causal models of transformers only, which this model is not"
    heads, keys = model.heads, model.key_heads
    if heads is not None and heads % cp:  # ulysses_sp.py, __init__
        return f"cp={cp} does not divide num_attention_heads={heads}"
    if keys is not None and keys % cp and cp % keys:
        return f"cp={cp} does not divide num_key_value_heads={keys}, nor the other way round"
    return ""


TARGET = Target(
    name="deepspeed",
    title="DeepSpeed 0.19.8",
    software="deepspeed-eager",
    words=WORDS,
    write=write,
    refuses=refuses,
    reads=reads,
    read=read,
    offloads=("optimizer", "parameters"),
)
