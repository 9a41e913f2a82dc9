"""Programs that recompute parts of themselves: every segment becomes a submodule under activation checkpointing.

A node of a program belongs to segment ``meta["segment"]``; the nodes of a segment are neighbours. Of a segment, only
the outputs live until the backward; when the backward first needs another tensor, the whole segment is recomputed from
its inputs, its collectives included. Random operators draw the same numbers again.

Outputs that others read can be freed, too (:func:`make_again`): the backward of their first reader recomputes the
segment, which refills them.
"""

from __future__ import annotations

import contextlib
import contextvars
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.fx
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from autopar.lower.freed_tensors import Backwards, Freed, fill_all
from autopar.torch_private import function_modes
from autopar.words.trees import PyTree

_MESH: contextvars.ContextVar[DeviceMesh | None] = contextvars.ContextVar("mesh", default=None)


@contextlib.contextmanager
def on_mesh(device_mesh: DeviceMesh) -> Iterator[None]:
    """Set the mesh of collectives in this scope, and of those recomputed in a backward of it."""
    token = _MESH.set(device_mesh)
    try:
        with spmd.set_current_mesh(device_mesh):
            yield
    finally:
        _MESH.reset(token)


def current_mesh() -> DeviceMesh | None:
    """Return the mesh of :func:`on_mesh`; None outside of it."""
    return _MESH.get()


class _AsBefore(contextlib.ExitStack):
    """The scope in which a segment is recomputed: :func:`on_mesh` and the function modes of its first run.

    Modes are off in ``Tensor.backward``. It is entered for every backward of the segment's graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device_mesh, self.modes = current_mesh(), function_modes()

    def __enter__(self) -> _AsBefore:
        if self.device_mesh is not None:
            self.enter_context(on_mesh(self.device_mesh))
        still_on = function_modes()
        for mode in self.modes:
            if all(mode is not mode_on for mode_on in still_on):
                self.enter_context(mode)
        return self


class _Outputs(torch.autograd.Function):
    """The outputs of a segment, unchanged, with one node of autograd for all of them.

    Like everything that autograd keeps in a segment, what the node has saved (nothing) is there again only after the
    segment's second run. So asking for it is asking for that run.
    """

    @staticmethod
    def forward(ctx: Any, given_up: dict[int, weakref.ref[_Output]], *outputs: torch.Tensor) -> PyTree:
        ctx.given_up = given_up
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.empty(0))
        return outputs

    @staticmethod
    def backward(_ctx: FunctionCtx, *grads: PyTree) -> PyTree:
        return None, *grads


class _Output(Freed):
    """An output of a segment that is freed until the backward."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__(whole)
        node: PyTree = whole.grad_fn
        self.node = weakref.ref(node)  # whose hook has this: they must not keep each other
        node.given_up[whole.output_nr] = weakref.ref(self)

    def again(self) -> None:
        """Recompute the segment."""
        node = self.node()
        assert node is not None
        _ = node.saved_tensors


@torch.compiler.disable
def make_again(whole: torch.Tensor, readers: Sequence[Backwards]) -> None:
    """Free an output of a segment until the backward of one of its readers, where the segment is recomputed.

    Args:
        whole: the output; its last reader has run.
        readers: the backwards of the operators outside of segments that read it.
    """
    if whole.grad_fn is None or not hasattr(whole.grad_fn, "given_up"):
        return  # nothing is kept for a backward, or the program runs without segments
    _Output(whole).until_backward(whole.grad_fn, readers)


