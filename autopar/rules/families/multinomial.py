"""``aten.multinomial`` with rows cut, by the random numbers of :mod:`.sharded_random`.

The numbers that decide over a row are hashes of where the row stands in the whole tensor, so rows may be cut: a rank
draws for its rows what one device would. The weights of one row stay together, since their sum and order decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import spmd_types as spmd
import torch

from autopar.rules.families.sharded_random import Shards, Site, one_of_two, uniform
from autopar.rules.lowering_helpers.local_shard import Cuts
from autopar.rules.notation import Lowering, Rule, line
from autopar.rules.operator_call import Call
from autopar.rules.registry import T, prove_with, rule, sample
from autopar.torch_private import assert_async

_BITS_A_DRAW = 24
"""How fine :func:`uniform` is. Words of a vocabulary may be rarer than 2**-24, so two draws make one number here."""
_SITES_OF_OTHERS = 1 << 41
"""Above the sites of all other draws, so that the two that are needed here are no other operator's."""


def multinomial(
    weights: torch.Tensor, n_drawn: int, replacement: bool = False, *, cut: Cuts, seed: Any, site: Site,
    shape: Sequence[int],
    shards: Shards, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Draw ``n_drawn`` categories for each row of ``weights`` [categories] or [rows categories].

    With replacement each draw is looked up in the running sums of the weights. Without, each category waits for an
    exponential time of the rate of its weight, and those that come first are drawn, as torch's kernel does it.
    """
    weights = weights.detach().double()
    refuse_invalid(weights)
    if replacement:
        sums = weights.cumsum(-1)
        drawn = _fine_uniform(seed, site, shape, shards, weights.device) * sums[..., -1:]
        # the first category whose running sum is above the number: one of weight 0 adds nothing and is never it
        return torch.searchsorted(sums, drawn, right=True).clamp(max=weights.shape[-1] - 1)
    times_shape, times_shards = (*shape[:-1], weights.shape[-1]), (*shards[:-1], ())
    unit = _fine_uniform(seed, site, times_shape, times_shards, weights.device) + 2.0 ** (-2 * _BITS_A_DRAW - 1)
    return (weights / -unit.log()).topk(n_drawn, dim=-1).indices


def _fine_uniform(
    seed: torch.Tensor, site: Site, shape: Sequence[int], shards: Shards, device: torch.device
) -> torch.Tensor:
    """Draw uniform numbers in [0, 1) in steps of 2**-48, float64."""
    coarse, fine = (
        uniform(seed, one_of_two(site, i, _SITES_OF_OTHERS), shape, shards, device, torch.float64)
        for i in (0, 1)
    )
    return coarse + fine * 2.0**-_BITS_A_DRAW


def refuse_invalid(weights: torch.Tensor) -> None:
    """Raise torch's errors for invalid weights; on accelerators without waiting for the values."""
    if spmd.is_type_checking():
        return
    assert_async(
        ((weights >= 0) & weights.isfinite()).all() & (weights.sum(-1) > 0).all(),
        "torch.multinomial: a weight is inf, nan or below 0, or all weights of a row are 0; give each row weights of "
        "which none is negative and one is above 0",
    )


@rule("aten.multinomial.default")
def multinomial_rule(call: Call) -> Rule:
    rows = "b " if len(call.ins[0].shape) == 2 else ""  # torch takes one row, or a matrix of rows
    whole = "categories drawn"
    text = f"{rows}categories -> {rows}drawn"
    return line(text, call, random=True, lowerings=(Lowering(multinomial),), whole=whole)


_WEIGHTS = T((6, 5), low=0.1, high=0.9, grad=False)
prove_with(
    "aten.multinomial.default",
    sample(_WEIGHTS, 3, True), sample(_WEIGHTS, 7, True), sample(_WEIGHTS, 3), sample(_WEIGHTS, 1),
    sample(T((8,), low=0.1, high=0.9, grad=False), 4, True), sample(T((8,), low=0.1, high=0.9, grad=False), 8),
)  # fmt: skip
