"""Megatron-LM with Megatron-Core 0.19; NeMo and Megatron-Bridge, which run it, as configs that are read."""

from __future__ import annotations

from autopar.targets.target import Target
from autopar.targets.trainers.megatron.layouts import refuses
from autopar.targets.trainers.megatron.reading import read, reads
from autopar.targets.trainers.megatron.writing import write

TARGET = Target(
    name="megatron",
    title="Megatron-Core 0.19",
    software="megatron-2023",
    words={
        "dp": None, "tp": None, "sp": ("",), "pp": None, "vp": None, "cp": None, "ep": None, "etp": None,
        # the distributed optimizer is zero=1; Megatron-FSDP's optim_grads_params zero=3 (megatron/core/distributed)
        "zero": ("0", "1", "3"), "fsdp": ("",),
        "schedule": ("1f1b", "interleaved-1f1b"),  # megatron/core/pipeline_parallel/schedules.py
        "recompute": ("none", "full", "full:*", "selective:*"),  # TransformerConfig.recompute_granularity and _modules
        "optimizer": ("adamw", "sgd", "sgd_momentum"),  # --optimizer adam, sgd
    },
    refuses=refuses,
    write=write,
    reads=reads,
    read=read,
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},  # validate_args asks for it on GPUs before Blackwell
)  # fmt: skip
