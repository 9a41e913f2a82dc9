"""Ranks that have rows of their own, and not equally many: the last batch of an epoch, or one that a filter shortened.

Every rank tells the others before a call how many rows it has, in an exchange of a few numbers between processors. As
long as all have equally many, rows go in as they lie (:mod:`.local_batch`). Else the batch is put together: every rank
gets all rows and calls the program for their number, and what the call gives is cut where each rank's rows are.

A loss inside the model is that of the whole batch, as always. One that a script computes of its own rows counts by
their part of the batch, so that a mean over rows is the mean over all of them; with equally many that is the mean over
the ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from autopar.capture.microbatches import leaves_of_call
from autopar.errors import RunError
from autopar.runtime.parameters.state import as_dtensor, torch_placements
from autopar.runtime.ranks.collective_log import CollectiveLog
from autopar.runtime.ranks.collectives import all_gather_flat
from autopar.runtime.ranks.groups import Groups, Wanted, backends, groups_for
from autopar.torch_private import pytree
from autopar.words.placements import State
from autopar.words.trees import Context

Call = tuple[tuple[Any, ...], dict[str, Any]]
QUIET_SECONDS = 1.0
"""After how long a rank says that it waits for the others' numbers: one that waits for it elsewhere reads it."""


class Exchange:
    """Numbers that ranks tell each other before each call, of one module."""

    def __init__(self, ranks: Sequence[int], groups: Groups) -> None:
        """Initialize the object; all of the ranks call it, in one order.

        Args:
            ranks: in the order of the mesh, which is that of their rows.
            groups: the groups of `ranks`, for the CPU.
        """
        in_order = tuple(sorted(ranks))
        groups.make([Wanted(in_order)])
        self.groups, self.group = groups, groups.of(in_order)
        self.order = [in_order.index(rank) for rank in ranks]
        self.calls = 0
        self._mine = torch.zeros(2, dtype=torch.int64)
        self._all = torch.zeros(2 * len(in_order), dtype=torch.int64)

    @staticmethod
    def of(ranks: Sequence[int]) -> Exchange | None:
        """Return the exchange of some ranks, in the order of their mesh; None if the world has no CPU backend."""
        groups = groups_for(torch.device("cpu"), ranks)
        return Exchange(ranks, groups) if "cpu" in backends() and groups.possible else None

    def __call__(self, rows: int, length: int, logs: Sequence[CollectiveLog]) -> list[tuple[int, int]]:
        """Return the pair of numbers of every rank, in the order of the mesh.

        Args:
            logs: the logs in which a rank that waits for this one elsewhere looks where it is.
        """
        self.calls += 1
        for log in logs:
            log.exchanges = self.calls
        self._mine[0], self._mine[1] = rows, length
        under_way = all_gather_flat(self._all, self._mine, group=self.group, async_op=True)
        if not _came(under_way, QUIET_SECONDS):
            for log in logs:
                log.note_waiting()
            while not _came(under_way, QUIET_SECONDS):  # in parts, between which an interrupt is heard
                pass
        flat = self._all.tolist()
        return [(flat[2 * i], flat[2 * i + 1]) for i in self.order]


