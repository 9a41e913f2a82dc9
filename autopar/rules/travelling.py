"""Rows that travel to the rank that has their expert, and back: all-to-all with as many rows for each rank as want it.

Nothing is dropped and nothing is padded, so how many rows a rank gets is known only when the program runs: ranks tell
each other how many rows they send for each expert, and the host reads these numbers once for each call, since torch
makes tensors of sizes that the host knows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

import spmd_types as spmd
import torch

from autopar.rules.distributed import n_pieces
from autopar.rules.lowering_trial import in_trial
from autopar.torch_private import (
    FakeTensor,
    LocalIntNode,
    LocalTensor,
    functional_collectives,
    group_of_axis,
)


class Trip:
    """One axis that rows travel along.

    Args:
        expert: int [rows], to which expert each row goes; rows below 0, or of ``n_experts`` and above, stay where they
            are, and what comes back for them is zero.
        n_experts: how many experts the ranks of the axis have together; each has as many, in order.
        axis: of the ambient mesh.
        busiest: for tensors without values: the number on the axis of the rank that gets most rows, and the share of
            rows that each gets; None where all get as many.
    """

    def __init__(
        self, expert: torch.Tensor, n_experts: int, axis: str, busiest: tuple[int, Sequence[float]] | None = None
    ) -> None:
        self.n_rows, ranks = expert.shape[0], n_pieces([axis])
        self.group = None if in_trial() else group_of_axis(axis)  # the backward knows no mesh
        of_each = n_experts // ranks
        key = torch.where((expert >= 0) & (expert < n_experts), expert, n_experts)
        in_order, order = torch.sort(key, stable=True)
        numbers = torch.arange(n_experts + 1, device=expert.device)
        begins = torch.searchsorted(in_order, numbers)
        leaving = begins[1:] - begins[:-1]  # rows for each expert
        arriving = exchanged(leaving, None, None, self.group)  # for each expert here, from one rank after the other
        by_rank = torch.stack([leaving.view(ranks, of_each).sum(1), arriving.view(ranks, of_each).sum(1)])
        self.sends, self.receives = _on_host(by_rank, self.n_rows, busiest)
        n_sent, self.n_received = sum(self.sends[1:], self.sends[0]), sum(self.receives[1:], self.receives[0])
        self.order = order.narrow(0, 0, n_sent)
        mine = numbers[:of_each].repeat(ranks)
        known = {"output_size": self.n_received} if isinstance(self.n_received, int) else {}
        if in_trial():  # nothing has arrived that says how often each expert stands there: all alike
            self.expert = mine.index_select(0, torch.arange(self.n_received, device=expert.device) % mine.shape[0])
        else:
            self.expert = torch.repeat_interleave(mine, arriving, **known)
        """int [received rows]: which of this rank's experts each row that arrives goes to."""

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows [rows ...] to the rows that arrive here [received rows ...]."""
        return _There.apply(rows, self.order, self)  # type: ignore[no-any-return]

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """What has become of the rows that arrived, [received rows ...], to where they came from: [rows ...]."""
        return _Back.apply(rows, self.order, self)  # type: ignore[no-any-return]

    def send(self, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return exchanged(rows.index_select(0, order), self.sends, self.receives, self.group)

    def bring(self, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        came = exchanged(rows.contiguous(), self.receives, self.sends, self.group)
        shape, n = (self.n_rows, *came.shape[1:]), order.shape[0]
        all_travelled = isinstance(n, int) and n == self.n_rows
        return (came.new_empty(shape) if all_travelled else came.new_zeros(shape)).index_copy_(0, order, came)


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, trip: Trip) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.trip = trip
        return trip.send(rows, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.trip.bring(grads[0], *ctx.saved_tensors), None, None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, trip: Trip) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.trip = trip
        return trip.bring(rows, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.trip.send(grads[0], *ctx.saved_tensors), None, None


def exchanged(rows: torch.Tensor, sends: Any, receives: Any, group: Any) -> torch.Tensor:
    """``sends[k]`` of the rows go to rank k, which has ``receives[k]`` for this one; None: equal parts."""
    if group is None:
        return rows.new_empty(len(rows) if receives is None else sum(receives[1:], receives[0]), *rows.shape[1:])
    arrived = functional_collectives.all_to_all_single(rows, receives, sends, group)
    return arrived.wait() if isinstance(arrived, functional_collectives.AsyncCollectiveTensor) else arrived


def _on_host(
    by_rank: torch.Tensor, n_rows: Any, busiest: tuple[int, Sequence[float]] | None
) -> Sequence[Sequence[Any]]:
    """The numbers of a tensor int [2 ranks]: how many rows go to each rank, and come from each.

    Tensors without values have rows that spread over all ranks alike, or as the load says. In a process that plays many
    ranks every number is one for each of them.
    """
    if in_trial() or isinstance(by_rank, FakeTensor):
        ranks = by_rank.shape[1]
        if busiest is not None and isinstance(n_rows, int):
            here, shares = busiest
            ends = [round(n_rows * share) for share in accumulate(shares)]
            sends = [end - begin for begin, end in pairwise([0, *ends])]
            return sends, [sends[here]] * ranks
        even = [n_rows // ranks + (k < n_rows % ranks) for k in range(ranks)]
        return even, even
    if isinstance(by_rank, LocalTensor):
        of_ranks = {rank: x.tolist() for rank, x in by_rank._local_tensors.items()}
        return [
            [torch.SymInt(LocalIntNode({r: of[way][k] for r, of in of_ranks.items()})) for k in range(by_rank.shape[1])]
            for way in range(2)
        ]
    return by_rank.tolist()  # type: ignore[no-any-return]


def untyped(like: Sequence[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """``result`` with the type that a product of all these has, for the type checker that did not see it made.

    What has no gradient counts as invariant where what has one is: there is no gradient of it to be summed.
    """
    invariant = {axis for x in like if x.requires_grad for axis, t in spmd.get_local_type(x).items() if t is spmd.I}
    probes = [_probe(x, invariant) for x in like]
    probe = probes[0]
    for x in probes[1:]:
        probe = torch.mul(probe, x)
    spmd.assert_type(result, dict(spmd.get_local_type(probe)))
    return result


def _probe(x: torch.Tensor, invariant: Collection[Any]) -> torch.Tensor:
    """One element of a tensor, of the same type."""
    one = x.detach().flatten().narrow(0, 0, 1)
    for axis, kind in dict(spmd.get_local_type(x)).items():
        if not x.requires_grad and kind is spmd.R and axis in invariant:
            one = spmd.convert(one, axis, src=spmd.R, dst=spmd.I, expert_mode=True)
    return one


__all__ = ["Trip", "exchanged", "untyped"]
