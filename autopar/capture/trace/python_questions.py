"""Python's questions for the values of tensors in a trace, and the answers that it gets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from autopar.capture.branches.data_branches import (
    COMPARED,
    DISTINCT,
    INDEXED,
    NUMBER,
    NUMBERS,
    PLACES,
    REPEATED,
    SAME,
    Read,
    can_be_listed,
    changing_tensors,
    is_integer,
    masks_in,
    take,
    take_list,
    times_of,
)
from autopar.capture.branches.numbers_given import READING_NUMBERS, with_numbers
from autopar.capture.branches.random_answers import ask, refused
from autopar.capture.branches.unknown_numbers import Drawn
from autopar.capture.repeats.repeated import BLOCK
from autopar.capture.trace.patches import PASS, Args, Function, Handle, Kwargs
from autopar.capture.trace.row_by_number import at_one_place, read_at, selected, write_at
from autopar.capture.trace.unique_values import distinct
from autopar.capture.trace.value_origins import (
    OF_THE_SHAPE,
    are_numbers,
    beginning,
    constant_value,
    drawn_by,
    node_of,
    note_made_of_numbers,
)
from autopar.torch_private import FakeTensor, OpOverload
from autopar.words.trees import PyTree


class Questions:
    """Handler of ``bool(t)``, ``t.item()``, ``int(t)`` and of all other functions that read values of tensors.

    Values that do not depend on data are computed. What selects elements by a mask that does not depend on data has as
    many as the mask has set: ``x[~torch.eye(n).bool()]`` reads the places that are found so. Of random numbers
    ``bool(t)`` is a question with two answers (:mod:`autopar.capture.branches`), of data one whose answer is checked at
    every call; and ``t.item()`` is a number that is not known yet.
    """

    ASKED = (
        torch.Tensor.__bool__, torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__float__,
        torch.Tensor.__index__, torch.Tensor.tolist,
    )  # fmt: skip

    WHERE = (torch.where, torch.Tensor.where)

    def __init__(self) -> None:
        self._table: dict[Function, Handle] = {}
        for functions, handle in (
            (self.ASKED, self._asked), ((torch.Tensor.__format__,), self._formatted), (REPEATED, self._repeated),
            (COMPARED, self._compared), (SAME, self._same), (DISTINCT, self._distinct),
            ((torch.tensor, torch.as_tensor, torch.asarray), self._of_list),
            ((torch.select, torch.Tensor.select), self._selected), (INDEXED, self._indexed),
            ((*self.WHERE, torch.nonzero, torch.Tensor.nonzero), self._places),
            ((torch.masked_select, torch.Tensor.masked_select), self._masked),
        ):  # fmt: skip
            self._table.update(dict.fromkeys(functions, handle))
        self.functions: frozenset[Function] = frozenset({*self._table, *READING_NUMBERS})

    def __call__(self, func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        """Handle a call of torch."""
        if func not in self.ASKED:
            args, kwargs = with_numbers(func, args, kwargs, _number_known)
        handle = self._table.get(func)
        answer = PASS if handle is None else handle(func, args, kwargs)
        return func(*args, **kwargs) if answer is PASS else answer

    def _asked(self, func: Function, args: Args, _kwargs: Kwargs) -> PyTree:
        if not args:
            return PASS
        constant = constant_value(args[0], lambda t: func(t, *args[1:]))
        if constant is not None:
            return constant
        if drawn := drawn_by(args[0]):
            answer = _not_known(func, args[0], ask, Drawn)
            if answer is None:
                raise refused("as a number that must be known", drawn[0])
            return answer
        if not isinstance(args[0], FakeTensor):
            return PASS
        if func in NUMBERS and (number := _number_of_inputs(args[0])) is not None:
            return number
        answer = _not_known(func, args[0], take, Read)
        return func(*args) if answer is None else answer

    def _formatted(self, _func: Function, args: Args, _kwargs: Kwargs) -> PyTree:
        number = None
        if isinstance(args[0], FakeTensor) and not args[0].dim():
            number = constant_value(args[0], lambda value: value.item())
            number = _number_of_inputs(args[0]) if number is None else number
        return PASS if number is None else format(number, *args[1:])

    def _repeated(self, func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        size = _sum_known(times_of(args, kwargs))
        return PASS if size is None else func(*args, **{**kwargs, "output_size": size})

    def _same(self, _func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        if len(args) != 2 or not any(isinstance(a, FakeTensor) for a in args):
            return self._compared(_func, args, kwargs)
        return args[0].shape == args[1].shape and self._truth((args[0] == args[1]).all())

    def _compared(self, _func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        if not any(isinstance(a, FakeTensor) for a in args):
            return PASS
        return self._truth(torch.isclose(*args, **kwargs).all())

    def _of_list(self, func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        as_it_is = func is not torch.tensor and isinstance(args[0] if args else None, torch.Tensor)  # with its gradient
        if len(args) == 1 and not as_it_is and _has_numbers_of_data(args[0]):
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            wanted = kwargs.pop("requires_grad", False)
            return _stacked(args[0]).detach().to(**kwargs).requires_grad_(wanted)
        if len(args) == 1 and isinstance(args[0], (list, tuple)) and are_numbers(args[0]):
            made = func(*args, **kwargs)
            note_made_of_numbers(made)
            return made
        return PASS

    def _distinct(self, func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        values = distinct(func, args, kwargs, lambda mask: _sum_known(mask, of_integers=True))
        return PASS if values is None else values

    def _selected(self, _func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        found = None if kwargs else selected(args)
        return PASS if found is None else found

    def _indexed(self, func: Function, args: Args, _kwargs: Kwargs) -> PyTree:
        one = at_one_place(args[0], args[1], lambda part: constant_value(part) is not None)
        if one is not None:
            return read_at(*one) if func is torch.Tensor.__getitem__ else write_at(*one, args[2])
        index = _joined(args[1]) if _has_numbers_of_data(args[1]) else args[1]
        return func(args[0], _places(index, _places_of_inputs), *args[2:])

    def _places(self, func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        places = _places_set(args[0]) if args else None
        if places is None or len(args) != 1 or kwargs.keys() - {"as_tuple"}:
            return PASS
        return places.unbind(1) if func in self.WHERE or kwargs.get("as_tuple") else places

    def _masked(self, _func: Function, args: Args, kwargs: Kwargs) -> PyTree:
        if len(args) != 2 or kwargs or _places_set(args[1]) is None:
            return PASS
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return args[0].expand(shape)[_places(args[1].expand(shape))]

    def _truth(self, tensor: torch.Tensor) -> Any:
        """Return the truth of a tensor that follows from others."""
        answer = self._asked(torch.Tensor.__bool__, (tensor,), {})
        return bool(tensor) if answer is PASS else answer


@contextlib.contextmanager
def lists_of_inputs() -> Iterator[None]:
    """Make ``tensor.tolist()`` of integers that follow from inputs those of the example, with a check.

    A tensor without values takes it apart into numbers before a mode is notified.
    """
    in_parts = FakeTensor.tolist

    def tolist(tensor: FakeTensor) -> Any:
        listed = list_of_inputs(tensor) if constant_value(tensor) is None else None
        return in_parts(tensor) if listed is None else listed

    with mock.patch.object(FakeTensor, "tolist", tolist):
        yield


def list_of_inputs(tensor: torch.Tensor) -> Any:
    """Return the example's integers, with a check, where they follow from inputs and the lists are fixed; else None."""
    return take_list(tensor) if can_be_listed(tensor) and _of_inputs(tensor) else None


