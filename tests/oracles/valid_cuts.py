"""What a rule leaves out: cuts in two that give the whole operator's outputs, found by trying all of them.

Every choice of one dim (or none) of each input is tried on two pieces. The call's arguments are taken as they are, with
the output shape halved in one dim, and as the rule localizes them for one factor. A cut is valid if the pieces of every
output, joined along a dim, or summed, or taken as copies, are the whole operator's. This looks only at the forward: the
report says where to look, :mod:`autopar.rules.proof` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from autopar.placements import PENDING, REPLICATED, Mesh, Placement, shard
from autopar.rules.local import resolve
from autopar.rules.many_ranks import join, piece
from autopar.rules.proof import Case, invoke
from autopar.rules.registry import Sample

_AXIS: Mesh = (("axis", 2),)
SEEDS = (0, 1)
"""Of the numbers that a cut is tried on: what is right twice is no coincidence of zeros or ties."""


@dataclass(frozen=True)
class ValidCut:
    """A valid cut: one placement per input, and per output all placements that describe its pieces."""

    ins: tuple[Placement, ...]
    outs: tuple[frozenset[Placement], ...]

    def __str__(self) -> str:
        return ", ".join(self.ins) + " -> " + ", ".join("|".join(sorted(o)) for o in self.outs)


def valid_cuts(target: str, sample: Sample) -> list[ValidCut]:
    """Every cut in two that is valid with the numbers of all seeds, but those that leave every tensor whole."""
    common: dict[tuple[Placement, ...], list[frozenset[Placement]]] | None = None
    for seed in SEEDS:
        case = Case(target, sample, seed)
        of_seed: dict[tuple[Placement, ...], list[frozenset[Placement]]] = {}
        for ins in product(*(_placements(s.shape) for s in case.call.ins)):
            for args, kwargs in _variants(case):
                outs = _try(case, ins, args, kwargs)
                if outs is None or (all(p == "R" for p in ins) and all("R" in o for o in outs)):
                    continue
                of_seed.setdefault(ins, outs)
        common = of_seed if common is None else {
            ins: both
            for ins, outs in common.items()
            if ins in of_seed and all(both := [a & b for a, b in zip(outs, of_seed[ins], strict=True)])
        }  # fmt: skip
    return [ValidCut(ins, tuple(outs)) for ins, outs in (common or {}).items()]


def unoffered(target: str, sample: Sample) -> list[ValidCut]:
    """The valid cuts that no option of the rule is."""
    case = Case(target, sample)
    if case.rule.random:
        return []
    def one_spelling(placements: Iterable[Placement]) -> tuple[Placement, ...]:
        return tuple(REPLICATED if p.is_whole else p for p in placements)

    offered = [(one_spelling(o.ins), one_spelling(o.outs)) for o in case.options()]
    return [
        cut
        for cut in valid_cuts(target, sample)
        if not any(
            cut.ins == ins and all(p in valid for p, valid in zip(outs, cut.outs, strict=True))
            for ins, outs in offered
        )
    ]


def _placements(shape: tuple[int, ...]) -> list[Placement]:
    return [REPLICATED, *(shard(d) for d, n in enumerate(shape) if n and n % 2 == 0)]


def _variants(case: Case) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    call, rule = case.call, case.rule
    yield call.args, dict(call.kwargs)
    if rule.shape_arg is not None:
        shape = call.out.shape
        for d, n in enumerate(shape):
            if n % 2 == 0:
                yield call.replaced(*rule.shape_arg, [*shape[:d], n // 2, *shape[d + 1 :]])
    if rule.localize is not None and not rule.lowerings:
        for factor, n in rule.sizes.items():
            if n % 2 == 0:
                yield rule.localize(call, {factor: 2})


def _try(case: Case, ins: tuple[Placement, ...], args: Any, kwargs: Any) -> list[frozenset[Placement]] | None:
    """The placements that describe each output, or None if an output has none."""
    results = []
    for rank in range(2):
        tensors = [piece(t, (p,), _AXIS, rank) for t, p in zip(case.tensors, ins, strict=True)]
        try:
            got = invoke(resolve(case.call.target), args, kwargs, tensors)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            return None  # the operator refuses these shapes
        results.append([t for t in (got if isinstance(got, (tuple, list)) else [got]) if isinstance(t, torch.Tensor)])
    placements = []
    for a, b, whole in zip(*results, case.outs, strict=True):
        fits = frozenset(p for p in [REPLICATED, PENDING, *map(shard, range(whole.dim()))] if _same(p, a, b, whole))
        if not fits:
            return None
        placements.append(fits)
    return placements


def _same(placement: Placement, a: torch.Tensor, b: torch.Tensor, whole: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != whole.dtype or (placement == "P" and whole.dtype == torch.bool):
        return False
    if placement == "R":
        return a.shape == whole.shape and all(torch.allclose(x, whole, equal_nan=True) for x in (a, b))
    joined = join([a, b], (placement,), _AXIS)
    return joined.shape == whole.shape and torch.allclose(joined, whole, equal_nan=True)
