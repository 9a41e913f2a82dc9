"""Compiled graphs of operators: one FX graph of a training step, by any backend of ``torch.compile``.

Dynamo, which reads Python, has nothing to read here: backends are called as Dynamo calls them, with a graph and inputs
without values. Most of them let AOTAutograd decompose the operators; what it makes is called with a list, which it
empties, so that each input is freed after its last use. The activations of a forward would otherwise live until the end
of the backward.

Inductor keeps the order of collectives, but would move what is to overlap with them before the first one, or behind the
waits: it schedules for memory, or puts operators where their results are used. So those passes are off.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.errors import RunError
from autopar.runtime.stages.compiled_graph import Boxed, CompiledGraph, Expected
from autopar.torch_private import (
    AOT_COMPILE,
    BoxedCodeGen,
    FakeTensorMode,
    backend_named,
    compilers_are_off,
    inductor_settings,
    takes_a_list,
    unwrapped,
)
from autopar.words.autocasting import without_autocast
from autopar.words.trees import PyTree

CompileArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of ``torch.compile``."""
SETTINGS = {"reorder_for_locality": False, "freezing": False}
"""Settings of inductor for any graph, unless the caller's options say otherwise: as for a model that is trained, which
has none of these passes."""
IN_ORDER = {"reorder_for_peak_memory": False}
"""Settings of inductor for a graph with collectives: what overlaps with one stays between it and the wait for it."""


def compile_graph(graph: torch.fx.GraphModule, arguments: CompileArguments) -> CompiledGraph:
    """Compile a graph of operators without autograd, for the shapes and numbers of its placeholders.

    Args:
        graph: flat placeholders with ``meta["val"]`` (a tensor without values; a number or None), operators, and a flat
            tuple of results, which may be inputs, views, numbers and None. It is not changed.
        arguments: of ``torch.compile``. ``fullgraph`` is true of any graph.

    Returns:
        The compiled graph, to be called without gradients. Each input is freed after its last use where the backend is
        inductor, goes through AOTAutograd or returns the graph's own ``forward``, and else at the end of the call.

    Raises:
        RunError: ``dynamic=True``, sizes that are symbols, or an error of the backend.
        TypeError: ``torch.compile`` has no such argument.
    """
    backend, name = _backend_of(arguments)
    of_tensors, inputs, numbers = _of_tensors_alone(graph)
    placeholders = of_tensors.graph.find_nodes(op="placeholder")
    results: Any = of_tensors.graph.output_node().args[0]
    communicates = any(getattr(n.target, "namespace", "") == "_c10d_functional" for n in of_tensors.graph.nodes)
    settings = {**SETTINGS, **(IN_ORDER if communicates else {})}
    try:
        with torch.no_grad(), without_autocast(), inductor_settings(settings):
            run = _boxed(backend, of_tensors, inputs)
    except Exception as error:
        raise RunError(
            f"compile(backend={name!r}): the backend failed on a graph of {len(graph.graph.nodes)} nodes and "
            f"{len(inputs)} tensors, with {type(error).__name__}: {error}. Run the program without compile(), or with "
            "another backend"
        ) from error
    return CompiledGraph(
        run,
        [Expected.of(node.name, x) for node, x in zip(placeholders, inputs, strict=True)],
        [Expected.of(x.name, x.meta["val"]) if isinstance(x, torch.fx.Node) else x for x in results],
        numbers,
    )


def checked_arguments(arguments: CompileArguments) -> CompileArguments | None:
    """Return arguments of ``torch.compile`` as they are; None if they, or the environment, say not to compile.

    Raises:
        RunError, TypeError: as for :func:`compile_graph`, of what is wrong with the arguments.
    """
    bound = _bound(arguments)
    if bound.get("disable") or compilers_are_off():
        return None
    if bound.get("backend") != "eager":
        _backend_of(arguments)
    return arguments


