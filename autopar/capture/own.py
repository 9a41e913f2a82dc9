"""From autopar's own operators in a trace (:mod:`autopar.capture.recording`) to nodes of the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.fx

from autopar.capture.exported import at, flat, module_of, source_of, spec_of
from autopar.capture.recording import BEGIN, DATA, END, HOOK, Recording
from autopar.errors import CaptureError
from autopar.graph import Node, Ref
from autopar.rules.function import PREFIX

if TYPE_CHECKING:
    from autopar.capture.building import Builder

DETACHED = frozenset({"aten.detach_.default", DATA})
"""Operators that are a detach in a graph, where nothing is written to."""


def own_operator(builder: Builder, fx: torch.fx.Node, name: str, args: tuple[Any, ...], no_grad: bool) -> Any:
    """Take one of them into the graph; its value."""
    if name in (BEGIN, END):
        builder.region = args[0] if name == BEGIN else -1
        return None
    recording: Recording = builder.exported.recording
    callee = recording.calls[args[1]]
    tensors = iter([args[0]] if name == HOOK else args[0])
    n_reads = len(callee.reads)
    objects = dict(callee.objects)
    values = recording.leaves[args[1]]
    leaves = [
        f"<{_text(objects[k])}>" if k in objects else next(tensors) if is_tensor else value
        for k, (is_tensor, value) in enumerate(values)
    ]  # fmt: skip
    leaves += [next(tensors) for _ in range(n_reads)]
    outs = tuple(spec_of(v) for v in flat(fx.meta["val"]))
    refs = [x for x in leaves if isinstance(x, Ref)]
    flows = not no_grad and any(builder.nodes[r.node].needs_grad and builder._spec_of(r).is_float for r in refs)
    ref = builder._add(
        Node(
            fx.name, "op", PREFIX + callee.name, (callee, *leaves), {}, outs,
            module_of(fx).removeprefix(builder.prefix), source_of(fx), flows and any(o.is_float for o in outs),
            any(builder.nodes[r.node].hot for r in refs),
        )
    )  # fmt: skip
    return ref if name == HOOK else [Ref(ref.node, k) for k in range(len(outs))]


def refuse_write_to_data(fx: torch.fx.Node) -> None:
    """What is written through ``.data`` changes the values that autograd has kept, which a program cannot do.

    Raises:
        CaptureError: an operator writes to ``x.data`` or to a view of it.
    """
    for k, argument in enumerate(fx.target._schema.arguments):  # type: ignore[union-attr]
        if argument.alias_info is None or not argument.alias_info.is_write or k >= len(fx.args):
            continue
        node = fx.args[k]
        while isinstance(node, torch.fx.Node) and node.op == "call_function":
            if str(node.target) == DATA:
                raise CaptureError(
                    f"cannot capture a write through .data in '{module_of(fx)}'{at(fx)}\n  compute a new tensor "
                    "instead, or write to the tensor itself under torch.no_grad()"
                )
            schema = getattr(node.target, "_schema", None)
            views = schema is not None and schema.arguments and schema.arguments[0].alias_info is not None
            node = node.args[0] if views and node.args else None


def _text(value: Any) -> str:
    """What stands for a value that has no text of its own."""
    return getattr(value, "__qualname__", None) or type(value).__qualname__


__all__ = ["DETACHED", "own_operator", "refuse_write_to_data"]
