"""The forward and the backward of one call, as two lists of operators.

A call of a program (an operator, a distributed lowering, a collective) is differentiated by autograd on tensors without
values, once for each combination of shapes, formats and wants. What its results need is its forward, the rest its
backward; what the backward reads of the forward is saved between them. A call whose backward reads nothing but its
arguments and results stays one operator in the forward, with all that it is composed of inside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
import torch.fx

from autopar.lower.steps.recording import OperatorRecorder
from autopar.torch_private import FakeTensorMode, OpOverload, pytree

aten = torch.ops.aten
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
    aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.detach.default, aten.alias.default,
    aten.view_as_complex.default, aten.view_as_real.default,
}  # fmt: skip
"""Operators that compute nothing: a backward does them again, so that what they look at is saved and not the view."""


@dataclass
class Adjoint:
    """A call with its backward.

    Attributes:
        inputs, arriving: placeholders of the tensor arguments, and of the gradients that arrive, one for each of the
            results that ``asked`` names.
        forward, backward: the operators of each, in order.
        outs, grads: nodes of the results, and of the gradients of the tensor arguments (None for those without one).
        composite: the forward is the call itself, and ``outs`` stand for its results.
        asked: numbers of the results to which a gradient may come.
        results: what the call gives, flat, tensors without values among it; ``spec`` is its structure.
        constants: tensors with values that the call makes itself, by node.
    """

    results: list[Any]
    spec: pytree.TreeSpec
    inputs: list[torch.fx.Node] = field(default_factory=list)
    arriving: list[torch.fx.Node] = field(default_factory=list)
    forward: list[torch.fx.Node] = field(default_factory=list)
    backward: list[torch.fx.Node] = field(default_factory=list)
    outs: list[torch.fx.Node] = field(default_factory=list)
    grads: list[torch.fx.Node | None] = field(default_factory=list)
    composite: bool = False
    asked: list[int] = field(default_factory=list)
    constants: dict[torch.fx.Node, torch.Tensor] = field(default_factory=dict)

    @property
    def passes_on(self) -> bool:
        """True if gradients go through as they are, as in a gather of parameters: where none comes, none goes on."""
        return not self.backward and all(x is None or x in self.arriving for x in self.grads)

    def of_results(self) -> list[tuple[torch.fx.Node, int]]:
        """Return the placeholders of gradients, each with the number of its result."""
        return list(zip(self.arriving, self.asked, strict=True))

    @property
    def fakes(self) -> list[torch.Tensor]:
        """The tensors among the results, without values."""
        return [x for x in self.results if isinstance(x, torch.Tensor)]


class Adjoints:
    """Calls that were differentiated, of one program.

    Attributes:
        mode: that of all tensors without values.
        of_call: by what is called, the forms of the arguments, the wants and the strides of gradients; None for those
            that autograd differentiates when they run.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.of_call: dict[Any, Adjoint | None] = {}


def adjoint_of(
    run: Callable[[Sequence[torch.Tensor]], Any], leaves: Sequence[torch.Tensor], wants: Sequence[bool],
    reached: Sequence[int] | None, is_operator: bool, strides: Sequence[Sequence[int]] | None = None,
) -> Adjoint:  # fmt: skip
    """Differentiate ``run(leaves)``.

    Args:
        leaves: its tensor arguments, without values.
        wants: which of them want a gradient.
        reached: numbers of its tensor results from which a way leads to an output; None for all.
        is_operator: the call is one operator of torch.
        strides: those of the gradients that arrive; None for those of the results.
    """
    recorder = OperatorRecorder()
    given = [x.detach().requires_grad_(want) for x, want in zip(leaves, wants, strict=True)]
    inputs = [recorder.given(x, f"x{k}") for k, x in enumerate(given)]
    with torch.enable_grad(), recorder:
        whole = run(given)
    results, spec = pytree.tree_flatten(whole)
    tensors = [x for x in results if isinstance(x, torch.Tensor)]
    asked = [k for k, x in enumerate(tensors) if x.requires_grad and (reached is None or k in reached)]
    wanted = [x for x in given if x.requires_grad]
    arriving = [torch.empty_like(tensors[k]) for k in asked]
    if strides is not None:
        each_one = zip(arriving, strides, strict=True)
        arriving = [torch.empty_strided(x.shape, s, dtype=x.dtype, device=x.device) for x, s in each_one]
    nodes = [recorder.given(g, f"g{k}") for k, g in enumerate(arriving)]
    got: Sequence[torch.Tensor | None] = [None] * len(wanted)
    if asked and wanted:
        with recorder:
            got = torch.autograd.grad([tensors[k] for k in asked], wanted, arriving, allow_unused=True)
    each = iter(got)
    grads = [next(each) if want else None for want in wants]
    adjoint = Adjoint(
        [x.detach() if isinstance(x, torch.Tensor) else x for x in results], spec, inputs, nodes,
        outs=[recorder.node_of(x) for x in tensors],
        grads=[None if x is None else recorder.node_of(x) for x in grads], asked=asked,
    )  # fmt: skip
    _simplify(recorder.graph, adjoint)
    _divide(recorder.graph, adjoint, is_operator)
    adjoint.constants = recorder.constants
    return adjoint


