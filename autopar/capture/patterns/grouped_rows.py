"""Rows that stand in the order of their experts: ``grouped_mm(rows, matrices, offs=ends)``, and counts of rows.

torch's kernel for tensors without values takes bfloat16 alone, and how many numbers ``bincount`` gives depends on data.
While a model is traced the first is an operator of autopar's, which the graph turns into products of rows in their own
order (:mod:`autopar.capture.patterns.sorted_rows`), and of counts there are ``minlength``: a larger number is an error.

``parts = rows.split(counts.tolist())`` has sizes that depend on data; here a part is what a mask selects, that of the
rows' places in the group (:mod:`autopar.capture.graph.selected_rows`), and where all parts are put together again, in
order, each is put in its places. So is ``rows[start:end]`` by running counts.

``start = 0; for i, n in enumerate(counts): end = start + n; part = rows[start:end]; start = end`` walks through rows by
their running counts. Such a slice is known by what its ends are sums of: all counts before one, and that one. Counts
may be read as a list, as an array of numpy, or one by one, and so may their running sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autopar.capture.branches.data_branches import Read
from autopar.capture.branches.random_answers import site_of
from autopar.capture.graph.expert_counts import CASTS, counted_numbers, element_of
from autopar.capture.graph.same_masks import behind
from autopar.capture.trace.patches import PASS, Args, Function, Handler, Kwargs, register
from autopar.capture.trace.python_questions import list_of_inputs
from autopar.capture.trace.value_origins import depends_on_data, node_of
from autopar.errors import CaptureError
from autopar.torch_private import grouped_product
from autopar.words.trees import PyTree

GROUPED = (torch.nn.functional.grouped_mm, grouped_product)
COUNTED = (torch.bincount, torch.Tensor.bincount)


SPLIT = (torch.split, torch.Tensor.split, torch.functional.split)
JOINED = (torch.cat, torch.concat, torch.concatenate, torch.vstack)
TAKEN_APART = (torch.Tensor.__getitem__, torch.Tensor.unbind, torch.unbind)
SUMMED = (torch.Tensor.cumsum, torch.cumsum)
Element = tuple[torch.fx.Node, int]


class GroupedRows:
    """Handler of grouped products, of counts of a known number, and of parts of rows by counts."""

    def __init__(self) -> None:
        self.parts: dict[str, tuple[torch.Tensor, int, int]] = {}
        """By torch's name of the number of rows of a part: the group of each place, which group it is, of how many."""
        self.running = RunningCounts()

    def __call__(self, func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        """Handle a call of torch."""
        self.running.note(func, args)
        answer: Any = None
        if func in GROUPED:
            answer = _product(*args, **kwargs)
        elif func in COUNTED:
            answer = _counts(*args, **kwargs)
        elif func in SPLIT:
            answer = self._split(*args, **kwargs)
        elif func in JOINED:
            answer = self._joined(*args, **kwargs)
        elif func is torch.Tensor.__getitem__ and isinstance(args[1], slice):
            answer = _all_of(args[0], args[1])
            answer = self._between(args[0], args[1]) if answer is None else answer
        elif func is torch.Tensor.__setitem__ and isinstance(args[1], slice):
            mask = self._mask_between(args[0], args[1])
            return PASS if mask is None else func(args[0], mask, args[2])
        elif func is torch.Tensor.numpy and depends_on_data(args[0]):
            answer = as_numbers(args[0])
        return PASS if answer is None else answer

    def _split(
        self, tensor: torch.Tensor, split_size_or_sections: object = None, dim: int = 0, **options: PyTree
    ) -> PyTree:
        """Compute ``torch.split``, where counts say how many rows each part has; else None."""
        sizes = options.get("split_size", split_size_or_sections)
        if not isinstance(sizes, (list, tuple)) or dim != 0 or not all(isinstance(n, Read) for n in sizes):
            return None
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
        """Compute ``tensor[start:stop]`` by running counts; None of any other slice."""
        mask = self._mask_between(tensor, rows)
        if mask is None:
            return None
        part = tensor[mask]
        found = self.running.group_of(rows.start, rows.stop, len(tensor))
        assert found is not None
        self.parts[str(part.shape[0])] = found
        return part

    def _mask_between(self, tensor: torch.Tensor, rows: slice) -> torch.Tensor | None:
        """Return the mask of the rows between two running counts; None of any other slice."""
        if rows.step is not None or not any(isinstance(n, (Read, torch.Tensor)) for n in (rows.start, rows.stop)):
            return None
        found = self.running.group_of(rows.start, rows.stop, tensor.shape[0])
        return None if found is None else found[0] == found[1]

    def _joined(self, tensors: object, dim: int = 0, **options: PyTree) -> PyTree:
        """Compute ``torch.cat`` of all parts of a split in order; else None."""
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
    """Return all rows for ``tensor[:sum(counts)]`` of counts of data, which every call checks; else None."""
    if rows.start is not None or rows.step is not None or not isinstance(rows.stop, Read):
        return None
    if not _is_total(rows.stop.tensor):
        return None
    _check(rows.stop.tensor, len(tensor))
    return tensor


def _is_total(number: torch.Tensor) -> bool:
    """Check that a number is the sum of all elements of a list, ``sum(counts.tolist())``."""
    return _are_counts(summed(number) or ())


def _are_counts(elements: Sequence[Any]) -> bool:
    """Check that `elements` are all those of a tensor that counts how often numbers occur, in order."""
    whole = elements[0][0] if elements and elements[0] is not None else None
    if whole is None or [*elements] != [(whole, k) for k in range(whole.meta["val"].shape[0])]:
        return False
    return counted_numbers(whole) is not None


def _check(total: torch.Tensor, rows: int) -> None:
    torch.ops.autopar.taken(total == rows, site_of(), True)


def _product(
    mat_a: torch.Tensor, mat_b: torch.Tensor, *, offs: object = None, bias: object = None, out_dtype: object = None
) -> torch.Tensor | None:
    """Compute ``torch.nn.functional.grouped_mm``, with the same parameters; None for what is left as it is."""
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs is None or bias is not None:
        return None
    if out_dtype not in (None, mat_a.dtype):
        return None
    return torch.ops.autopar.expert_linear_in_order(mat_a, mat_b, offs)  # type: ignore[no-any-return]


def _counts(input: torch.Tensor, weights: object = None, minlength: int = 0) -> torch.Tensor | None:
    """Compute ``torch.bincount``, with the same parameters; None for what is left as it is."""
    if weights is not None or not minlength or input.dim() != 1 or not isinstance(input.shape[0], int):
        return None
    ones = torch.ones_like(input, dtype=torch.int64)
    return torch.zeros(minlength, dtype=torch.int64, device=input.device).scatter_add(0, input.to(torch.int64), ones)


class RunningCounts:
    """Counts of a trace whose numbers Python reads."""

    def __init__(self) -> None:
        self._seen: dict[torch.fx.Node, torch.Tensor] = {}
        """Tensors of one dim that were taken apart into their numbers, or summed up to each of them."""
        self._groups: dict[tuple[torch.fx.Node, int], torch.Tensor] = {}

    def note(self, func: object, args: PyTree) -> None:
        """Note the tensor whose numbers a call of torch takes apart or sums up."""
        if func not in TAKEN_APART + SUMMED or not args or not isinstance(args[0], torch.Tensor) or args[0].dim() != 1:
            return
        node = behind(node_of(args[0]), CASTS)
        if node is not None and (func in SUMMED or _are_integers(args[0])):
            self._seen.setdefault(node, args[0])

    def group_of(self, start: object, stop: object, rows: int) -> tuple[torch.Tensor, int, int] | None:
        """Return ``(group of each row, group between the ends, number of groups)`` of consecutive counts; else None."""
        before, until = summed(start), summed(stop)
        if before is None or not until:
            return None
        whole, n = until[0][0], len(until)
        if before != [(whole, k) for k in range(n - 1)] or until != [(whole, k) for k in range(n)]:
            return None
        counts, count = self._seen.get(whole), int(whole.meta["val"].shape[0])
        if counts is None or counted_numbers(whole) is None or not isinstance(rows, int):
            return None
        if (whole, rows) not in self._groups:
            ends = counts.to(torch.int64).cumsum(0)
            torch.ops.autopar.taken(ends[-1] == rows, site_of(), True)
            places = torch.arange(rows, device=counts.device)
            self._groups[whole, rows] = torch.searchsorted(ends, places, right=True)
        return self._groups[whole, rows], n - 1, count


def summed(number: object) -> list[Element] | None:
    """Return the elements, in order, of the tensor that a number of data is the sum of; None if it is no such sum."""
    if number is None or (isinstance(number, int) and number == 0):
        return []
    tensor = number.tensor if isinstance(number, Read) else number
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
        return None
    found: list[Element] = []
    todo: list[Any] = [node_of(tensor)]
    while todo:
        node = behind(todo.pop(), CASTS)
        if isinstance(node, int) and not isinstance(node, bool) and node == 0:
            continue
        if not isinstance(node, torch.fx.Node):
            return None
        if node.target is torch.ops.aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
            todo += node.args[:2]
            continue
        elements = _running(element_of(node))
        if elements is None:
            return None
        found += elements
    return sorted(found, key=lambda e: (e[0].name, e[1]))


def _running(element: Element | None) -> list[Element] | None:
    """Return an element of counts, or all those up to the one whose running count it is."""
    if element is None:
        return None
    whole, k = element
    total = behind(whole, CASTS)
    if isinstance(total, torch.fx.Node) and total.target is torch.ops.aten.cumsum.default:
        counts: Any = behind(total.args[0], CASTS)
        return [(counts, i) for i in range(k + 1)]
    return [(behind(whole, CASTS), k)]


class ReadNumbers:
    """The stand-in for ``counts.numpy()`` of data in a trace: it can be iterated, indexed and summed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape, self.ndim, self.size = tuple(tensor.shape), tensor.ndim, tensor.numel()

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __getitem__(self, index: PyTree) -> PyTree:
        if not isinstance(index, int):
            raise self._refused("indexed by more than a number")
        return self.tensor[index].item()

    def tolist(self) -> list[Any]:
        """Return the numbers, as Python has them."""
        return self.tensor.tolist()  # type: ignore[no-any-return]

    def cumsum(self, axis: int = 0) -> ReadNumbers:
        """Return the running sums."""
        return ReadNumbers(self.tensor.cumsum(axis))

    def sum(self) -> Any:
        """Return the sum."""
        return self.tensor.sum().item()

    def __array__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        raise self._refused("given to numpy")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refused(f"asked for '{name}'")

    def _computed(self, *_others: object) -> Any:
        raise self._refused("computed with")

    # Python looks for these on the class, so that __getattr__ would not be asked
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = _computed
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _computed  # type: ignore[assignment]

    @staticmethod
    def _refused(what: str) -> CaptureError:
        return CaptureError(
            f"a numpy array of integers that depend on data is {what}, at {site_of().partition('@')[0]}: only its "
            "numbers, its running sums (cumsum) and its sum can be followed\n  compute with the tensor instead of "
            ".numpy(), or move it out of forward(); sizes that follow from it, such as periods by which a series is "
            "folded, must be known before: give them as numbers, from the configuration or of the training data"
        )


def _are_integers(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 1 and not tensor.is_floating_point() and tensor.dtype != torch.bool


def as_numbers(tensor: object) -> Any:
    """Return ``tensor.numpy()`` as numbers; None if it is left to torch."""
    if not isinstance(tensor, torch.Tensor) or node_of(tensor) is None or not _are_integers(tensor):
        return None
    if (numbers := list_of_inputs(tensor)) is not None:
        import numpy

        return numpy.array(numbers, dtype=str(tensor.dtype).removeprefix("torch."))
    return ReadNumbers(tensor)


register(
    Handler(
        "grouped rows", "torch's grouped product takes bfloat16 alone, and parts by counts have sizes of data",
        lambda _record: GroupedRows(),
        (*GROUPED, *COUNTED, *SPLIT, *JOINED, *TAKEN_APART, *SUMMED, torch.Tensor.__setitem__, torch.Tensor.numpy),
    )
)  # fmt: skip
