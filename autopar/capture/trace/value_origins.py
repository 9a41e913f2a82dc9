"""The origin of a tensor of the trace under way: numbers alone, random operators, or data."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from math import prod
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from autopar.capture.aliasing.schemas import facts
from autopar.capture.graph.exported_nodes import flat, storage_of
from autopar.capture.repeats.repeated import BLOCK
from autopar.torch_private import (
    DisableTorchFunction,
    FakeTensor,
    OpOverload,
    no_dispatch_modes,
    unset_fake_temporarily,
)
from autopar.words.trees import PyTree

MOST_ELEMENTS = 1 << 26
"""The most elements of a tensor whose value is computed while tracing: half a gigabyte of indices."""


def constant_value(tensor: object, read: Callable[[torch.Tensor], Any] = lambda t: t) -> Any:
    """Return ``read(value)`` of a traced tensor without data or draws in it; None of others and of too large ones."""
    asked, proxy_mode = node_of(tensor), get_proxy_mode()
    if asked is None or proxy_mode is None:
        return None
    root = proxy_mode.tracer.root  # type: ignore[union-attr]  # torch's other kind of tracer is not that of an export

    def value(nodes: list[torch.fx.Node]) -> Any:
        values: dict[torch.fx.Node, Any] = {}
        for node in nodes:
            if node.op == "get_attr":
                values[node] = _made_of_numbers(node, root)
                continue
            a = torch.fx.node.map_arg(node.args, values.__getitem__)
            k = dict(torch.fx.node.map_arg(node.kwargs, values.__getitem__))
            if "device" in k:
                k["device"] = torch.device("cpu")
            assert callable(node.target)  # an operator, or the choice of one of its results
            shape = getattr(node.meta.get("val"), "shape", ())
            if prod(shape) > MOST_ELEMENTS:
                raise LookupError
            values[node] = node.target(*a, **k)
        return values[asked]

    try:
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

        with DisableTorchFunction(), no_dispatch_modes(), disable_proxy_modes_tracing():
            with unset_fake_temporarily():
                nodes, drawn = _made_by(asked)
                return None if drawn else read(value(nodes))
    except LookupError:
        return None


OF_NUMBERS = "autopar made of numbers"
"""In a node's meta: it is a tensor that Python code has made of a list of numbers."""
_FRESH = ("aten.lift_fresh_copy.default", "aten.lift_fresh.default")


def _made_of_numbers(node: torch.fx.Node, root: torch.nn.Module) -> torch.Tensor:
    """Return the value of a tensor that the forward makes of numbers: ``torch.tensor([3, 5])``.

    Raises:
        LookupError: it is a tensor that was there before, which could be written to, or is made of an array that could.
    """
    tensor = getattr(root, str(node.target), None)
    fresh = all(str(user.target) in _FRESH for user in node.users)
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor) or tensor.is_meta or not fresh:
        raise LookupError
    if tensor.numel() != 1 and OF_NUMBERS not in node.meta:
        raise LookupError
    return tensor.detach().cpu()


def note_made_of_numbers(tensor: torch.Tensor) -> None:
    """Note that ``torch.tensor([3, 5])`` gave this, so that its values are known."""
    node = node_of(tensor)
    while node is not None and node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    if node is not None and node.op == "get_attr":
        node.meta[OF_NUMBERS] = True


def are_numbers(values: PyTree) -> bool:
    """Check that this is a nested list of plain numbers."""
    if isinstance(values, (list, tuple)):
        return all(map(are_numbers, values))
    return isinstance(values, (bool, int, float))


def node_of(tensor: object) -> torch.fx.Node | None:
    """Return the node of the trace under way that a tensor is; None for a tensor of none."""
    proxy_mode = get_proxy_mode()
    if proxy_mode is None or not isinstance(tensor, torch.Tensor):
        return None
    slot = proxy_mode.tracer.tensor_tracker.get(tensor)
    return None if slot is None else slot.proxy.node


def drawn_by(tensor: object) -> list[str]:
    """Return the random operators that a traced tensor follows from, if from nothing else; else nothing."""
    asked = node_of(tensor)
    try:
        return [] if asked is None else _made_by(asked)[1]
    except LookupError:
        return []


def depends_on_data(tensor: torch.Tensor, buffers: Iterable[torch.Tensor | None] = ()) -> bool:
    """Check that a tensor of the trace under way follows from an input, a parameter or a buffer.

    ``buffers``: which may be read, as long as nothing writes to them: rotary angles follow from their frequencies.
    """
    if not isinstance(tensor, FakeTensor):
        return False
    asked = node_of(tensor)
    held = {beginning(node) for buffer in buffers if (node := node_of(buffer)) is not None}
    if asked is None or not held:
        return constant_value(tensor) is None
    try:
        return bool(_made_by(asked, held)[1])
    except LookupError:
        return True


OF_THE_SHAPE = frozenset(
    f"aten.{name}"
    for name in (
        "rand_like.default", "randn_like.default", "randint_like.default", "randint_like.low_dtype",
        "empty_like.default", "zeros_like.default", "ones_like.default", "full_like.default", "new_empty.default",
        "new_zeros.default", "new_ones.default", "new_full.default", "new_empty_strided.default",
    )
)  # fmt: skip
"""Operators that read no value of their first argument."""


def _made_by(
    asked: torch.fx.Node, held: Collection[torch.fx.Node] = ()
) -> tuple[list[torch.fx.Node], list[str]]:
    """Return the operators that a tensor's value comes from, in order, and the names of the random ones among them.

    ``held``: what else it may come from, if nothing writes there.

    Raises:
        LookupError: it depends on an input, a parameter or a buffer.
    """
    nodes = list(asked.graph.nodes)
    writers = [n for n in nodes if isinstance(n.target, OpOverload) and facts(n.target).writes]
    makers: set[torch.fx.Node] = set()
    drawn: list[str] = []
    memory: set[int | None] = set()
    todo = [asked]
    while todo:
        while todo:
            node = todo.pop()
            if node in makers:
                continue
            makers.add(node)
            if node.op == "get_attr":  # a tensor that Python code made of numbers
                continue
            if node.target is not operator.getitem and node not in held:
                if not isinstance(node.target, OpOverload) or node.target is BLOCK:
                    raise LookupError
                if torch.Tag.nondeterministic_seeded in node.target.tags:
                    drawn.append(str(node.target))
            memory.update(storage_of(v) for v in flat(node.meta.get("val")) if isinstance(v, torch.Tensor))
            read = node.all_input_nodes
            todo.extend(read[1:] if str(node.target) in OF_THE_SHAPE else read)
        kept = {storage_of(node.meta.get("val")) for node in makers if node in held}
        for writer in writers:
            if any(storage_of(n.meta.get("val")) in kept for n in writer.all_input_nodes):
                raise LookupError
            if writer not in makers and any(storage_of(n.meta.get("val")) in memory for n in writer.all_input_nodes):
                todo.append(writer)
    return [n for n in nodes if n in makers], drawn


def beginning(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node of a tensor before anything wrote to it."""
    while node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
