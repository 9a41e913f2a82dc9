"""Embedding: rows looked up by id; the vocabulary may be cut."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.lowering_helpers.collective_helpers import bilinear, pending
from autopar.rules.lowering_helpers.local_shard import Cuts, Sizes, axes_of, first, with_one
from autopar.rules.notation import Lowering, Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, rule, sample


def vocabulary_embedding(
    weight: torch.Tensor, ids: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False, *,
    cut: Cuts,
    sizes: Sizes = None,
) -> torch.Tensor:
    """Look up the ids that this rank's rows of the table hold, with zeros for the others; the sum is pending."""
    # weight [v d], ids [...] -> [... d]; local v
    axes = axes_of(cut, "v")
    local = ids - first(cut, sizes, "v", weight, 0)
    inside = (local >= 0) & (local < weight.shape[0])
    weight = with_one(weight, 0, 0.0, cut, sizes, "v")
    y = bilinear(lambda w, i: torch.embedding(w, i), weight, local * inside) * inside.unsqueeze(-1)
    if padding_idx >= 0:  # the row of the padding is read but gets no gradient
        padding = (ids == padding_idx).unsqueeze(-1)
        y = y * ~padding + y.detach() * padding
    return pending(y, axes)


@rule(
    "aten.embedding.default",
    samples=[
        sample(T((8, 4)), T((4, 2), "int64", high=8)),
        sample(T((8, 4)), T((8,), "int64", high=8), 1),
        sample(T((8, 4)), T((2, 4), "int64", high=8), -1, True),
    ],
)
def embedding(call: Call) -> Rule:
    by_count = bool(call.arg(3, "scale_grad_by_freq", False))  # gradients divided by counts over all ids
    sparse = bool(call.arg(4, "sparse", False))
    text = "v d, ... -> ... d"
    dims = line(text, call).inputs[1]
    return line(
        text,
        call,
        whole=" ".join(["v", *(f for dim in dims for f in dim)]) if by_count else "v" if sparse else "",
        linear=[{0}],
        lowerings=(Lowering(vocabulary_embedding, frozenset("v"), uneven=True),),
        kind="copy",
        curve="lookup",
        saves=(1,),
    )
