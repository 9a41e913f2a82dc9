"""From autopar's own operators in a trace (:mod:`autopar.capture.trace.recording`) to nodes of the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.fx

from autopar.capture.branches.asking import ASK
from autopar.capture.graph.exported import flat, module_of, source_of, spec_of
from autopar.capture.trace.recording import BEGIN, END, HOOK, Recording
from autopar.graph import Node, Ref
from autopar.rules.function import PREFIX

if TYPE_CHECKING:
    from autopar.capture.graph.building import Builder

def own_operator(builder: Builder, fx: torch.fx.Node, name: str, args: tuple[Any, ...], no_grad: bool) -> list[Ref]:
    """Take one of them into the graph; its results."""
    if name == ASK:
        builder.asked(fx, *args)
        return []
    if name in (BEGIN, END):
        builder.region = args[0] if name == BEGIN else -1
        return []
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
    return [Ref(ref.node, k) for k in range(len(outs))]


def _text(value: Any) -> str:
    """What stands for a value that has no text of its own."""
    return getattr(value, "__qualname__", None) or type(value).__qualname__


__all__ = ["own_operator"]
