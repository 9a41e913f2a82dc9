"""A check that the inputs of a call that have the rows of a batch have equally many."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from autopar.capture import Captured
from autopar.capture.batch_factor import inputs_with_rows
from autopar.capture.in_parts import names_of, no_rows_in
from autopar.errors import RunError
from autopar.runtime.batches.calls import leaves_of
from autopar.words.trees import PyTree


def row_leaves(captured: Captured) -> frozenset[int]:
    """Return the positions of the leaves of a call that have rows.

    Those are as long as the first one, without those that the graph or the caller says have none.
    """
    kept: frozenset[int] | None = captured.graph.derived.get("row_leaves")
    if kept is not None:
        return kept
    nodes, without = captured.graph.nodes, no_rows_in(captured)
    named = [(i, n) for i, (n, name) in enumerate(zip(captured.inputs, names_of(captured), strict=True))
             if n is not None and name not in without and nodes[n].out.shape]  # fmt: skip
    rows = nodes[named[0][1]].out.shape[0] if named else 0
    found = {i: n for i, n in named if nodes[n].out.shape[0] == rows}
    if captured.example is None or captured.example.in_parts is None:
        of_graph = inputs_with_rows(captured.graph, rows).rows
        found = {i: n for i, n in found.items() if n in of_graph}
    captured.graph.derived["row_leaves"] = frozenset(found)
    return frozenset(found)


def check_equal_rows(
    captured: Captured, signature: inspect.Signature, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> None:
    """Refuse a batch whose inputs have unequal numbers of rows.

    Raises:
        RunError: with the inputs and both numbers.
    """
    leaves = leaves_of(captured, signature, args, kwargs)
    if leaves is None:
        return
    lengths = {
        i: int(leaf.shape[0]) for i, (leaf, n) in enumerate(zip(leaves, captured.inputs, strict=True))
        if n is not None and isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.dim()
        and captured.graph.nodes[n].out.shape
    }  # fmt: skip
    nodes = captured.graph.nodes
    wanted = {i: nodes[n].out.shape[0] for i, n in enumerate(captured.inputs) if n is not None and i in lengths}
    if len({(length, wanted[i]) for i, length in lengths.items()}) < 2:
        return
    of_rows = {i: length for i, length in lengths.items() if i in row_leaves(captured)}
    if len(set(of_rows.values())) < 2:
        return
    names = names_of(captured)
    first, *others = of_rows
    other = next(i for i in others if of_rows[i] != of_rows[first])
    raise RunError(
        f"input {names[first]} has {of_rows[first]} rows and input {names[other]} {of_rows[other]}, and both have the "
        "rows of the batch: give them equally many; an input that is the same for all rows is left out of "
        "parallelize(..., input_rows=[...]), which names those with rows"
    )
