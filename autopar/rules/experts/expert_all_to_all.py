"""Rows that travel to the rank that has their expert, and back: all-to-all with as many rows for each rank as want it.

Nothing is dropped, and without a bound nothing is padded, so how many rows a rank gets is known only when the program
runs: ranks tell each other how many rows they send for each expert, and the host reads these numbers once for each
exchange, since torch makes tensors of sizes that the host knows. With a bound the device alone knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import spmd_types as spmd
import torch
from torch.distributed import ProcessGroup

from autopar.errors import RunError
from autopar.rules.lowering_helpers.joined_axes import group_along
from autopar.rules.lowering_helpers.local_shard import n_shards
from autopar.rules.lowering_helpers.lowering_trial import COUNTED, Begun, in_trial
from autopar.torch_private import FakeTensor, LocalIntNode, LocalTensor, assert_async, functional_collectives
from autopar.words.exchanges import RowExchange
from autopar.words.trees import Context
from cost_models.joined_axes import JOINED


class Trip:
    """An exchange of rows between the ranks of one axis, or of several neighbouring ones as if they were one.

    Rows go in chunks, one for each of several equal parts of a rank's experts, so that the products of one chunk are
    computed while others are on their way. An expert has all of its rows in one chunk, in the same order as without.

    With a bound as many rows go to each rank always, so that the host need not know how many there are: those that are
    missing are zeros without an expert. More than the bound are an error (:meth:`_check`).

    Args:
        expert: int [rows], to which expert each row goes; rows below 0, or of ``n_experts`` and above, stay where they
            are, and what comes back for them is zero.
        n_experts: how many experts the ranks have together: each has as many, in order, but for the last ones, which
            have fewer or none where the ranks do not divide them.
        exchange: its axes are of the ambient mesh, the last one fastest; its chunks divide the experts of each rank.
        busiest: for tensors without values: the number among the ranks of the one that gets most rows, and the share
            of rows that each gets; None if all get as many.
    """

    def __init__(
        self, expert: torch.Tensor, n_experts: int, exchange: RowExchange,
        busiest: tuple[int, Sequence[float]] | None = None,
    ) -> None:  # fmt: skip
        self.ranks, self.exchange = n_shards(exchange.axes), exchange
        self.n_rows, self.axis = expert.shape[0], JOINED.join(exchange.axes)
        self.group = None if in_trial() else group_along(exchange.axes)  # the backward knows no mesh
        self.of_each = -(-n_experts // self.ranks)
        """The experts of a rank that has most experts."""
        self.of_chunk = self.of_each // exchange.chunks
        in_order, order = torch.sort(self._key(expert, n_experts, self.ranks), stable=True)
        numbers = torch.arange(n_experts + 1, device=expert.device)
        begins = torch.searchsorted(in_order, numbers)
        leaving = begins[1:] - begins[:-1]  # rows for each expert, none for those that the last ranks lack
        if self.of_each * self.ranks > n_experts:
            leaving = torch.nn.functional.pad(leaving, (0, self.of_each * self.ranks - n_experts))
        leaving = leaving.view(exchange.chunks, self.ranks, self.of_chunk)
        arriving = exchanged(leaving.transpose(0, 1).flatten(), None, None, self.group)
        arriving = arriving.view(self.ranks, exchange.chunks, self.of_chunk).transpose(0, 1)
        mine = numbers[: self.of_chunk].repeat(self.ranks)
        if exchange.bound:
            each = exchange.rows_to_each(self.n_rows, self.ranks)
            self.order = self._bounded(order, leaving, each)
            ways: Any = [([each] * self.ranks,) * 2] * exchange.chunks
            experts = [_experts_of_bounded(of_chunk, each) for of_chunk in arriving]
        else:
            by_rank = torch.stack([x.sum(2) for x in (leaving, arriving)])
            ways = list(zip(*_on_host(by_rank, self.n_rows, busiest), strict=True))
            experts = [
                _arrived_experts(mine, of_chunk.flatten(), _total(receives))
                for of_chunk, (_, receives) in zip(arriving, ways, strict=True)
            ]
            self.order = order.narrow(0, 0, _total([_total(sends) for sends, _ in ways]))
        """int [sent rows]: which rows are sent, chunk by chunk; the number of rows stands for one that is missing."""
        self.chunks = [
            Chunk(self, number, sends, receives, of_chunk)
            for number, ((sends, receives), of_chunk) in enumerate(zip(ways, experts, strict=True))
        ]

    def _bounded(self, order: torch.Tensor, leaving: torch.Tensor, each: int) -> torch.Tensor:
        """Return which rows are sent, as many of each chunk to each rank: int [chunks ranks each] in one dim."""
        to_each = leaving.sum(2).flatten()
        self._check(to_each, each)
        place = torch.arange(each, device=order.device)
        from_where = (to_each.cumsum(0) - to_each).unsqueeze(1) + place
        with_one = torch.nn.functional.pad(order, (0, 1), value=self.n_rows)
        there = with_one.index_select(0, from_where.flatten().clamp(max=self.n_rows))
        return torch.where((place < to_each.unsqueeze(1)).flatten(), there, self.n_rows)

    def _check(self, to_each: torch.Tensor, each: int) -> None:
        """Refuse to drop rows: on CPUs at once with the numbers; on accelerators by an assertion of the device.

        Raises:
            RunError: more rows go to a rank than the bound.
        """
        if in_trial() or isinstance(to_each, FakeTensor):
            return
        what = (
            f"the bound of {each} of this rank's {self.n_rows} rows to each rank of axis '{self.axis}' is exceeded, "
            f"and no row is dropped: pin the experts to a larger bound than @{self.exchange.bound:g}, to @max (all "
            "rows fit), or to 'travel' without one, for which the host reads how many rows there are"
        )
        if to_each.device.type == "cpu" and not isinstance(to_each, LocalTensor):
            most = int(to_each.max())
            if most > each:
                raise RunError(f"{most} rows go to one rank: {what}")
        else:
            assert_async((to_each <= each).all(), what)

    def _key(self, expert: torch.Tensor, n_experts: int, ranks: int) -> torch.Tensor:
        """Return the number by which rows are sorted: chunk by chunk, in each rank by rank, expert by expert."""
        key = torch.where((expert >= 0) & (expert < n_experts), expert, n_experts)
        if self.of_chunk == self.of_each:
            return key
        rank, own = key // self.of_each, key % self.of_each
        in_chunks = (own // self.of_chunk * ranks + rank) * self.of_chunk + own % self.of_chunk
        return torch.where(key < n_experts, in_chunks, n_experts)

    def there(self, rows: Mapping[int, torch.Tensor]) -> list[dict[int, Passage]]:
        """Send this rank's rows [rows ...] to the ranks that need them, each chunk of all tensors before the next one.

        [received rows ...] arrive here.
        """
        taken = {k: _taken(x, self) for k, x in rows.items()}
        return [{k: Passage(chunk, x[chunk.number], home=False) for k, x in taken.items()} for chunk in self.chunks]

    def placed(self, came: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put the rows that came home, of every chunk [sent rows ...], in their original order: [rows ...]."""
        return _Placed.apply(self.order, self, *came)  # type: ignore[no-any-return]


