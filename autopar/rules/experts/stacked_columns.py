"""Several matrices side by side in one, cut by columns: each rank's piece becomes its piece of each of them.

Gate and up projection of experts are often one matrix ``[k (2 f)]``. Where its columns are cut into contiguous pieces,
as parameters are stored, the first ranks have columns of the gate alone and the last ones of the up projection alone;
what follows wants the same columns of both. So after the product ranks exchange features: of ``n`` ranks, the one with
number q holds the units p q .. p q + p - 1 of ``p n`` (of p parts) and gets q, n + q, 2 n + q, ...
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.experts.expert_all_to_all import exchanged
from autopar.rules.lowering_helpers.local_shard import for_each, n_shards, piece
from autopar.rules.lowering_helpers.lowering_trial import in_trial
from autopar.torch_private import group_of_axis
from autopar.words.trees import Context


class _Route:
    """The destinations of units along an axis.

    Args:
        parts: p.
        device: the device of the tensors.
    """

    def __init__(self, parts: int, axis: str, device: torch.device) -> None:
        n = n_shards([axis])
        self.group = None if in_trial() else group_of_axis(axis)  # the backward knows no mesh

        def count(src: int, dst: int) -> int:
            return sum(unit % n == dst for unit in range(parts * src, parts * (src + 1)))

        self.sends = [for_each(axis, lambda mine, r=peer: count(mine, r)) for peer in range(n)]  # type: ignore[misc]
        self.receives = [for_each(axis, lambda mine, r=peer: count(r, mine)) for peer in range(n)]  # type: ignore
        units = torch.arange(parts, device=device) + parts * piece((axis,), device)
        self.order = torch.sort(units % n, stable=True)[1]
        """int [p]: the units in the order of the ranks that they go to."""


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, units: torch.Tensor, order: torch.Tensor, route: _Route) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.route = route
        return exchanged(units.index_select(0, order), route.sends, route.receives, route.group)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> Any:
        route = ctx.route
        came = exchanged(grads[0].contiguous(), route.receives, route.sends, route.group)
        [order] = ctx.saved_tensors
        return torch.empty_like(came).index_copy_(0, order, came), None, None


def own_parts(x: torch.Tensor, parts: int, dim: int, axis: str) -> list[torch.Tensor]:
    """Return a rank's shard of each of several equal parts of a dim, of which ``x`` has a contiguous shard."""
    units = x.movedim(dim, 0).unflatten(0, (parts, x.shape[dim] // parts))
    route = _Route(parts, axis, x.device)
    arrived = _Exchanged.apply(units, route.order, route)
    return [part.movedim(0, dim) for part in arrived.unbind(0)]  # type: ignore[no-untyped-call]
