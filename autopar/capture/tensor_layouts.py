"""Tensors of other layouts than strided ones are refused: no rule says how to cut a sparse or a nested tensor.

So are packed sequences that are made outside of the model: their rows are those of all steps, one behind the other, and
how many there are depends on the lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from autopar.errors import CaptureError
from autopar.torch_private import pytree


def not_dense(tensor: torch.Tensor) -> str:
    """Describe a sparse or nested tensor, and the remedy, for messages; empty for a dense one."""
    if tensor.is_nested:
        return "a nested tensor, and only dense ones can be cut; pass it padded, as .to_padded_tensor(0.0) makes it"
    if tensor.layout != torch.strided:
        name = str(tensor.layout).removeprefix("torch.")
        return f"a tensor of layout {name}, and only dense ones can be cut; pass it dense, as .to_dense() makes it"
    return ""


def check_not_packed(call: Mapping[str, object]) -> None:
    """Refuse packed sequences among the inputs, by what these are called.

    Raises:
        CaptureError: with the first one's place, and what to do instead.
    """
    for what, tree in call.items():
        leaves, _ = pytree.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, PackedSequence))
        for path, leaf in leaves:
            if isinstance(leaf, PackedSequence):
                raise CaptureError(
                    f"input {what}{pytree.keystr(path)} is a PackedSequence, whose number of rows depends on the "
                    "lengths, so it is no batch that can be cut\n  pass the padded batch and its lengths, and have "
                    "forward() pack them: pack_padded_sequence(x, lengths.cpu(), batch_first=True, "
                    "enforce_sorted=False) is captured, and computes the same"
                )


def check_dense(
    model: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object], targets: Sequence[object]
) -> None:
    """Refuse a model with sparse or nested tensors, among its inputs or its own.

    Raises:
        CaptureError: with the first one's place or name, what it is, and what to do instead.
    """
    named: list[tuple[str, Any]] = [(f"parameter '{name}'", tensor) for name, tensor in model.named_parameters()]
    named += [(f"buffer '{name}'", tensor) for name, tensor in model.named_buffers()]
    call = {"args": tuple(args), "kwargs": dict(kwargs), "targets": tuple(targets)}
    check_not_packed(call)
    for what, tree in call.items():
        leaves, _ = pytree.tree_flatten_with_path(tree)
        named += [(f"input {what}{pytree.keystr(path)}", leaf) for path, leaf in leaves]
    for place, tensor in named:
        if isinstance(tensor, torch.Tensor) and (said := not_dense(tensor)):
            raise CaptureError(f"{place} is {said}")
