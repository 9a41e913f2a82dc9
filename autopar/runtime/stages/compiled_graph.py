"""Calls of a compiled graph: inputs and results are what it was compiled for, and what others were that read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autopar.errors import RunError

Boxed = Callable[[list[Any]], Sequence[Any]]
"""Called with a list of inputs, which it empties."""


class Expected(NamedTuple):
    """A tensor that a graph was traced with."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, name: str, x: torch.Tensor) -> Expected:
        """Return what is expected in the place of a tensor without values; numbers in it are plain ones."""
        x = x.detach().resolve_conj().resolve_neg()
        return cls(name, x.shape, x.stride(), x.dtype, x.device)

    def differs(self, x: object) -> str:
        """Say how a value differs in what cannot be made alike; empty if it does not."""
        if not isinstance(x, torch.Tensor):
            return f"is {self._shown()}, and a {type(x).__name__} was given"
        if (x.shape, x.dtype, x.device) == (self.shape, self.dtype, self.device):
            return ""
        return f"is {self._shown()}, and {x.dtype} of shape {tuple(x.shape)} on {x.device} was given"

    def _shown(self) -> str:
        return f"{self.dtype} of shape {tuple(self.shape)} on {self.device}"

    def made_alike(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor with these strides and no bit that says that values are conjugated or negated."""
        x = x.resolve_conj().resolve_neg()
        if x.numel() == 0 or all(a == b or n == 1 for a, b, n in zip(x.stride(), self.stride, x.shape, strict=True)):
            return x
        # dims along which one element is at all places are written once
        once = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in self.stride)]
        made = torch.empty_strided(once.shape, self.stride, dtype=x.dtype, device=x.device)
        return made.copy_(once).expand(x.shape)


class CompiledGraph:
    """A compiled graph, called with a list of inputs that is emptied.

    Inputs are copied where their strides are others than those with which it was compiled. Results have the shapes,
    dtypes and strides of the graph's ``meta["val"]``, so that another graph, traced with them, can take them.

    Args:
        run: takes the tensors.
        inputs: the tensors.
        results: a number or None is itself.
        numbers: by their places among all inputs, the other inputs, for which the graph was compiled, with the names of
            the placeholders; the name is empty if nothing reads it.
    """

    def __init__(
        self, run: Boxed, inputs: Sequence[Expected], results: Sequence[Any],
        numbers: Mapping[int, tuple[str, object]],
    ) -> None:  # fmt: skip
        self.run = run
        self.inputs, self.results, self.numbers = inputs, results, numbers
        self.odd: list[int] | None = None
        """Places of results that the backend returns with other strides, or in the memory of another one, where a
        gradient may be summed in place; None before the first call."""

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        """Run the graph.

        Raises:
            RunError: other shapes, dtypes, devices or numbers than it was compiled for, or results that are not what
                the graph says.
        """
        self._take(inputs)
        results = self.run(inputs)
        if self.odd is None:
            self.odd = self._odd(results)
        if self.odd:
            results = list(results)
            for place in self.odd:
                made = self.results[place].made_alike(results[place])
                results[place] = made.clone() if made is results[place] else made
        return tuple(results)

    def _take(self, inputs: list[Any]) -> None:
        """Leave tensors alone in a list of inputs, made alike those for which the graph was compiled."""
        n = len(self.inputs) + len(self.numbers)
        if len(inputs) != n:
            raise RunError(f"a compiled graph has {n} inputs, and {len(inputs)} were given")
        if self.numbers:
            self._check_numbers(inputs)
            inputs[:] = [x for place, x in enumerate(inputs) if place not in self.numbers]
        for place, ((_, shape, stride, dtype, device), x) in enumerate(zip(self.inputs, inputs, strict=True)):
            if (
                not isinstance(x, torch.Tensor) or x.stride() != stride or x.shape != shape or x.dtype is not dtype
                or x.device != device or x.is_neg() or (dtype.is_complex and x.is_conj())
            ):  # fmt: skip
                expected = self.inputs[place]
                if said := expected.differs(x):
                    raise RunError(
                        f"a compiled graph takes its inputs as it was compiled for them: {expected.name} {said}. "
                        "Compile it again for other inputs"
                    )
                inputs[place] = expected.made_alike(x)

    def _check_numbers(self, inputs: Sequence[Any]) -> None:
        for place, (name, value) in self.numbers.items():
            x = inputs[place]
            if name and repr(x) != repr(value):
                raise RunError(
                    f"a graph was compiled for {name} = {value!r}, and {x!r} was given: compile it again, or pass a "
                    "tensor, which may have another value in each call"
                )

    def _odd(self, results: Sequence[Any]) -> list[int]:
        """Return the places of results that are to be made alike.

        Raises:
            RunError: a result is not what the graph says.
        """
        if len(results) != len(self.results):
            raise RunError(
                f"the backend of compile() returned {len(results)} results of a graph of {len(self.results)}: "
                "use another backend"
            )
        odd, memories = [], set()
        for place, (expected, x) in enumerate(zip(self.results, results, strict=True)):
            if not isinstance(expected, Expected):
                said = "" if repr(x) == repr(expected) else f"is {expected!r}, and {x!r} was given"
            elif not (said := expected.differs(x)):
                memory = x.untyped_storage()._cdata
                if expected.made_alike(x) is not x or (memory in memories and x.numel()):
                    odd.append(place)
                memories.add(memory)
            if said:
                raise RunError(f"the backend of compile() returned something else: result {place} {said}")
        return odd
