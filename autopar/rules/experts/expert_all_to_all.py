"""Rows that travel to the rank that has their expert, and back: all-to-all with as many rows for each rank as want it.

Nothing is dropped and nothing is padded, so how many rows a rank gets is known only when the program runs: ranks tell
each other how many rows they send for each expert, and the host reads these numbers once for each call, since torch
makes tensors of sizes that the host knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any

import spmd_types as spmd
import torch
from torch.distributed import ProcessGroup

from autopar.rules.lowering_helpers.local_shard import n_shards
from autopar.rules.lowering_helpers.lowering_trial import COUNTED, Begun, in_trial
from autopar.torch_private import FakeTensor, LocalIntNode, LocalTensor, functional_collectives, group_of_axis
from autopar.words.trees import Context


class Trip:
    """One axis that rows travel along.

    Args:
        expert: int [rows], to which expert each row goes; rows below 0, or of ``n_experts`` and above, stay where they
            are, and what comes back for them is zero.
        n_experts: how many experts the ranks of the axis have together: each has as many, in order, but for the last
            ones, which have fewer or none where the ranks do not divide them.
        axis: the axis of the ambient mesh.
        busiest: for tensors without values: the number on the axis of the rank that gets most rows, and the share of
            rows that each gets; None if all get as many.
    """

    def __init__(
        self, expert: torch.Tensor, n_experts: int, axis: str, busiest: tuple[int, Sequence[float]] | None = None
    ) -> None:
        self.n_rows, self.axis, ranks = expert.shape[0], axis, n_shards([axis])
        self.group = None if in_trial() else group_of_axis(axis)  # the backward knows no mesh
        self.of_each = -(-n_experts // ranks)
        """The experts of a rank that has most experts."""
        key = torch.where((expert >= 0) & (expert < n_experts), expert, n_experts)
        in_order, order = torch.sort(key, stable=True)
        numbers = torch.arange(n_experts + 1, device=expert.device)
        begins = torch.searchsorted(in_order, numbers)
        leaving = begins[1:] - begins[:-1]  # rows for each expert, none for those that the last ranks lack
        if self.of_each * ranks > n_experts:
            leaving = torch.nn.functional.pad(leaving, (0, self.of_each * ranks - n_experts))
        arriving = exchanged(leaving, None, None, self.group)  # for each expert here, from one rank after the other
        by_rank = torch.stack([each.view(ranks, self.of_each).sum(1) for each in (leaving, arriving)])
        self.sends, self.receives = _on_host(by_rank, self.n_rows, busiest)
        n_sent, self.n_received = sum(self.sends[1:], self.sends[0]), sum(self.receives[1:], self.receives[0])
        self.order = order.narrow(0, 0, n_sent)
        mine = numbers[: self.of_each].repeat(ranks)
        size = {"output_size": self.n_received} if isinstance(self.n_received, int) else {}
        if in_trial():  # nothing has arrived that says how often each expert stands there: all alike
            self.expert = mine.index_select(0, torch.arange(self.n_received, device=expert.device) % mine.shape[0])
        else:
            self.expert = torch.repeat_interleave(mine, arriving, **size)
        """int [received rows]: which of this rank's experts each row that arrives goes to."""

    def there(self, rows: torch.Tensor) -> Passage:
        """Send this rank's rows [rows ...] to the ranks that need them; [received rows ...] arrive here."""
        return Passage(self, rows, home=False)

    def back(self, rows: torch.Tensor) -> Passage:
        """Send the results of received rows, [received rows ...], back to their ranks: [rows ...]."""
        return Passage(self, rows, home=True)