class Chunk:
    """What goes at once: the rows of one part of every rank's experts.

    Args:
        sends, receives: how many rows go to each rank, and come from it.
        expert: int [received rows]: which of this chunk's experts on this rank each row that arrives goes to.
    """

    def __init__(
        self, trip: Trip, number: int, sends: Sequence[Any], receives: Sequence[Any], expert: torch.Tensor
    ) -> None:
        self.trip, self.number, self.expert = trip, number, expert
        self.sends, self.receives, self.n_sent = sends, receives, _total(sends)

    def back(self, rows: torch.Tensor) -> Passage:
        """Send the results of received rows, [received rows ...], back to their ranks: [sent rows ...]."""
        return Passage(self, rows, home=True)


class Passage:
    """Rows of a chunk in transit between ranks.

    What is computed before :meth:`arrived` is called overlaps the collective. The backward mirrors this: gradients
    are sent where the forward waited, and waited for where it sent.

    Args:
        chunk: of which it has the rows of one tensor.
        rows: [sent rows ...], or where they go home [received rows ...].
        home: whether they go back.

    Attributes:
        waits_for: gives what arrives, of the forward or the backward that is under way; None if none is.
    """

    def __init__(self, chunk: Chunk, rows: torch.Tensor, home: bool) -> None:
        self.chunk, self.home = chunk, home
        self.waits_for: Callable[[], torch.Tensor] | None = None
        self._set_out: torch.Tensor | None = _SetOut.apply(rows, self)
        """[0]: its gradient stands for that of what is on its way."""

    def arrived(self) -> torch.Tensor:
        """Return the rows that arrived: [received rows ...], or on the way home [sent rows ...]."""
        on_its_way, self._set_out = self._set_out, None  # which has this in its autograd graph
        return _Arrived.apply(on_its_way, self)  # type: ignore[no-any-return]

    def send(self, rows: torch.Tensor, home: bool, backward: bool) -> None:
        """Begin the collective."""
        chunk = self.chunk
        ways = (chunk.receives, chunk.sends) if home else (chunk.sends, chunk.receives)
        self.waits_for = set_out(rows.contiguous(), *ways, chunk.trip.group)
        counted = COUNTED.get()
        if counted is not None:
            most = max(rows.shape[0], _total(ways[1]))
            row_bytes = rows.numel() // max(1, rows.shape[0]) * rows.element_size()
            trip, n_bytes = chunk.trip, most * row_bytes
            counted.begun.append(Begun(self, trip.axis, n_bytes, backward, trip, len(trip.chunks), self.home))
            counted.under_way.add(self)

    def wait(self) -> torch.Tensor:
        """Wait for the rows that arrive."""
        assert self.waits_for is not None
        came, self.waits_for = self.waits_for(), None
        counted = COUNTED.get()
        if counted is not None:
            counted.under_way.discard(self)
        return came


