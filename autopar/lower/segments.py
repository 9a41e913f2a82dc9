"""Programs that run parts of themselves again: every segment becomes a submodule under activation checkpointing.

A node of a program belongs to segment ``meta["segment"]``; the nodes of a segment are neighbours. Nothing that is
made in a segment lives until the backward but its outputs; when the backward first asks for something else, the whole
segment runs again from its inputs, its collectives included. Random operators draw the same numbers again.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.fx
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

_MESH: contextvars.ContextVar[DeviceMesh | None] = contextvars.ContextVar("mesh", default=None)


@contextlib.contextmanager
def on_mesh(device_mesh: DeviceMesh) -> Iterator[None]:
    """Collectives in here, and those made again in a backward of what is computed here, find their axes there."""
    token = _MESH.set(device_mesh)
    try:
        with spmd.set_current_mesh(device_mesh):
            yield
    finally:
        _MESH.reset(token)


def current_mesh() -> DeviceMesh | None:
    """The mesh of :func:`on_mesh`; None outside of it."""
    return _MESH.get()


class _OnMesh(contextlib.ExitStack):
    """:func:`on_mesh`, entered as often as a segment runs again: once for every backward of its graph."""

    def __init__(self, device_mesh: DeviceMesh) -> None:
        super().__init__()
        self.device_mesh = device_mesh

    def __enter__(self) -> _OnMesh:
        self.enter_context(on_mesh(self.device_mesh))
        return self


def again_in_backward(
    run: Callable[..., tuple[Any, ...]], inputs: Sequence[Any], changing: Collection[int] = (),
    renewed: Collection[int] = (),
) -> tuple[Any, ...]:  # fmt: skip
    """``run(*inputs)``, of which autograd keeps the inputs alone; it runs again in every backward.

    Then it runs to its end, however little of it is still wanted: so it costs what plans say, and all ranks
    make the same collectives.

    Args:
        changing: positions of inputs that ``run`` may change and does not depend on, such as the running mean of a
            batch norm in training: the second time it gets copies, so that they change once.
        renewed: positions of inputs that are given new values before the backward: copies of them are kept.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    inputs = [x.clone() if k in renewed else x for k, x in enumerate(inputs)]
    mesh = _MESH.get()
    held = [(k, inputs[k]) for k in sorted(changing)]
    first = True

    def with_held(*rest: Any) -> tuple[Any, ...]:
        nonlocal first
        values = list(rest)
        for k, value in held:
            values.insert(k, value if first else value.clone())
        first = False
        return run(*values)

    def contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
        return contextlib.nullcontext(), contextlib.nullcontext() if mesh is None else _OnMesh(mesh)

    return checkpoint(  # type: ignore[no-any-return]
        with_held, *(x for k, x in enumerate(inputs) if k not in changing), use_reentrant=False,
        preserve_rng_state=False, context_fn=contexts, early_stop=False,
    )  # fmt: skip


class Segment(torch.nn.Module):
    """One segment of a program: ``inner`` maps its inputs to its outputs; see :func:`again_in_backward`."""

    def __init__(self, inner: torch.fx.GraphModule, changing: Collection[int], renewed: Collection[int]) -> None:
        super().__init__()
        self.inner, self.changing, self.renewed = inner, changing, renewed

    @torch.compiler.disable
    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        return again_in_backward(self.inner, inputs, self.changing, self.renewed)


def with_segments(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The module with every segment as a submodule; the module itself if it has none."""
    nodes = list(module.graph.nodes)
    groups: dict[int, list[torch.fx.Node]] = {}
    for node in nodes:
        if "segment" in node.meta:
            groups.setdefault(node.meta["segment"], []).append(node)
    if not groups:
        return module
    graph, root = torch.fx.Graph(), torch.nn.Module()
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    done: set[int] = set()
    for node in nodes:
        number = node.meta.get("segment")
        if number is None:
            env[node] = graph.node_copy(node, env.__getitem__)
        elif number not in done:
            done.add(number)
            inputs, outputs, inner = _cut_out(groups[number])
            name = f"segment_{number}"
            kinds = [x.meta.get("autopar", {}).get("buffer") for x in inputs]
            changing, renewed = ({k for k, kind in enumerate(kinds) if kind == w} for w in ("changing", "renewed"))
            root.add_module(name, Segment(inner, changing, renewed))
            call = graph.call_module(name, tuple(env[x] for x in inputs))
            env.update((x, graph.call_function(operator.getitem, (call, k))) for k, x in enumerate(outputs))
    return torch.fx.GraphModule(root, graph, class_name=type(module).__name__)


def _cut_out(nodes: list[torch.fx.Node]) -> tuple[list[torch.fx.Node], list[torch.fx.Node], torch.fx.GraphModule]:
    """``(inputs, outputs, module)`` of a stretch of nodes."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = torch.fx.Graph()
    env = {x: graph.placeholder(x.name) for x in inputs}
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[x] for x in outputs))
    return inputs, outputs, torch.fx.GraphModule(torch.nn.Module(), graph, class_name="Segment")


__all__ = ["Segment", "again_in_backward", "current_mesh", "on_mesh", "with_segments"]