def _sum_known(counts: torch.Tensor | None, of_integers: bool = False) -> int | None:
    """Return the sum of integers or of a mask that is known, or fixed to that of the example; else None."""
    if not isinstance(counts, FakeTensor):
        return None
    known = constant_value(counts, lambda value: int(value.sum()))
    if known is not None or not _of_inputs(counts, of_integers):
        return known  # type: ignore[no-any-return]
    total = take_list(counts.sum().reshape(1))
    return None if total is None else int(total[0])


def _number_known(tensor: torch.Tensor) -> int | None:
    """Return an integer that torch would read, where it depends on no data, or as :func:`_number_of_inputs` does."""
    if not isinstance(tensor, FakeTensor):
        return None
    constant = constant_value(tensor, int)
    number = _number_of_inputs(tensor) if constant is None else constant
    return number if number is None or isinstance(number, int) else int(number[0])


def _number_of_inputs(tensor: torch.Tensor) -> int | None:
    """Return the example's number, where an integer follows from given integers and numbers are fixed; else None."""
    known = is_integer(tensor) and _of_inputs(tensor, of_integers=True)
    return take_list(tensor, NUMBER) if known else None  # type: ignore[no-any-return]


def _places_of_inputs(mask: torch.Tensor) -> torch.Tensor | None:
    """Return the example's ``mask.nonzero()``, where a mask follows from given integers and masks are fixed.

    So may a mask of other numbers that leaves nothing out, such as which pictures of a batch are not padding; of one
    that leaves something out the next batch would hardly have the same.
    """
    of_integers, listed = _of_inputs(mask, of_integers=True), None
    if of_integers or _of_inputs(mask):
        listed = take_list(mask, PLACES, (lambda _answer: True) if of_integers else _leaves_nothing_out)
    if listed is None:
        return None
    return torch.tensor(_set_in(listed), dtype=torch.int64, device=mask.device).reshape(-1, mask.dim())


