"""The program of a block of routed experts: what happens to a row, as values and steps, as text, and computed.

It says for one row what :mod:`autopar.rules.experts.expert_block` does for all: products with the matrices of the row's
expert and, between them, operators that work on each row by itself.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from autopar.rules.experts.expert_by_expert import Matrices, in_turn, one_after_the_other
from autopar.rules.experts.expert_features import LOOKUP, SPLIT
from autopar.rules.experts.experts import EXPERTS
from autopar.rules.experts.stacked_columns import own_parts
from autopar.rules.local_calls import resolve
from autopar.words.trees import PyTree

ROW, EXPERT, COMMON = "row", "expert", "common"
"""What a tensor of a block is: of rows, of experts, or the same for all."""


@dataclass(frozen=True)
class Value:
    """Stands for a tensor in a step: one of the block's, then the results of its steps, counted on."""

    number: int
    out: int = 0


@dataclass(frozen=True)
class Body:
    """The program of a block of experts.

    Attributes:
        roles: the roles of the block's tensors, the expert of each row not counted.
        steps: ``(operator, args, kwargs)`` in order; the last one makes the result. The expert of each row is the
            :class:`Value` behind those with roles.
    """

    roles: tuple[str, ...]
    steps: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...]

    @property
    def text(self) -> str:
        """As it stands in a call."""
        return repr((self.roles, _written(self.steps)))


def _written(value: PyTree) -> PyTree:
    """Write a Python literal; tensors and dtypes become dicts with one entry, which nothing else does."""
    if isinstance(value, Value):
        return {VALUE: (value.number, value.out)}
    if isinstance(value, torch.dtype):
        return {DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_written, value))
    return {name: _written(x) for name, x in value.items()} if isinstance(value, dict) else value


def _read(value: PyTree) -> PyTree:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_read, value))
    if not isinstance(value, dict):
        return value
    if VALUE in value:
        return Value(*value[VALUE])
    return getattr(torch, value[DTYPE]) if DTYPE in value else {name: _read(x) for name, x in value.items()}


VALUE, DTYPE = "$", "torch"


@lru_cache(maxsize=1024)
def body_of(text: str) -> Body:
    """Parse :attr:`Body.text`."""
    roles, steps = ast.literal_eval(text)
    return Body(roles, _read(steps))


def in_double_precision(text: str) -> str:
    """Return the block in float64, with its casts to lower precision."""
    for low in ("float32", "bfloat16", "float16"):
        text = text.replace(repr({DTYPE: low}), repr({DTYPE: "float64"}))
    return text


def computed(tensors: Sequence[torch.Tensor], body: Body, axis: str | None = None) -> torch.Tensor:
    """Compute a block, [rows features]: rows are put in the order of their experts once, and back.

    Args:
        tensors: as the block has them, the expert of each row last; rows of an expert below 0, or of the number of
            experts and above, take part in no product, and become zero.
    """
    *given, expert = tensors
    weight = given[body.roles.index(EXPERT)]
    order, ends, expert = torch.ops.autopar.by_expert(expert, weight.detach())
    if axis is None and in_turn(given, expert.shape[0], weight.shape[0]):
        made = _in_turn(given, body, order, ends)
        if made is not None:
            return torch.ops.autopar.in_order_of_rows(made, order)  # type: ignore[no-any-return]
    values: list[PyTree] = [
        torch.ops.autopar.in_order_of_experts(x, order) if role == ROW else x
        for x, role in zip(given, body.roles, strict=True)
    ]
    values.append(expert)
    value = partial(_value, values)
    for target, args, kwargs in body.steps:
        if target == SPLIT and (x := value(args[0])).shape[args[2]] != sum(args[1]):
            assert axis is not None
            values.append(own_parts(x, len(args[1]), args[2] % x.dim(), axis))
        elif target == EXPERTS:
            rows, weight, _ = args
            values.append(torch.ops.autopar.expert_linear_in_order(value(rows), value(weight), ends))
        else:
            values.append(resolve(target)(*map(value, args), **{k: value(x) for k, x in kwargs.items()}))
    return torch.ops.autopar.in_order_of_rows(values[-1], order)  # type: ignore[no-any-return]


def _in_turn(given: Sequence[Any], body: Body, order: torch.Tensor, ends: torch.Tensor) -> torch.Tensor | None:
    """Compute a block on rows in the order of their experts, expert by expert."""
    products = [step[1][1].number for step in body.steps if step[0] == EXPERTS]
    others = [step[1:] for step in body.steps if step[0] not in (EXPERTS, LOOKUP)]
    if any(number >= len(given) for number in products) or _reads(others, len(given)):
        return None
    matrices = {k: Matrices(given[k]) for k in products if products.count(k) == 1}
    own = {k: x.unbind(0) for k, x in enumerate(given) if body.roles[k] == EXPERT and k not in matrices}
    of_rows = [k for k, role in enumerate(body.roles) if role == ROW]
    in_order = [torch.ops.autopar.in_order_of_experts(given[k], order) for k in of_rows]

    def of_expert(rows: Sequence[torch.Tensor], e: int) -> torch.Tensor:
        values: list[PyTree] = [
            None if k in matrices else own[k][e] if k in own else x for k, x in enumerate(given)
        ]  # fmt: skip
        for k, part in zip(of_rows, rows, strict=True):
            values[k] = part
        values.append(None)  # the expert of each row
        value = partial(_value, values)
        for target, args, kwargs in body.steps:
            if target == EXPERTS:
                k = args[1].number
                left = value(args[0])
                values.append(matrices[k].product(left, e) if k in matrices else torch.mm(left, own[k][e]))
            elif target == LOOKUP:
                values.append(value(args[0]).unsqueeze(0).expand(len(rows[0]), -1))
            else:
                values.append(resolve(target)(*map(value, args), **{k: value(x) for k, x in kwargs.items()}))
        return values[-1]  # type: ignore[no-any-return]

    return one_after_the_other(in_order, ends, of_expert)


def _value(values: Sequence[PyTree], x: torch.Tensor) -> PyTree:
    """Return an argument of a step, with the results of earlier steps filled in."""
    if isinstance(x, Value):
        result = values[x.number]
        return result[x.out] if isinstance(result, (tuple, list)) else result
    return type(x)(_value(values, each) for each in x) if isinstance(x, (list, tuple)) else x


def _reads(value: PyTree, number: int) -> bool:
    """Check whether arguments contain the value of step ``number``."""
    if isinstance(value, Value):
        return value.number == number
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(_reads(x, number) for x in inside)
