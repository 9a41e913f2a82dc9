"""Nodes of a graph, made one after another while the traced program is walked over."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.capture.aliasing.schemas import draws_by_itself, seeded
from autopar.capture.graph.exported_nodes import at, drawn_strides, module_of, source_of
from autopar.errors import CaptureError
from autopar.words.graph import Node, Ref, Spec, refs_in
from autopar.words.trees import PyTree


class NodeEmitter:
    """Maker of the nodes of a graph.

    Attributes:
        prefix: the prefix of module paths that users do not see.
        at: the traced node that is walked over: new nodes get its name, module and line.
        no_grad: gradients do not flow at that node.
        region: number of the region under activation checkpointing around that node; -1 for none.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[Node] = []
        self.names: set[str] = set()
        self.at: torch.fx.Node | None = None
        self.no_grad = False
        self.region = -1

    def emit(
        self, target: str, args: tuple[object, ...], kwargs: dict[str, PyTree], outs: tuple[Spec | None, ...], name: str
    ) -> list[Ref]:
        """Make an operator at the traced node that is walked over, and return its outputs."""
        fx = self.at
        assert fx is not None
        if draws_by_itself(target, args, kwargs):
            raise self.refused(
                fx, "draws random numbers, and no rule draws them alike on all ranks",
                "make them from torch.rand, torch.randn or torch.randint, or give the operator a rule (docs/adding.md)",
            )  # fmt: skip
        refs = list(refs_in((args, kwargs)))
        hot = any(self.nodes[r.node].hot for r in refs)
        grads = target != "aten.detach.default" and not self.no_grad and any(map(self.needs_grad, refs))
        floats = any(o is not None and o.is_float for o in outs)
        ref = self.add(
            Node(name or fx.name, "op", target, tuple(args), dict(kwargs), outs,
                 module_of(fx).removeprefix(self.prefix), source_of(fx), grads and floats, hot,
                 strides=drawn_strides(fx) if seeded(target) else ())
        )  # fmt: skip
        return [Ref(ref.node, i) for i in range(len(outs))]

    def needs_grad(self, ref: Ref) -> bool:
        """Check whether gradients flow through a value."""
        return self.nodes[ref.node].needs_grad and self.spec_of(ref).is_float

    def add(self, node: Node) -> Ref:
        """Add a node, under a name of its own."""
        name = node.name
        count = 1
        while name in self.names:
            name, count = f"{node.name}_{count}", count + 1
        self.names.add(name)
        if name != node.name or (self.region >= 0 and node.kind == "op"):
            node = replace(node, name=name, again=self.region if node.kind == "op" else -1)
        self.nodes.append(node)
        return Ref(len(self.nodes) - 1)

    def spec_of(self, ref: Ref) -> Spec:
        """Return the spec of a tensor."""
        spec = self.nodes[ref.node].outs[ref.out]
        assert spec is not None
        return spec

    def refused(self, fx: torch.fx.Node, what: str, instead: str) -> CaptureError:
        """Make the error of an operator that cannot be planned."""
        return CaptureError(f"'{fx.target}' in '{module_of(fx)}'{at(fx)} {what}\n  {instead}")
