"""Expansion of blocks that were one node each while the model was traced, operator by operator.

The program is then the one that tracing everything would have given, names included: each name follows from those
requested before it, so the log of requests, with that of the traced block in the place of each skipped call, gives them
all.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from autopar.capture.repeats.block_calls import HERE, Ext, Int, storage
from autopar.capture.repeats.names_asked import Skipped
from autopar.capture.repeats.repeated import BLOCK, Repeats
from autopar.capture.trace.recording import HOOK
from autopar.torch_private import Namespace, OpOverload
from autopar.words.trees import PyTree


class Unlike(Exception):
    """A program that may differ from a trace of the whole model."""


def write_out(exported: Any, repeats: Repeats) -> None:
    """Replace every skipped call in an exported program by its operators, and give all nodes their names.

    ``exported.alike`` becomes the paths of blocks that were not traced, by that of the block which stands for them.

    Raises:
        Unlike: a name is not known, so the whole model must be traced.
    """
    old, new = _names(repeats)
    placeholders = {n.name for n in exported.graph.nodes if n.op == "placeholder"}
    if not placeholders.isdisjoint(old) or not placeholders.isdisjoint(old.values()):
        raise Unlike("an input has the name of an operator")
    _write(exported.graph_module, repeats, old, new)
    alike: dict[str, list[str]] = {}
    for skipped in repeats.skipped.values():
        alike.setdefault(in_model(skipped.like.path), []).append(in_model(skipped.path))
    exported.alike = alike


def _names(repeats: Repeats) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return names in the whole program by those in the traced one, and the names of every skipped call's operators."""
    names = repeats.names
    assert names is not None
    space = Namespace()
    space._used_names, space._base_count = set(names.used_before), dict(names.count_before)
    create = space.create_name
    names_in_order: list[str] = []
    inside: dict[str, list[str]] = {}
    keys = iter(repeats.skipped)
    for entry in names.log:
        if isinstance(entry, Skipped):
            given = [create(candidate, None) for candidate in entry.like.names]
            inside[next(keys)] = [given[i] for i in entry.like.named]
            names_in_order.append("")
        else:
            names_in_order.append(create(entry, None))
    old = {name: names_in_order[position] for name, position in names.given.items()}
    for key, skipped in repeats.skipped.items():  # a region without gradients has the name of its result
        old |= {name: inside[key][n] for name, n in zip(skipped.results, skipped.like.made, strict=True)}
    return old, inside


def _write(gm: torch.fx.GraphModule, repeats: Repeats, old: dict[str, str], new: dict[str, list[str]]) -> None:
    graph = gm.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is BLOCK:
            key = node.args[1]
            _expand(graph, node, repeats.skipped[key], new[key])
        elif node.op == "get_attr":
            inner = getattr(gm, str(node.target), None)
            if isinstance(inner, torch.fx.GraphModule):
                _write(inner, repeats, old, new)
        elif node.op != "placeholder" and node.name in old:
            node.name = old[node.name]
        elif node.op == "call_function" and isinstance(node.target, OpOverload):
            raise Unlike(f"{node.name} has another name than when it was traced")


def _expand(graph: torch.fx.Graph, call: torch.fx.Node, skipped: Skipped, names: list[str]) -> None:
    """Put a block's operators before its call, and their results in place of the call's."""
    external: PyTree = call.args[0]
    like, copies = skipped.like, list[torch.fx.Node]()
    path = in_model(skipped.path)
    stacks: dict[object, PyTree] = {}
    there = [(storage(a), n.meta["val"]) for a, n in zip(like.memory, external, strict=True)]
    memory = {key: val.untyped_storage() for key, val in there if isinstance(val, torch.Tensor)}

    def value(token: PyTree) -> PyTree:
        if type(token) is Int:
            return copies[token.number]
        if type(token) is Ext:
            return external[token.number]
        if isinstance(token, (list, tuple)):
            return type(token)([value(t) for t in token])
        return {k: value(v) for k, v in token.items()} if isinstance(token, dict) else token

    before = call.prepend
    for op, meta, name in zip(like.ops, like.metas, names, strict=True):
        node = torch.fx.Node(graph, name, "call_function", op.target, value(op.args), value(op.kwargs))
        before(node)
        if op.stack not in stacks:
            stacks[op.stack] = {_there(k, path): (_there(v[0], path), v[1]) for k, v in op.stack}
        node.meta = {**meta, "nn_module_stack": stacks[op.stack], "val": _apart(meta.get("val"), memory)}
        copies.append(node)
    results = list(like.made)
    for user in list(call.users):
        assert user.target is operator.getitem
        if any(str(reader.target) == HOOK for reader in user.users):
            raise Unlike("a hook stands right behind what it changes")
        user.replace_all_uses_with(copies[results[int(user.args[1])]])  # type: ignore[arg-type]
        graph.erase_node(user)
    graph.erase_node(call)


def _apart(val: PyTree, memory: dict[int | None, torch.UntypedStorage]) -> PyTree:
    """Return tensors like the traced ones, in memory of their own that is shared as theirs is.

    ``memory`` is by that of the traced call.
    """
    if isinstance(val, (list, tuple)):
        return type(val)([_apart(v, memory) for v in val])
    if not isinstance(val, torch.Tensor):
        return val
    fresh = memory.get(storage(val))
    if fresh is None:
        fresh = memory[storage(val)] = torch.UntypedStorage(val.untyped_storage().nbytes(), device="meta")
    return torch.empty(0, dtype=val.dtype, device="meta").set_(fresh, val.storage_offset(), val.shape, val.stride())


def _there(path: str, block: str) -> str:
    """Return the path of a module in another block of the same kind."""
    if path.startswith(HERE):
        return block + path[len(HERE) :]
    return in_model(path)


def in_model(path: str) -> str:
    """Return a module's path in the model, from that in the traced wrapper of ``torch.export``."""
    return path.removeprefix("_export_root").removeprefix(".")
