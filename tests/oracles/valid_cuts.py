"""What a rule leaves out: valid cuts that no option of it is."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.rules.discovery.cuts import Path, ValidCut, halvable, valid_cuts, value_at, with_value
from autopar.rules.proving.proof import Case
from autopar.rules.registry import Sample
from autopar.words.placements import REPLICATED, Placement

SEEDS = (0, 1)


def unoffered(target: str, sample: Sample) -> list[ValidCut]:
    """The valid cuts that no option of the rule is."""
    case = Case(target, sample)
    if case.rule.random:
        return []

    def one_spelling(placements: Iterable[Placement]) -> tuple[Placement, ...]:
        return tuple(REPLICATED if p.is_replicated else p for p in placements)

    offered = [(one_spelling(o.ins), one_spelling(o.outs)) for o in case.options()]
    return [
        cut
        for cut in valid_cuts(
            [Case(target, sample, seed) for seed in SEEDS], pending=False, paths=_as_the_rule_says(case)
        )
        if not any(
            cut.ins == ins and all(p in valid for p, valid in zip(outs, cut.outs, strict=True))
            for ins, outs in offered
        )
    ]


def _as_the_rule_says(case: Case) -> list[Path | None]:
    """The whole numbers among the arguments that the rule divides."""
    call, rule = case.call, case.rule
    paths: list[Path | None] = [None]
    localize = rule.localize if not rule.lowerings else None
    for path in filter(None, halvable(call)):
        halved = with_value(call, path, value_at(call, path) // 2)
        divided = localize is not None and any(
            localize(call, {factor: 2}) == (halved.args, dict(halved.kwargs))
            for factor, n in rule.sizes.items() if n % 2 == 0
        )  # fmt: skip
        if divided or (rule.shape_arg is not None and path[0] in rule.shape_arg):
            paths.append(path)
    return paths