def recompute_in_backward(
    run: Callable[..., tuple[PyTree, ...]], inputs: Sequence[PyTree], changing: Collection[int] = (),
    renewed: Collection[int] = (), gives_up: bool = False,
) -> tuple[PyTree, ...]:  # fmt: skip
    """Return ``run(*inputs)``, of which autograd keeps the inputs alone; every backward recomputes it.

    It is then recomputed to its end, however little is still needed: so it costs what plans say, and all ranks call the
    same collectives.

    Args:
        run: the segment.
        inputs: its arguments.
        changing: positions of inputs that ``run`` may change and does not depend on, such as the running mean of a
            batch norm in training: the second time it gets copies, so that they change once.
        renewed: positions of inputs that get new values before the backward: copies of them are kept.
        gives_up: some of the results may be freed until the backward (:func:`make_again`).
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    inputs = [x.clone() if k in renewed else x for k, x in enumerate(inputs)]
    as_before = _AsBefore()
    changing_inputs = [(k, inputs[k]) for k in sorted(changing)]
    first = True
    given_up: dict[int, weakref.ref[_Output]] = {}

    def with_held(*rest: PyTree) -> tuple[PyTree, ...]:
        nonlocal first
        values = list(rest)
        for k, value in changing_inputs:
            values.insert(k, value if first else value.clone())
        fill_all(() if first else values)
        results = list(run(*values))
        numbers = [k for k, x in enumerate(results) if isinstance(x, torch.Tensor) and x.requires_grad]
        if numbers and gives_up:
            for k, x in zip(numbers, _Outputs.apply(given_up, *(results[k] for k in numbers)), strict=True):
                results[k] = x
        for number, output in given_up.items() if not first else ():
            again = output()
            if again is not None:
                again.put(results[numbers[number]])
        first = False
        return tuple(results)

    def contexts() -> tuple[contextlib.AbstractContextManager[object], contextlib.AbstractContextManager[object]]:
        return contextlib.nullcontext(), as_before

    return checkpoint(  # type: ignore[no-any-return]
        with_held, *(x for k, x in enumerate(inputs) if k not in changing), use_reentrant=False,
        preserve_rng_state=False, context_fn=contexts, early_stop=False,
    )  # fmt: skip


class SegmentModule(torch.nn.Module):
    """A segment of a program: ``inner`` maps its inputs to its outputs; see :func:`recompute_in_backward`."""

    def __init__(
        self, inner: torch.fx.GraphModule, changing: Collection[int], renewed: Collection[int], gives_up: bool
    ) -> None:
        super().__init__()
        self.inner, self.changing, self.renewed, self.gives_up = inner, changing, renewed, gives_up

    @torch.compiler.disable
    def forward(self, *inputs: PyTree) -> tuple[PyTree, ...]:
        """Run the segment."""
        return recompute_in_backward(self.inner, inputs, self.changing, self.renewed, self.gives_up)


def with_segments(
    module: torch.fx.GraphModule, made: Callable[..., torch.nn.Module] = SegmentModule
) -> torch.fx.GraphModule:
    """Return the module with every segment as a submodule; the module itself if it has none.

    ``made`` creates a submodule from the arguments of :class:`SegmentModule`.
    """
    nodes = list(module.graph.nodes)
    groups: dict[int, list[torch.fx.Node]] = {}
    for node in nodes:
        if "segment" in node.meta:
            groups.setdefault(node.meta["segment"], []).append(node)
    if not groups:
        return module
    graph, root = torch.fx.Graph(), torch.nn.Module()
    for name, part in module.named_children():
        root.add_module(name, part)
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
            gives_up = any(user.target is make_again for x in outputs for user in x.users)
            root.add_module(name, made(inner, changing, renewed, gives_up))
            call = graph.call_module(name, tuple(env[x] for x in inputs))
            env.update((x, graph.call_function(operator.getitem, (call, k))) for k, x in enumerate(outputs))
    return torch.fx.GraphModule(root, graph, class_name=type(module).__name__)


def _cut_out(nodes: list[torch.fx.Node]) -> tuple[list[torch.fx.Node], list[torch.fx.Node], torch.fx.GraphModule]:
    """Return ``(inputs, outputs, module)`` of a stretch of nodes."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = torch.fx.Graph()
    env = {x: graph.placeholder(x.name) for x in inputs}
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[x] for x in outputs))
    return inputs, outputs, torch.fx.GraphModule(torch.nn.Module(), graph, class_name="SegmentModule")
