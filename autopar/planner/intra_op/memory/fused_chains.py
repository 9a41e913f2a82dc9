"""Chains of operators that are one kernel: what lies inside of a chain is never written to memory.

With :attr:`hardware_profiles.software.Software.fused`, pointwise operators, norms and softmax that follow each other
run as one kernel. Its backward computes again what it needs of the inside from what the kernel read or wrote, as the
fused norms, GELU, SwiGLU and softmax of Megatron and Transformer Engine do and as the partitioner of ``torch.compile``
chooses (torch/_functorch/partitioners.py). So of memory inside of a chain nothing is kept, and what would keep it keeps
what it follows from: a norm its input and a scale for every row, SwiGLU the gate and the other half and not SiLU's
result.

A tensor is inside of a chain if an operator that can be fused makes it and all that read it can be fused with that one:
they are on the same *level*, which counts the operators on the way there that cannot be fused (products, attention,
collectives, losses). So the sum of a residual is no part of a chain: an operator behind the next product reads it, too.
"""

from __future__ import annotations

import networkx as nx

from autopar.rules.notation import Rule
from autopar.rules.strategy import Strategy
from autopar.words.graph import Graph, Node

FUSED_KINDS = ("pointwise", "reduce", "norm", "softmax")
"""Kinds of rules whose operators run as parts of a fused kernel."""
LOSSES = ("loss", "nll", "cross_entropy")
"""Parts of the names of operators that are kernels of their own: torch's losses keep the logarithms of all classes, as
the cross-entropy of Megatron does, whose vocabulary is cut (megatron/core/tensor_parallel/cross_entropy.py)."""
SCALE_SHARE = 1 / 16
"""A reduction that leaves at most this share of its input's bytes is kept as it is: the scale of a row."""


def may_fuse(node: Node, rule: Rule, strategy: Strategy) -> bool:
    """Return whether an operator may be in a fused kernel: no random draw, no loss, no communication inside."""
    if rule.kind not in FUSED_KINDS or rule.random or is_loss(node):
        return False
    across = {factor for lowering in rule.lowerings for factor in lowering.factors}
    return across.isdisjoint(strategy.names)


def is_loss(node: Node) -> bool:
    """Return whether an operator is a loss over classes."""
    return any(word in node.target for word in LOSSES)


class FusedChains:
    """Chains of operators that a walk over a graph finds, in the order of the graph.

    Attributes:
        fused: operators that may be parts of fused kernels.
        inside: by memory that is inside of a chain, as far as is known, the operator that makes it.
        norms_only: chains need a norm or a softmax to be one kernel.
        loss_in_place: a loss reads what is before it as a fused kernel does, and needs nothing beside.
    """

    def __init__(self, graph: Graph, norms_only: bool = False, loss_in_place: bool = False) -> None:
        self.graph, self.norms_only, self.loss_in_place = graph, norms_only, loss_in_place
        self.readers: dict[int, list[int]] = {}  # by memory that may be inside, of those that may be fused with it
        self.reductions: set[int] = set()
        self.levels = [0] * len(graph.nodes)
        self.fused: set[int] = set()
        self.inside: dict[int, int] = {}

    def read(self, memory: int, reader: int, segment: int, made_in: int) -> None:
        """Note that an operator reads some memory; ``made_in`` is the segment in which that is made."""
        maker = self.inside.get(memory)
        if maker is None:
            return
        is_part = reader in self.fused and self.levels[reader] == self.levels[maker]
        if not is_part or segment != made_in:
            del self.inside[memory]
        else:
            self.readers.setdefault(memory, []).append(reader)

    def op(self, i: int, rule: Rule, strategy: Strategy, is_view: bool) -> None:
        """Note what an operator is, before what it reads. ``is_view``: all of its results lie in what it reads."""
        node = self.graph.nodes[i]
        may = not is_view and (may_fuse(node, rule, strategy) or (self.loss_in_place and is_loss(node)))
        before = max((self.levels[ref.node] for ref in node.refs), default=0)
        self.levels[i] = before + (not is_view and not may)
        if may:
            self.fused.add(i)
            if rule.kind != "pointwise":
                self.reductions.add(i)

    def made(self, memory: int, i: int, n_bytes: int, most_read: int) -> None:
        """Note that an operator makes some memory; the largest that it reads has ``most_read`` bytes."""
        if i in self.fused and n_bytes > SCALE_SHARE * most_read:
            self.inside[memory] = i

    def close(self) -> None:
        """Leave, where only norms are fused, only chains with a norm; call it after the last operator."""
        if not self.norms_only:
            return
        joined = nx.Graph()
        joined.add_nodes_from(self.fused)
        joined.add_edges_from((self.inside[m], reader) for m in self.inside for reader in self.readers.get(m, ()))
        norms = [part for part in nx.connected_components(joined) if part & self.reductions]
        self.fused = set().union(*norms)
        self.inside = {memory: maker for memory, maker in self.inside.items() if maker in self.fused}

    def written(self, memory: int) -> None:
        """Note that some memory is written whoever reads it: an output, or sent, gathered or given up by a decision."""
        self.inside.pop(memory, None)
