"""Rows that stand in the order of their experts: ``grouped_mm(rows, matrices, offs=ends)``, and counts of rows.

torch's kernel for tensors without values takes bfloat16 alone, and how many numbers ``bincount`` gives depends on data.
While a model is traced the first is an operator of autopar's, which the graph turns into products of rows in their own
order (:mod:`autopar.capture.patterns.sorted_rows`), and of counts there are ``minlength``: a larger number is an error.

``parts = rows.split(counts.tolist())`` has sizes that depend on data; here a part is what a mask selects, that of the
rows' places in the group (:mod:`autopar.capture.graph.selected_rows`), and where all parts are put together again, in
order, each is put in its places. So is ``rows[start:end]`` by running counts (:mod:`.running_counts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.capture.branches.data_branches import Read
from autopar.capture.branches.random_answers import site_of
from autopar.capture.graph.expert_counts import counted_numbers, element_of
from autopar.capture.trace.expert_dispatch import Dispatched
from autopar.capture.trace.hit_experts import HitExperts
from autopar.capture.trace.one_hot_sizes import hot_of
from autopar.capture.trace.running_counts import RunningCounts, as_numbers, summed
from autopar.capture.trace.value_origins import depends_on_data, node_of
from autopar.torch_private import grouped_product

GROUPED = (torch.nn.functional.grouped_mm, grouped_product)
COUNTED = (torch.bincount, torch.Tensor.bincount)


SPLIT = (torch.split, torch.Tensor.split, torch.functional.split)
JOINED = (torch.cat, torch.concat, torch.concatenate, torch.vstack)


class GroupedRows(TorchFunctionMode):
    """Takes the place of grouped products of rows with matrices of experts, of counts of a known number, and of parts
    of rows by counts."""

    def __init__(self, listed: Callable[[torch.Tensor], list[int] | None]) -> None:
        """``listed`` gives integers that follow from inputs as those of the example, if the trace is to have these."""
        super().__init__()
        self.listed = listed
        self.parts: dict[str, tuple[torch.Tensor, int, int]] = {}
        """By torch's name of the number of rows of a part: the group of each place, which group it is, of how many."""
        self.running, self.hit, self.dispatched = RunningCounts(), HitExperts(), Dispatched()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.running.note(func, args)
        answer: Any = self.hit.called(func, args, kwargs)
        answer = self.dispatched.called(func, args, kwargs) if answer is None else answer
        answer = hot_of(func, args, kwargs) if answer is None else answer
        if answer is not None:
            return answer
        if func in GROUPED:
            answer = _product(*args, **(kwargs or {}))
        elif func in COUNTED:
            answer = _counts(*args, **(kwargs or {}))
        elif func in SPLIT:
            answer = self._split(*args, **(kwargs or {}))
        elif func in JOINED:
            answer = self._joined(*args, **(kwargs or {}))
        elif func is torch.Tensor.__getitem__ and isinstance(args[1], slice):
            answer = _all_of(args[0], args[1])
            answer = self._between(args[0], args[1]) if answer is None else answer
        elif func is torch.Tensor.__setitem__ and isinstance(args[1], slice):
            mask = self._mask_between(args[0], args[1])
            return func(*args) if mask is None else func(args[0], mask, args[2])
        elif func is torch.Tensor.numpy and depends_on_data(args[0]):
            answer = as_numbers(args[0], self.listed)
        return func(*args, **(kwargs or {})) if answer is None else answer

    def _split(self, tensor: torch.Tensor, split_size_or_sections: Any = None, dim: int = 0, **options: Any) -> Any:
        """As ``torch.split``, where counts say how many rows each part has; else None."""
        sizes = options.get("split_size", split_size_or_sections)
        if not isinstance(sizes, (list, tuple)) or dim != 0 or not all(isinstance(n, Read) for n in sizes):
            return None
        if (of_columns := self.dispatched.parts(tensor, sizes)) is not None:
            return of_columns
        numbers = [n.tensor for n in sizes]
        if not _are_counts([element_of(node_of(n)) for n in numbers]):
            return None
        ends = torch.stack(numbers).cumsum(0)
        _check(ends[-1], len(tensor))
        groups = torch.searchsorted(ends, torch.arange(len(tensor), device=tensor.device), right=True)
        parts = [tensor[groups == k] for k in range(len(sizes))]
        for k, part in enumerate(parts):
            self.parts[str(part.shape[0])] = groups, k, len(sizes)
        return tuple(parts)

    def _between(self, tensor: torch.Tensor, rows: slice) -> torch.Tensor | None:
        """``tensor[start:stop]`` by running counts; None of any other slice."""
        mask = self._mask_between(tensor, rows)
        if mask is None:
            return None
        part = tensor[mask]
        found = self.running.group_of(rows.start, rows.stop, len(tensor))
        assert found is not None
        self.parts[str(part.shape[0])] = found
        return part

    def _mask_between(self, tensor: torch.Tensor, rows: slice) -> torch.Tensor | None:
        """Which rows stand between two running counts."""
        if rows.step is not None or not any(isinstance(n, (Read, torch.Tensor)) for n in (rows.start, rows.stop)):
            return None
        found = self.running.group_of(rows.start, rows.stop, tensor.shape[0])
        return None if found is None else found[0] == found[1]

    def _joined(self, tensors: Any, dim: int = 0, **options: Any) -> Any:
        """As ``torch.cat``, of all parts of a split in order; else None."""
        if dim != 0 or options or not isinstance(tensors, (list, tuple)) or not tensors:
            return None
        groups_of_parts = [
            self.parts.get(str(t.shape[0])) if isinstance(t, torch.Tensor) and t.dim() else None for t in tensors
        ]
        first = groups_of_parts[0]
        if first is None or len(tensors) != first[2]:
            return None
        groups = first[0]
        if any(part is None or part[0] is not groups or part[1] != k for k, part in enumerate(groups_of_parts)):
            return None
        one = tensors[0]
        joined = torch.zeros(len(groups), *one.shape[1:], dtype=one.dtype, device=one.device)
        for k, part in enumerate(tensors):
            joined = torch.index_put(joined, (groups == k,), part)
        return joined


