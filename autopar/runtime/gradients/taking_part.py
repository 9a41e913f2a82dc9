"""The parameters that took part in the calls of a step: others have no gradient, where a program makes zeros."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist

from autopar.runtime.ranks.streams import OnHost
from autopar.words.graph import Graph
from autopar.words.placements import State

Buffers = Mapping[str, tuple[torch.Tensor, State]]


class Took:
    """The parts of one call: a copy of the buffers, which the next call overwrites.

    Args:
        parts: the parts of the program that was called.
        flags: bool [n], those of all its buffers.
    """

    def __init__(self, parts: TakingPart, flags: torch.Tensor) -> None:
        self._parts, self._flags = parts, OnHost(flags)

    @property
    def conditional(self) -> frozenset[str]:
        """The parameters that some calls do not use."""
        return frozenset(self._parts.elements)

    @cached_property
    def names(self) -> frozenset[str]:
        """The parameters that this call used, of those that some calls do not use."""
        (up,) = self._flags.tolist()  # the forward is over by the time its backward hands gradients over
        return frozenset(name for name, elements in self._parts.elements.items() if any(up[e] for e in elements))


class TakingPart:
    """The parameters of a program that some calls do not use.

    Attributes:
        elements: for each of them the flags, in the row of all buffers, one of which is up where it does.
    """

    def __init__(self, graph: Graph) -> None:
        self.elements: dict[str, list[int]] = {}
        self._buffers: list[str] = []
        begins = 0
        here = {node.target for _, node in graph.of_kind("param")}
        for node in graph.parts:
            if node.target in graph.updates:
                self._buffers.append(node.target)
                for name, element in node.kwargs["parameters"]:
                    if name in here:
                        self.elements.setdefault(name, []).append(begins + element)
                begins += node.out.n_elements

    def always(self, names: Iterable[str]) -> None:
        """Let the parameters `names` always take part from now on."""
        for name in names:
            self.elements.pop(name, None)

    def look(self, buffers: Buffers) -> Took | None:
        """Return what took part in the last call; None where everything always does."""
        if not self.elements:
            return None
        return Took(self, torch.cat([buffers[name][0] for name in self._buffers]))


class InStep:
    """The parts of the forwards of a step whose gradients are not handed over yet."""

    def __init__(self) -> None:
        self._calls: dict[int, Took] = {}

    def add(self, took: Took | None) -> None:
        """Add a forward whose backward counts in the step; the same one counts once."""
        if took is not None:
            self._calls[id(took)] = took

    def idle(self) -> frozenset[str]:
        """Return the parameters that took part in none of the forwards, and forget the forwards."""
        calls = list(self._calls.values())
        self.forget()
        conditional: frozenset[str] = frozenset().union(*(took.conditional for took in calls))
        return conditional.difference(*(took.names for took in calls))

    def forget(self) -> None:
        """Begin a step."""
        self._calls.clear()


def told_elsewhere(graphs: Sequence[Graph]) -> list[str]:
    """Return parameters of the stages of a pipeline whose part another stage than their own knows, or one of several.

    They are taken to have a part in every step, which a warning says.
    """
    holders: dict[str, set[int]] = {}
    for s, graph in enumerate(graphs):
        for _, node in graph.of_kind("param"):
            holders.setdefault(node.target, set()).add(s)
    names = {
        name for s, graph in enumerate(graphs) for node in graph.parts if node.target in graph.updates
        for name, _ in node.kwargs["parameters"] if holders.get(name, {s}) != {s}
    }  # fmt: skip
    if names and not (dist.is_initialized() and dist.get_rank()):
        shown = sorted(names)
        warnings.warn(
            f"{len(shown)} parameters ({', '.join(shown[:3])}{', ...' if len(shown) > 3 else ''}) belong to experts "
            "whose rows another stage of the pipeline counts: where they have no rows in a step their gradients are "
            "zeros, where the model leaves them None, and an optimizer with momentum or weight decay steps them; "
            "choose cuts= that leave the experts of a layer in one stage, at modules in front of and behind it",
            stacklevel=3,
        )
    return sorted(names)
