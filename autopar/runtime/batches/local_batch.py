"""Batches of which every rank has its own rows, as with DistributedDataParallel (``parallelize(..., batch="local")``).

The batch of a step is all ranks' rows, one rank after the other in the order of the mesh. A rank's rows go in as they
lie: where the program cuts them over all ranks they are its piece already, and on an axis along which ranks compute
together with the same rows they are gathered. What a call gives is the rank's own rows again; scalars, such as the
loss, are those of the whole batch. Where ranks have not equally many rows the batch is put together
(:mod:`.uneven_rows`).

A loss that the script computes of a rank's own rows counts as it does there: gradients are those of the mean of the
ranks' losses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from autopar.capture.microbatches import have_rows, part_of_batch, rows_of
from autopar.errors import CaptureError, MeshError, RunError
from autopar.runtime.batches.row_sampler import RowSampler, Samplers
from autopar.runtime.batches.uneven_rows import Exchange, OwnOfUneven, put_together
from autopar.runtime.parameters.state import as_dtensor, torch_placements
from autopar.runtime.ranks.agree import mesh_group
from autopar.runtime.ranks.collective_log import CollectiveLog
from autopar.runtime.ranks.groups import groups_on
from autopar.torch_private import pytree
from autopar.words.placements import State, shard
from autopar.words.trees import Context, PyTree

Call = tuple[tuple[Any, ...], dict[str, Any]]


def rows_in(args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], without: Collection[str] = ()) -> int | None:
    """Return the rows of a call; None of one with DTensors, or in which nothing has rows.

    Args:
        without: inputs without rows, by name.
    """
    plain = pytree.tree_map(lambda x: None if type(x) is DTensor else x, (tuple(args), dict(kwargs)))
    try:
        return rows_of(plain, without)
    except CaptureError:
        return None


class RowsOfRanks:
    """Who has which rows of a batch.

    Attributes:
        ranks: how many parts it has.
        place: which of them this rank's is.
        exchange: tells before each call how many rows each rank has; None if all have equally many.
        counts: rows of each part in the last call, if they were not equally many.
        without: inputs without rows, by name (:func:`~autopar.capture.microbatches.leaves_of_call`).
    """

    without: frozenset[str] = frozenset()

    def __init__(self, ranks: int, place: int, everyone: Sequence[int]) -> None:
        """Initialize the object; all ranks call it.

        Args:
            everyone: these ranks, in the order of their mesh.
        """
        self.ranks, self.place = ranks, place
        self.exchange = Exchange.of(everyone)
        self.counts: list[int] | None = None

    def uneven_counts(
        self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], logs: Sequence[CollectiveLog]
    ) -> list[int] | None:
        """Return each rank's number of rows if they are unequal.

        None if they are equal, or where the call has DTensors or nothing with rows. All ranks call it before each
        call.
        """
        self.counts = None
        rows = rows_in(args, kwargs, self.without)
        if self.exchange is None or rows is None:
            return None
        counts = [n for n, _ in self.exchange(rows, 0, logs)]
        return counts if len(set(counts)) > 1 else None

    def sampler(
        self, dataset: Dataset[Any], shuffle: bool, seed: int, drop_last: bool, together: int = 1
    ) -> RowSampler:
        """Make a sampler that draws the rows of a data set that this rank loads."""
        return RowSampler(
            dataset, self.ranks, self.place, shuffle=shuffle, seed=seed, drop_last=drop_last, together=together
        )


class LocalBatch(RowsOfRanks):
    """The batches of one module on its ranks, each of which has a part."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        """Initialize the object; all ranks of the module call it.

        Args:
            device_mesh: the mesh of the module's ranks.
        """
        ranks = [int(rank) for rank in device_mesh.mesh.flatten()]
        super().__init__(len(ranks), ranks.index(dist.get_rank()), ranks)
        self.device_mesh = device_mesh
        self.state = State([shard(0)] * device_mesh.ndim)

    def put_together(
        self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], logs: Sequence[CollectiveLog]
    ) -> Call | None:
        """Return the call with all rows of all ranks if their numbers are unequal; None if they are equal.

        All ranks call it before each call that is not of DTensors.

        Raises:
            RunError: the ranks' calls differ in more than their rows.
        """
        counts = self.uneven_counts(args, kwargs, logs)
        if counts is None or self.exchange is None:
            return None
        self.counts = counts
        in_order = sorted(int(rank) for rank in self.device_mesh.mesh.flatten())
        groups = groups_on(self.device_mesh)
        group = groups.of(in_order) if groups.possible else mesh_group(self.device_mesh)
        call = tuple(args), dict(kwargs)
        return put_together(
            call, counts, counts, self.place, group, self.exchange.order, self.exchange, self.without
        )  # fmt: skip

    def whole(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> Call:
        """Return the call with the whole batch: DTensors in place of tensors, of which this rank holds its rows.

        Inputs with rows are cut among the ranks; DTensors keep their own placements.
        """
        rows = rows_in(args, kwargs, self.without)
        if rows is None:
            return args, dict(kwargs)
        call = tuple(args), dict(kwargs)
        leaves, spec = pytree.tree_flatten(call)
        joined = [
            as_dtensor(leaf, self.state, (self.ranks * rows, *leaf.shape[1:]), self.device_mesh)
            if cut and not isinstance(leaf, DTensor) else leaf
            for leaf, cut in zip(leaves, have_rows(call, rows, self.without), strict=True)
        ]  # fmt: skip
        positional, by_name = pytree.tree_unflatten(joined, spec)
        return positional, by_name

    def parts(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], count: int) -> list[Call]:
        """Return the calls of a step in ``count`` microbatches, each with rows of every rank.

        Raises:
            CaptureError: the rows do not divide.
        """
        batch = tuple(args), dict(kwargs)
        return [self.whole(*part_of_batch(batch, count, number, self.without)) for number in range(count)]

    def of_output(self, value: torch.Tensor, state: State, shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's rows of an output.

        Args:
            value: this rank's piece of it, in ``state``; ``shape`` is that of the whole.
        """
        rows_here: torch.Tensor
        if self.counts is None:
            rows_here = _LocalBatch.apply(value, state, shape, self)
        else:
            rows_here = OwnOfUneven.apply(value, state, shape, self.device_mesh, self.counts, self.place)
        return rows_here


