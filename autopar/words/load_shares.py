"""The load of routed experts: the share of rows that each of them has.

A load is only for prices: of the ranks that share experts, the one whose experts have most rows computes longest, gets
most of an all-to-all and keeps most for the backward, and all others wait for it. The result of a program does not
depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from autopar.errors import PlanError
from hardware_profiles.strict import Unreadable, parse_json, read_text

Load = tuple[float, ...]
"""The share of rows that each expert has; they sum to 1. Without any, all have the same."""
UNIFORM, MEASURED = "uniform", "measured"
ROUNDING = 1e-9
EVERY = "*"
"""The pattern of a load that is given for all routed experts of a model."""
MOST_ROWS = 1e18
"""The most rows of one expert: sums of all stay finite."""


def parse_load(value: object, where: str) -> dict[str, Load]:
    """Return the loads of routed experts by patterns of modules; none for a uniform load.

    Args:
        value: ``"uniform"``, rows or shares of each expert, a dict of these by patterns of modules, or the path of a
            JSON file that holds one of the last two.
        where: the origin of the value, for messages.

    Raises:
        PlanError: it is none of these, or a file cannot be read.
    """
    if value is None or value == UNIFORM:
        return {}
    if isinstance(value, (str, Path)):
        path = Path(value)
        try:
            value = parse_json(read_text(path))
        except Unreadable as error:
            raise PlanError(
                f"{where}: no file of loads can be read at '{path}' ({error}); give '{UNIFORM}', '{MEASURED}', or a "
                'JSON file such as [3, 1, 1, 1] or {"layers.*": [3, 1, 1, 1]}'
            ) from error
        where = f"{where}: {path}"
    table = value if isinstance(value, Mapping) else {EVERY: value}
    return {str(pattern): _shares(rows, f"{where}['{pattern}']") for pattern, rows in table.items()}


def _shares(rows: object, where: str) -> Load:
    example = "give one number for each expert, its rows or its share of them, such as [3, 1, 1, 1]"
    if not isinstance(rows, (list, tuple)) or not rows:
        raise PlanError(f"{where} is {rows!r}; {example}")
    for expert, n in enumerate(rows):
        if isinstance(n, bool) or not isinstance(n, (int, float)) or not 0 <= n <= MOST_ROWS:
            raise PlanError(f"{where}: expert {expert} has {n!r}; {example}, each 0 or more and at most {MOST_ROWS:g}")
    total = math.fsum(rows)
    if not total:
        raise PlanError(f"{where}: all {len(rows)} experts have 0 rows; {example}, not all of them 0")
    if abs(total - 1) < ROUNDING:  # shares already, which are written to a file and read as they are
        return tuple(map(float, rows))
    return tuple(n / total for n in rows)


def uniform(n_experts: int) -> Load:
    """Return the load of experts that all have the same."""
    return (1 / n_experts,) * n_experts


def shares_of_ranks(load: Load, ranks: int) -> list[float]:
    """Return the share of rows of each of `ranks` ranks, to which ``torch.chunk`` deals the experts."""
    each = -(-len(load) // ranks)
    return [math.fsum(load[k * each : (k + 1) * each]) for k in range(ranks)]


def busiest(load: Load, ranks: int) -> tuple[int, float]:
    """Return the first of `ranks` ranks that has most rows, and its share."""
    shares = shares_of_ranks(load, ranks)
    most = max(shares)
    return shares.index(most), most


def path_to_busiest(load: Load, sizes: Sequence[int]) -> list[tuple[int, list[float]]]:
    """Return the path of rows to the busiest rank, if axes of `sizes` cut the experts one after the other.

    It has for each axis the busiest rank's number on it, and the share of the rows sent along it that each rank gets.
    """
    here, _ = busiest(load, math.prod(sizes))
    way, among = [], load
    for k, size in enumerate(sizes):
        number = here // math.prod(sizes[k + 1 :]) % size
        shares = shares_of_ranks(among, size)
        total = math.fsum(shares)
        way.append((number, [share / total for share in shares] if total else [1 / size] * size))
        each = -(-len(among) // size)
        among = among[number * each : (number + 1) * each]
    return way


def grown(load: Load, sizes: Sequence[int]) -> list[float]:
    """Return along each axis the busiest rank's rows, sent or received, as a multiple of an equal share."""
    rows, factors = 1.0, []
    for (number, shares), size in zip(path_to_busiest(load, sizes), sizes, strict=True):
        arrived = rows * shares[number] * size
        factors.append(max(rows, arrived))
        rows = arrived
    return factors
