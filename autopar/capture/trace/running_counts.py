"""``rows[start:end]`` of counts that depend on data: the rows of one group, where rows stand in the order of groups.

``start = 0; for i, n in enumerate(counts): end = start + n; part = rows[start:end]; start = end`` walks through rows by
their running counts. While a model is traced, such a slice is known by what its ends are sums of: all counts before one
and that one. Counts may be read as a list, as an array of numpy, or one by one, and so may their running sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autopar.capture.branches.data_branches import Read
from autopar.capture.branches.random_answers import site_of
from autopar.capture.graph.expert_counts import CASTS, counted_numbers, element_of
from autopar.capture.graph.same_masks import behind
from autopar.capture.trace.value_origins import node_of
from autopar.errors import CaptureError

TAKEN_APART = (torch.Tensor.__getitem__, torch.Tensor.unbind, torch.unbind)
SUMMED = (torch.Tensor.cumsum, torch.cumsum)
Element = tuple[torch.fx.Node, int]


class RunningCounts:
    """Counts of a trace whose numbers Python has in its hands."""

    def __init__(self) -> None:
        self._seen: dict[torch.fx.Node, torch.Tensor] = {}
        """Tensors of one dim that were taken apart into their numbers, or summed up to each of them."""
        self._groups: dict[tuple[torch.fx.Node, int], torch.Tensor] = {}

    def note(self, func: Any, args: Any) -> None:
        """A function of torch is called with these arguments."""
        if func not in TAKEN_APART + SUMMED or not args or not isinstance(args[0], torch.Tensor) or args[0].dim() != 1:
            return
        node = behind(node_of(args[0]), CASTS)
        if node is not None and (func in SUMMED or _are_integers(args[0])):
            self._seen.setdefault(node, args[0])

    def group_of(self, start: Any, stop: Any, rows: int) -> tuple[torch.Tensor, int, int] | None:
        """Where ``start`` and ``stop`` are running counts that follow each other: the group of each of the rows, int
        [rows], which group lies between them, and of how many; else None. The counts must be those of all rows, which
        is checked at every call."""
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


def summed(number: Any) -> list[Element] | None:
    """The elements, in order, of a tensor of one dim that a number of data is the sum of; none of 0, and None of what
    is no such sum."""
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
    """An element of counts, or all those up to the one whose running count it is."""
    if element is None:
        return None
    whole, k = element
    total = behind(whole, CASTS)
    if isinstance(total, torch.fx.Node) and total.target is torch.ops.aten.cumsum.default:
        counts: Any = behind(total.args[0], CASTS)
        return [(counts, i) for i in range(k + 1)]
    return [(behind(whole, CASTS), k)]


class ReadNumbers:
    """What ``counts.numpy()`` gives for integers that depend on data while a model is traced: an array that can be
    walked through, indexed and summed, and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape, self.ndim, self.size = tuple(tensor.shape), tensor.ndim, tensor.numel()

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            raise self._refused("indexed by more than a number")
        return self.tensor[index].item()

    def tolist(self) -> list[Any]:
        return self.tensor.tolist()  # type: ignore[no-any-return]

    def cumsum(self, axis: int = 0) -> ReadNumbers:
        return ReadNumbers(self.tensor.cumsum(axis))

    def sum(self) -> Any:
        return self.tensor.sum().item()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refused("given to numpy")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refused(f"asked for '{name}'")

    def _computed(self, *others: Any) -> Any:
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


def as_numbers(tensor: Any, listed: Callable[[torch.Tensor], list[int] | None]) -> Any:
    """That of ``tensor.numpy()``; None where it is left to torch.

    Args:
        listed: gives the numbers of the example, where the trace is to have these.
    """
    if not isinstance(tensor, torch.Tensor) or node_of(tensor) is None or not _are_integers(tensor):
        return None
    if (numbers := listed(tensor)) is not None:
        import numpy

        return numpy.array(numbers, dtype=str(tensor.dtype).removeprefix("torch."))
    return ReadNumbers(tensor)


__all__ = ["RunningCounts", "as_numbers", "summed"]