def _of_inputs(tensor: torch.Tensor, of_integers: bool = False) -> bool:
    """Check that a tensor follows from the arguments of the call alone, not from what the module holds.

    A pointer into a queue is another number at each call.

    ``of_integers``: and from no other numbers than integers.
    """
    in_attributes = {beginning(node) for t in changing_tensors() if (node := node_of(t)) is not None}
    todo, seen = [node_of(tensor)], set[torch.fx.Node]()
    while todo:
        node = todo.pop()
        if node is None or node in in_attributes or node.target is BLOCK:
            return False
        if of_integers and _is_given_floats(node):
            return False
        if node not in seen:
            seen.add(node)
            read = node.all_input_nodes
            todo.extend(read[1:] if str(node.target) in OF_THE_SHAPE else read)
    return True


def _is_given_floats(node: torch.fx.Node) -> bool:
    """Check that numbers begin there that are no integers: given, or drawn."""
    drawn = isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    value = node.meta.get("val")
    return drawn or (node.op == "placeholder" and isinstance(value, torch.Tensor) and value.is_floating_point())


def _leaves_nothing_out(mask: object) -> bool:
    return all(map(_leaves_nothing_out, mask)) if isinstance(mask, list) else bool(mask)


def _not_known(
    func: object, tensor: torch.Tensor, truth: Callable[[torch.Tensor], bool], number: type[Drawn]
) -> Any:
    """Return Python's stand-in for a tensor with unknown values; None if it needs the values themselves."""
    if func is torch.Tensor.__bool__:
        return truth(tensor)
    if func is torch.Tensor.item and tensor.numel() == 1:
        return number(tensor)
    return _listed(tensor, number) if func is torch.Tensor.tolist else None


def _listed(tensor: torch.Tensor, number: type[Drawn]) -> Any:
    return [_listed(x, number) for x in tensor.unbind()] if tensor.dim() else number(tensor)


def _has_numbers_of_data(values: PyTree) -> bool:
    """Check that a nested list has tensors without dims in it whose values are not known."""
    if isinstance(values, (list, tuple)):
        return any(map(_has_numbers_of_data, values))
    return isinstance(values, Drawn) or (isinstance(values, FakeTensor) and not values.dim())


def _stacked(values: PyTree) -> torch.Tensor:
    """Return ``torch.tensor(values)`` of a nested list of numbers and tensors without dims."""
    if isinstance(values, (list, tuple)):
        rows = [_stacked(row) for row in values]
        dtype = functools.reduce(torch.promote_types, (row.dtype for row in rows))
        return torch.stack([row.to(dtype) for row in rows])
    if isinstance(values, Drawn):  # a number of Python's, of which torch makes a tensor of its default dtype
        number = values.tensor
        return number.to(torch.get_default_dtype()) if number.is_floating_point() else number
    return values if isinstance(values, torch.Tensor) else torch.full((), values)


def _joined(index: PyTree) -> PyTree:
    """Return an index in which lists of tensors without dims are tensors: ``x[rows, columns]``."""

    def joined(part: object) -> Any:
        return _stacked(part) if isinstance(part, (list, tuple)) and _has_numbers_of_data(part) else part

    return tuple(map(joined, index)) if isinstance(index, tuple) else index


def _places(index: PyTree, of_inputs: Callable[[torch.Tensor], torch.Tensor | None] = lambda _mask: None) -> PyTree:
    """Return an index in which masks that are known, or that ``of_inputs`` knows, are the places that they have set."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(mask, FakeTensor) for mask in masks_in(index)):
        return index
    opened: list[Any] = []
    for part in parts:
        places = None
        if any(part is mask and isinstance(mask, FakeTensor) for mask in masks_in(part)):
            places = _places_set(part)
            places = of_inputs(part) if places is None else places
        opened += [part] if places is None else places.unbind(1)
    return tuple(opened)


def _set_in(mask: object, at: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Return the places at which a nested list of plain numbers, which no trace sees, is true."""
    if not isinstance(mask, list):
        return [at] if mask else []
    return [place for i, part in enumerate(mask) for place in _set_in(part, (*at, i))]


def _places_set(tensor: object) -> torch.Tensor | None:
    """Return ``tensor.nonzero()``, found anew in each run, of a traced tensor without data in it; None of any other."""
    if not isinstance(tensor, FakeTensor):
        return None
    n = constant_value(tensor, lambda value: int(value.count_nonzero()))
    return None if n is None else torch.nonzero_static(tensor, size=n)
