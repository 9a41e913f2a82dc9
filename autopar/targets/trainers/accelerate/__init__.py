"""Hugging Face accelerate 1.15.0: data parallelism, FSDP2 and its hybrid, context and tensor parallelism.

=============== =======================================================================================================
:mod:`.reading` the reader of accelerate's yaml and of Trainer arguments
:mod:`.writing` the files of accelerate: its yaml, Trainer arguments with the same decisions, and what a person runs
=============== =======================================================================================================
"""

from __future__ import annotations

from autopar.planner.layouts.layout_words import Layout
from autopar.targets.target import ModelFacts, Target
from autopar.targets.trainers.accelerate.reading import read, reads
from autopar.targets.trainers.accelerate.writing import is_fsdp, write
from autopar.targets.trainers.hugging_face.known import is_causal, known, refuses_tensor

WORDS: dict[str, tuple[str, ...] | None] = {
    "dp": None,  # parallelism_config.py: dp_replicate_size, dp_shard_size
    "tp": None,  # parallelism_config.py: tp_size, of models that transformers has sharded; alone
    "cp": None,  # parallelism_config.py: cp_size, with cp_comm_strategy alltoall (a ring) or allgather
    "zero": ("0", "3"),  # no FSDP: DistributedDataParallel; FSDP2
    "fsdp": None,  # fully_shard; fsdp=8: dp_shard_size=8; fsdp=keep: fsdp_reshard_after_forward: false
    "mbs": None,
    "m": None,  # GradientAccumulationPlugin(num_steps)
    "recompute": ("none", "full"),  # fsdp_activation_checkpointing wraps every block (fsdp_utils.fsdp2_apply_ac)
    "optimizer": ("adamw", "sgd", "sgd_momentum"),
}


def refuses(layout: Layout, model: ModelFacts) -> str:
    """Return why accelerate cannot train a model in a layout, in one sentence; empty if it can."""
    sizes, fsdp = layout.sizes, is_fsdp(layout)
    dp, cp, tp = sizes["dp"], sizes["cp"], sizes["tp"]
    if cp > 1 and layout.way not in ("ring", "allgather"):
        return f"cp={cp}:{layout.way}: cp_comm_strategy is alltoall (ring) or allgather; write cp={cp}:ring"
    if cp > 1 and not is_causal(model):
        return f"cp={cp}: torch's context parallelism cuts causal attention, which this model is not known to have"
    if cp > 1 and not fsdp:  # state.py: cp_size > 1 needs an fsdp_plugin
        return f"cp={cp} with zero={layout.zero}: context parallelism there needs FSDP2; write fsdp"
    if tp > 1 and dp > 1 and not fsdp:  # parallelism_config.py, __post_init__
        return f"tp={tp} with dp={dp} and zero={layout.zero}: DDP cannot be joined with tensor parallelism; write tp=1"
    if tp > 1 and fsdp:  # accelerator.py, _prepare_tp
        return (
            f"tp={tp} with fsdp: accelerate 1.15.0 imports ReplicateParallel for it, which transformers "
            f"{known()['transformers']} has no more; write tp=1"
        )
    if fsdp and dp * cp == 1:
        return f"fsdp with dp={dp}: there is no rank to shard over; write zero=0"
    if fsdp and layout.shards == 1 and "fsdp=1" in layout.text.replace(" ", "").split(","):
        return f"fsdp=1 with dp={dp}: a mesh without shards is DDP; write zero=0"
    return refuses_tensor(model, tp)


TARGET = Target(
    name="accelerate",
    title="accelerate 1.15",
    software="accelerate",
    words=WORDS,
    write=write,
    refuses=refuses,
    reads=reads,
    read=read,
)
