"""The forward of a model for serving: one short prompt, in eval mode, without a loss, with few of its equal blocks."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import autopar.rules  # noqa: F401  (registers the rules)
from autopar.capture import Captured, capture
from autopar.errors import CaptureError, PlanError
from autopar.parallelizing.forward_only import frozen
from autopar.serving.skipped_blocks import NotAlike, SkippedBlocks
from autopar.torch_private import pytree
from autopar.words.graph import Graph, Node, Ref

LABELS = ("labels", "label", "targets", "target")
"""Arguments that only a loss reads."""
PRIMES = (17, 19, 23, 29, 13, 11, 31, 37)
"""Lengths of a short prompt: one that is no size of the model tells tokens from features."""


@dataclass(frozen=True)
class Forward:
    """A captured forward.

    Attributes:
        graph: of one request of ``tokens`` tokens.
        tokens: its length.
        times: by the path of a block, how many blocks it stands for.
        constants: values of tensors that are no parameters, by the name of their buffer, where they have values.
    """

    graph: Graph
    tokens: int
    times: Mapping[str, int]
    constants: Mapping[str, torch.Tensor]

    def times_of(self, path: str) -> int:
        """Return how often what has this path is there in the model: a module, or a parameter."""
        for block, times in self.times.items():
            if path == block or path.startswith(block + "."):
                return times
        return 1

    @property
    def elements(self) -> float:
        """Elements of all parameters of the model."""
        return sum(node.out.n_elements * self.times_of(node.target) for _, node in self.graph.of_kind("param"))


def captured_forward(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], tokens: int | None = None
) -> Forward:
    """Capture the forward of a model on one request.

    Args:
        model: any module; it is left as it was.
        args, kwargs: an example call; its first tensor of integers ``[batch, length]`` is the prompt.
        tokens: length of the prompt; None for a short one.

    Raises:
        PlanError: the example has no prompt.
        CaptureError: the model cannot be traced.
    """
    sizes = _sizes(model)
    length = tokens or next((n for n in PRIMES if all(size % n for size in sizes)), PRIMES[0])
    with _as_served(model):
        try:
            captured, times = _captured(model, *one_request(*without_labels(model, args, kwargs), length))
        except CaptureError:  # labels may be what a decoder reads
            captured, times = _captured(model, *one_request(args, kwargs, length))
    return Forward(without_loss(captured.graph), length, times, _values(model, captured))


def _captured(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Captured, Mapping[str, int]]:
    """Capture a call, with few of the model's equal blocks where they can be shown to do the same."""
    blocks = SkippedBlocks(model)
    if blocks.times:
        with contextlib.suppress(NotAlike, CaptureError), torch.no_grad(), blocks.skipping():
            captured = capture(model, tuple(args), kwargs)
            return captured, blocks.times
    with torch.no_grad():
        return capture(model, tuple(args), kwargs), {}


def without_labels(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call without the arguments that only a loss reads, where the model can be called so."""
    parameters = inspect.signature(model.forward).parameters
    optional = {name for name in LABELS if name in parameters and parameters[name].default is None}
    names = list(parameters)
    kept = list(args)
    for k, name in enumerate(names[: len(kept)]):
        if name in optional:
            kept[k] = None
    return tuple(kept), {name: value for name, value in kwargs.items() if name not in optional}


def one_request(args: Sequence[Any], kwargs: Mapping[str, Any], length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an example call as one of a single request with a prompt of another length.

    Raises:
        PlanError: there is no tensor of integers ``[batch, length]``.
    """
    tensors = [x for x in pytree.tree_leaves((args, dict(kwargs))) if isinstance(x, torch.Tensor)]
    prompt = next((x for x in tensors if x.dim() == 2 and not x.is_floating_point()), None)
    if prompt is None:
        shown = ", ".join(f"{str(x.dtype).removeprefix('torch.')}[{' '.join(map(str, x.shape))}]" for x in tensors)
        raise PlanError(
            f"the example inputs ({shown or 'no tensors'}) have no prompt: an int tensor [batch, length]. Serving is "
            "planned for models that make tokens of tokens; plan others without mode inference"
        )
    batch, long = prompt.shape

    def resized(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.dim() == 0:
            return x
        shape = [length if n == long and d > 0 else n for d, n in enumerate(x.shape)]
        if x.shape[0] == batch:
            shape[0] = 1
        return x if shape == list(x.shape) else torch.zeros(shape, dtype=x.dtype, device=x.device)

    changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(resized, (tuple(args), dict(kwargs)))
    return changed


def without_loss(graph: Graph) -> Graph:
    """Return the graph without the loss that it ends with: its result are the values that the loss is taken of."""
    results = [ref for ref in graph.outputs if isinstance(ref, Ref) and graph.spec(ref).is_float]
    if not results or any(graph.spec(ref).shape for ref in results[:1]):
        return graph
    if any(graph.spec(ref).shape for ref in results):  # the loss and what it was taken of
        outputs = tuple(ref for ref in results if graph.spec(ref).shape)[:1]
        return _pruned(replace(graph, outputs=outputs, loss=None))
    losses = [node for _, node in graph.of_kind("op") if "cross_entropy" in node.target or "nll_loss" in node.target]
    if not losses:
        raise PlanError(
            "the model returns one number, and no cross entropy is in it: leave the loss out of what is planned for "
            "serving, so that the model returns the scores of the next token"
        )
    return _pruned(replace(graph, outputs=(losses[-1].refs[0],), loss=None))


def _pruned(graph: Graph) -> Graph:
    """Return the graph without what its outputs do not need."""
    needed: set[int] = {ref.node for ref in graph.outputs if isinstance(ref, Ref)}
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in needed:
            needed |= {ref.node for ref in graph.nodes[i].refs}
    kept = sorted(needed)
    at = {old: new for new, old in enumerate(kept)}
    moved: list[Node] = [graph.nodes[i].moved(lambda ref: Ref(at[ref.node], ref.out)) for i in kept]
    outputs = tuple(Ref(at[ref.node], ref.out) for ref in graph.outputs)
    return replace(graph, nodes=tuple(moved), outputs=outputs, updates={})


def most_positions(forward: Forward) -> int | None:
    """Return the rows of the smallest table of positions, which are numbers that do not depend on the prompt.

    None for a model that computes positions, as rotary embeddings do. A table with fewer rows than the prompt has
    tokens is none of positions: it tells kinds of tokens apart.
    """
    graph, found = forward.graph, []
    for _, node in graph.of_kind("op"):
        if node.target.startswith("aten.embedding.") and len(node.refs) == 2:
            table, numbers = node.refs
            rows = graph.spec(table).shape[0]
            of_prompt = graph.spec(numbers).shape[-1:] == (forward.tokens,)
            if numbers.node not in graph.from_inputs and of_prompt and rows >= forward.tokens:
                found.append(rows)
    return min(found, default=None)


def _values(model: torch.nn.Module, captured: Captured) -> dict[str, torch.Tensor]:
    """Return the tensors with values that are no parameters."""
    named = {**dict(model.named_buffers()), **captured.constants}
    return {name: value for name, value in named.items() if not value.is_meta}


def _sizes(model: torch.nn.Module) -> set[int]:
    return {n for p in [*model.parameters(), *model.buffers()] for n in p.shape}


@contextlib.contextmanager
def _as_served(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into eval mode without gradients or a cache of its own in this scope."""
    config: Any = getattr(model, "config", None)
    caches = getattr(config, "use_cache", None)
    put_back = frozen(model)
    try:
        if caches:
            config.use_cache = False
        yield
    finally:
        put_back()
        if caches:
            config.use_cache = caches
