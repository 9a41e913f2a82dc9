"""A call like another one, small enough to be tried: the same operator on tensors of a few elements.

Sizes are made small one after the other, and only as far as the operator takes it and gives outputs of as many dims: a
size in all dims that have it, or also where it stands among the arguments that are whole numbers (768 and 64 of a view
of ``(8, 768)`` as ``(8, 12, 64)`` are made small together). Different sizes stay different, so that no two dims seem to
belong together that do not. Floating-point numbers become float64 where the operator takes that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Any

import torch

from autopar.rules.discovery.safe_calls import REFUSALS, outputs
from autopar.rules.operator_call import Call, In
from autopar.rules.proving.proof import draw
from autopar.rules.registry import Sample, T
from autopar.words.trees import PyTree

SMALL = (4, 6, 8, 10, 12, 16, 14, 18, 20, 24)
"""Sizes to try, all even: a dim that can't be halved is never found to be one that may be cut."""
SMALL_ENOUGH = 8
MOST_ELEMENTS = 1 << 16
"""The most elements of a tensor in a call that is tried; an operator whose sizes can't be made so small is left
whole."""
FLOATS = ("float64", "float32", "float16", "bfloat16")
RANGES = (((0.0, 0.0), (0, 2)), ((0.1, 0.9), (0, 2)), ((0.0, 0.0), (1, 3)), ((0.0, 0.0), (0, 6)))
"""For floating-point inputs, normal numbers, else numbers between these (a logarithm's). For whole numbers: an index of
any dim, else what can be divided by, else more of them, for what is the same for the first two."""


@dataclass(frozen=True)
class Small:
    """``sample`` is a call that can be tried; ``as_it_is`` the call itself, if it is not too large to be."""

    sample: Sample
    as_it_is: Sample | None


def small_call(call: Call) -> Small | str:
    """Return a small call like this one, or the reason why there is none, to follow the operator's name."""
    sizes = sorted({n for spec in call.ins for n in spec.shape if n > 1}, reverse=True)
    trial = _best(call, {}, frozenset()) if _bytes(call, {}) else None
    if trial is None:  # too large as it is: the largest sizes first, all at once
        start = {n: SMALL[min(i, len(SMALL) - 1)] for i, n in enumerate(s for s in sizes if s > SMALL_ENOUGH)}
        for whole_numbers in (frozenset[int](), frozenset(start)):
            trial = _best(call, start, whole_numbers)
            if trial is not None:
                return _made(trial, start, whole_numbers)
        return "does not run on small tensors of random numbers"
    mapped: dict[int, int] = {}
    whole_numbers = frozenset[int]()
    for n in sizes:
        if n in mapped or (n <= SMALL_ENOUGH and n % 2 == 0):
            continue
        for attempt, numbers in _attempts(n, mapped, call):
            both = whole_numbers | numbers
            if trial.shapes({**mapped, **attempt}, both) is not None:
                mapped, whole_numbers = {**mapped, **attempt}, both
                break
    return _made(trial, mapped, whole_numbers)


def _best(call: Call, mapped: Mapping[int, int], whole_numbers: frozenset[int]) -> _Trial | None:
    """Return the first trial that the operator accepts, preferring one whose numbers are evidence."""
    able = [trial for trial in _kinds(call) if trial.shapes(mapped, whole_numbers) is not None]
    telling = (trial for trial in able if trial.says_something(mapped, whole_numbers))
    return next(telling, able[0] if able else None)


def _made(trial: _Trial, mapped: Mapping[int, int], whole_numbers: frozenset[int]) -> Small | str:
    if not _bytes(trial.call, mapped):
        return f"needs tensors of more than {MOST_ELEMENTS:,} elements to be tried"
    outs = trial.shapes(mapped, whole_numbers)
    assert outs is not None
    for _, least_and_most in RANGES:
        if replace(trial, whole_numbers=least_and_most).shapes(mapped, whole_numbers) not in (outs, None):
            return "gives tensors whose sizes depend on values"
    floats = [i for i, spec in enumerate(trial.call.ins) if spec.dtype in FLOATS]
    for n in range(len(floats) + 1):  # some inputs have no gradient: the last ones, as a rule
        for without in combinations(reversed(floats), n):
            fewer = replace(trial, without_grad=frozenset(without))
            if fewer.takes_gradients(mapped, whole_numbers):
                able = _bytes(trial.call, {}) and trial.shapes({}) is not None
                return Small(fewer.sample(mapped, whole_numbers), fewer.sample({}, frozenset()) if able else None)
    return "has no forward of inputs with or without gradients"


