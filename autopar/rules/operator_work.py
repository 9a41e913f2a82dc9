"""The work of a device for one operator as cost models count it: product sizes, bytes, fusion of pointwise ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod

from autopar.rules.notation import ADD, Rule
from autopar.rules.registry import rules_of
from autopar.words.exchanges import exchange_of
from autopar.words.graph import Graph, Node, Ref
from cost_models.operator_cost import ALIGNMENT_BYTES, COMPUTE_KINDS

SCATTER_BYTES = 30
"""What the gradient of a row that was looked up takes, in bytes moved for each of its own: numbers are sorted, rows
added one by one. On an H200 a table of 128,256 rows takes 0.94 ms for 8,192 rows of 4,096, one of 32,000 takes 1.75 ms
for 32,768 (hardware_profiles/measured/h200/rates.json)."""
FUSED = ("pointwise", "reduce", "copy")
"""Kinds that compilers and hand-written kernels run in one, look-ups excepted."""


def curve_of(rule: Rule) -> str:
    """Return what the cost model tells apart of the operator's kind; empty for the kind itself."""
    return "" if rule.curve == ADD else rule.curve


def gemm_of(
    rule: Rule, pieces: Mapping[str, int | Fraction], flops: float, first: Sequence[int], out: Sequence[int]
) -> tuple[int, int, int] | None:  # fmt: skip
    """Return ``(m, n, k)`` of a contraction on one rank.

    n comes from the second input alone, m is the rest of the output, k is summed over. For attention: queries, the
    mean number of keys that a query sees, and the head size. Where a rule names the factors of its products
    (``Rule.gemm``), m are the rows of one group.

    Args:
        flops: FLOPs of the forward on this rank.
        first, out: local shapes of the first input and the first output.
    """
    if rule.kind == "attention":
        return attention_shape(flops, first, out)
    if rule.kind not in ("matmul", "conv"):
        return None
    if rule.gemm is not None:
        rows, features, summed, groups = (rule.size_at(f, pieces) for f in rule.gemm)
        return max(1, rows // max(1, groups)), features, summed
    if len(rule.inputs) < 2:
        return None
    of_first = {f for d in rule.inputs[0] for f in d}
    second = {f for d in rule.inputs[1] for f in d}
    of_out = {f for d in rule.outputs[0] for f in d}

    def size(factors: set[str]) -> int:
        return prod(rule.size_at(f, pieces) for f in factors)

    m, n = size(of_out - (second - of_first)), size((second & of_out) - of_first)
    if rule.kind == "conv":  # the places of the image that its kernel is moved to are no part of what is summed
        return m, n, max(1, round(flops / max(1, 2 * m * n)))
    return m, n, size((of_first | second) - of_out)


def attention_shape(flops: float, first: Sequence[int], out: Sequence[int]) -> tuple[int, int, int] | None:
    """Return ``(queries, keys that a query sees, size of a head)``; None if there is nothing to compute.

    Args:
        flops: 2 for each multiply-add of scores and values.
        first: local shape of the queries.
        out: local shape of the result.
    """
    queries, size = first[-2], (first[-1] + out[-1]) // 2
    rows = prod(out[:-1])
    if not rows or not size or not flops:
        return None
    return queries, max(1, round(flops / (4 * rows * size))), size


def unfused_scores_bytes(
    rule: Rule, gradients: Sequence[bool], pieces: Mapping[str, int | Fraction]
) -> float:  # fmt: skip
    """Return one rank's bytes of the scores of attention whose mask gets a gradient; 0 for others.

    Torch's fused kernels give no such gradient, so it runs in plain operators, in float32.
    """
    if rule.kind != "attention" or not any(gradients[3:]):
        return 0.0
    (queries,), (keys,) = rule.inputs[0][-2:-1], rule.inputs[1][-2:-1]
    return 4.0 * prod(rule.size_at(f, pieces) for dim in (*rule.inputs[0][:-2], queries, keys) for f in dim)


def is_aligned(rule: Rule, dtype: str, pieces: Mapping[str, int | Fraction]) -> bool:
    """Check that inner sizes of a product, whole and on one rank, are multiples of what tensor cores read at once."""
    if rule.kind != "matmul" or len(rule.inputs) < 2 or dtype not in ("bfloat16", "float16"):
        return True
    elements = ALIGNMENT_BYTES // 2
    for dim in (*rule.inputs[0][-1:], *rule.inputs[1][-1:], *rule.outputs[0][-1:]):
        whole = prod(rule.sizes[f] for f in dim)
        if whole > 1 and (whole % elements or prod(rule.size_at(f, pieces) for f in dim) % elements):
            return False
    return True


def joined_gradients(rule: Rule, names: Iterable[str]) -> list[int]:
    """Return the inputs of which an op reads parts, whose gradients are joined: what groups have, made in chunks."""
    in_chunks = rule.gemm is not None and any(exchange_of(name)[1].chunks > 1 for name in names)
    groups = rule.gemm[3] if in_chunks and rule.gemm is not None else ""
    return [i for i, term in enumerate(rule.inputs) if any(groups in dim for dim in term)] if groups else []


def moved_bytes(
    rule: Rule, read: Sequence[float], written: Sequence[float], gradients: Sequence[bool], counted: Sequence[bool]
) -> tuple[float, float]:
    """Return the bytes an operator reads and writes, forward and backward (of products, forward only).

    The backward reads the gradients of the results and what was kept, and writes those of its inputs. A look-up reads
    the rows that it gives, not the table, and its backward writes a table.

    Args:
        read, written: bytes on one rank of each input and each output.
        gradients: for each input whether it has a gradient.
        counted: for each input and each output, whether it goes through memory.
    """
    ins = [n * c for n, c in zip(read, counted, strict=False)]
    outs = [n * c for n, c in zip(written, counted[len(read) :], strict=True)]
    forward = 2 * sum(ins[1:]) if rule.in_place else sum(ins) + sum(outs)
    if rule.kind in COMPUTE_KINDS:
        biased = any(grad and i in rule.additive for i, grad in enumerate(gradients))
        return forward, sum(written) if biased else 0.0
    if not any(gradients) or rule.curve == ADD:
        return forward, 0.0
    into = sum(n for n, grad in zip(ins, gradients, strict=True) if grad)
    if rule.curve == "lookup":
        forward = sum(ins[1:]) + 2 * sum(written)
        return forward, into + SCATTER_BYTES * sum(written)
    kept = sum(ins[i] for i in rule.saves) + (sum(outs) if rule.saves_out else 0.0)
    return forward, sum(outs) + kept + into


def through_memory(graph: Graph, node: Node) -> tuple[bool, ...]:
    """Return, for each input and output of an operator, whether it goes through memory.

    Consecutive memory-bound operators are one kernel: a tensor between two of them, with no other reader, does not.
    """
    known: dict[int, tuple[bool, ...]] | None = graph.derived.get("through memory")
    if known is None:
        known = graph.derived["through memory"] = dict(_through_memory(graph))
    return known[graph.index[node.name]]


def _through_memory(graph: Graph) -> Iterator[tuple[int, tuple[bool, ...]]]:
    rules, ops = rules_of(graph), [i for i, _ in graph.of_kind("op")]
    depth: dict[int, int] = {}  # of others on the longest way to an operator, itself included
    kernel: dict[int, int] = {}  # of those that are bound by memory, by which they share a kernel
    source: dict[int, int] = {}  # of views, what they look at
    for i in ops:
        rule, refs = rules[i], graph.nodes[i].refs
        before = max((depth.get(ref.node, 0) for ref in refs), default=0)
        depth[i] = before + (rule is not None and rule.kind in COMPUTE_KINDS)
        if rule is not None and rule.kind == "none" and refs:
            source[i] = source.get(refs[0].node, refs[0].node)
        elif rule is not None and rule.kind in FUSED and rule.curve != "lookup":
            kernel[i] = before
    given = {value.node for value in graph.outputs if isinstance(value, Ref)}
    outside: set[int] = {source.get(i, i) for i in given}  # read by another kernel
    for i in ops:
        if i not in source:
            outside |= {
                made for made in (source.get(ref.node, ref.node) for ref in graph.nodes[i].refs)
                if kernel.get(made) != kernel.get(i)
            }  # fmt: skip
    for i in ops:
        node = graph.nodes[i]
        shares = [i in kernel and kernel.get(source.get(ref.node, ref.node)) == kernel[i] for ref in node.refs]
        unread = not any(graph.consumers.get(Ref(i, k)) for k in range(len(node.outs)))
        written = i not in kernel or i in outside or unread
        yield i, (*(not shared for shared in shares), *[written] * sum(out is not None for out in node.outs))