class _SetOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, rows: torch.Tensor, passage: Passage) -> torch.Tensor:
        ctx.passage = passage
        passage.send(rows, passage.home, backward=False)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> Any:
        return ctx.passage.wait(), None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, on_its_way: torch.Tensor, passage: Passage) -> torch.Tensor:
        ctx.passage = passage
        return passage.wait()

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> Any:
        ctx.passage.send(grads[0], not ctx.passage.home, backward=True)
        return grads[0].new_empty(0), None


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, rows: torch.Tensor, order: torch.Tensor, trip: Trip) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(order)
        ctx.trip = trip
        return tuple(_pieces(_in_order(rows, order, trip), trip))

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> Any:
        [order] = ctx.saved_tensors
        return _in_place(grads, order, ctx.trip), None, None


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, order: torch.Tensor, trip: Trip, *came: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.trip = trip
        return _in_place(came, order, trip)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> Any:
        [order] = ctx.saved_tensors
        return None, None, *_pieces(_in_order(grads[0], order, ctx.trip), ctx.trip)


def _taken(rows: torch.Tensor, trip: Trip) -> tuple[torch.Tensor, ...]:
    return _Taken.apply(rows, trip.order, trip)  # type: ignore[no-any-return]


def _pieces(rows: torch.Tensor, trip: Trip) -> list[torch.Tensor]:
    """Cut the rows that leave, [sent rows ...], into chunks."""
    pieces, begin = [], 0
    for chunk in trip.chunks:
        pieces.append(rows if len(trip.chunks) == 1 else rows.narrow(0, begin, chunk.n_sent))
        begin = begin + chunk.n_sent
    return pieces


def _in_order(rows: torch.Tensor, order: torch.Tensor, trip: Trip) -> torch.Tensor:
    """Take rows in an order: [rows ...] to [sent rows ...]; missing ones are zero."""
    if trip.exchange.bound:
        rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    return rows.index_select(0, order)


def _in_place(pieces: Sequence[torch.Tensor], order: torch.Tensor, trip: Trip) -> torch.Tensor:
    """Invert taking rows in an order, and cutting them; rows that did not leave are zero."""
    first, n = pieces[0], order.shape[0]
    more = 1 if trip.exchange.bound else 0  # where what came for missing rows goes
    shape = (trip.n_rows + more, *first.shape[1:])
    all_leave = isinstance(n, int) and n == trip.n_rows and not more
    whole = first.new_empty(shape) if all_leave else first.new_zeros(shape)
    for to, piece in zip(_pieces(order, trip), pieces, strict=True):
        whole.index_copy_(0, to, piece)
    return whole[: trip.n_rows].clone() if more else whole


