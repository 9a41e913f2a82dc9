"""Attention in a graph: which queries look at which keys, what of a token is cached for that, how far back it looks.

Attention is ``scaled_dot_product_attention``, or two products with a softmax between them. What a cache has to keep of
a token is found by going back from keys and values over operators that only move numbers: repeated heads are kept
once. Where keys and values of all heads are one product of a narrower tensor, that tensor is kept (latent attention).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from autopar.rules.notation import Rule
from autopar.rules.registry import rules_of
from autopar.serving.known_values import value_of
from autopar.words.graph import Graph, Node, Ref

FUSED = "aten.scaled_dot_product_attention.default"
MOST_MASK = 2**28
"""Elements of a mask that is computed to see how far back it lets a token look."""


@dataclass(frozen=True)
class AttentionCall:
    """One attention.

    Attributes:
        node: the operator that makes the result.
        query, key, value: its tensors, ``[... heads, length, size]``.
        mask: what is added to the scores or says which are taken; None for none.
        causal: a token looks at none behind it, as an argument says.
        kept: the tensors that a cache has to keep.
        latent: they are less than keys and values of all heads, which are products of them.
    """

    node: int
    query: Ref
    key: Ref
    value: Ref
    mask: Ref | None
    causal: bool
    kept: tuple[Ref, ...]
    latent: bool


def attention_calls(graph: Graph) -> list[AttentionCall]:
    """Return all attention of a graph, in order."""
    return [_with_kept(graph, call) for i, node in graph.of_kind("op") if (call := _attention(graph, i, node))]


def _attention(graph: Graph, i: int, node: Node) -> AttentionCall | None:
    if node.target == FUSED:
        query, key, value, *others = node.args
        mask = others[0] if others else node.kwargs.get("attn_mask")
        causal = bool(others[2]) if len(others) > 2 else bool(node.kwargs.get("is_causal"))
        return AttentionCall(i, query, key, value, mask if isinstance(mask, Ref) else None, causal, (), False)
    if not _is_product_of_activations(graph, i):
        return None
    shares, value = node.refs[:2]
    softmax = _back(graph, shares, lambda n: "softmax" in n.target)
    if softmax is None:
        return None
    scores = _back(graph, graph.nodes[softmax].refs[0], lambda n: rule_kind(graph, n) == "matmul")
    if scores is None or not _is_product_of_activations(graph, scores):
        return None
    query, key = graph.nodes[scores].refs[:2]
    return AttentionCall(i, query, key, value, _added(graph, scores, softmax), False, (), False)


def rule_kind(graph: Graph, node: Node) -> str:
    """Return the kind of an operator by its rule."""
    rule = rules_by_number(graph)[graph.index[node.name]]
    return rule.kind if rule is not None else ""


def rules_by_number(graph: Graph) -> list[Rule | None]:
    """Return the rules of all nodes, remembered with the graph."""
    if "rules" not in graph.derived:
        graph.derived["rules"] = rules_of(graph)
    return graph.derived["rules"]  # type: ignore[no-any-return]


def _is_product_of_activations(graph: Graph, i: int) -> bool:
    node = graph.nodes[i]
    return (
        rule_kind(graph, node) == "matmul" and "expert" not in node.target and len(node.refs) >= 2
        and all(ref.node in graph.from_inputs for ref in node.refs[:2])
    )  # fmt: skip


def _back(graph: Graph, ref: Ref, wanted: Callable[[Node], bool], most: int = 24) -> int | None:
    """Return the first wanted operator on the way back over first activations; None if a product comes first."""
    for _ in range(most):
        node = graph.nodes[ref.node]
        if node.kind != "op":
            return None
        if wanted(node):
            return ref.node
        if rule_kind(graph, node) in ("matmul", "conv"):
            return None
        before = [r for r in node.refs if r.node in graph.from_inputs and graph.nodes[r.node].hot]
        if not before:
            return None
        ref = max(before, key=lambda r: graph.spec(r).n_elements)
    return None


def _added(graph: Graph, scores: int, softmax: int) -> Ref | None:
    """Return what operators between scores and softmax take beside the scores: the mask."""
    length = graph.nodes[scores].out.shape[-1]
    for i in range(scores + 1, softmax):
        for ref in graph.nodes[i].refs if graph.nodes[i].hot else ():
            spec = graph.nodes[ref.node].outs[ref.out]
            if spec is not None and not graph.nodes[ref.node].hot and spec.shape[-2:] == (length, length):
                return ref
    return None


# --- what is cached ---------------------------------------------------------------------------------------------------


def _with_kept(graph: Graph, call: AttentionCall) -> AttentionCall:
    keys, values = tuple(_moved_from(graph, call.key)), tuple(_moved_from(graph, call.value))
    kept = tuple(dict.fromkeys((*keys, *values)))
    narrower = _latent(graph, kept)
    return AttentionCall(
        call.node, call.query, call.key, call.value, call.mask, call.causal, narrower or kept, narrower is not None
    )


def _moved_from(graph: Graph, ref: Ref, narrowing: bool = False) -> Iterator[Ref]:
    """Yield the tensors that one is put together of, by operators that only move numbers.

    A part of a larger tensor is one of its own, unless ``narrowing``.
    """
    node, rule = graph.nodes[ref.node], rules_by_number(graph)[ref.node]
    if node.kind == "op" and rule is not None:
        before = [r for r in node.refs if r.node in graph.from_inputs]
        together = node.target.split(".")[1] in PUT_TOGETHER
        is_part = not together and any(graph.spec(r).n_elements > graph.spec(ref).n_elements for r in before)
        if before and (together or (rule.kind == "none" and (narrowing or not is_part))):
            for r in before:
                yield from _moved_from(graph, r, narrowing)
            return
    yield ref


PUT_TOGETHER = ("cat", "stack", "slice_scatter", "repeat_interleave")
"""Operators that copy, and compute nothing."""


def _latent(graph: Graph, kept: tuple[Ref, ...]) -> tuple[Ref, ...] | None:
    """Return the narrower tensors of which products make keys and values; None if these are as narrow."""
    narrower = [source for ref in kept for source in _sources_of_product(graph, ref)]
    found = tuple(dict.fromkeys(narrower))
    return found if found != kept and _width(graph, found) < _width(graph, kept) else None


def _sources_of_product(graph: Graph, ref: Ref) -> Iterator[Ref]:
    """Yield what a tensor is a product of, where that is narrower than what it was itself made of; else the tensor."""
    for made in _moved_from(graph, ref, narrowing=True):
        node = graph.nodes[made.node]
        if node.kind == "op" and rule_kind(graph, node) == "matmul" and node.refs:
            source = node.refs[0]
            first = _back(graph, source, lambda n: rule_kind(graph, n) == "matmul")
            if first is not None and graph.spec(source).shape[-1] < graph.spec(graph.nodes[first].refs[0]).shape[-1]:
                yield from _moved_from(graph, source)
                return
    yield ref


def _width(graph: Graph, refs: tuple[Ref, ...]) -> int:
    return sum(graph.spec(ref).n_elements for ref in refs)


# --- how far back -----------------------------------------------------------------------------------------------------


def seen_tokens(graph: Graph, call: AttentionCall, constants: Mapping[str, torch.Tensor]) -> tuple[bool, int | None]:
    """Return whether a token looks at none behind it, and how many a late one looks at; None for all.

    A mask that cannot be computed here (of inputs, of buffers without values) is taken to be causal.
    """
    if call.mask is None:
        return call.causal, None
    spec = graph.spec(call.mask)
    if spec.n_elements > MOST_MASK:
        return True, None
    mask = value_of(graph, call.mask, constants)
    if mask is None:
        return True, None
    rows = _taken(mask).reshape(-1, *mask.shape[-2:])[0]
    if not bool(rows[0, 0]) and bool(rows[0, -1]):
        rows = ~rows  # what says which scores are left out
    first, last = int(rows[0].sum()), int(rows[-1].sum())
    return first <= 1, None if last >= rows.shape[-1] else last


def _taken(mask: torch.Tensor) -> torch.Tensor:
    """Return which scores a mask takes: of truth values, of ones and zeros, or of what is added to scores."""
    if mask.dtype == torch.bool:
        return mask
    added = mask.is_floating_point() and bool((mask < 0).any())
    return mask > torch.finfo(mask.dtype).min / 2 if added else mask != 0