def _bound(arguments: CompileArguments) -> dict[str, Any]:
    given, options = arguments
    try:
        return inspect.signature(torch.compile).bind(None, *given, **options).arguments
    except TypeError as error:
        names = ", ".join(list(inspect.signature(torch.compile).parameters)[1:])
        raise TypeError(f"compile(): {error}; it takes those of torch.compile, by name: {names}") from None


def _backend_of(arguments: CompileArguments) -> tuple[Callable[..., Any], str]:
    """Return the backend with its options, and its name.

    Raises:
        RunError, TypeError: as for :func:`compile_graph`.
    """
    bound = _bound(arguments)
    if bound.get("mode") is not None and bound.get("options") is not None:
        raise RunError("compile(mode=..., options=...): give one of the two; a mode is a set of options")
    if bound.get("dynamic"):
        raise RunError(
            "compile(dynamic=True): forward and backward are traced for each set of shapes, and compiled with fixed "
            "sizes. Leave dynamic away, or pass False"
        )
    backend = "eager" if bound.get("disable") else bound.get("backend", "inductor")
    try:
        run, others = backend_named({"backend": backend, "mode": bound.get("mode"), "options": bound.get("options")})
    except Exception as error:
        raise RunError(f"compile(backend={backend!r}): {type(error).__name__}: {error}") from error
    mine = {key: value for key in ("mode", "options") if (value := others.get(key)) and value != "default"}
    return partial(run, **mine) if mine else run, str(getattr(backend, "__name__", backend))


def _of_tensors_alone(
    graph: torch.fx.GraphModule,
) -> tuple[torch.fx.GraphModule, list[torch.Tensor], dict[int, tuple[str, object]]]:
    """Return a copy of a graph without placeholders of numbers, inputs without values, and the numbers.

    The numbers are by the place and name of the placeholder; one that nothing reads has no name.

    Raises:
        RunError: sizes are symbols.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    copied = torch.fx.Graph()
    new: dict[torch.fx.Node, Any] = {}
    inputs: list[torch.Tensor] = []
    numbers: dict[int, tuple[str, object]] = {}
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder":
            new[node] = copied.node_copy(node, lambda x: new[x])
        elif not isinstance(value, torch.Tensor):
            numbers[len(numbers) + len(inputs)] = node.name if node.users else "", value
            new[node] = value
        else:
            if not all(type(n) is int for n in (*value.shape, *value.stride())):
                raise RunError(
                    f"compile(): {node.name} has the symbolic shape {tuple(value.shape)}, and the graph would be "
                    "compiled with fixed sizes. Run the program without compile()"
                )
            # a mode of the graph's own: parts of it may have been traced in several
            inputs.append(mode.from_tensor(value.detach().resolve_conj().resolve_neg(), static_shapes=True))
            new[node] = copied.node_copy(node)
            new[node].meta["val"] = inputs[-1]
    for node in copied.nodes:
        node.type = None  # an annotation that is text keeps the graph out of AOTAutograd's cache
    return torch.fx.GraphModule(graph, copied), inputs, numbers


def _boxed(backend: Callable[..., Any], graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Boxed:
    """Return what a backend makes of a graph, called with a list that is emptied."""
    boxed_of: dict[Callable[..., Any], Boxed] = {}
    aot_compile = AOT_COMPILE.get()

    def compile_boxed(module: torch.fx.GraphModule, *args: PyTree, **kwargs: PyTree) -> Callable[..., Any]:
        boxed = aot_compile(takes_a_list(module), *args, **kwargs)

        def called(*values: PyTree) -> PyTree:
            return boxed([*values])

        boxed_of[called] = boxed
        return called

    with AOT_COMPILE.replaced(compile_boxed):
        made = unwrapped(backend(graph, inputs))
    if made in boxed_of:
        return boxed_of[made]
    if getattr(made, "_boxed_call", False):
        return made  # type: ignore[no-any-return]
    if getattr(made, "__self__", made) is graph:
        graph.graph.set_codegen(BoxedCodeGen())
        graph.recompile()
        return graph.forward

    def call(values: list[Any]) -> tuple[Any, ...]:
        given = (*values,)
        values.clear()
        return made(*given)  # type: ignore[no-any-return]

    return call
