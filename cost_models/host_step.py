"""Seconds of an optimizer's step that the host takes, for state in its memory.

A step on a processor is bound by the host's memory: a fused one reads and writes each value once, as
:data:`~cost_models.data_sheet_costs.STEP_PASSES` has it. An optimizer that makes one pass for each of its operators
(torch's default on processors; ``fused=True`` does not) takes :data:`UNFUSED` times as long.

Measured on an H200's host of 16 cores (docs/measurements/host-optimizer.md): 93 to 118 ms for 438 million parameters in
float32, and 590 to 650 ms unfused. DeepSpeed's tutorial of ZeRO-Offload has 5 to 7 times between its fused Adam on
processors and torch's plain one. One thread moves some 18 GB/s: torchrun sets ``OMP_NUM_THREADS=1`` unless it is set.
"""

from __future__ import annotations

from cost_models.data_sheet_costs import STEP_PASSES
from cost_models.host_link import HostCopies

UNFUSED = 5.9
"""By what a step that is not fused takes longer on a processor."""


def host_step_seconds(optimizer: str, n_bytes: float, host: HostCopies) -> float:
    """Return the seconds of a fused step on parameters of ``n_bytes`` as they are stored, on the host of one device."""
    return STEP_PASSES.get(optimizer, STEP_PASSES["adamw"]) * n_bytes / host.memory_rate