class Passage:
    """Rows in transit between ranks: all that a rank has of a tensor.

    What is computed before :meth:`arrived` is called overlaps the collective. The backward mirrors this: gradients
    are sent where the forward waited, and waited for where it sent.

    Args:
        trip: along its axis.
        rows: this rank's, [rows ...], or where they go home those that had arrived, [received rows ...].
        home: whether they go back.

    Attributes:
        waits_for: gives what arrives, of the forward or the backward that is under way; None if none is.
    """

    def __init__(self, trip: Trip, rows: torch.Tensor, home: bool) -> None:
        self.trip, self.home, self.key = trip, home, object()
        self.waits_for: Callable[[], torch.Tensor] | None = None
        self._set_out: torch.Tensor | None = _SetOut.apply(rows, trip.order, self)
        """[0]: its gradient stands for that of what is on its way."""

    def arrived(self) -> torch.Tensor:
        """Return the rows that arrived: [received rows ...], or on the way home [rows ...]."""
        on_its_way, self._set_out = self._set_out, None  # which has this in its autograd graph
        return _Arrived.apply(on_its_way, self.trip.order, self)  # type: ignore[no-any-return]

    def send(self, rows: torch.Tensor, order: torch.Tensor, home: bool, backward: bool) -> None:
        """Begin the collective."""
        trip = self.trip
        ways = (trip.receives, trip.sends) if home else (trip.sends, trip.receives)
        rows = rows.contiguous() if home else rows.index_select(0, order)
        self.waits_for = set_out(rows, *ways, trip.group)
        counted = COUNTED.get()
        if counted is not None:
            most = max(rows.shape[0], sum(ways[1][1:], ways[1][0]))
            row_bytes = rows.numel() // max(1, rows.shape[0]) * rows.element_size()
            counted.begun.append(Begun(self.key, trip.axis, most * row_bytes, backward))
            counted.under_way.add(self.key)

    def wait(self, order: torch.Tensor, home: bool) -> torch.Tensor:
        """Wait for the rows that arrive; on the way home, put them in their original order."""
        assert self.waits_for is not None
        came, self.waits_for = self.waits_for(), None
        counted = COUNTED.get()
        if counted is not None:
            counted.under_way.discard(self.key)
        if not home:
            return came
        shape, n = (self.trip.n_rows, *came.shape[1:]), order.shape[0]
        all_travelled = isinstance(n, int) and n == self.trip.n_rows
        return (came.new_empty(shape) if all_travelled else came.new_zeros(shape)).index_copy_(0, order, came)


class _SetOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, rows: torch.Tensor, order: torch.Tensor, passage: Passage) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.passage = passage
        passage.send(rows, order, passage.home, backward=False)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> Any:
        return ctx.passage.wait(*ctx.saved_tensors, not ctx.passage.home), None, None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, on_its_way: torch.Tensor, order: torch.Tensor, passage: Passage) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.passage = passage
        return passage.wait(order, passage.home)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> Any:
        ctx.passage.send(grads[0], *ctx.saved_tensors, not ctx.passage.home, backward=True)
        return grads[0].new_empty(0), None, None


def exchanged(rows: torch.Tensor, sends: Any, receives: Any, group: ProcessGroup | None) -> torch.Tensor:
    """Exchange rows: ``sends[k]`` of them go to rank k, which sends ``receives[k]`` back; None: equal parts."""
    return set_out(rows, sends, receives, group)()


def set_out(rows: torch.Tensor, sends: Any, receives: Any, group: ProcessGroup | None) -> Callable[[], torch.Tensor]:
    """Start the exchange of :func:`exchanged`; the function that is returned waits for what arrives."""
    if group is None:
        nothing = rows.new_empty(len(rows) if receives is None else sum(receives[1:], receives[0]), *rows.shape[1:])
        return lambda: nothing
    arriving = functional_collectives.all_to_all_single(rows, receives, sends, group)
    if isinstance(arriving, functional_collectives.AsyncCollectiveTensor):
        return arriving.wait  # type: ignore[no-any-return]
    return lambda: arriving


def _on_host(
    by_rank: torch.Tensor, n_rows: Any, busiest: tuple[int, Sequence[float]] | None
) -> Sequence[Sequence[Any]]:
    """Return the numbers of a tensor int [2 ranks]: how many rows go to each rank, and come from each.

    Tensors without values have rows that spread over all ranks alike, or by the load. In a process that simulates
    many ranks every number is one for each of them.
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
    """Give ``result``, which the type checker did not see computed, the type of a product of all tensors in `like`.

    A factor without a gradient counts as invariant if another factor has one, since it has no gradient to be summed.
    """
    invariant = {axis for x in like if x.requires_grad for axis, t in spmd.get_local_type(x).items() if t is spmd.I}
    probes = [_probe(x, invariant) for x in like]
    probe = probes[0]
    for x in probes[1:]:
        probe = torch.mul(probe, x)
    spmd.assert_type(result, dict(spmd.get_local_type(probe)))
    return result


def _probe(x: torch.Tensor, invariant: Collection[Any]) -> torch.Tensor:
    """Return one element of a tensor, of the same type."""
    one = x.detach().flatten().narrow(0, 0, 1)
    for axis, kind in dict(spmd.get_local_type(x)).items():
        if not x.requires_grad and kind is spmd.R and axis in invariant:
            one = spmd.convert(one, axis, src=spmd.R, dst=spmd.I, expert_mode=True)
    return one