def _attempts(n: int, mapped: Mapping[int, int], call: Call) -> Iterator[tuple[dict[int, int], frozenset[int]]]:
    """Yield candidates ``({size: smaller size}, sizes that are also replaced among whole numbers)``."""
    taken = {*mapped.values(), *(m for spec in call.ins for m in spec.shape if m not in mapped and m != n)}
    parts = sorted({k for k in _whole_numbers(call) if 1 < k < n and n % k == 0}, reverse=True)
    free = [s for s in SMALL if s not in taken and (s < n or n % 2)]
    for s in free:
        yield {n: s}, frozenset()
        yield {n: s}, frozenset({n})
    for k in parts:  # a multiple of what stands among the arguments, such as of a number of groups
        for s in (2 * k, 4 * k, *(k * s for s in free[:2])):
            if s < n and s not in taken:
                yield {n: s}, frozenset()
        for s in free[:3]:  # and one of which that becomes smaller
            yield {n: n // k * s, k: s}, frozenset({n, k})


def _whole_numbers(value: PyTree) -> Iterator[int]:
    if isinstance(value, Call):
        yield from _whole_numbers((value.args, tuple(value.kwargs.values())))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _whole_numbers(part)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _bytes(call: Call, mapped: Mapping[int, int]) -> bool:
    """Check that no input has too many elements."""
    return all(prod(mapped.get(n, n) for n in spec.shape) <= MOST_ELEMENTS for spec in call.ins)


def _kinds(call: Call) -> Iterator[_Trial]:
    """Yield ways to draw inputs: double precision and normal numbers first, whole numbers up to a dim's size last."""
    wide = any(spec.dtype in FLOATS[1:] for spec in call.ins)
    for double in (True, False) if wide else (True,):
        for (low, high), whole_numbers in RANGES:
            yield _Trial(call, double, low, high, whole_numbers)


@dataclass(frozen=True)
class _Trial:
    """A way to draw inputs."""

    call: Call
    double: bool
    low: float
    high: float
    whole_numbers: tuple[int, int]
    without_grad: frozenset[int] = frozenset()

    def sample(self, mapped: Mapping[int, int], whole_numbers: frozenset[int]) -> Sample:
        """Return the call with sizes replaced: in shapes, and those of ``whole_numbers`` among the arguments too."""

        def replaced(value: PyTree) -> PyTree:
            if isinstance(value, In):
                return self._tensor(value.position, mapped)
            if isinstance(value, (list, tuple)):
                return type(value)(replaced(v) for v in value)
            if isinstance(value, int) and not isinstance(value, bool) and value in whole_numbers:
                return mapped[value]
            return value

        return Sample(
            tuple(replaced(a) for a in self.call.args), {k: replaced(v) for k, v in self.call.kwargs.items()}
        )

    def _tensor(self, position: int, mapped: Mapping[int, int]) -> T:
        spec = self.call.ins[position]
        shape = tuple(mapped.get(n, n) for n in spec.shape)
        if spec.dtype in FLOATS:
            dtype = "float64" if self.double else spec.dtype
            return T(shape, dtype, self.high, grad=position not in self.without_grad, low=self.low)
        return T(shape, spec.dtype, low=self.whole_numbers[0], high=self.whole_numbers[1])

    def shapes(
        self, mapped: Mapping[int, int], whole_numbers: frozenset[int] = frozenset()
    ) -> tuple[tuple[int, ...] | None, ...] | None:
        """Return the shapes of the outputs; None if the operator refuses, or returns no numbers or no tensors."""
        try:
            outs = self._called(mapped, whole_numbers)
        except REFUSALS:
            return None
        if len(outs) != len(self.call.outs):
            return None
        for out, spec in zip(outs, self.call.outs, strict=True):
            if isinstance(out, torch.Tensor) != (spec is not None):
                return None
            if spec is not None and (out.dim() != len(spec.shape) or not bool(torch.isfinite(out).all())):
                return None
        return tuple(tuple(out.shape) if isinstance(out, torch.Tensor) else None for out in outs)

    def says_something(self, mapped: Mapping[int, int], whole_numbers: frozenset[int]) -> bool:
        """Check that no output is zeros, or the same for other numbers."""
        of_seeds = [self._called(mapped, whole_numbers, seed=seed) for seed in range(3)]
        return not any(
            says_nothing([out for out in outs if isinstance(out, torch.Tensor)]) for outs in zip(*of_seeds, strict=True)
        )

    def takes_gradients(self, mapped: Mapping[int, int], whole_numbers: frozenset[int]) -> bool:
        """Check that the operator runs forward and backward on inputs with the requested gradients."""
        try:
            outs = self._called(mapped, whole_numbers, grads=True)
            losses = [out.sum() for out in outs if isinstance(out, torch.Tensor) and out.requires_grad]
            if losses:
                torch.autograd.backward(losses)
        except REFUSALS:
            return False
        return True

    def _called(
        self, mapped: Mapping[int, int], whole_numbers: frozenset[int], grads: bool = False, seed: int = 0
    ) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        tensors: list[torch.Tensor] = []

        def take(value: PyTree) -> PyTree:
            if isinstance(value, T):
                tensor = draw(value, generator)
                tensors.append(tensor.requires_grad_(grads and value.grad and tensor.is_floating_point()))
                return In(len(tensors) - 1)
            if isinstance(value, (list, tuple)):
                return type(value)(take(v) for v in value)
            return value

        sample = self.sample(mapped, whole_numbers)
        args, kwargs = tuple(map(take, sample.args)), {k: take(v) for k, v in sample.kwargs.items()}
        leaves = [t.clone() for t in tensors] if grads else tensors  # operators may write to them
        return outputs(self.call.target, args, kwargs, leaves)


def says_nothing(outs: Sequence[torch.Tensor]) -> bool:
    """Check whether an output over several draws is no evidence: for zeros every cut is right."""
    if not outs or outs[0].numel() == 0:
        return False
    return any(not bool(out.any()) for out in outs) or all(torch.equal(out, outs[0]) for out in outs[1:])
