"""A backward in two halves: gradients of the inputs first, those of the weights whenever there is time.

A compiled program has a function for each half (:mod:`autopar.lower.steps.halves`). Of others the autograd graph is cut
where paths to weights leave the paths to the inputs (the idea of zero bubble, and of
``torch.distributed.pipelining._backward``). The first half runs the latter and keeps the gradients that arrive at the
cuts; the second starts there. Weights that one cut leads to are computed together; so are weights that several cuts
lead to, such as a position bias that all layers read, and then nothing runs from one cut into another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from autopar.runtime.stages.step_program import LeafGradients, first_half, is_step

Grads = tuple[torch.Tensor | None, ...]
Before = Mapping[Node, list[Node]]


@dataclass(eq=False)
class _Group:
    """Numbers of weights, and the values that their gradients follow from.

    Those are the ones at cuts, by node, and those of outputs that no input leads to.
    """

    leaves: list[int] = field(default_factory=list)
    cuts: dict[Node, Grads] = field(default_factory=dict)
    ends: set[Node] = field(default_factory=set)
    roots: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)


class Halves:
    """The first halves of microbatches whose second half is still to come.

    Attributes:
        waiting: by microbatch, what gives the leaves with their gradients.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, Callable[[], LeafGradients]] = {}

    def inputs(
        self, microbatch: int, roots: Sequence[GradientEdge], grads: Sequence[torch.Tensor],
        wanted: Sequence[GradientEdge], leaves: Sequence[torch.Tensor],
    ) -> Grads:  # fmt: skip
        """Compute the gradients at ``wanted``, given those of the outputs at ``roots``; the rest is kept for later."""
        if roots and is_step(roots[0]):
            gradients, self.waiting[microbatch] = first_half(roots, grads, wanted)
        else:
            gradients, self.waiting[microbatch] = _first_half_of_graph(roots, grads, wanted, leaves)
        return gradients

    def weights(self, microbatch: int) -> None:
        """Add the gradients of the weights."""
        for leaf, grad in self.waiting.pop(microbatch)():
            if grad is not None:
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad


def _first_half_of_graph(
    roots: Sequence[GradientEdge], grads: Sequence[torch.Tensor], wanted: Sequence[GradientEdge],
    leaves: Sequence[torch.Tensor],
) -> tuple[Grads, Callable[[], LeafGradients]]:  # fmt: skip
    """Compute gradients at ``wanted``; return them, and what gives those of the leaves."""
    ends = [root.node for root in roots]
    before = _before(ends)
    inside = _closure([edge.node for edge in wanted], before, set())[0]
    groups = _groups([get_gradient_edge(leaf).node for leaf in leaves], inside, set(ends), before)
    gradients: Grads = (None,) * len(wanted)
    for group in groups:
        for root, end, grad in zip(roots, ends, grads, strict=True):
            if end in group.ends:
                group.roots.append((root, grad))
    if wanted and roots:
        with ExitStack() as hooks:
            for group in groups:
                for node in group.cuts:
                    hooks.callback(node.register_prehook(_keeper(group.cuts, node)).remove)
            gradients = torch.autograd.grad(roots, list(wanted), grads, retain_graph=True, allow_unused=True)
    return gradients, lambda: _second_half_of_graph(groups, inside, leaves)


def _second_half_of_graph(
    groups: Sequence[_Group], inside: set[Node], leaves: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    for group in groups:
        weights = [leaves[i] for i in group.leaves]
        kept = [(GradientEdge(node, k), g) for node, gs in group.cuts.items() for k, g in enumerate(gs)]
        given = [(edge, g) for edge, g in [*kept, *group.roots] if g is not None]
        if not given:
            continue
        with ExitStack() as hooks:
            for node, hook in _fences(group, inside) if len(group.cuts) > 1 else ():
                hooks.callback(node.register_prehook(hook).remove)
            edges, grads = zip(*given, strict=True)
            gradients = torch.autograd.grad(edges, weights, grads, retain_graph=True, allow_unused=True)
        yield from zip(weights, gradients, strict=True)


def _before(ends: Iterable[Node]) -> Before:
    """Map every node that a backward reaches to the nodes that it comes from."""
    sources: dict[Node, list[Node]] = {node: [] for node in ends}
    todo = list(sources)
    while todo:
        node = todo.pop()
        for after, _ in node.next_functions:
            if after is not None:
                if after not in sources:
                    sources[after] = []
                    todo.append(after)
                sources[after].append(node)
    return sources


def _closure(starts: Iterable[Node], before: Before, stop: set[Node]) -> tuple[set[Node], set[Node]]:
    """Return all nodes that lead to ``starts`` without passing ``stop``, and the nodes of ``stop`` that are met."""
    reached = {node for node in starts if node in before}
    met: set[Node] = set()
    todo = list(reached)
    while todo:
        for node in before[todo.pop()]:
            if node in stop:
                met.add(node)
            elif node not in reached:
                reached.add(node)
                todo.append(node)
    return reached, met


def _groups(leaves: Sequence[Node], inside: set[Node], ends: set[Node], before: Before) -> list[_Group]:
    """Group the weights that a backward reaches by the cut or output that they share."""
    group_of: dict[Node, _Group] = {}
    groups: list[_Group] = []
    for i, leaf in enumerate(leaves):
        outside, cuts = _closure([leaf], before, inside)
        own_ends = outside & ends
        if not cuts and not own_ends:
            continue
        merged = _Group([i], dict.fromkeys(cuts, ()), own_ends)
        for overlapping in dict.fromkeys(group_of[node] for node in (*cuts, *own_ends) if node in group_of):
            groups.remove(overlapping)
            merged = _Group(
                [*overlapping.leaves, *merged.leaves],
                {**overlapping.cuts, **merged.cuts},
                overlapping.ends | merged.ends,
            )
        groups.append(merged)
        group_of.update(dict.fromkeys((*merged.cuts, *merged.ends), merged))
    return groups


Hook = Callable[[Grads], Grads | None]


def _keeper(cuts: dict[Node, Grads], node: Node) -> Hook:
    def keep(grads: Grads) -> None:
        cuts[node] = grads

    return keep


def _putter(kept: Grads) -> Hook:
    return lambda _: kept


def _fences(group: _Group, inside: set[Node]) -> list[tuple[Node, Hook]]:
    """Return the hooks that give every cut what it kept, whatever arrives there, and end paths towards inputs."""
    fences: list[tuple[Node, Hook]] = []
    for node, kept in group.cuts.items():
        fences.append((node, _putter(kept)))
        after = {n for n, _ in node.next_functions if n is not None and n in inside and n not in group.cuts}
        fences.extend((n, lambda grads: (None,) * len(grads)) for n in after)
    return fences
