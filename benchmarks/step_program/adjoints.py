"""The forward and the backward of one call, as two small graphs that torch's autograd is traced into.

A call of a program (an operator, a distributed lowering, a collective) is differentiated once for each combination of
shapes, by ``make_fx`` over ``autograd.grad`` on tensors without values. What does not depend on the gradient is the
forward; what the backward reads of it is saved. A call whose backward reads nothing but its inputs and outputs stays
one node, with all that it is composed of inside. A call that cannot be traced, such as a user's own Python or a branch
on a number, stays a node of a kind of its own (:data:`OPAQUE`).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.fx
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.lower import collectives
from autopar.rules.families.branch import branch
from autopar.rules.function import Callee
from autopar.torch_private import OpOverload, pytree

aten = torch.ops.aten
Tensors = Sequence[torch.Tensor]
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default,
    aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default, aten.squeeze.dims,
    aten.slice.Tensor, aten.select.int, aten.detach.default, aten.alias.default, aten.view_as_complex.default,
    aten.view_as_real.default,
}  # fmt: skip
"""Operators that compute nothing: a backward does them again, and what they look at is saved."""
BRANCH = torch.ops.autopar.branch.default


@dataclass
class Adjoint:
    """A call with its backward.

    Attributes:
        graph: the nodes of both, in order; its placeholders are the tensor arguments, then the gradients.
        forward, backward: the nodes of each.
        outs, grads: nodes of the results, and of the gradients of the tensor arguments (None for those without one).
        composite: the forward is the call itself, ``outs`` are its results.
        differentiable: which of the results have a gradient.
        opaque: the call is differentiated by autograd when it runs.
        metas: the results on tensors without values, by position.
    """

    graph: torch.fx.Graph | None = None
    inputs: list[torch.fx.Node] = field(default_factory=list)
    arriving: list[torch.fx.Node] = field(default_factory=list)
    forward: list[torch.fx.Node] = field(default_factory=list)
    backward: list[torch.fx.Node] = field(default_factory=list)
    outs: list[torch.fx.Node] = field(default_factory=list)
    grads: list[torch.fx.Node | None] = field(default_factory=list)
    composite: bool = False
    differentiable: list[bool] = field(default_factory=list)
    opaque: bool = False
    metas: list[torch.Tensor] = field(default_factory=list)
    spec: Any = None


def is_opaque(target: object) -> bool:
    """Return whether a call is the model's own Python, or a branch on a number."""
    return isinstance(target, Callee) or target in (BRANCH, branch)


def adjoint_of(
    run: Callable[[Tensors], Any], leaves: Tensors, wants: Sequence[bool], asked: Sequence[bool] | None,
    target: object,
) -> Adjoint:  # fmt: skip
    """Differentiate ``run(leaves)``.

    Args:
        leaves: its tensor arguments, without values.
        wants: which of them want a gradient.
        asked: which of its tensor results a gradient comes to; None for all.
    """

    def fresh() -> list[torch.Tensor]:
        return [x.detach().requires_grad_(w) for x, w in zip(leaves, wants, strict=True)]

    compiling = mock.patch.object(torch.compiler, "is_compiling", lambda: True)
    around = compiling if target is collectives.all_to_all else contextlib.nullcontext()
    with torch.enable_grad(), around:
        whole = run(fresh())
    flat, spec = pytree.tree_flatten(whole)
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    comes = list(asked) if asked is not None else [True] * len(tensors)
    roots = [x.requires_grad and c for x, c in zip(tensors, comes, strict=True)]
    done = Adjoint(
        differentiable=[x.requires_grad for x in tensors], spec=spec, opaque=is_opaque(target),
        metas=[x.detach() if isinstance(x, torch.Tensor) else x for x in flat],
    )  # fmt: skip
    if done.opaque:
        return done
    arriving = [torch.empty_like(x) for x, root in zip(tensors, roots, strict=True) if root]

    def joint(xs: list[torch.Tensor], gs: list[torch.Tensor]) -> Any:
        xs = [x.detach().requires_grad_(w) for x, w in zip(xs, wants, strict=True)]
        with torch.enable_grad():
            outs = [x for x in pytree.tree_leaves(run(xs)) if isinstance(x, torch.Tensor)]
        wanted = [x for x in xs if x.requires_grad]
        got: Sequence[Any] = [None] * len(wanted)
        if gs and wanted:
            got = torch.autograd.grad([x for x, r in zip(outs, roots, strict=True) if r], wanted, gs, allow_unused=True)
        return [*(x.detach() for x in outs), *got]

    with around:
        graph = make_fx(joint)([x.detach() for x in leaves], arriving).graph  # one object for each argument
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    done.inputs, done.arriving = placeholders[: len(leaves)], placeholders[len(leaves) :]
    (end,) = [n for n in graph.nodes if n.op == "output"]
    identities(graph, keep={*placeholders})
    whole = end.args[0] if isinstance(end.args[0], (list, tuple)) else [end.args[0]]
    done.graph, done.outs = graph, list(whole[: len(tensors)])
    each = iter(whole[len(tensors) :])
    done.grads = [next(each) if w else None for w in wants]
    _divided(done, target)
    return done


