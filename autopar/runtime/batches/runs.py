"""A batch of any number of rows, in a pipeline or on one mesh: runs of equal microbatches.

A run is microbatches of one shape, in a pipeline one trip through the stages. A batch is one run where its rows divide
into as few microbatches as the planned size allows; else there are two, whole microbatches of the planned size and a
last one with the rows that are left. Gradients of all runs add up, and every loss counts by its part of the rows, so a
step's loss is the mean over the rows of its batch, as for the whole batch at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.capture import Captured
from autopar.capture.in_parts import names_of, no_rows_in
from autopar.capture.microbatches import widened
from autopar.runtime.batches.calls import leaves_of
from autopar.runtime.batches.equal_rows import check_equal_rows
from autopar.runtime.batches.module_calls import ModuleCall
from autopar.torch_private import pytree
from autopar.words.trees import PyTree

COPIED_BYTES = 1 << 20
"""Bytes up to which the rows of one rank are repeated for a microbatch of all, by which a program is looked for."""


@dataclass(frozen=True)
class Run:
    """Microbatches of one shape, one after the other.

    Attributes:
        call: with the rows of all of them.
        share: the weight of each microbatch's loss in that of the batch.
        cut: for each leaf of the call, whether it has rows.
    """

    call: ModuleCall
    microbatches: int
    share: float
    cut: tuple[bool, ...] = ()

    @property
    def with_rows(self) -> set[int]:
        """The leaves of the call that have rows, by ``id``."""
        leaves = pytree.tree_leaves((self.call.args, dict(self.call.kwargs)))
        return {id(leaf) for leaf, is_cut in zip(leaves, self.cut, strict=False) if is_cut}


def sizes(rows: int, most: int) -> list[tuple[int, int]]:
    """Return the numbers of microbatches and the rows of each, for all rows of a batch; none has more than ``most``."""
    count = -(-rows // most)
    if rows <= most or rows % count == 0:
        return [(max(count, 1), rows // max(count, 1))]
    return [(rows // most, most), (1, rows % most)]


def runs(
    captured: Captured, signature: inspect.Signature, planned: int, args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    ranks: int = 1, most: int | None = None,
) -> list[Run]:  # fmt: skip
    """Return the runs of a call.

    Args:
        captured: the microbatch that was planned first. What has its rows there is cut, but for what is as long in the
            batch as well; in a call of another structure, what has as many rows as the first tensor that has a dim. The
            rest goes into every microbatch.
        planned: microbatches of a step for which the plan is.
        ranks: the ranks that each have rows of their own, of which the call has one's.
        most: rows of a microbatch at most; None for those of ``captured``.

    Raises:
        RunError: inputs with rows have unequal numbers of them.
    """
    check_equal_rows(captured, signature, args, kwargs)
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    has_rows = _have_rows(captured, signature, args, kwargs, leaves)
    lengths = [leaf.shape[0] for leaf, has in zip(leaves, has_rows, strict=True) if has]
    whole = rows_of_microbatch(captured)
    rows = lengths[0] if lengths else 0
    if not rows or any(length not in (rows, whole) for length in lengths):  # what is wrong is refused as it is
        return [Run(ModuleCall(args, kwargs, in_parts=True, parts=planned), planned, 1 / planned)]
    cut = [has and leaf.shape[0] == rows for leaf, has in zip(leaves, has_rows, strict=True)]
    runs_of_call, begin = [], 0

    def part(start: int, length: int, ranks: int = 1) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        if length == rows and ranks == 1:
            return tuple(args), dict(kwargs)
        some = [leaf.narrow(0, start, length) if c else leaf for leaf, c in zip(leaves, cut, strict=True)]
        if ranks > 1:
            some = [widened(leaf, ranks, COPIED_BYTES) if c else leaf for leaf, c in zip(some, cut, strict=True)]
        positional, by_name = pytree.tree_unflatten(some, spec)
        return tuple(positional), dict(by_name)

    of_sizes = sizes(rows, max(1, whole // ranks) if most is None else most)
    for count, each in of_sizes:
        one = part(begin, each, ranks)
        call = ModuleCall(*part(begin, count * each), in_parts=True, parts=count, one=one, of_several=len(of_sizes) > 1)
        runs_of_call.append(Run(call, count, each / rows, tuple(cut)))
        begin += count * each
    return runs_of_call


def rows_of_microbatch(captured: Captured) -> int:
    """Return the rows of the microbatch that was captured: the first dim of the first input that has one."""
    whole = no_rows_in(captured)
    shapes = (
        captured.graph.nodes[number].out.shape for number, name in zip(captured.inputs, names_of(captured), strict=True)
        if number is not None and name not in whole
    )  # fmt: skip
    return next((shape[0] for shape in shapes if shape and shape[0]), 1)


def _have_rows(
    captured: Captured, signature: inspect.Signature, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree],
    leaves: list[PyTree],
) -> list[bool]:  # fmt: skip
    """Return, for each leaf of a call, whether it may have the batch's rows."""
    in_order = leaves_of(captured, signature, args, kwargs)
    if in_order is not None:
        rows, whole = rows_of_microbatch(captured), no_rows_in(captured)
        with_rows = {
            id(leaf)
            for leaf, number, name in zip(in_order, captured.inputs, names_of(captured), strict=True)
            if number is not None and captured.graph.nodes[number].out.shape[:1] == (rows,) and name not in whole
        }
        return [isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and id(leaf) in with_rows for leaf in leaves]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    rows = tensors[0].shape[0] if tensors else 0
    return [isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows for leaf in leaves]
