"""A run of the model on its example, which records what its Python code is told of the values of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.capture.branches.data_branches import (
    COMPARED,
    DISTINCT,
    INDEXED,
    LIST,
    NUMBER,
    NUMBERS,
    OF_ROWS,
    PLACES,
    REPEATED,
    SAME,
    asked_for_rows_only,
    can_be_listed,
    is_integer,
    masks_in,
    place_of_question,
    times_of,
)
from autopar.capture.branches.masks import MaskQuestions
from autopar.capture.branches.numbers_given import with_numbers
from autopar.capture.branches.random_answers import site_of
from autopar.capture.branches.unknown_numbers import DIGITS, Drawn, checked
from autopar.capture.python.restoring import generators_kept, kept
from autopar.capture.trace.decisions import Answers
from autopar.torch_private import DisableTorchFunction, FakeTensor, pytree
from autopar.words.trees import PyTree


def answers_of(module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, PyTree]) -> Answers:
    """Run ``module(*args, **kwargs)`` and return what it answered; nothing where tensors have no values.

    The module is left as it was.
    """
    tensors = [*module.parameters(), *module.buffers(), *pytree.tree_leaves((args, kwargs))]
    if any(isinstance(t, torch.Tensor) and (t.is_meta or isinstance(t, FakeTensor)) for t in tensors):
        return Answers()
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), (tuple(args), dict(kwargs))
    )
    recorded, before = _Recording(), _versions(module)
    with kept(module), generators_kept(), torch.enable_grad(), checked():
        with recorded:
            module(*args, **kwargs)
        steady = frozenset(name for name, version in _versions(module).items() if before.get(name) == version)
    answers = {site: [recorded.masks.answers.get(site, a) for a in given] for site, given in recorded.answers.items()}
    return Answers({**answers, **recorded.always_listed()}, listed=recorded.listed, steady=steady, observed=True)


def _versions(module: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Return the identity of each buffer, and how often it was written to."""
    return {name: (id(buffer), buffer._version) for name, buffer in module.named_buffers()}


class _Known(Drawn):
    """The result of ``tensor.item()`` while answers are recorded: the number, whose comparisons are recorded too."""

    def digits(self) -> Any:
        with DisableTorchFunction():
            return self.tensor.item()

    def __hash__(self) -> int:
        return hash(self.digits())

    def __repr__(self) -> str:
        return repr(self.digits())


def _of_digits(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.digits(), name)(*args)


for _name in DIGITS:
    setattr(_Known, _name, _of_digits(_name))


def _of_tensors(func: Any, args: Sequence[PyTree]) -> bool:
    """Check that a comparison of two tensors asks for their values: those of other shapes are not the same anyway."""
    return len(args) > 1 and (func not in SAME or args[0].shape == args[1].shape)


class _Recording(TorchFunctionMode):
    """The mode that records what Python is told about the truth of tensors, by the place that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, list[bool]] = {}
        self.masks = MaskQuestions()
        self.listed: dict[str, list[Any]] = {}

    def recorded(self, tensor: torch.Tensor) -> bool:
        """Return the answer, recorded by the place that asks."""
        return self._heard_at(place_of_question(), tensor)

    def _heard_at(self, place: str, tensor: torch.Tensor) -> bool:
        with DisableTorchFunction():
            answer = bool(tensor.item())
        self.answers.setdefault(place, []).append(answer)
        return answer

    def _array(self, tensor: torch.Tensor) -> Any:
        """Return ``tensor.numpy()`` with numbers whose comparisons are recorded, unless branches only work on rows."""
        import numpy

        def recorded(answer: torch.Tensor) -> bool:
            with DisableTorchFunction():
                return bool(answer.item()) if asked_for_rows_only() else self.recorded(answer)

        with DisableTorchFunction():
            self.listed.setdefault(site_of() + LIST, []).append(tensor.tolist())
            numbers = [_Known(number, recorded) for number in tensor.unbind()]
        array = numpy.empty(len(numbers), dtype=object)
        array[:] = numbers
        return array

    def _numbers(self, tensor: torch.Tensor) -> Any:
        """Return ``tensor.tolist()``, with numbers whose comparisons are recorded."""
        if not tensor.dim():
            return _Known(tensor, self.recorded)
        with DisableTorchFunction():
            rows = tensor.unbind()
        return [self._numbers(row) for row in rows]

    def _number(self, tensor: torch.Tensor) -> int:
        self.listed.setdefault(site_of() + NUMBER, []).append(tensor.tolist())
        return int(tensor)

    def always_listed(self) -> dict[str, list[bool]]:
        """Return the places at which the same integers were read each time."""
        return {site: [True] for site, lists in self.listed.items() if all(each == lists[0] for each in lists)}

    def __torch_function__(self, func: Any, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        if func is torch.Tensor.__bool__ and args[0].numel() == 1:
            place = place_of_question()
            answer = self._heard_at(place, args[0])
            if place.endswith(OF_ROWS):
                self.masks.asked(args[0], place, answer)
            return answer
        if func in COMPARED and _of_tensors(func, args):
            with DisableTorchFunction():
                same = func(*args, **(kwargs or {}))
            self.answers.setdefault(place_of_question(), []).append(same)
            return same
        if func is torch.Tensor.tolist and can_be_listed(args[0]):
            with DisableTorchFunction():
                answer = args[0].tolist()
            self.listed.setdefault(site_of() + LIST, []).append(answer)
            return answer
        if func is torch.Tensor.tolist:
            return self._numbers(args[0])
        if func is torch.Tensor.numpy and args[0].ndim == 1 and can_be_listed(args[0]):
            return self._array(args[0])
        if func in DISTINCT:
            with DisableTorchFunction():
                values = func(*args, **(kwargs or {}))
                n = len(values[0] if isinstance(values, tuple) else values)
                self.listed.setdefault(site_of() + LIST, []).append([n])
            return values
        if func in REPEATED and (times := times_of(args, kwargs or {})) is not None:
            with DisableTorchFunction():
                self.listed.setdefault(site_of() + LIST, []).append([int(times.sum())])
        with DisableTorchFunction():
            if (func in NUMBERS or func is torch.Tensor.__format__) and is_integer(args[0]):
                self._number(args[0])
            with_numbers(func, args, kwargs or {}, self._number)
            for mask in masks_in(args[1]) if func in INDEXED else ():
                self.listed.setdefault(site_of() + PLACES, []).append(mask.tolist())
        if func is torch.Tensor.item and args[0].numel() == 1:
            return _Known(args[0], self.recorded)
        result = func(*args, **(kwargs or {}))
        self.masks.computed(func, args, result)
        return result