def identities(graph: torch.fx.Graph, keep: set[torch.fx.Node]) -> None:
    """Leave out nodes that give what they get: detached tensors, and transposed ones transposed back."""
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if node in keep or not isinstance(source, torch.fx.Node):
            continue
        new = None
        if node.target in (aten.detach.default, aten.alias.default):
            new = source
        elif node.target is aten.t.default and source.target is aten.t.default:
            new = source.args[0]
        elif node.target is aten.view.default and source.target in (aten.view.default, aten.reshape.default):
            node.args, node.target = (source.args[0], node.args[1]), aten.reshape.default
        elif node.target is aten.view.default and list(source.meta["val"].shape) == list(node.args[1]):
            new = source
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # gradients arrive in other strides than those of the trace
        if new is not None:
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _divided(done: Adjoint, target: object) -> None:
    """Say which nodes are forward and which are backward."""
    computed = [n for n in done.graph.nodes if n.op not in ("placeholder", "output")]
    early: set[torch.fx.Node] = set()
    todo = list(done.outs)
    while todo:
        node = todo.pop()
        if node not in early:
            early.add(node)
            todo.extend(node.all_input_nodes)
    early |= {n for n in computed if n.target is operator.getitem and n.args[0] in early}  # not the whole tuple
    inside = {n for n in computed if n not in early}  # also what needs no gradient: autograd computes it then
    wanted = [x for x in done.grads if x is not None]
    todo = [x for n in inside for x in n.all_input_nodes] + wanted
    while todo:
        node = todo.pop()
        if node not in inside and node.target in VIEWS:
            inside.add(node)
            todo.extend(node.all_input_nodes)
    done.backward = [n for n in computed if n in inside]
    saved = {x for n in done.backward for x in n.all_input_nodes if x not in inside}
    saved |= {x for x in wanted if x not in inside}
    done.forward = [n for n in computed if n in early]
    known = {*done.inputs, *done.outs, *done.arriving}
    done.composite = isinstance(target, OpOverload) and saved <= known
    if done.composite:
        done.forward = []


class Tape:
    """An opaque call that has run: autograd's graph of it, from detached arguments to its results."""

    def __init__(self, leaves: Tensors, outs: Sequence[Any]) -> None:
        self.leaves, self.outs = leaves, outs


def run_opaque(target: Callable[..., Any], spec: Any, wants: Sequence[bool], *values: Any) -> tuple[Any, ...]:
    """Call ``target`` under autograd; return the tape, then the results."""
    leaves = iter(wants)
    values = tuple(x.detach().requires_grad_(next(leaves)) if isinstance(x, torch.Tensor) else x for x in values)
    args, kwargs = pytree.tree_unflatten(list(values), spec)
    with torch.enable_grad():
        outs = pytree.tree_leaves(target(*args, **kwargs))
    alone = OneNode.of(values, outs)
    if alone is not None:
        return alone, outs[0].detach()
    tape = Tape([x for x in values if isinstance(x, torch.Tensor)], [x for x in outs if isinstance(x, torch.Tensor)])
    return (tape, *(x.detach() if isinstance(x, torch.Tensor) else x for x in outs))


class OneNode:
    """An opaque call that made one node of autograd, whose ``backward`` is called without the engine."""

    def __init__(self, node: Any, places: Sequence[int | None]) -> None:
        self.node, self.places = node, places

    @classmethod
    def of(cls, values: Sequence[Any], outs: Sequence[Any]) -> OneNode | None:
        """Return the node, if the call made one user Function and nothing else."""
        node = outs[0].grad_fn if len(outs) == 1 and isinstance(outs[0], torch.Tensor) else None
        if not isinstance(node, BackwardCFunction):
            return None
        leaves = [x for x in values if isinstance(x, torch.Tensor)]
        numbers: list[int | None] = [None] * len(leaves)
        for k, (before, _) in enumerate(node.next_functions):
            if before is None:
                continue
            variable = getattr(before, "variable", None)
            at = [n for n, x in enumerate(leaves) if x is variable]
            if len(at) != 1:
                return None
            numbers[at[0]] = k
        return cls(node, numbers)

    def gradients(self, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the tensor arguments."""
        with torch.no_grad():
            got = self.node.apply(grad)
        got = got if isinstance(got, tuple) else (got,)
        return tuple(None if k is None else got[k] for k in self.places)


def opaque_backward(tape: Tape | OneNode, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the arguments of an opaque call."""
    if isinstance(tape, OneNode):
        (grad,) = grads
        return (None,) * len(tape.places) if grad is None else tape.gradients(grad)
    given = [(x, g) for x, g in zip(tape.outs, grads, strict=True) if x.requires_grad and g is not None]
    wanted = [x for x in tape.leaves if x.requires_grad]
    got: Sequence[Any] = [None] * len(wanted)
    if given:
        roots, arriving = zip(*given, strict=True)
        got = torch.autograd.grad(roots, wanted, arriving, retain_graph=True, allow_unused=True)
    each = iter(got)
    return tuple(next(each) if x.requires_grad else None for x in tape.leaves)
