"""Rows of several masks, one behind the other: ``out.index_add_(0, torch.cat(rows), torch.cat(results))``.

Rows that masks select may be put together before they go back to a tensor of all. Nothing has that many rows here
(:mod:`.selected_rows`); what is done with all of them is done with those of each mask by itself, and what writes them
writes one part after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from autopar.capture.graph.exported_nodes import name_of
from autopar.capture.graph.rows_of_graph import Rows, RowsOfGraph, val_of
from autopar.capture.graph.rows_put_back import RowsPutBack, writes_rows
from autopar.words.trees import PyTree

aten = torch.ops.aten
SIZES = ("aten.sym_size.int", "aten.sym_numel.default")
SPLITS = ("aten.split_with_sizes.default", "aten.split.sizes")


@dataclass(frozen=True)
class Joined:
    """What stands for rows of several masks, each with those of its own (:class:`~.rows_of_graph.Rows`)."""

    parts: tuple[Rows, ...]


class JoinedRows:
    """Rewriter of rows of several masks that were put together: each part goes to ``take``, as rows of one mask.

    Attributes:
        take: rewrites one node that takes rows, or selects them.
    """

    def __init__(self, state: RowsOfGraph, put_back: RowsPutBack, take: Callable[[Node], None]) -> None:
        self.state, self.put_back, self.take = state, put_back, take

    def joins(self, node: Node) -> bool:
        """Check whether a node puts rows of several masks together; notes what stands for it."""
        if name_of(node.target) != "aten.cat.default":
            return False
        args: PyTree = node.args
        taken: list[Any] = [self.state.rows.get(n) for n in args[0]]
        along = int(args[1]) if len(args) > 1 else 0
        parts = [part for t in taken for part in (t.parts if isinstance(t, Joined) else [t])]
        if not all(isinstance(part, Rows) and part.dim == along % node.meta["val"].dim() for part in parts):
            return False
        self.state.rows[node] = Joined(tuple(parts))
        return True

    def takes_joined(self, node: Node) -> bool:
        """Check whether a node takes joined rows; if so, note what replaces its result, or write the rows."""
        joined = {n: rows for n in node.all_input_nodes if isinstance(rows := self.state.rows.get(n), Joined)}
        counts = {n: c for n in node.all_input_nodes if isinstance(c := self.state.counts.get(n), tuple)}
        if not joined and not counts:
            return False
        name = name_of(node.target)
        numbers = {len(rows.parts) for rows in joined.values()} | {len(c) for c in counts.values()}
        if len(numbers) != 1:
            raise self.state.refused(f"'{name}' takes those of as many masks as others are not of:")
        [n] = numbers
        if name in SIZES:
            [rows] = joined.values()
            if name == "aten.sym_size.int" and node.args[1] != rows.parts[0].dim:
                raise self.state.refused("asks for their number")
            self.state.counts[node] = tuple(_number(part) for part in rows.parts)
            self.state.gone.append(node)
        elif name in SPLITS and self._takes_apart(node):
            self.state.gone.append(node)
        elif joined and writes_rows(name):
            self._write_parts(node, joined, n)
        else:
            self._compute_parts(node, joined, counts, n)
        return True

    def _takes_apart(self, node: Node) -> bool:
        """Check whether a split gives the parts that were put together: its sizes are the numbers of their rows."""
        args: PyTree = node.args
        rows, sizes = self.state.rows.get(args[0]), args[1]
        if not isinstance(rows, Joined) or len(sizes) != len(rows.parts):
            return False
        masks = [self.state.counted.get(size) for size in sizes]
        same = [m is not None and self.state.same.root(m) is self.state.same.root(p.mask)
                for m, p in zip(masks, rows.parts, strict=True)]  # fmt: skip
        if not all(same):
            raise self.state.refused("parts of other sizes are made of")
        self.state.rows[node] = list(rows.parts)
        return True

    def _write_parts(self, node: Node, joined: dict[Node, Joined], n: int) -> None:
        written: Any = node.args[0]
        if written in joined:
            raise self.state.refused("something is put in")
        for k in range(n):
            stands: dict[Node, Node] = {}
            for whole, rows in joined.items():
                part = self.state.graph.call_function(aten.alias.default, (whole,))
                part.meta = dict(whole.meta)
                self.state.rows[part], stands[whole] = rows.parts[k], part
                if whole in self.state.columns:
                    self.state.columns[part] = self._part_of_column(whole, k)
            args: PyTree = torch.fx.node.map_arg(node.args, partial(_in_place_of, stands))
            target: Any = node.target
            of_part = self.state.graph.call_function(target, (written, *args[1:]), dict(node.kwargs))
            of_part.meta = dict(node.meta)
            self.state.gone += stands.values()
            written = self.put_back.rewrite(of_part)
        node.replace_all_uses_with(written)
        self.state.gone.append(node)

    def _part_of_column(self, column: Node, k: int) -> Node:
        """Return the positions of one part, which an index repeats for each feature."""
        positions = self.state.columns[column]
        part = self.state.graph.call_function(aten.alias.default, (positions,))
        part.meta = dict(positions.meta)
        self.state.rows[part] = self.state.rows[positions].parts[k]
        self.state.gone.append(part)
        return part

    def _compute_parts(self, node: Node, joined: dict[Node, Joined], counts: dict[Node, Any], n: int) -> None:
        """Rewrite a node for each part."""
        joined = {**joined, **{p: self.state.rows[p] for n in joined if (p := self.state.columns.get(n)) is not None}}
        rows: list[Any] = []
        numbers: list[Any] = []
        for k in range(n):
            self.state.rows.update((whole, of.parts[k]) for whole, of in joined.items())
            self.state.counts.update((number, of[k]) for number, of in counts.items())
            self.take(node)
            rows.append(self.state.rows.pop(node, None))
            numbers.append(self.state.counts.pop(node, None))
        self.state.rows.update(joined)
        self.state.counts.update(counts)
        self.state.gone = list(dict.fromkeys(self.state.gone))
        if isinstance(rows[0], Rows):
            self.state.rows[node] = Joined(tuple(rows))
        elif isinstance(rows[0], list):
            self.state.rows[node] = [Joined(tuple(each)) for each in zip(*rows, strict=True)]
        else:
            self.state.counts[node] = numbers[0]


def _number(rows: Rows) -> int:
    return int(val_of(rows.mask).numel())


def _in_place_of(stands: Mapping[Node, Node], node: Node) -> Node:
    return stands.get(node, node)
