"""Fit the one factor of each software in hardware_profiles/data/software.toml to published runs.

    python benchmarks/accuracy.py *.csv benchmarks/published_data/*.csv --json rows.json
    python benchmarks/fit_software.py rows.json            prints factors, and the errors on both halves
    python benchmarks/fit_software.py rows.json --write    writes them into software.toml

A price is proportional to its software's factor. The factor is that with the smallest median error, each source of the
software weighing the same: rows that are far off for a reason of their own do not move it. It is taken over one half of
the models, every second one of each source from that with most rows on, or of the layouts where a source has one model,
and tested on the other half. Records of one trainer that differ in what they overlap share a factor. Rows of quality C,
such as those that were read off a chart by eye, are not fitted to, nor are those of :data:`HELD_OUT`; nor is a factor
taken that leaves a median error above :data:`WORST`: what is missing there is no factor.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf, log
from pathlib import Path
from statistics import median

from published.errors import loaded, time_error, with_factors
from published.pricing import Priced
from published.rows import OWN

TOGETHER = {"nanotron-ddp": "nanotron", "megatron-2023-plain": "megatron-2023"}
"""Records that share the factor of another one."""
FEWEST = 4
"""Rows of the first half from which a factor is fitted; with fewer the factor stays as it is."""
HELD_OUT = frozenset({"DeepSpeed PR 8255"})
"""Sources that nothing is fitted to: rows that tell whether a factor holds elsewhere."""
WORST = 0.3
"""Median error beyond which a factor says nothing."""
FILE = Path(__file__).resolve().parents[1] / "hardware_profiles" / "data" / "software.toml"


@dataclass(frozen=True)
class Fit:
    """The factor of a software.

    Attributes:
        models: of the half that it was fitted to.
        first, second: median absolute errors with this factor on both halves; None where there are no rows.
    """

    software: str
    factor: float
    models: tuple[str, ...]
    rows: tuple[int, int]
    first: float | None
    second: float | None

    @property
    def text(self) -> str:
        """For the file: how the factor was found, and how good it is."""
        second = "no rows there" if self.second is None else f"{self.second:.1%} of {self.rows[1]} rows"
        return (
            f"least median error over {self.rows[0]} rows ({', '.join(self.models)}), sources alike: median error "
            f"{self.first or 0:.1%}; on the other half {second}"
        )


def halves(some: Sequence[Priced]) -> tuple[list[Priced], list[Priced]]:
    """The rows to fit to and those to test on: every second model of each source, from that with most rows on; of a
    single one, every second row."""
    first: list[Priced] = []
    second: list[Priced] = []
    by_source: dict[str, dict[str, list[Priced]]] = defaultdict(lambda: defaultdict(list))
    for p in sorted(some, key=lambda p: p.run.id):
        by_source[p.run.source][p.run.model].append(p)
    for models in by_source.values():
        if len(models) == 1:
            (rows,) = models.values()
            first += rows[::2]
            second += rows[1::2]
            continue
        for i, name in enumerate(sorted(models, key=lambda name: (-len(models[name]), name))):
            (second if i % 2 else first).extend(models[name])
    return first, second


def fits(priced: Sequence[Priced]) -> list[Fit]:
    """The factors of all software of which there are enough rows."""
    groups: dict[str, list[Priced]] = defaultdict(list)
    for p in priced:
        if p.run.software == OWN or p.run.source in HELD_OUT or p.run.quality == "C":
            continue
        if not p.standin and time_error(p) is not None:
            groups[TOGETHER.get(p.run.software, p.run.software)].append(p)
    found = []
    for software, rows in sorted(groups.items()):
        first, second = halves(rows)
        if len(first) < FEWEST:
            continue
        count = Counter(p.run.source for p in first)
        ratios = [(log((p.run.seconds or 1) / (p.seconds or 1) * p.factor), 1 / count[p.run.source]) for p in first]
        factor = round(exp(_nearest(ratios)), 3)
        if (_error(first, factor) or 0.0) > WORST:
            continue
        models = tuple(sorted({p.run.model for p in first}))
        found.append(
            Fit(software, factor, models, (len(first), len(second)), _error(first, factor), _error(second, factor))
        )
    return found


def _nearest(values: Sequence[tuple[float, float]]) -> float:
    """The number from which half of the weight is least far: the middle of the narrowest span that holds half.

    Args:
        values: with their weights.
    """
    ordered = sorted(values)
    half = sum(weight for _, weight in ordered) / 2
    best, end, inside = (inf, 0.0), 0, 0.0
    for low, weight in ordered:
        while inside < half and end < len(ordered):
            inside += ordered[end][1]
            end += 1
        if inside < half:
            break
        high = ordered[end - 1][0]
        best = min(best, (high - low, (high + low) / 2))
        inside -= weight
    return best[1]


def _error(rows: Sequence[Priced], factor: float) -> float | None:
    again = with_factors(rows, {p.run.software: factor for p in rows})
    errors = [abs(e) for p in again if (e := time_error(p)) is not None]
    return median(errors) if errors else None


def factors_of(found: Sequence[Fit]) -> dict[str, float]:
    """Factors by record, those that share one among them."""
    factors = {fit.software: fit.factor for fit in found}
    return {**factors, **{name: factors[other] for name, other in TOGETHER.items() if other in factors}}


def written(text: str, found: Sequence[Fit]) -> str:
    """The text of software.toml with these factors, and with how each was found among the sources."""
    by_name = {fit.software: fit for fit in found}
    factors = factors_of(found)
    lines, out, name = text.splitlines(), [], ""
    for line in lines:
        table = re.fullmatch(r"\[([\w-]+)(\.sources)?\]", line)
        name = table[1] if table else name
        if name in factors and line.startswith("factor ="):
            continue
        out.append(line)
        if name not in factors:
            continue
        if table and not table[2]:
            out.append(f"factor = {factors[name]}")
        elif table:
            fit = by_name.get(name) or by_name[TOGETHER[name]]
            how = fit.text if name in by_name else f"that of {fit.software}"
            out.append(f'factor = "{how}"')
    return "\n".join(out) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, print, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="rows that benchmarks/accuracy.py --json wrote")
    parser.add_argument("--write", action="store_true", help=f"write the factors into {FILE.name}")
    given = parser.parse_args(arguments)
    found = fits([p for path in given.files for p in loaded(path.read_text(encoding="utf-8"))])
    for fit in found:
        print(f"{fit.software} = {fit.factor}: {fit.text}")
    if given.write:
        FILE.write_text(written(FILE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