def _came(work: dist.Work, seconds: float) -> bool:
    """Wait for a collective for at most ``seconds``, asleep; return whether it is done.

    Polling would take a processor that the other ranks may be waiting for.

    Raises:
        RuntimeError: what went wrong with it.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it came just then, or says what went wrong
    return True


def put_together(
    call: Call, of_all: Sequence[int], counts: Sequence[int], place: int, group: dist.ProcessGroup | None,
    order: Sequence[int],
    exchange: Exchange, without: Collection[str] = (),
) -> Call:  # fmt: skip
    """Return the call with the rows of all ranks, one rank's after the other's: plain tensors, equal on every rank.

    Args:
        of_all: rows of every rank of ``exchange``; tensors with that number of rows on every rank have rows.
        counts: rows of each part of the batch; ``place`` is which of them this rank has.
        group: the group of all ranks, for the tensors' device; ``order`` says which of them has each part.
        without: inputs without rows, by name.

    Raises:
        RunError: the ranks' calls differ in more than their rows; on all of them.
    """
    leaves, spec = pytree.tree_flatten(call)
    outlines = [
        (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, torch.Tensor) else None for leaf in leaves
    ]  # fmt: skip
    told: list[Any] = [None] * len(of_all)
    dist.all_gather_object(told, (str(spec), outlines), group=exchange.group)
    of_ranks = [told[i] for i in exchange.order]
    lines = [f"rank {place_of}: {_text(outline)}" for place_of, (_, outline) in enumerate(of_ranks)]
    if any(structure != of_ranks[0][0] for structure, _ in of_ranks):
        raise RunError(f"ranks are called with other arguments, at the same call: {'; '.join(lines)}")
    has_rows = []
    for number, (name, _) in enumerate(leaves_of_call(call)):
        of_leaf = [outline[number] for _, outline in of_ranks]
        as_long = (each is not None and each[0][:1] == (n,) for each, n in zip(of_leaf, of_all, strict=True))
        cut = name not in without and all(as_long)
        has_rows.append(cut)
        alike = {(each[0][1:], each[1]) for each in of_leaf} if cut else set(of_leaf)
        if len(alike) > 1:
            raise RunError(
                f"ranks have {', '.join(map(str, of_all))} rows of their own, and the tensors differ in more: "
                f"{'; '.join(lines)}. Lengths have to be those of all ranks: pad rows to one length on all of them, or "
                "give parallelize shapes='buckets', buckets=[(rows, length), ...], which pads for all ranks alike"
            )
    whole = [
        _Together.apply(leaf, counts, place, group, order) if cut else leaf
        for leaf, cut in zip(leaves, has_rows, strict=True)
    ]
    positional, by_name = pytree.tree_unflatten(whole, spec)
    return tuple(positional), dict(by_name)


def _text(outline: Sequence[Any]) -> str:
    return ", ".join(f"{dtype.removeprefix('torch.')}{list(shape)}" for shape, dtype in filter(None, outline))


class _Together(torch.autograd.Function):
    """The rows of all ranks, from this rank's; their gradient, which every rank has whole, becomes that of these."""

    @staticmethod
    def forward(
        ctx: Context, mine: torch.Tensor, counts: Sequence[int], place: int, group: dist.ProcessGroup | None,
        order: Sequence[int],
    ) -> torch.Tensor:  # fmt: skip
        """Concatenate the rows of all ranks from this rank's."""
        ctx.start, ctx.rows = sum(counts[:place]), counts[place]
        most, ranks = max(counts), dist.get_world_size(group)
        padded = mine.new_zeros((most, *mine.shape[1:]))
        padded[: mine.shape[0]] = mine
        sent = padded.view(-1).view(torch.uint8)
        arrived = sent.new_empty(ranks * sent.numel())
        all_gather_flat(arrived, sent, group=group)
        by_rank = arrived.view(mine.dtype).view(ranks, *padded.shape)
        return torch.cat([by_rank[i, :n] for i, n in zip(order, counts, strict=True)])

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Return the part of the gradient for this rank's rows."""
        return grad.narrow(0, ctx.start, ctx.rows), None, None, None, None


class OwnOfUneven(torch.autograd.Function):
    """A piece of an output becomes this rank's rows; their gradient becomes that piece's, of the mean over all rows."""

    @staticmethod
    def forward(
        ctx: Context, value: torch.Tensor, state: State, shape: tuple[int, ...], device_mesh: DeviceMesh,
        counts: Sequence[int], place: int,
    ) -> torch.Tensor:  # fmt: skip
        """Return this rank's rows of the whole."""
        ctx.state, ctx.shape, ctx.device_mesh = state, shape, device_mesh
        ctx.start, ctx.rows, ctx.share = sum(counts[:place]), counts[place], counts[place] / max(1, sum(counts))
        whole = as_dtensor(value, state, shape, device_mesh).full_tensor()
        return whole.narrow(0, ctx.start, ctx.rows).clone()

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """Place the gradient of this rank's rows in the whole's, scaled by its share."""
        placed = grad.new_zeros(ctx.shape)
        placed.narrow(0, ctx.start, ctx.rows).copy_(grad * ctx.share)
        pending = [Partial()] * ctx.device_mesh.ndim
        whole = DTensor.from_local(placed, ctx.device_mesh, pending, run_check=False)
        return whole.redistribute(placements=torch_placements(ctx.state)).to_local(), None, None, None, None, None
