"""Cuts in two that give the whole operator's outputs, found by trying all of them.

Every choice of one dim (or none, or a pending sum) of each input is tried on two pieces, with each of the calls that
:func:`edits` gives: the arguments as they are, or one whole number among them halved: a size of the output's shape, a
number of groups or repeats. A cut is valid if the pieces of every output, joined along a dim, or summed, or taken as
copies, are the whole operator's. This looks only at the forward: it says where to look,
:mod:`autopar.rules.proving.proof` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from autopar.rules.discovery.safe_calls import REFUSALS, outputs
from autopar.rules.operator_call import Call
from autopar.rules.proving.many_ranks import join, piece
from autopar.rules.proving.proof import Case
from autopar.words.meshes import Mesh
from autopar.words.placements import PENDING, REPLICATED, Placement, State, shard
from autopar.words.trees import PyTree

_AXIS = Mesh.of(axis=2)

Path = tuple[int | str, ...]
"""Where a value stands among the arguments: ``(3,)`` the fourth, ``("size", 0)`` the first of a list."""


@dataclass(frozen=True)
class ValidCut:
    """A valid cut: one placement per input, and per output all placements that describe its pieces.

    ``halved`` is the whole number among the arguments that a piece has half of; None if there is none.
    """

    ins: tuple[Placement, ...]
    outs: tuple[frozenset[Placement], ...]
    halved: Path | None = None

    def __str__(self) -> str:
        return ", ".join(self.ins) + " -> " + ", ".join("|".join(sorted(o)) for o in self.outs)


def valid_cuts(
    cases: Sequence[Case], equal_sizes: bool = False, pending: bool = True, paths: Sequence[Path | None] | None = None
) -> list[ValidCut]:
    """List every cut in two that is valid with the numbers of all cases, except those that replicate every tensor.

    Args:
        cases: the same call with different numbers: what is right twice is no coincidence of zeros or ties.
        equal_sizes: only dims of one size are cut together.
        pending: inputs may be pending sums beside inputs that are cut.
        paths: the whole numbers that may be halved; None for all that :func:`halvable` gives.
    """
    call = cases[0].call
    summable = [pending and g for g in cases[0].grads]
    cuts = [
        ValidCut(ins, tuple(frozenset(_all_placements(o.shape)) for o in call.outs if o is not None), path)
        for ins in choices_of([s.shape for s in call.ins], equal_sizes, summable)
        for path in (halvable(call) if paths is None else paths)
    ]
    for case in cases:
        cuts = [still for cut in cuts if (still := _tried(case, cut)) is not None]
    return [
        cut for cut in cuts
        if any(p.is_shard for p in cut.ins) or not all(REPLICATED in o or PENDING in o for o in cut.outs)
    ]  # fmt: skip


def choices_of(
    shapes: Sequence[tuple[int, ...]], equal_sizes: bool, summable: Sequence[bool] | None = None
) -> list[tuple[Placement, ...]]:
    """List the choices: for each input a dim that can be halved or none; or a pending sum, if it is ``summable``."""
    sums = summable or [False] * len(shapes)

    def of(shape: tuple[int, ...], may_sum: bool, size: int | None) -> list[Placement]:
        dims = [d for d, n in enumerate(shape) if n and n % 2 == 0 and (size is None or n == size)]
        return [REPLICATED, *([PENDING] if may_sum else []), *(shard(d) for d in dims)]

    sizes = sorted({n for shape in shapes for n in shape if n and n % 2 == 0}) if equal_sizes else [None]
    choices = {
        ins: None for size in sizes
        for ins in product(*(of(shape, may_sum, size) for shape, may_sum in zip(shapes, sums, strict=True)))
    }  # fmt: skip
    return [tuple(REPLICATED for _ in shapes), *(ins for ins in choices if any(p.is_shard for p in ins))]


def halvable(call: Call) -> list[Path | None]:
    """List None, and the positions of even whole numbers among the arguments."""
    paths: list[Path | None] = [None]
    arguments: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    for key, value in arguments:
        if _is_even(value):
            paths.append((key,))
        elif isinstance(value, (list, tuple)):
            paths += [(key, i) for i, part in enumerate(value) if _is_even(part)]
    return paths


def _is_even(value: PyTree) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1 and value % 2 == 0


def value_at(call: Call, path: Path) -> int:
    """Return the whole number at a path among the arguments."""
    value: PyTree = call.args[path[0]] if isinstance(path[0], int) else call.kwargs[path[0]]
    return value[path[1]] if len(path) > 1 else value  # type: ignore[no-any-return]


def with_value(call: Call, path: Path, value: int) -> Call:
    """Return the call with another whole number at a path."""
    here: Any = value
    if len(path) > 1:
        values = call.args[path[0]] if isinstance(path[0], int) else call.kwargs[path[0]]
        here = [value if i == path[1] else v for i, v in enumerate(values)]
    if isinstance(path[0], int):
        return replace(call, args=(*call.args[: path[0]], here, *call.args[path[0] + 1 :]))
    return replace(call, kwargs={**call.kwargs, path[0]: here})


def _all_placements(shape: tuple[int, ...]) -> list[Placement]:
    return [REPLICATED, PENDING, *map(shard, range(len(shape)))]


def _tried(case: Case, cut: ValidCut) -> ValidCut | None:
    """Return the cut with the placements of outputs that are right for a case; None if an output has none."""
    call = case.call if cut.halved is None else with_value(case.call, cut.halved, value_at(case.call, cut.halved) // 2)
    results = []
    for rank in range(2):
        tensors = [piece(t, State((p,)), _AXIS, rank) for t, p in zip(case.tensors, cut.ins, strict=True)]
        try:
            results.append([t for t in outputs(call.target, call.args, call.kwargs, tensors) if torch.is_tensor(t)])
        except REFUSALS:
            return None
    if not len(results[0]) == len(results[1]) == len(case.outs):
        return None
    fitting = tuple(
        frozenset(p for p in placements if _same(p, a, b, whole))
        for a, b, whole, placements in zip(*results, case.outs, cut.outs, strict=True)
    )
    return replace(cut, outs=fitting) if all(fitting) else None


def _same(placement: Placement, a: torch.Tensor, b: torch.Tensor, whole: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != whole.dtype or (placement == PENDING and whole.dtype == torch.bool):
        return False
    if placement == REPLICATED:
        return a.shape == whole.shape and all(torch.allclose(x, whole, equal_nan=True) for x in (a, b))
    joined = join([a, b], State((placement,)), _AXIS)
    return joined.shape == whole.shape and torch.allclose(joined, whole, equal_nan=True)
