"""Verifier: the result of every pass is well formed, or the pass is named (:mod:`autopar.capture.passes`).

Of a traced program, nodes read earlier ones, every tensor has a traced value, and no size is free whose node is gone.
Of a draft or a graph, references go to earlier results that are tensors, the shapes and dtypes of changed nodes are
those that their operators give, and gradients flow only where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch

from autopar.capture.aliasing.schemas import argument_names, named, results_of
from autopar.capture.graph.drafts import Draft, TracedProgram
from autopar.capture.graph.exported_nodes import flat, is_symbolic
from autopar.errors import CaptureError, RuleError
from autopar.rules.operator_call import call_of
from autopar.rules.registry import rule_for
from autopar.torch_private import OpOverload
from autopar.words.graph import Graph, Node, Ref, Spec, refs_in


class PassError(CaptureError):
    """A pass gave a result that is not well formed."""


def verify(name: str, subject: TracedProgram | Draft | Graph, before: TracedProgram | Draft | Graph) -> None:
    """Check the result of a pass; ``before`` is its input, the same object for a traced program.

    Raises:
        PassError: with the pass, the node and the fault.
    """
    if isinstance(subject, TracedProgram):
        fault = next(_faults_of_program(subject.graph), "")
    else:
        assert not isinstance(before, TracedProgram)
        fault = next(_faults_of_graph(subject, before), "")
    if fault:
        raise PassError(
            f"pass '{name}' gave a program that is not well formed: {fault}\n  this is a defect of the pass; capture "
            f"without it (autopar.capture.passes.skipping(['{name}'])) and report it"
        )


def _faults_of_program(graph: torch.fx.Graph) -> Iterator[str]:
    seen: set[torch.fx.Node] = set()
    sizes: set[object] = set()
    for node in graph.nodes:
        late = next((given for given in node.all_input_nodes if given not in seen), None)
        if late is not None:
            yield f"{node.name} ({node.target}) reads {late.name}, which is not before it"
        seen.add(node)
        if node.op == "call_function" and "val" not in node.meta:
            if isinstance(node.target, OpOverload) and node.target._schema.returns:
                yield f"{node.name} ({node.target}) has no traced value"
            continue
        sizes.update(node.meta.get("unbacked_bindings") or ())
        for value in flat(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and is_symbolic(tuple(value.shape)):
                free = {symbol for n in value.shape for symbol in _symbols(n)}
                if not free <= sizes:
                    yield f"{node.name} ({node.target}) has size {tuple(value.shape)}, whose rows nothing selects"


def _symbols(size: object) -> Iterator[object]:
    if isinstance(size, torch.SymInt):
        yield from size.node.expr.free_symbols


def _faults_of_graph(subject: Draft | Graph, before: Draft | Graph) -> Iterator[str]:
    nodes, old = subject.nodes, {node.name: node for node in before.nodes}

    def spec_of(ref: Ref) -> Spec:
        spec = nodes[ref.node].outs[ref.out]
        assert spec is not None
        return spec

    def is_tensor(ref: Ref) -> bool:
        outs = nodes[ref.node].outs
        return ref.out < len(outs) and outs[ref.out] is not None

    if len({node.name for node in nodes}) < len(nodes):
        yield "two nodes have one name"
    for i, node in enumerate(nodes):
        refs = node.refs
        for ref in refs:
            if not 0 <= ref.node < i or not is_tensor(ref):
                yield f"{node.where} reads {ref}, which is no tensor before it (it is node {i} of {len(nodes)})"
        if node.kind != "op":
            continue
        was = old.get(node.name)
        same = was is not None and (was.target, was.outs, len(was.refs)) == (node.target, node.outs, len(refs)) and all(
            before.nodes[then.node].outs[then.out] == spec_of(ref) for then, ref in zip(was.refs, refs, strict=True)
        )  # fmt: skip
        if not same:
            yield from _faults_of_specs(node, spec_of)
        if node.needs_grad and not any(nodes[ref.node].needs_grad and spec_of(ref).is_float for ref in refs):
            yield f"{node.where} has a gradient, and nothing that it reads has one"
        if not node.hot and any(nodes[ref.node].needs_grad and spec_of(ref).is_float for ref in refs):
            yield f"{node.where} reads what depends on parameters, and is marked as if it did not"
    for what, ref in (*(("an output", ref) for ref in refs_in(subject.outputs)), *subject.updates.items()):
        if not 0 <= ref.node < len(nodes) or not is_tensor(ref):
            yield f"{what} is {ref}, which is no tensor"
    loss = None if subject.loss is None else subject.outputs[subject.loss]
    if subject.loss is not None and not (isinstance(loss, Ref) and nodes[loss.node].needs_grad):
        yield f"output {subject.loss} is the loss and has no gradient"


def _faults_of_specs(node: Node, spec_of: Callable[[Ref], Spec]) -> Iterator[str]:
    """Compare the specs of a node with those that its operator gives: by torch, or by its rule where torch cannot."""
    op = named(node.target)
    if op is not None:
        kwargs = {**node.kwargs, **({"device": "meta"} if "device" in argument_names(op) else {})}
        outs = results_of(op, node.args, kwargs, spec_of)
        if outs and outs != node.outs:
            yield f"{node.where} gives {_text(outs)}, and is noted as {_text(node.outs)}"
        return
    try:
        rule = rule_for(call_of(node, spec_of))
    except RuleError:
        return
    shapes = [tuple(prod(rule.sizes[f] for f in dim) for dim in term) for term in rule.outputs]
    if shapes != [out.shape for out in node.outs if out is not None]:
        yield f"{node.where} gives shapes {shapes}, and is noted as {_text(node.outs)}"


def _text(outs: tuple[Spec | None, ...]) -> str:
    return ", ".join(map(str, outs))