def _total(numbers: Sequence[Any]) -> Any:
    """Return a sum of numbers, which may be one for each simulated rank."""
    return sum(numbers[1:], numbers[0])


def _arrived_experts(mine: torch.Tensor, arriving: torch.Tensor, n_received: Any) -> torch.Tensor:
    """Return the expert of each row that arrives.

    Args:
        mine: int [n], experts in the order in which rows arrive.
        arriving: int [n], how many rows each of these stands for.
        n_received: their sum.
    """
    if in_trial():  # nothing has arrived that says how often each expert stands there: all alike
        return mine.index_select(0, torch.arange(n_received, device=mine.device) % mine.shape[0])
    size = {"output_size": n_received} if isinstance(n_received, int) else {}
    return torch.repeat_interleave(mine, arriving, **size)


def _experts_of_bounded(arriving: torch.Tensor, each: int) -> torch.Tensor:
    """Return the expert of each of as many rows from each rank; those that are missing have the number of experts.

    Args:
        arriving: int [ranks experts], how many rows come from each rank for each expert, in the order of experts.
        each: the rows from each rank.
    """
    ends = arriving.cumsum(1)
    places = torch.arange(each, device=arriving.device).expand(arriving.shape[0], each)
    return torch.searchsorted(ends, places.contiguous(), right=True).flatten()


def exchanged(rows: torch.Tensor, sends: Any, receives: Any, group: ProcessGroup | None) -> torch.Tensor:
    """RowExchange rows: ``sends[k]`` of them go to rank k, which sends ``receives[k]`` back; None: equal parts."""
    return set_out(rows, sends, receives, group)()


def set_out(rows: torch.Tensor, sends: Any, receives: Any, group: ProcessGroup | None) -> Callable[[], torch.Tensor]:
    """Start the exchange of :func:`exchanged`; the function that is returned waits for what arrives."""
    if group is None:
        nothing = rows.new_empty(len(rows) if receives is None else _total(receives), *rows.shape[1:])
        return lambda: nothing
    arriving = functional_collectives.all_to_all_single(rows, receives, sends, group)
    if isinstance(arriving, functional_collectives.AsyncCollectiveTensor):
        return arriving.wait  # type: ignore[no-any-return]
    return lambda: arriving


def _on_host(
    by_rank: torch.Tensor, n_rows: Any, busiest: tuple[int, Sequence[float]] | None
) -> Sequence[Sequence[Sequence[Any]]]:
    """Return the numbers of a tensor int [2 chunks ranks]: how many rows go to each rank, and come from each.

    Tensors without values have rows that spread over all ranks and chunks alike, or over ranks by the load. In a
    process that simulates many ranks every number is one for each of them.
    """
    _, chunks, ranks = by_rank.shape
    if in_trial() or isinstance(by_rank, FakeTensor):
        if busiest is not None and isinstance(n_rows, int):
            here, shares = busiest
            ends = [round(n_rows * share) for share in accumulate(shares)]
            sends = [_evenly(end - begin, chunks) for begin, end in pairwise([0, *ends])]
            of_chunks = list(zip(*sends, strict=True))
            return of_chunks, [[of_chunk[here]] * ranks for of_chunk in of_chunks]
        even = [_evenly(n, ranks) for n in _evenly(n_rows, chunks)]
        return even, even
    if isinstance(by_rank, LocalTensor):
        of_ranks = {rank: x.tolist() for rank, x in by_rank._local_tensors.items()}
        return [
            [
                [torch.SymInt(LocalIntNode({r: of[way][c][k] for r, of in of_ranks.items()})) for k in range(ranks)]
                for c in range(chunks)
            ]
            for way in range(2)
        ]
    return by_rank.tolist()  # type: ignore[no-any-return]


def _evenly(n: Any, parts: int) -> list[Any]:
    """Deal n rows to parts that have as many, or one more."""
    return [n // parts + (k < n % parts) for k in range(parts)]


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