def _simplify(graph: torch.fx.Graph, adjoint: Adjoint) -> None:
    """Leave out operators that give what they get: detached tensors, and transposed ones transposed back."""
    end = graph.output((adjoint.outs, adjoint.grads))
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(source := node.args[0], torch.fx.Node):
            continue
        same = None
        if node.target in (aten.detach.default, aten.alias.default):
            same = source
        elif node.target is aten.t.default and source.target is aten.t.default:
            same = source.args[0]
        elif node.target is aten.view.default and source.target in (aten.view.default, aten.reshape.default):
            node.args, node.target = (source.args[0], node.args[1]), aten.reshape.default
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            if list(source.meta["val"].shape) == list(node.meta["val"].shape):
                same = source
            node.target = aten.reshape.default  # gradients may arrive in other strides than those of the record
        if isinstance(same, torch.fx.Node):
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    adjoint.outs, adjoint.grads = map(list, end.args[0])  # type: ignore[arg-type]
    graph.erase_node(end)


def _leading_to(ends: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    """Return the nodes that others need, themselves included."""
    found: set[torch.fx.Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found


def _divide(graph: torch.fx.Graph, adjoint: Adjoint, is_operator: bool) -> None:
    """Say which operators are forward and which are backward."""
    wanted = [x for x in adjoint.grads if x is not None]
    acting = [n for n in graph.nodes if n.op == "call_function" and acts(n)]
    needed = _leading_to([*adjoint.outs, *wanted, *acting])
    computed = [n for n in graph.nodes if n.op == "call_function" and n in needed]
    ran_first = list(takewhile(lambda n: n not in adjoint.arriving, graph.nodes))
    early = _leading_to([*adjoint.outs, *(n for n in ran_first if n in acting)])
    early |= _before_last_write(ran_first)
    early |= {n for n in computed if n.target is operator.getitem and n.args[0] in early}
    late = {n for n in computed if n not in early}
    todo = [x for n in late for x in n.all_input_nodes] + wanted
    while todo:
        node = todo.pop()
        if node not in late and node.target in VIEWS:
            late.add(node)
            todo.extend(node.all_input_nodes)
    adjoint.forward = [n for n in computed if n in early]
    adjoint.backward = [n for n in computed if n in late]
    saved = {x for n in adjoint.backward for x in n.all_input_nodes if x not in late}
    saved |= {x for x in wanted if x not in late}
    known = {*adjoint.inputs, *adjoint.outs, *adjoint.arriving}
    adjoint.composite = is_operator and saved <= known
    if adjoint.composite:
        adjoint.forward = []


def carried_over(
    adjoint: Adjoint, other: Adjoint, env: Mapping[torch.fx.Node, torch.fx.Node]
) -> dict[torch.fx.Node, torch.fx.Node] | None:  # fmt: skip
    """Return the nodes of a step for another adjoint of a call, of which it has the forward of the first one.

    None if the other one keeps something else.
    """
    if adjoint.composite != other.composite or len(adjoint.constants) != len(other.constants):
        return None
    if [n.target for n in adjoint.forward] != [n.target for n in other.forward]:
        return None
    pairs = [(adjoint.inputs, other.inputs), (adjoint.outs, other.outs), (adjoint.forward, other.forward)]
    pairs.append(([*adjoint.constants], [*other.constants]))
    found = {b: env[a] for one, two in pairs for a, b in zip(one, two, strict=True)}
    read = {x for n in other.backward for x in n.all_input_nodes} | {x for x in other.grads if x is not None}
    return found if read <= {*found, *other.arriving, *other.backward} else None


def _before_last_write(nodes: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    """Return what runs before the last operator that writes to memory, such as a copy of what is overwritten."""
    last = max((k for k, n in enumerate(nodes) if n.op == "call_function" and writes_to_argument(n)), default=0)
    return set(nodes[:last])


def writes_to_argument(node: torch.fx.Node) -> bool:
    """Check whether an operator writes to an argument, or does something that nobody reads."""
    target = node.target
    return isinstance(target, OpOverload) and (target._schema.is_mutable or not target._schema.returns)


def communicates(node: torch.fx.Node) -> bool:
    """Check whether an operator begins a collective or waits for one."""
    return getattr(node.target, "namespace", "") == "_c10d_functional"


def acts(node: torch.fx.Node) -> bool:
    """Check whether a node is to run though nobody may read its result: ``meta["acts"]`` says it of functions.

    So are collectives, since other ranks may read theirs: in a ring that is causal, the first rank reads nothing of
    what it receives.
    """
    return writes_to_argument(node) or communicates(node) or node.meta.get("acts", False)


def results_read(end: torch.fx.Node, n_outputs: int) -> dict[torch.fx.Node, set[int]]:
    """Return the numbers of the results of each call from which a way leads to an output; -1 stands for all of them."""
    reached: dict[torch.fx.Node, set[int]] = {}
    outputs: Any = end.args[0]
    todo: list[tuple[Any, int]] = [(x, -1) for x in outputs[:n_outputs]]
    while todo:
        node, k = todo.pop()
        if not isinstance(node, torch.fx.Node):
            continue
        if node.target is operator.getitem:
            source: Any = node.args
            todo.append((source[0], source[1]))
            continue
        first = node not in reached
        reached.setdefault(node, set()).add(k)
        if first:
            todo.extend((x, -1) for x in node.all_input_nodes)
    return reached
