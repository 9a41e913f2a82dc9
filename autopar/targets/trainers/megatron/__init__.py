"""Megatron-LM with Megatron-Core 0.19; NeMo and Megatron-Bridge, which run it, as configs that are read.

=================== ===================================================================================================
:mod:`.configs`     from Megatron's options to the words of a layout, the batch, the precision and the sizes of the
                    model
:mod:`.fields`      the options of Megatron-LM, and what of them changes time or memory
:mod:`.layouts`     layouts in Megatron-LM's arguments, and which of them it refuses
:mod:`.models`      models that Megatron-LM trains, in its arguments
:mod:`.nemo`        fields of NeMo, Megatron-Bridge and Megatron's own yaml as options of Megatron-LM
:mod:`.options`     the options of a Megatron command line as data, from whichever file says them
:mod:`.precisions`  Megatron's options of number formats as a precision policy
:mod:`.reading`     which files are configs of Megatron, and what they say
:mod:`.shell`       shell scripts as text
:mod:`.shell_words` the words and statements of a shell script, with quotes and expansions as they stand there
:mod:`.stage_texts` ``--pipeline-model-parallel-layout`` as numbers of layers
:mod:`.writing`     the folder that a person runs
:mod:`.yaml_files`  yaml files
=================== ===================================================================================================
"""

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
    offloads=("optimizer",),
)  # fmt: skip
