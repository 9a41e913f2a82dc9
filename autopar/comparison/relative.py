"""Relative differences between the results of two sides, and the part that rounding explains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from autopar.runtime.gradients.reached import reached_whatever_is_drawn
from autopar.words.graph import Graph
from autopar.words.trees import PyTree

LIMITS = {"float64": 1e-9, "float32": 1e-4, "complex64": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest relative difference that rounding explains, by precision."""


@dataclass(frozen=True)
class Comparison:
    """Worst relative differences between graph and model, with the name of the tensor; all 0 if nothing was run.

    Attributes:
        note: why nothing was compared; empty if it was.
    """

    loss: float = 0.0
    gradient: float = 0.0
    gradient_of: str = ""
    buffer: float = 0.0
    buffer_of: str = ""
    limit: float = 0.0
    note: str = ""

    @property
    def worst(self) -> float:
        """The largest of the differences."""
        return max(self.loss, self.gradient, self.buffer)

    @property
    def same(self) -> bool:
        """True where rounding explains the differences, or nothing was compared."""
        return bool(self.note) or self.worst <= self.limit


@dataclass
class Ran:
    """The results of one side: outputs, gradients by name, new buffers by name."""

    outputs: list[PyTree]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def is_tensor(x: PyTree) -> bool:
    """Return whether a value is a tensor of numbers that can be compared."""
    return isinstance(x, torch.Tensor)


def relative(a: torch.Tensor, b: torch.Tensor, largest: float = 0.0) -> float:
    """Return ``max|a - b|`` in units of the largest value; equal infinities and NaNs are no difference."""
    if a.shape != b.shape:
        return float("inf")
    if not b.numel():
        return 0.0
    kind = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = a.to(kind), b.to(kind)
    same = (x == y) | (x.isnan() & y.isnan())
    if same.all():
        return 0.0
    apart = torch.where(same, torch.zeros_like(x), x - y).abs().max().item()
    finite = y[y.isfinite()].abs()
    scale = finite.max().item() if finite.numel() else 0.0
    ratio = apart / (scale + 1e-3 * largest + 1e-30)
    return ratio if ratio == ratio else float("inf")


def largest_value(tensors: Iterable[torch.Tensor]) -> float:
    """Return the largest finite absolute value in any of some tensors; 1.0 if they have none."""
    finite = [values for t in tensors if (values := t[t.isfinite()].abs()).numel()]
    return max((float(values.max().item()) for values in finite), default=1.0)


def off(a: torch.Tensor | None, b: torch.Tensor | None, largest: float) -> float:
    """Return the relative difference where a gradient may be missing, which is zero."""
    if a is None or b is None:
        some = b if a is None else a
        return 0.0 if some is None else relative(some, torch.zeros_like(some), largest)
    return relative(a, b, largest)


def _of_those_that_took_part(graph: Graph, ran: Ran) -> dict[str, torch.Tensor]:
    """Return the gradients without the zeros of parameters that took no part, by the graph's flags.

    Such are those of an expert without rows: a program returns none.
    """
    took: dict[str, bool] = {}
    for part in graph.parts:
        for name, element in part.kwargs["parameters"]:
            took[name] = took.get(name, False) or bool(ran.buffers[part.target][element])
    return {name: gradient for name, gradient in ran.gradients.items() if took.get(name, True)}


def difference_of(graph: Graph, mine: Ran, theirs: Ran) -> Comparison:
    """Return the largest relative differences between the graph (``mine``) and the model (``theirs``)."""
    kinds = {spec.dtype for node in graph.nodes for spec in node.outs if spec is not None}
    limit = max([LIMITS[k] for k in kinds if k in LIMITS], default=LIMITS["float64"])
    loss = 0.0 if len(mine.outputs) == len(theirs.outputs) else float("inf")
    for a, b in zip(mine.outputs, theirs.outputs, strict=False):
        if is_tensor(a) and is_tensor(b):
            loss = max(loss, relative(a, b, 1e3 if b.ndim == 0 else 0.0))
        elif is_tensor(a) != is_tensor(b):
            loss = float("inf")
    largest = largest_value(theirs.gradients.values())
    gradient, gradient_of = 0.0, ""
    params = {node.target for _, node in graph.of_kind("param")} - reached_whatever_is_drawn(graph)
    gradients = _of_those_that_took_part(graph, mine)
    for name in {**gradients, **theirs.gradients}:
        apart = off(gradients.get(name), theirs.gradients.get(name), largest)
        if name in params and (name in gradients) != (name in theirs.gradients):
            apart = float("inf")  # an optimizer passes over a parameter that hangs on a branch, or moves it
        gradient, gradient_of = max((gradient, gradient_of), (apart, name))
    buffer, buffer_of = 0.0, ""
    for name, b in theirs.buffers.items():
        apart = relative(mine.buffers[name], b)
        buffer, buffer_of = max((buffer, buffer_of), (apart, name))
    return Comparison(loss, gradient, gradient_of if gradient else "", buffer, buffer_of if buffer else "", limit)
