"""What Python code asks of tensors while it is traced, and the answers that it gets."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

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
    is_integer,
    masks_in,
    take,
    take_list,
    times_of,
)
from autopar.capture.branches.numbers_given import with_numbers
from autopar.capture.branches.random_answers import ask, refused
from autopar.capture.branches.unknown_numbers import Drawn
from autopar.capture.repeats.repeated import BLOCK
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
from autopar.torch_private import (
    FakeTensor,
    OpOverload,
)


class AnswerConstants(TorchFunctionMode):
    """Answers ``bool(t)``, ``t.item()``, ``int(t)`` for tensors that do not depend on data.

    What selects elements by a mask that does not depend on data has as many as the mask has set:
    ``x[~torch.eye(n).bool()]`` reads the places that are found so.

    Of random numbers ``bool(t)`` is a question with two answers (:mod:`autopar.capture.branches`), of data one whose
    answer is checked at every call; and ``t.item()`` is a number that is not known yet.
    """

    ASKED = (
        torch.Tensor.__bool__,
        torch.Tensor.item,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.Tensor.tolist,
    )

    SELECT = (torch.select, torch.Tensor.select)
    WHERE = (torch.where, torch.Tensor.where)
    PLACES = (torch.nonzero, torch.Tensor.nonzero, *WHERE)
    SELECTED = (torch.masked_select, torch.Tensor.masked_select)
    OF_LISTS = (torch.tensor, torch.as_tensor, torch.asarray)

    def __init__(self, held: Callable[[], Iterable[torch.Tensor]] = tuple) -> None:
        """``held`` gives the parameters, and the buffers that change, of what is traced, as they are then."""
        super().__init__()
        self.held = held

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.ASKED and args:
            constant = constant_value(args[0], lambda t: func(t, *args[1:]))
            if constant is not None:
                return constant
            drawn = drawn_by(args[0])
            if drawn:
                answer = _not_known(func, args[0], ask, Drawn)
                if answer is None:
                    raise refused("as a number that must be known", drawn[0])
                return answer
            if isinstance(args[0], FakeTensor):
                if func in NUMBERS and (number := self._number_of_inputs(args[0])) is not None:
                    return number
                answer = _not_known(func, args[0], take, Read)
                return func(*args) if answer is None else answer
        if func is torch.Tensor.__format__ and (number := self._written_out(args[0])) is not None:
            return format(number, *args[1:])
        args, kwargs = with_numbers(func, args, kwargs or {}, self._number_known)
        if func in REPEATED and (size := self._size_of_repeated(times_of(args, kwargs))) is not None:
            kwargs = {**kwargs, "output_size": size}
        if func in SAME and len(args) == 2 and any(isinstance(a, FakeTensor) for a in args):
            return args[0].shape == args[1].shape and self._truth((args[0] == args[1]).all())
        as_it_is = func is not torch.tensor and isinstance(args[0] if args else None, torch.Tensor)  # with its gradient
        if func in self.OF_LISTS and len(args) == 1 and not as_it_is and _has_numbers_of_data(args[0]):
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            wanted = kwargs.pop("requires_grad", False)
            return _stacked(args[0]).detach().to(**kwargs).requires_grad_(wanted)
        if func in self.OF_LISTS and len(args) == 1 and isinstance(args[0], (list, tuple)) and are_numbers(args[0]):
            made = func(*args, **kwargs)
            note_made_of_numbers(made)
            return made
        if func in COMPARED and any(isinstance(a, FakeTensor) for a in args):
            return self._truth(torch.isclose(*args, **kwargs).all())
        if func in DISTINCT and (values := distinct(func, args, kwargs, self._how_many)) is not None:
            return values
        if func in self.SELECT and not kwargs and (found := selected(args)) is not None:
            return found
        if func in INDEXED:
            one = at_one_place(args[0], args[1], lambda part: constant_value(part) is not None)
            if one is not None:
                return read_at(*one) if func is torch.Tensor.__getitem__ else write_at(*one, args[2])
            index = _joined(args[1]) if _has_numbers_of_data(args[1]) else args[1]
            return func(args[0], _places(index, self._places_of_inputs), *args[2:])
        if func in self.PLACES and args and (places := _places_set(args[0])) is not None:
            rest = {name: value for name, value in kwargs.items() if name != "as_tuple"}
            if func in self.WHERE and len(args) == 1 and not rest:
                return places.unbind(1)
            if func not in self.WHERE and len(args) == 1 and not rest:
                return places.unbind(1) if kwargs.get("as_tuple") else places
        if func in self.SELECTED and len(args) == 2 and not kwargs and _places_set(args[1]) is not None:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return args[0].expand(shape)[_places(args[1].expand(shape))]
        return func(*args, **kwargs)

    def _written_out(self, tensor: torch.Tensor) -> Any:
        """The number that ``f"{tensor}"`` writes; None where it is not known."""
        if not isinstance(tensor, FakeTensor) or tensor.dim():
            return None
        number = constant_value(tensor, lambda value: value.item())
        return self._number_of_inputs(tensor) if number is None else number

    @contextlib.contextmanager
    def lists(self) -> Iterator[None]:
        """In here ``tensor.tolist()`` of integers that follow from inputs is those of the example, and a check: a
        tensor without values takes it apart into numbers before a mode hears of it."""
        in_parts = FakeTensor.tolist

        def tolist(tensor: FakeTensor) -> Any:
            listed = self.list_of_inputs(tensor) if constant_value(tensor) is None else None
            return in_parts(tensor) if listed is None else listed

        with mock.patch.object(FakeTensor, "tolist", tolist):
            yield

    def list_of_inputs(self, tensor: torch.Tensor) -> Any:
        """The integers of the example, and a check, where they follow from inputs; None where they are not known, or it
        was not tried yet to do without."""
        return take_list(tensor) if can_be_listed(tensor) and self._of_inputs(tensor) else None

    def _size_of_repeated(self, times: torch.Tensor | None) -> int | None:
        """How many elements there are, where each is repeated so often; None where that is not known."""
        if not isinstance(times, FakeTensor):
            return None
        known = constant_value(times, lambda value: int(value.sum()))
        if known is not None or not self._of_inputs(times):
            return known
        total = take_list(times.sum().reshape(1))
        return None if total is None else int(total[0])

    def _how_many(self, mask: torch.Tensor) -> int | None:
        """How many elements of a mask are set; None where that is not known."""
        if not isinstance(mask, FakeTensor):
            return None
        n = constant_value(mask, lambda value: int(value.count_nonzero()))
        if n is not None or not self._of_inputs(mask, of_integers=True):
            return n
        total = take_list(mask.sum().reshape(1))
        return None if total is None else int(total[0])

    def _number_known(self, tensor: torch.Tensor) -> int | None:
        """That of an integer which torch would read, where it depends on no data, or as :meth:`_number_of_inputs`."""
        if not isinstance(tensor, FakeTensor):
            return None
        constant = constant_value(tensor, int)
        number = self._number_of_inputs(tensor) if constant is None else constant
        return number if number is None or isinstance(number, int) else int(number[0])

    def _number_of_inputs(self, tensor: torch.Tensor) -> int | None:
        """That of the example, where an integer follows from integers that are given, and nothing else helps."""
        return take_list(tensor, NUMBER) if is_integer(tensor) and self._of_inputs(tensor, of_integers=True) else None

    def _places_of_inputs(self, mask: torch.Tensor) -> torch.Tensor | None:
        """``mask.nonzero()`` of the example, where a mask follows from given integers, and nothing else helps.

        So may one of other numbers that leaves nothing out, such as which pictures of a batch are not padding; of one
        that leaves something out the next batch would hardly have the same.
        """
        of_integers, listed = self._of_inputs(mask, of_integers=True), None
        if of_integers or self._of_inputs(mask):
            listed = take_list(mask, PLACES, (lambda answer: True) if of_integers else _leaves_nothing_out)
        if listed is None:
            return None
        return torch.tensor(_set_in(listed), dtype=torch.int64, device=mask.device).reshape(-1, mask.dim())

    def _of_inputs(self, tensor: torch.Tensor, of_integers: bool = False) -> bool:
        """Whether a tensor follows from what the model is called with alone, not from what it holds: a pointer into a
        queue is another number at each call. ``of_integers``: and from no other numbers than integers."""
        in_attributes = {beginning(node) for t in self.held() if (node := node_of(t)) is not None}
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

    def _truth(self, tensor: torch.Tensor) -> Any:
        """That of a tensor that follows from others."""
        return self.__torch_function__(torch.Tensor.__bool__, (), (tensor,))


def _is_given_floats(node: torch.fx.Node) -> bool:
    """Whether numbers begin there that are no integers: what is given, or drawn."""
    drawn = isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    value = node.meta.get("val")
    return drawn or (node.op == "placeholder" and isinstance(value, torch.Tensor) and value.is_floating_point())


def _leaves_nothing_out(mask: Any) -> bool:
    return all(map(_leaves_nothing_out, mask)) if isinstance(mask, list) else bool(mask)


def _not_known(
    func: Any, tensor: torch.Tensor, truth: Callable[[torch.Tensor], bool], number: type[Drawn]
) -> Any:
    """What Python gets of a tensor whose values are not known yet; None where it wants to have them in its hands."""
    if func is torch.Tensor.__bool__:
        return truth(tensor)
    if func is torch.Tensor.item and tensor.numel() == 1:
        return number(tensor)
    return _listed(tensor, number) if func is torch.Tensor.tolist else None


def _listed(tensor: torch.Tensor, number: type[Drawn]) -> Any:
    return [_listed(x, number) for x in tensor.unbind()] if tensor.dim() else number(tensor)


def _has_numbers_of_data(values: Any) -> bool:
    """Whether a nested list has tensors without dims in it whose values are not known while they are traced."""
    if isinstance(values, (list, tuple)):
        return any(map(_has_numbers_of_data, values))
    return isinstance(values, Drawn) or (isinstance(values, FakeTensor) and not values.dim())


def _stacked(values: Any) -> torch.Tensor:
    """``torch.tensor(values)`` of a nested list of numbers and tensors without dims."""
    if isinstance(values, (list, tuple)):
        rows = [_stacked(row) for row in values]
        dtype = functools.reduce(torch.promote_types, (row.dtype for row in rows))
        return torch.stack([row.to(dtype) for row in rows])
    if isinstance(values, Drawn):  # a number of Python's, of which torch makes a tensor of its default dtype
        number = values.tensor
        return number.to(torch.get_default_dtype()) if number.is_floating_point() else number
    return values if isinstance(values, torch.Tensor) else torch.full((), values)


def _joined(index: Any) -> Any:
    """An index of several dims in which lists and tuples of tensors without dims are tensors: ``x[rows, columns]``."""

    def joined(part: Any) -> Any:
        return _stacked(part) if isinstance(part, (list, tuple)) and _has_numbers_of_data(part) else part

    return tuple(map(joined, index)) if isinstance(index, tuple) else index


def _places(index: Any, of_inputs: Callable[[torch.Tensor], torch.Tensor | None] = lambda mask: None) -> Any:
    """An index in which masks that do not depend on data are the places that they have set, and so are those of which
    ``of_inputs`` says them."""
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


def _set_in(mask: Any, at: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """The places of a nested list at which it is true; of plain numbers, which no trace sees."""
    if not isinstance(mask, list):
        return [at] if mask else []
    return [place for i, part in enumerate(mask) for place in _set_in(part, (*at, i))]


def _places_set(tensor: Any) -> torch.Tensor | None:
    """``tensor.nonzero()`` of a tensor of the trace that does not depend on data, whose size is known so; None of any
    other. It is found anew in each run, where the tensor is made."""
    if not isinstance(tensor, FakeTensor):
        return None
    n = constant_value(tensor, lambda value: int(value.count_nonzero()))
    return None if n is None else torch.nonzero_static(tensor, size=n)


__all__ = ["AnswerConstants"]
