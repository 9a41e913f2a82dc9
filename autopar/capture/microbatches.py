"""The batch in parts: which inputs are cut into microbatches, and the graph of a microbatch of any size.

Capturing a model once for every size that a search looks at would take longer than the search. Two captures are enough
where all sizes in the graph are linear in the number of rows, as they are in almost every model: the others lie on the
line. What runs is always captured, so a graph that is not what was expected is found out there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from autopar.capture.batch_factor import followed, may_have_rows
from autopar.capture.row_flows import ROWS
from autopar.errors import CaptureError
from autopar.torch_private import pytree
from autopar.words.graph import TRAINING, Graph, Node, Ref, Spec
from autopar.words.trees import PyTree

MOST = 1024
"""Microbatches that are tried at most."""
SHOWN = 4
"""Modules or buffers that a message names."""
COPIED_BYTES = 1 << 28
"""Bytes up to which the rows of one rank are repeated for an example of the whole batch; larger ones are one row."""
ATTENTION = "aten.scaled_dot_product_attention.default"


def leaves_of_call(example: PyTree) -> list[tuple[str, Any]]:
    """Return the leaves of a call with their names for messages, such as ``args[0]`` or ``'labels'``.

    Args:
        example: ``(args, kwargs)``, or ``(args, kwargs, targets)``: targets follow the positional arguments.
    """
    before = len(example[0]) if isinstance(example, tuple) and len(example) == 3 else 0

    def name(path: Sequence[Any]) -> str:
        top, *rest = path
        if getattr(top, "idx", 0) == 1 and rest:
            return f"'{rest[0].key}'" + pytree.keystr(tuple(rest[1:]))
        if getattr(top, "idx", 0) == 2 and rest:
            return f"args[{before + rest[0].idx}]" + pytree.keystr(tuple(rest[1:]))
        return f"args{pytree.keystr(tuple(rest))}"

    return [(name(path), leaf) for path, leaf in pytree.tree_flatten_with_path(example)[0]]


def rows_of(example: object, whole: Collection[str] = ()) -> int:
    """Return the rows of a batch: the first dim of the first tensor that has one, but for those named in ``whole``.

    Raises:
        CaptureError: no input has a dim.
    """
    named = leaves_of_call(example) if whole else [("", leaf) for leaf in pytree.tree_leaves(example)]
    for name, leaf in named:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and name not in whole:
            return int(leaf.shape[0])
    raise CaptureError("no example input has a dim that could be cut into microbatches; give microbatches=1")


def have_rows(example: object, rows: int, whole: Collection[str] = ()) -> list[bool]:
    """Return, for each leaf of a call, whether it has the rows of the batch.

    It has a first dim as long, and another name than those of ``whole``.
    """
    return [
        isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows and name not in whole
        for name, leaf in leaves_of_call(example)
    ]


def first_part(example: object, parts: int, whole: Collection[str] = ()) -> Any:
    """Return :func:`part_of_batch` number 0."""
    return part_of_batch(example, parts, 0, whole)


def part_of_batch(example: object, parts: int, number: int, whole: Collection[str] = ()) -> Any:
    """Return one of equal parts of a batch: tensors with rows are cut, the others belong to every part.

    Tensors named in ``whole`` (:func:`leaves_of_call`) have no rows, though they may be as long.

    Raises:
        CaptureError: the rows do not divide.
    """
    if parts == 1:
        return example
    rows = rows_of(example, whole)
    if rows % parts:
        raise CaptureError(f"a batch of {rows} rows cannot be cut into {parts} microbatches; use a divisor of {rows}")
    each = rows // parts
    leaves, spec = pytree.tree_flatten(example)
    cut = have_rows(example, rows, whole)
    return pytree.tree_unflatten(
        [x[number * each : (number + 1) * each] if c else x for x, c in zip(leaves, cut, strict=True)], spec
    )


def as_whole(example: object, ranks: int, whole: Collection[str] = ()) -> Any:
    """Return an example of the batch of all ranks, from that of one: its rows repeated, but for inputs in ``whole``."""
    leaves, spec = pytree.tree_flatten(example)
    cut = have_rows(example, rows_of(example, whole), whole)
    return pytree.tree_unflatten([widened(x, ranks) if c else x for x, c in zip(leaves, cut, strict=True)], spec)


def widened(rows: torch.Tensor, ranks: int, copied_bytes: int = COPIED_BYTES) -> torch.Tensor:
    """Repeat one rank's rows `ranks` times.

    If the result exceeds `copied_bytes`, repeat the first row without copying.
    """
    if rows.is_meta or rows.numel() * rows.element_size() * ranks <= copied_bytes:
        return torch.cat([rows.detach()] * ranks).requires_grad_(rows.requires_grad)
    wide = rows.detach()[:1].expand(ranks * rows.shape[0], *rows.shape[1:])
    return wide.requires_grad_(rows.requires_grad)


def numbers_of_parts(rows: int) -> list[int]:
    """Return numbers of microbatches to try: divisors of the rows, each at least twice the one before."""
    numbers: list[int] = []
    for n in range(1, min(rows, MOST) + 1):
        if rows % n == 0 and (not numbers or n >= 2 * numbers[-1]):
            numbers.append(n)
    return numbers


def modules_with_statistics(graphs: Iterable[Graph]) -> list[str]:
    """Return the modules that normalize by statistics of the whole batch, in order."""
    return list(dict.fromkeys(
        node.module or "<model>"
        for graph in graphs
        for node in graph.nodes
        if node.target == "aten.batch_norm.default" and node.args[TRAINING]
    ))  # fmt: skip


def attention_between_rows(graph: Graph) -> list[str]:
    """Return the modules whose attention has the rows of the batch among its queries.

    The dim of the queries comes from that of the rows, by the rules of the operators between.
    """
    shapes = [graph.spec(Ref(i)).shape for i, node in enumerate(graph.nodes) if node.kind == "input" and node.outs]
    rows = next((shape[0] for shape in shapes if shape), 1)
    queries = [(node, graph.spec(node.refs[0]).shape) for node in graph.nodes if node.target == ATTENTION]
    if rows == 1 or all(shape[-2] % rows for _, shape in queries):
        return []
    flows = followed(graph, may_have_rows(graph, rows)).flows
    return list(dict.fromkeys(
        node.module or "<model>" for node, shape in queries
        if any(label == ROWS for _, label in flows[node.refs[0]].dims[len(shape) - 2])
    ))  # fmt: skip


def taken_of_batch(graph: Graph) -> str:
    """Return what makes a step in microbatches another one than that of the whole batch; mostly nothing.

    Attention among rows, such as documents packed into one row whose tokens are the rows of the batch. Batch norms,
    which each microbatch gives statistics of its own; or buffers that the forward writes from what it is
    called with, such as running means, which move once for each microbatch.
    """
    if between := attention_between_rows(graph):
        return f"attention ({_named(between)}) is between the rows of the batch"
    if modules := modules_with_statistics([graph]):
        return f"batch norms ({_named(modules)}) take statistics of the batch"
    written = [name for name in graph.written if graph.updates[name].node in graph.from_inputs]
    return f"the forward writes buffers from the batch ({_named(written)})" if written else ""


def _named(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:SHOWN])
    return f"{shown}, ... {len(names)} in all" if len(names) > SHOWN else shown


class NotLinear(Exception):
    """Two graphs of one model differ in more than sizes."""


def resized(a: Graph, b: Graph, rows_a: int, rows_b: int, rows: int) -> Graph:
    """Return the graph of a batch of ``rows``, from those of two other sizes, by linear interpolation of every integer.

    Raises:
        NotLinear: the graphs differ in something else, or a size would be no integer.
    """
    share = Fraction(rows - rows_a, rows_b - rows_a)

    def node(x: Node, y: Node) -> Node:
        if (x.name, x.kind, x.target, x.needs_grad, x.hot) != (y.name, y.kind, y.target, y.needs_grad, y.hot):
            raise NotLinear(f"{x.name} and {y.name}")
        args, kwargs, outs = _on_line((x.args, x.kwargs, x.outs), (y.args, y.kwargs, y.outs), share)
        return replace(x, args=args, kwargs=kwargs, outs=outs)

    if len(a.nodes) != len(b.nodes) or a.loss != b.loss or a.tied != b.tied or a.updates != b.updates:
        raise NotLinear("nodes")
    nodes = tuple(node(x, y) for x, y in zip(a.nodes, b.nodes, strict=True))
    return replace(a, nodes=nodes, outputs=_on_line(a.outputs, b.outputs, share))


def _on_line(x: PyTree, y: PyTree, share: Fraction) -> PyTree:
    """Return the value at a share of the way from one value to another, integer by integer."""
    if type(x) is type(y):
        if isinstance(x, Spec) and x.dtype == y.dtype:
            return x if x == y else Spec(_on_line(x.shape, y.shape, share), x.dtype)
        if isinstance(x, (tuple, list)) and not isinstance(x, Spec) and len(x) == len(y):
            return type(x)(_on_line(p, q, share) for p, q in zip(x, y, strict=True))
        if isinstance(x, dict) and list(x) == list(y):
            return {k: _on_line(x[k], y[k], share) for k in x}
        if x == y:
            return x
        if isinstance(x, int) and not isinstance(x, bool) and (between := x + (y - x) * share).denominator == 1:
            return int(between)
    raise NotLinear(f"{x!r} and {y!r}")
