"""Functions that a step calls besides operators: code under autograd, branches on numbers, tensors that are given up.

They are functions of plain values, called by the text of a step like operators.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch.autograd.function import BackwardCFunction

from autopar.lower.freed_tensors import Freed
from autopar.lower.program import Program
from autopar.plans.memory_decisions import DECISIONS
from autopar.rules.experts.expert_block import TRAVEL, rows_computed, rows_leave, rows_return, travelling_block
from autopar.rules.families.branch import branch
from autopar.rules.function import Callee
from autopar.torch_private import OpOverload, autograd_again, keeps_graph, pytree
from autopar.words.exchanges import is_bounded

BRANCHES = (branch, torch.ops.autopar.branch.default)
OPENED = (rows_leave, rows_computed)
"""Calls that give no tensors, but what the next call of the same block goes on with."""
TRAVELLING = (travelling_block, *OPENED, rows_return)


def runs_under_autograd(target: object) -> bool:
    """Check whether a call is differentiated by autograd when it runs.

    Such are the model's own Python, and rows that travel to their experts, of which the data says how many.
    """
    return isinstance(target, Callee) or target in TRAVELLING


def calls_outside(program: Program, recorded: bool = False) -> list[str]:
    """Return the calls of a program that no compiler sees into, by their names and kinds.

    Args:
        recorded: those that are not recorded as a CUDA graph: where rows travel within a bound, the host reads nothing.
    """
    reasons = []
    for node in program.module.graph.nodes:
        if isinstance(node.target, Callee):
            reasons.append(f"{node.name}: the model's own Python code, {node.target.name}")
        elif node.target in OPENED:
            continue  # their block is told by its last part
        elif node.target in TRAVELLING and recorded and any(map(is_bounded, node.kwargs["cut"][TRAVEL])):  # type: ignore[index, call-overload, union-attr, arg-type]
            continue
        elif node.target in TRAVELLING:
            reasons.append(f"{node.name}: experts to which rows travel")
        elif node.target in BRANCHES:
            reasons.append(f"{node.name}: a branch on a number")
    return reasons


class Opened:
    """An object that one call under autograd gives to the next one, with autograd's graph in it, and its leaves."""

    def __init__(self, inside: Any, leaves: list[torch.Tensor]) -> None:
        self.inside, self.leaves = inside, leaves


