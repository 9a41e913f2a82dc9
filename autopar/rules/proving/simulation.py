"""torch's simulation of many ranks in one process, without most of its overhead.

A ``LocalTensor`` holds one piece per rank, and torch asks it in Python for its sizes, strides and offset whenever C++
wants to know them: two of three calls that reach its dispatcher. Each of these entered a mode of its own, which patches
the device mesh, copies the random state once per rank and runs the question through the general path of operators. Here
they are answered at once from the pieces. Answers, and everything else, are torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autopar.torch_private import LocalIntNode, LocalTensor, LocalTensorMode
from autopar.words.trees import PyTree

aten = torch.ops.aten


def _of_all_ranks(numbers: Sequence[Any], ranks: Sequence[int]) -> Any:
    """Return one number if all ranks have the same, else torch's integer with one per rank."""
    if all(n == numbers[0] for n in numbers):
        return numbers[0]
    return torch.SymInt(LocalIntNode(dict(zip(ranks, numbers, strict=True))))


def _sizes(x: LocalTensor) -> tuple[Any, ...]:
    return tuple(x._size)


def _dims(x: LocalTensor) -> int:
    return len(x._size)


def _strides(x: LocalTensor) -> tuple[Any, ...]:
    pieces = x._local_tensors
    strides = [piece.stride() for piece in pieces.values()]
    if all(of_rank == strides[0] for of_rank in strides):
        return strides[0]
    return tuple(_of_all_ranks(dim, [*pieces]) for dim in zip(*strides, strict=True))


def _offset(x: LocalTensor) -> Any:
    return _of_all_ranks([piece.storage_offset() for piece in x._local_tensors.values()], [*x._local_tensors])


QUESTIONS: dict[Any, Callable[[LocalTensor], Any]] = {
    aten.sym_size.default: _sizes,
    aten.sym_stride.default: _strides,
    aten.sym_storage_offset.default: _offset,
    aten.dim.default: _dims,
}
"""What is asked of a tensor that is in pieces, and how it is answered."""


class Simulation(LocalTensorMode):
    """``LocalTensorMode`` that answers :data:`QUESTIONS` at once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        answer = QUESTIONS.get(func)
        if answer is not None and type(args[0]) is LocalTensor:
            return answer(args[0])
        if func is aten._conj.default and isinstance(args[0], complex):
            # of a number beside a tensor (``1j * x``), for its gradient; torch looks for memory that is shared with it
            return torch.tensor(args[0].conjugate(), dtype=torch.complex128)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if type(result) is LocalTensor and any(x.layout is torch.sparse_coo for x in result._local_tensors.values()):
            # the gradient of an embedding made with sparse=True: torch takes it for a strided tensor, as it does all
            # that are in pieces; on ranks it becomes dense when it is added up
            return LocalTensor({rank: x.to_dense() for rank, x in result._local_tensors.items()})
        return result


def _dispatch(cls: type, func: Any, types: Any, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
    """Dispatch for a ``LocalTensor`` outside of its mode, which happens within the mode's own work."""
    answer = QUESTIONS.get(func)
    return answer(args[0]) if answer is not None else _ORIGINAL.__func__(cls, func, types, args, kwargs)


_ORIGINAL = LocalTensor.__dict__["__torch_dispatch__"]


@contextlib.contextmanager
def simulation(n: int) -> Iterator[None]:
    """Simulate ``n`` ranks in this process."""
    LocalTensor.__torch_dispatch__ = classmethod(_dispatch)  # type: ignore[assignment, method-assign]
    try:
        with Simulation(n):
            yield
    finally:
        LocalTensor.__torch_dispatch__ = _ORIGINAL  # type: ignore[method-assign]
