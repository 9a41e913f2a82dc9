"""Trainers, a file or a folder each, which defines ``TARGET``, a :class:`~autopar.targets.target.Target`.

The rest of autopar knows none of them by name. Their facts (fields, allowed values, versions) have their source beside
them.

==================== ==================================================================================================
:mod:`.accelerate`   Hugging Face accelerate 1.15.0
:mod:`.deepspeed`    DeepSpeed 0.19.8
:mod:`.fsdp2`        plain PyTorch
:mod:`.hugging_face` what the trainers of the Hugging Face stack have in common
:mod:`.megatron`     Megatron-LM with Megatron-Core 0.19; NeMo and Megatron-Bridge, which run it, as configs that are
                     read
:mod:`.torchtitan`   TorchTitan 0.3
==================== ==================================================================================================
"""