def _all_of(tensor: torch.Tensor, rows: slice) -> torch.Tensor | None:
    """``tensor[:sum(counts)]`` of counts that depend on data: all rows, which is checked at every call."""
    if rows.start is not None or rows.step is not None or not isinstance(rows.stop, Read):
        return None
    if not _is_total(rows.stop.tensor):
        return None
    _check(rows.stop.tensor, len(tensor))
    return tensor


def _is_total(number: torch.Tensor) -> bool:
    """Whether a number is the sum of all elements of a list, ``sum(counts.tolist())``."""
    return _are_counts(summed(number) or ())


def _are_counts(elements: Sequence[Any]) -> bool:
    """Whether these are all elements, in order, of a tensor that counts how often numbers occur."""
    whole = elements[0][0] if elements and elements[0] is not None else None
    if whole is None or [*elements] != [(whole, k) for k in range(whole.meta["val"].shape[0])]:
        return False
    return counted_numbers(whole) is not None


def _check(total: torch.Tensor, rows: int) -> None:
    torch.ops.autopar.taken(total == rows, site_of(), True)


def _product(
    mat_a: torch.Tensor, mat_b: torch.Tensor, *, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor | None:
    """As ``torch.nn.functional.grouped_mm``, whose arguments these are; None for what is left as it is."""
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None or bias is not None:
        return None
    if out_dtype not in (None, mat_a.dtype):
        return None
    return torch.ops.autopar.expert_linear_in_order(mat_a, mat_b, offs)  # type: ignore[no-any-return]


def _counts(input: torch.Tensor, weights: Any = None, minlength: int = 0) -> torch.Tensor | None:
    """As ``torch.bincount``, whose arguments these are; None for what is left as it is."""
    if weights is not None or not minlength or input.dim() != 1 or not isinstance(input.shape[0], int):
        return None
    ones = torch.ones_like(input, dtype=torch.int64)
    return torch.zeros(minlength, dtype=torch.int64, device=input.device).scatter_add(0, input.to(torch.int64), ones)


__all__ = ["GroupedRows"]
