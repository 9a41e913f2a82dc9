"""Which outputs of an operator share the memory of an input, as in eager mode.

Schemas say it of views; of ``reshape``, ``contiguous`` and ``to`` it depends on strides, and of ``einsum`` or inactive
dropout they say nothing. The traced values do not say it for sure: tracing decomposes some operators otherwise than
eager mode runs them, and blocks that were not traced have the values of the block which stands for them. So the
operator runs once more, on tensors without values, and equal calls are asked for once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from autopar.capture.graph.exported_nodes import flat, storage_of, without_values
from autopar.torch_private import OpOverload


class Shared(NamedTuple):
    """What one output is.

    Attributes:
        source: number of the input, among the traced node's inputs, whose memory it has; -1 for memory of its own.
        itself: it is that very tensor.
        stride, offset: how it lies there, from where the input begins.
    """

    source: int
    itself: bool = False
    stride: tuple[int, ...] = ()
    offset: int = 0


NEW = Shared(-1)


class Sharing:
    """Asks operators, and remembers their answers."""

    def __init__(self) -> None:
        self.known: dict[object, list[Shared]] = {}

    def __call__(self, fx: torch.fx.Node, op: OpOverload) -> list[Shared]:
        """Return the memory of every output of a call; empty if the operator cannot run on empty tensors."""
        inputs = fx.all_input_nodes
        numbers = {n: i for i, n in enumerate(inputs)}
        args, kwargs = torch.fx.node.map_arg((fx.args, dict(fx.kwargs)), lambda n: _Input(numbers[n]))
        key = (op, repr(args), repr(kwargs), tuple(_layout(n.meta.get("val")) for n in inputs))
        shared = self.known.get(key)
        if shared is None:
            shared = self.known[key] = _asked(fx, op, numbers)
        return shared


class _Input(NamedTuple):
    number: int


def _layout(val: object) -> object:
    if isinstance(val, torch.Tensor):
        return tuple(val.size()), tuple(val.stride()), val.dtype
    return tuple(map(_layout, val)) if isinstance(val, (tuple, list)) else val


def _asked(fx: torch.fx.Node, op: OpOverload, numbers: dict[torch.fx.Node, int]) -> list[Shared]:
    inputs_by_memory: dict[int | None, tuple[int, torch.Tensor]] = {}

    def empty(node: torch.fx.Node) -> Any:
        given = without_values(node)
        inputs_by_memory.update({storage_of(x): (numbers[node], x) for x in flat(given) if isinstance(x, torch.Tensor)})
        return given

    args = torch.fx.node.map_arg(fx.args, empty)
    kwargs = dict(torch.fx.node.map_arg(fx.kwargs, empty))
    try:
        with torch.no_grad():
            outs = flat(op(*_on_meta(args), **{k: _on_meta(v) for k, v in kwargs.items()}))
    except (RuntimeError, NotImplementedError, TypeError):
        return []
    shared = []
    for out in outs:
        number, x = inputs_by_memory.get(storage_of(out), (-1, out))
        lies = (tuple(out.stride()), int(out.storage_offset())) if number >= 0 else ((), 0)
        shared.append(Shared(number, out is x and number >= 0, *lies))
    return shared


def _on_meta(value: object) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    return tuple(map(_on_meta, value)) if isinstance(value, tuple) else value
