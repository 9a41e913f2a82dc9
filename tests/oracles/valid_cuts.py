"""What a rule leaves out: valid cuts that no option of it is."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.placements import REPLICATED, Placement
from autopar.rules.discovery.cuts import ValidCut, valid_cuts
from autopar.rules.proof import Case
from autopar.rules.registry import Sample

SEEDS = (0, 1)


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
        for cut in valid_cuts([Case(target, sample, seed) for seed in SEEDS], pending=False)
        if not any(
            cut.ins == ins and all(p in valid for p, valid in zip(outs, cut.outs, strict=True))
            for ins, outs in offered
        )
    ]
