"""Bytes of optimizer state."""

from __future__ import annotations

# State tensors of the parameter's shape and dtype that torch.optim keeps per parameter, and whether it keeps
# a scalar `step` (float32) for each parameter tensor. Source: torch/optim/adamw.py, adam.py, sgd.py and
# _muon.py (2.13), `_init_group`.
OPTIMIZERS = {
    "adamw": (2, True), "adam": (2, True), "adamw8bit": (2, True), "sgd_momentum": (1, False), "sgd": (0, False),
    "muon": (1, False),
}  # fmt: skip
MUON, BESIDE_MUON = "muon", "adamw"
"""The optimizer of whole matrices, and the one of all other parameters beside it."""
STEP_BYTES = 4

# States in 8 bits: a byte an element, a float32 scale for each block, and a table of 256 float32 values for each state;
# tensors that are small or no multiples of the block keep their states wide. Source: torchao 0.18,
# optim/subclass_8bit.py (`zeros`) and optim/adam.py (`_new_buffer`); bitsandbytes has the same block and threshold.
EIGHT_BIT = frozenset({"adamw8bit"})
BLOCK, LEAST_ELEMENTS, SCALE_BYTES, TABLE_BYTES = 256, 4096, 4, 256 * 4


def optimizer_state_bytes(optimizer: str, n_elements: int, element_bytes: int, n_tensors: int = 1) -> int:
    """Return the optimizer state in bytes of `n_tensors` parameters with `n_elements` elements in all.

    torch.optim keeps its state in the dtype of the parameter (`element_bytes` each), under a policy in that of its
    moments. Of an optimizer with 8-bit states the elements are those of one tensor. An unknown optimizer raises
    ValueError.
    """
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer '{optimizer}', known: {', '.join(OPTIMIZERS)}")
    copies, has_step = OPTIMIZERS[optimizer]
    if optimizer in EIGHT_BIT and n_elements >= LEAST_ELEMENTS and n_elements % BLOCK == 0:
        each = n_elements + n_elements // BLOCK * SCALE_BYTES + TABLE_BYTES
        return copies * each + STEP_BYTES * n_tensors
    return copies * n_elements * element_bytes + has_step * STEP_BYTES * n_tensors