class _LocalBatch(torch.autograd.Function):
    """A piece of an output becomes this rank's rows; their gradient becomes that piece's, of the mean over ranks."""

    @staticmethod
    def forward(
        ctx: Context, value: torch.Tensor, state: State, shape: tuple[int, ...], local_batch: LocalBatch
    ) -> torch.Tensor:  # fmt: skip
        ctx.state, ctx.shape, ctx.local_batch = state, shape, local_batch
        whole = as_dtensor(value, state, shape, local_batch.device_mesh)
        rows: torch.Tensor = whole.redistribute(placements=torch_placements(local_batch.state)).to_local()
        return rows.clone() if rows is value or rows._base is not None else rows

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> Any:  # type: ignore[override]
        local_batch = ctx.local_batch
        rows = grad.contiguous() / local_batch.ranks
        whole = as_dtensor(rows, local_batch.state, ctx.shape, local_batch.device_mesh)
        return whole.redistribute(placements=torch_placements(ctx.state)).to_local(), None, None, None


def sampler_of(
    rows: RowsOfRanks | None, samplers: Samplers, dataset: Dataset[Any], shuffle: bool, drop_last: bool, seed: int,
    together: int = 1,
) -> RowSampler:  # fmt: skip
    """Return what draws the rows that this rank loads, and is saved with the module."""
    if rows is None:
        sampler = RowSampler(dataset, 1, 0, shuffle=shuffle, seed=seed, drop_last=drop_last)
    else:
        sampler = rows.sampler(dataset, shuffle, seed, drop_last, together)
    return samplers.add(sampler)


def sharded(rows: RowsOfRanks | None, samplers: Samplers, loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Return a loader of whole batches as one that gives this rank's rows of each.

    Raises:
        MeshError: its batches cannot be cut.
        RunError: it draws in a way of its own.
    """
    ranks = 1 if rows is None else rows.ranks
    kinds = torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler
    if loader.batch_size is None or not isinstance(loader.sampler, kinds):
        raise RunError(
            "shard: the loader draws rows in a way of its own (a batch_sampler, a sampler, or an iterable data "
            "set); make one with sampler=pm.sampler(dataset), which gives this rank's rows"
        )
    if loader.batch_size % ranks:
        raise MeshError(f"shard: batches of {loader.batch_size} rows do not divide among {ranks} ranks")
    shuffled, each = isinstance(loader.sampler, torch.utils.data.RandomSampler), loader.batch_size // ranks
    return DataLoader(
        loader.dataset, each, num_workers=loader.num_workers, collate_fn=loader.collate_fn,
        sampler=sampler_of(rows, samplers, loader.dataset, shuffled, loader.drop_last, seed, each),
        pin_memory=loader.pin_memory, drop_last=loader.drop_last, timeout=loader.timeout, worker_init_fn=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor, persistent_workers=loader.persistent_workers,
    )  # fmt: skip
