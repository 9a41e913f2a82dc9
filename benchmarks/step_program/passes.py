"""Passes on a step: what runs again, reductions in buckets, collectives that overlap computation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import prod

import torch
import torch.fx
from building import Step

from autopar.torch_private import OpOverload

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
WAIT = c10d.wait_tensor.default


def is_start(node: torch.fx.Node) -> bool:
    """Return whether a node begins a collective."""
    target = node.target
    return isinstance(target, OpOverload) and target.namespace == c10d.name and target is not WAIT


def overlapped(nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """Order nodes so that what a collective needs comes first, and waits come last.

    Behind its start stands what else was to be computed before it, such as the gradient of a weight.
    """
    done: dict[torch.fx.Node, None] = {}
    inside = set(nodes)

    def emit(node: torch.fx.Node) -> None:
        todo = [node]
        while todo:
            at = todo[-1]
            before = [x for x in (*at.all_input_nodes, *at.meta.get("guard", ())) if x in inside and x not in done]
            if before and at not in done:
                todo.extend(reversed(before))
            else:
                done.setdefault(todo.pop())

    place = {node: k for k, node in enumerate(nodes)}
    position = 0
    for start in [n for n in nodes if is_start(n)]:
        emit(start)
        for node in nodes[position : place[start]]:
            if node.target is not WAIT and not _waits(node, inside, done):
                emit(node)
        position = max(position, place[start])
    for last in (False, True):
        for node in nodes:
            if last or not (node.target is WAIT and not node.users):
                emit(node)
    return list(done)


def _waits(node: torch.fx.Node, inside: set[torch.fx.Node], done: dict[torch.fx.Node, None]) -> bool:
    """Return whether a node needs a wait that nobody has asked for yet."""
    todo, seen = [node], set()
    while todo:
        at = todo.pop()
        if at in done or at not in inside or at in seen:
            continue
        if at.target is WAIT:
            return True
        seen.add(at)
        todo.extend(at.all_input_nodes)
    return False


def in_buckets(step: Step, limit: int) -> int:
    """Reduce gradients of parameters together, as many as fit ``limit`` bytes; return the number of buckets."""
    ends = {node: k for k, node in step.grads.items()}
    open_: dict[object, list[torch.fx.Node]] = {}
    full: list[list[torch.fx.Node]] = []
    size: dict[object, int] = {}
    for node in step.graph.nodes:
        if not is_start(node) or "all_reduce" not in node.target.name() or not node.meta["late"]:
            continue
        (wait,) = node.users
        if wait not in ends or wait.users or node.meta.get("guard"):
            continue
        val = node.args[0].meta["val"]
        n_bytes = prod(val.shape) * val.element_size()
        if n_bytes >= limit:
            continue
        key = node.args[1:], val.dtype
        open_.setdefault(key, []).append(node)
        size[key] = size.get(key, 0) + n_bytes
        if size[key] >= limit:
            full.append(open_.pop(key))
            size[key] = 0
    for bucket in (b for b in (*full, *open_.values()) if len(b) > 1):
        _together(step, bucket, ends)
    return len(full) + len(open_)


def _together(step: Step, bucket: list[torch.fx.Node], ends: dict[torch.fx.Node, int]) -> None:
    graph = step.graph

    def new(target: object, *args: object, val: torch.Tensor | None = None) -> torch.fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta.update(val=val, late=True, of="bucket", guard=())
        return node

    given = [node.args[0] for node in bucket]
    with graph.inserting_before(bucket[-1]):
        flat = [new(aten.reshape.default, x, [-1], val=x.meta["val"].new_empty(x.meta["val"].numel())) for x in given]
        total = sum(x.meta["val"].numel() for x in given)
        val = given[0].meta["val"].new_empty(total)
        start = new(bucket[0].target, new(aten.cat.default, flat, val=val), *bucket[0].args[1:], val=val)
        wait = new(WAIT, start, val=val)
        offset = 0
        for node, x in zip(bucket, given, strict=True):
            shape = list(x.meta["val"].shape)
            part = new(
                aten.narrow.default, wait, 0, offset, prod(shape), val=flat[0].meta["val"].new_empty(prod(shape))
            )
            offset += prod(shape)
            whole = new(aten.reshape.default, part, shape, val=x.meta["val"])
            (old,) = node.users
            step.grads[ends[old]] = whole
            graph.erase_node(old)
            graph.erase_node(node)


def again(step: Step, names: Collection[str]) -> int:
    """Run calls again in the backward instead of keeping what they make; return the number of nodes.

    This is recomputation, and with a gather among the calls it is gathering again.
    """
    of_calls = {n for n in step.graph.nodes if not n.meta["late"] and n.meta["of"] in names}
    copies: dict[torch.fx.Node, torch.fx.Node] = {}

    def copy(node: torch.fx.Node, before: torch.fx.Node) -> torch.fx.Node:
        if node not in of_calls or node.op != "call_function":
            return node
        if node not in copies:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: copy(n, before))
            with step.graph.inserting_before(before):
                copies[node] = step.graph.call_function(node.target, args, kwargs)
            copies[node].meta.update(node.meta, late=True, guard=())
        return copies[node]

    for node in list(step.graph.nodes):
        if node.meta.get("late") and node.op == "call_function" and node not in copies.values():
            for x in node.all_input_nodes:
                if x in of_calls:
                    node.replace_input_with(x, copy(x, node))
    return len(copies)


def in_place(step: Step) -> int:
    """Add up gradients, and sum them over ranks, in memory that nobody else reads; return how often."""
    ends = {*step.grads.values(), *(x for x in step.results if isinstance(x, torch.fx.Node))}
    n = 0
    for node in step.graph.nodes:
        into = {c10d.all_reduce.default: c10d.all_reduce_.default, aten.add.Tensor: aten.add_.Tensor}.get(node.target)
        first = node.args[0] if into is not None else None
        if not isinstance(first, torch.fx.Node) or not node.meta.get("late") or node.meta.get("guard"):
            continue
        own = first.op == "call_function" and first.meta.get("late") and first not in ends and len(first.users) == 1
        if node.target is aten.add.Tensor:
            second = node.args[1]
            same = isinstance(second, torch.fx.Node) and second is not first and "sum" in node.meta
            own = own and same and first.meta["val"].stride() == node.meta["val"].stride()
        if own and isinstance(first.target, OpOverload) and first.target in _OWN:
            node.target = into
            n += 1
    return n


_OWN = {
    aten.mm.default, aten.bmm.default, aten.add.Tensor, aten.add_.Tensor, aten.mul.Tensor, aten.clone.default,
    aten.cat.default, aten.convolution.default, aten.embedding_dense_backward.default, aten.sum.dim_IntList,
}  # fmt: skip
"""Operators whose result is memory of its own, contiguous as the trace says."""


def collectives_of(nodes: Iterable[torch.fx.Node]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the number and the bytes of collectives by ``(group, kind)``, as the certificate counts bytes."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for node in nodes:
        if is_start(node):
            tensors = [node.meta["val"], *(x.meta["val"] for x in node.all_input_nodes)]
            n_bytes = max(x.numel() * x.element_size() for x in tensors)
            key = str(node.args[-1]), node.target._schema.name.split("::")[1]
            times, before = found.get(key, (0, 0))
            found[key] = times + 1, before + n_bytes
    return found
