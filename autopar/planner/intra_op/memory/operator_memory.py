"""The memory of an operator's call, kept for the backward or needed while it runs, as its inputs are laid out.

It is tried out once for calls that are alike (:mod:`autopar.rules.saved_tensors`, :mod:`autopar.rules.working_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from autopar.rules.kernels import Kernels
from autopar.rules.notation import Rule
from autopar.rules.operator_call import call_of
from autopar.rules.saved_tensors import LocalLayout, Saved, Strides, saved_by
from autopar.rules.strategy import Strategy, grads_of
from autopar.rules.working_memory import Needs, needs_of
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.shards import local_shape

T = TypeVar("T")


class OperatorMemory:
    """Memory of the operators of a graph, cut as ``chosen``; of global tensors if that is None."""

    def __init__(
        self, graph: Graph, rules: Sequence[Rule | None], mesh: Mesh, chosen: Mapping[int, Strategy] | None,
        kernels: Kernels,
    ) -> None:  # fmt: skip
        self.graph, self.rules, self.mesh, self.chosen, self.kernels = graph, rules, mesh, chosen, kernels
        self.known: dict[object, Any] = {}
        self.whole: dict[int, Strategy] = {}

    def strategy(self, i: int) -> Strategy:
        """Return the strategy of an operator; a trivial one where global tensors are walked through."""
        if self.chosen is not None:
            return self.chosen[i]
        kind, node = self.graph.alike[i], self.graph.nodes[i]
        if kind not in self.whole:
            n_outs = sum(spec is not None for spec in node.outs)
            self.whole[kind] = Strategy((), (State(),) * len(node.refs), (State(),) * n_outs)
        return self.whole[kind]

    def saved(self, i: int, strides: tuple[Strides, ...]) -> Saved:
        """Return what autograd keeps of an operator's call, whose inputs have these strides."""
        return self._tried(i, strides, "saved", saved_by)

    def needs(self, i: int, strides: tuple[Strides, ...], arriving: tuple[Strides, ...]) -> Needs:
        """Return the working memory of an operator.

        ``arriving`` as in :func:`~autopar.rules.working_memory.needs_of`.
        """
        return self._tried(i, strides, "needs", needs_of, arriving)

    def _tried(self, i: int, strides: tuple[Strides, ...], what: str, trial: Callable[..., T], *more: object) -> T:
        """Return what a trial of an operator's call says, ``more`` being its last arguments but one.

        It is remembered here by the call, and by the operator's rule for other graphs and walks.
        """
        strategy = self.strategy(i)
        key = what, self.graph.alike[i], id(strategy), strides, *more
        found: T | None = self.known.get(key)
        if found is None:
            node, rule, gpu = self.graph.nodes[i], self.rules[i], self.kernels.gpu
            assert rule is not None
            grads = node.needs_grad, tuple([self.graph.nodes[ref.node].needs_grad for ref in node.refs])
            request = what, node.target, grads, strategy.names, self.mesh, strides, gpu, *more
            found = rule.derived.get(request)
            if found is None:
                layouts = local_layouts(self.graph, i, strategy, self.mesh, strides)
                found = rule.derived[request] = trial(
                    call_of(node, self.graph.spec), rule, strategy.options, self.mesh, layouts, *more, gpu
                )
            self.known[key] = found
        return found


def local_layouts(
    graph: Graph, i: int, strategy: Strategy, mesh: Mesh, strides: Sequence[Strides]
) -> list[LocalLayout]:
    """Return the layouts of an operator's inputs on one rank."""
    node = graph.nodes[i]
    grads, _ = grads_of(graph, node)
    return [
        LocalLayout(local_shape(spec.shape, state, mesh), lies, spec.dtype, grad)
        for spec, state, lies, grad in zip(map(graph.spec, node.refs), strategy.ins, strides, grads, strict=True)
    ]