class Tape:
    """A call that ran under autograd: its graph, from detached arguments to results."""

    def __init__(self, leaves: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        self.leaves, self.results = leaves, results
        self.alone = _one_node(leaves, results)

    def gradients(self, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the leaves; the graph is kept."""
        if self.alone is not None and grads[0] is not None:
            node, places = self.alone
            with autograd_again(), torch.no_grad():
                given = node.apply(grads[0])
            given = given if isinstance(given, tuple) else (given,)
            return tuple(None if k is None else _fitting(given[k], x) for k, x in zip(places, self.leaves, strict=True))
        pairs = [(x, g) for x, g in zip(self.results, grads, strict=True) if x.requires_grad and g is not None]
        wanted = [x for x in self.leaves if x.requires_grad]
        got: Sequence[Any] = [None] * len(wanted)
        if pairs and wanted:
            roots, arriving = zip(*pairs, strict=True)
            with autograd_again():
                got = torch.autograd.grad(roots, wanted, arriving, retain_graph=True, allow_unused=True)
        each = iter(got)
        return tuple(next(each) if x.requires_grad else None for x in self.leaves)


def _one_node(
    leaves: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> tuple[Any, list[int | None]] | None:  # fmt: skip
    """Return the node of a call that is one user Function and nothing else, and which of its gradients is each leaf's.

    Its ``backward`` can be called without autograd's engine, which costs more than a small one.
    """
    node: Any = results[0].grad_fn if len(results) == 1 else None
    if not isinstance(node, BackwardCFunction) or results[0]._backward_hooks:
        return None
    places: list[int | None] = [None] * len(leaves)
    asked = [k for k, wants in enumerate(node.needs_input_grad) if wants]  # of the arguments, tensors or not
    before = [edge for edge, _ in node.next_functions if edge is not None]  # of the tensors that want a gradient
    for k, edge in zip(asked, before, strict=True):
        at = [n for n, x in enumerate(leaves) if x is getattr(edge, "variable", None)]
        if len(at) != 1 or places[at[0]] is not None:
            return None
        places[at[0]] = k
    return node, places


def _fitting(grad: torch.Tensor | None, leaf: torch.Tensor) -> torch.Tensor | None:
    """Return a gradient in the shape and format of its tensor, as autograd's engine takes it from a user's Function."""
    if grad is None or (grad.shape == leaf.shape and grad.dtype == leaf.dtype):
        return grad
    return grad.sum_to_size(leaf.shape).to(leaf.dtype)


def run_under_autograd(
    target: Any, spec: pytree.TreeSpec | None, wants: Sequence[bool], *values: Any
) -> tuple[Any, ...]:  # fmt: skip
    """Call ``target`` under autograd.

    Args:
        spec: structure of ``(args, kwargs)``, of which ``values`` are the leaves; None if they are the arguments.
        wants: for each tensor among them, whether it wants a gradient.

    Returns:
        A :class:`Tape` and the results; of a call in :data:`OPENED` an :class:`Opened`.
    """
    leaves: list[torch.Tensor] = []
    given: list[Any] = []
    each = iter(wants)
    for x in values:
        if isinstance(x, Opened):
            leaves.extend(x.leaves)
            x = x.inside
        elif isinstance(x, torch.Tensor):
            x = x.detach().requires_grad_(next(each))
            leaves.append(x)
        given.append(x)
    args, kwargs = (given, {}) if spec is None else pytree.tree_unflatten(given, spec)
    with autograd_again(), torch.enable_grad():
        results = target(*args, **kwargs)
    if target in OPENED:
        return (Opened(results, leaves),)
    flat = pytree.tree_leaves(results)
    tape = Tape(leaves, [x for x in flat if isinstance(x, torch.Tensor)])
    return (tape, *(x.detach() if isinstance(x, torch.Tensor) else x for x in flat))


def gradients_by_autograd(tape: Tape, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the tensor arguments of a call that ran under autograd."""
    return tape.gradients(grads)


def is_taken(condition: torch.Tensor) -> bool:
    """Return the value of a branch's number."""
    return bool(condition)


def chosen(taken: bool, if_true: torch.Tensor, if_false: torch.Tensor) -> torch.Tensor:
    """Copy the side of a branch that its number chooses."""
    return (if_true if taken else if_false).clone()


def only_if(taken: bool, wanted: bool, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient where the branch went to the wanted side, None where it did not."""
    return grad if taken is wanted else None


def sum_of(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Add two gradients of which one or both may not have come."""
    return b if a is None else a if b is None else a + b


def filled(grad: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a gradient, or zeros where none came."""
    return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad


def laid_out(grad: torch.Tensor | None, strides: Sequence[int]) -> torch.Tensor | None:
    """Return a gradient with the strides with which its readers were recorded: kernels may rely on them."""
    if grad is None or lies_alike(grad, strides):
        return grad
    return torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)


def lies_alike(x: torch.Tensor, strides: Sequence[int]) -> bool:
    """Check the strides of a tensor, in dims that have more than one element."""
    return all(n < 2 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True)) or not x.numel()


def has_known_strides(node: torch.fx.Node) -> bool:
    """Check whether the strides of a gradient are those of its ``val``: not what autograd gives when it runs."""
    source = node.args[0] if node.target is operator.getitem else node
    assert isinstance(source, torch.fx.Node)
    known = node.op == "placeholder" or source.target is laid_out or isinstance(source.target, OpOverload)
    return known and not node.meta.get("unknown")


# --- tensors that are given up until the backward ---------------------------------------------------------------------


def leave(whole: torch.Tensor, decision: str, before: Freed | None = None) -> Freed:
    """Give up a tensor that has had its last reader, as a decision about memory says.

    Args:
        before: the tensor that was given up so long before that its copy must be done by now.
    """
    fills = DECISIONS[decision].freed
    assert fills is not None
    freed: Freed = fills(whole)
    freed.leave()
    freed.follow(before)
    return freed


def end_forward(*leaving: Freed) -> None:
    """Free what is still on its way to where it waits."""
    for freed in leaving:
        freed.gone()


def begin_backward(*leaving: Freed) -> None:
    """Start the way back of those that were given up last."""
    for freed in reversed(leaving):
        freed.come()


def come_back(freed: Freed) -> torch.Tensor:
    """Return a tensor that was given up, with its values."""
    freed.fill()
    (whole,) = freed.values
    return whole


def be_done(freed: Freed) -> None:
    """End the last use of a tensor that was given up: another backward may follow if the graph is kept."""
    if keeps_graph():
        freed.free()
    else:
        freed.let_go()
