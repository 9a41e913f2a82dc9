"""Rows for experts as ``nonzero(gates).sort(0)`` finds them (the dispatcher that came with the first sparse experts).

``found = torch.nonzero(gates); _, order = found.sort(0)`` has in ``order[:, 1]`` the places of ``gates``, [rows
experts], by expert; ``found[order[:, 1], 0]`` are the rows of the first expert, then those of the second, and so on.
While a model is traced these are the rows of each column's mask, one behind the other
(:mod:`autopar.capture.graph.joined_rows`), and ``x[rows].split((gates > 0).sum(0).tolist())`` gives those of each
column again. What else is asked of such an order is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.capture.branches.data_branches import Read
from autopar.capture.branches.random_answers import site_of
from autopar.capture.graph.expert_counts import CASTS, element_of
from autopar.capture.graph.same_masks import behind
from autopar.capture.trace.patches import PASS, Args, Function, Handler, Kwargs, register
from autopar.capture.trace.value_origins import depends_on_data, node_of
from autopar.errors import CaptureError
from autopar.words.trees import PyTree

FOUND = (torch.nonzero, torch.Tensor.nonzero)
SORTED = (torch.sort, torch.Tensor.sort)
SPLIT = (torch.split, torch.Tensor.split, torch.functional.split)
GET = torch.Tensor.__getitem__
COUNTED = ("aten.sum.dim_IntList", "aten.count_nonzero.dim_IntList")


@dataclass(frozen=True)
class _Places:
    """The places of a matrix that are not zero, by column.

    Attributes:
        marked: bool [rows columns].
        rows, columns: int [places], of each.
        sizes: how many each column has.
    """

    marked: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    sizes: tuple[Any, ...]


class Dispatched:
    """Handler of `nonzero` of gate matrices, and of `sort` of what it found."""

    def __init__(self) -> None:
        self._found: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._by_column: dict[Any, _Places] = {}
        self._of_length: dict[str, _Places] = {}

    def __call__(self, func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        """Handle a call of torch."""
        if not args or not isinstance(args[0], torch.Tensor):
            return PASS
        if func in SPLIT:
            parts = self._parts(*args, **kwargs)
            return PASS if parts is None else parts
        if func in FOUND and len(args) == 1 and not kwargs and args[0].dim() == 2 and depends_on_data(args[0]):
            places = func(args[0])
            self._found.append((places, args[0]))
            return places
        matrix = self._matrix_of(args[0]) if self._found and func in (*SORTED, GET) else None
        if matrix is None:
            return PASS
        if func is GET:
            return args[1][0].rows_of(args[1]) if _is_ordered(args[1]) else PASS
        along = args[1] if len(args) > 1 else kwargs.get("dim", -1)
        if along != 0 or set(kwargs) - {"dim"}:
            return PASS
        places_by_column = self._places_of(matrix)
        return _Columns(places_by_column, sorted=True), _Columns(places_by_column, sorted=False)

    def _matrix_of(self, places: torch.Tensor) -> torch.Tensor | None:
        return next((matrix for found, matrix in self._found if found is places), None)

    def _places_of(self, matrix: torch.Tensor) -> _Places:
        key = node_of(matrix)
        if key not in self._by_column:
            marked = matrix != 0
            rows = [marked[:, k].nonzero().squeeze(1) for k in range(matrix.shape[1])]
            columns = [torch.full_like(each, k) for k, each in enumerate(rows)]
            places = _Places(marked, torch.cat(rows), torch.cat(columns), tuple(each.shape[0] for each in rows))
            self._by_column[key] = self._of_length[str(places.rows.shape[0])] = places
        return self._by_column[key]

    def _parts(
        self, tensor: torch.Tensor, split_size_or_sections: object = None, dim: int = 0, **options: PyTree
    ) -> PyTree:
        """Return the rows of each column, where the sizes are numbers of its places that were read; else None."""
        sizes = options.get("split_size", split_size_or_sections)
        if not isinstance(sizes, (list, tuple)) or dim != 0:
            return None
        places = self._of_length.get(str(tensor.shape[0])) if tensor.dim() else None
        if places is None or len(sizes) != len(places.sizes) or not all(isinstance(n, Read) for n in sizes):
            return None
        elements = [element_of(node_of(n.tensor)) for n in sizes]
        whole: Any = elements[0][0] if elements[0] is not None else None
        if whole is None or elements != [(whole, k) for k in range(len(sizes))]:
            return None
        if str(getattr(behind(whole, CASTS), "target", "")) not in COUNTED:
            return None
        counts = torch.stack([n.tensor for n in sizes])
        torch.ops.autopar.taken((counts == places.marked.sum(0)).all(), site_of(), True)
        return tensor.split(list(places.sizes))


def _is_ordered(index: PyTree) -> bool:
    return isinstance(index, tuple) and len(index) == 2 and isinstance(index[0], _Order)


@dataclass(frozen=True)
class _Order:
    """``order[:, 1]``: in which order places stand by column."""

    places: _Places

    def rows_of(self, index: PyTree) -> torch.Tensor:
        """Return ``found[order[:, 1], 0]``, or the columns with a 1."""
        if index[1] not in (0, 1):
            raise _refused()
        return self.places.rows if index[1] == 0 else self.places.columns


class _Columns:
    """The result of ``found.sort(0)``: the sorted places, by columns, or their order.

    Args:
        sorted: whether these are the places.
    """

    def __init__(self, places: _Places, sorted: bool) -> None:
        self.places, self.sorted = places, sorted

    def __getitem__(self, index: PyTree) -> PyTree:
        if index == (slice(None), 1):
            return self.places.columns if self.sorted else _Order(self.places)
        if self.sorted and _is_ordered(index):
            return index[0].rows_of(index)
        raise _refused()

    def split(self, split_size: int, dim: int = 0) -> Any:
        """Return both columns."""
        if not self.sorted or split_size != 1 or dim not in (1, -1):
            raise _refused()
        return None, self.places.columns.unsqueeze(1)

    def __getattr__(self, name: str) -> Any:
        raise _refused()


def _refused() -> CaptureError:
    return CaptureError(
        "the order of places that are not zero is used by more than to find the rows of each column, at "
        f"{site_of().partition('@')[0]}: how many there are depends on values\n  find the rows of each column by "
        "itself (rows = gates[:, e].nonzero().squeeze(1)), and add its results to all (out.index_add_(0, rows, y))"
    )


register(Handler("expert dispatch", "the number of places that are not zero depends on data",
                 lambda _record: Dispatched(),
                 (*FOUND, *SORTED, *SPLIT, GET), before=("one-hot sizes", "grouped rows")))  # fmt: skip
