"""Numbers in, seconds and bytes out. Floor 1: imports `hardware_profiles` only; no torch, no model."""

from .axes import mesh_axes
from .collectives import KINDS as COLLECTIVE_KINDS
from .collectives import AxisCost
from .compute import KINDS as OP_KINDS
from .compute import op_seconds, peak_flops
from .memory import adam_state_bytes, gradient_bytes, optimizer_state_bytes, training_state_bytes

__all__ = [
    "COLLECTIVE_KINDS", "OP_KINDS", "AxisCost", "adam_state_bytes", "gradient_bytes", "mesh_axes",
    "op_seconds", "optimizer_state_bytes", "peak_flops", "training_state_bytes",
]  # fmt: skip
