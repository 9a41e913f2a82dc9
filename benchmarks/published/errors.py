"""Prices beside what was measured: errors by source, GPU, software and size, and tables of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean, median
from typing import Any

from published.pricing import Priced
from published.rows import OWN, Run, Shape, Sizes

SIZES = ((8, "1 to 8"), (64, "9 to 64"), (512, "65 to 512"), (10**9, "more than 512"))
"""Numbers of GPUs, in classes."""
FEWEST = 4
"""Layouts of one model on one machine of which ranks are compared."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a title."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


# --- of one row ------------------------------------------------------------------------------------------------------


def time_error(p: Priced) -> float | None:
    """The price of a step over its measured seconds, less 1; None where there are not both."""
    if p.seconds is None or not p.run.seconds:
        return None
    return p.seconds / p.run.seconds - 1


def memory_error(p: Priced) -> float | None:
    """The predicted peak of memory over the measured one, less 1; None where there are not both.

    Of rows that print what the allocator held, the prediction has the software's fragmentation and its reserved bytes.
    """
    if p.gib is None or not p.run.gib or p.run.is_out_of_memory or is_recompute_assumed(p):
        return None
    return predicted_gib(p) / p.run.gib - 1


def predicted_gib(p: Priced) -> float:
    """What a row's measured memory is compared with, in GiB."""
    from hardware_profiles.software import software_named

    assert p.gib is not None
    if not p.run.is_reserved:
        return p.gib
    record = software_named(p.run.software)
    return p.gib * (1 + record.fragmentation) + record.reserved_bytes / 2**30


def is_recompute_assumed(p: Priced) -> bool:
    """Whether the row does not say what runs again: then whether it fits means nothing."""
    return any(what.startswith("recompute") for what in p.run.assumed)


def is_known(p: Priced) -> bool:
    """Whether the software has a record, and the precision a policy of its own."""
    return p.run.software != OWN and not p.standin


# --- of many ---------------------------------------------------------------------------------------------------------


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, of which equal values share the mean."""
    x, y = _ranks(a), _ranks(b)
    mean_x, mean_y = fmean(x), fmean(y)
    over = sum((p - mean_x) * (q - mean_y) for p, q in zip(x, y))
    under = (sum((p - mean_x) ** 2 for p in x) * sum((q - mean_y) ** 2 for q in y)) ** 0.5
    return over / under if under else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    first: dict[float, int] = {}
    for i, value in enumerate(order):
        first.setdefault(value, i)
    count = Counter(values)
    return [first[value] + (count[value] - 1) / 2 for value in values]


def ranks_of(some: Iterable[Priced]) -> tuple[float, int] | None:
    """The rank correlation of layouts of one model, batch and precision on one machine, as the mean over such groups
    weighed by their rows; and the number of groups. None where there are none of :data:`FEWEST` rows."""
    groups: dict[Any, list[Priced]] = defaultdict(list)
    for p in some:
        if time_error(p) is not None:
            run = p.run
            groups[run.source, run.shape, run.gpu, run.n_gpus, run.sizes.batch, run.precision].append(p)
    found = [
        (rank_correlation([p.seconds or 0.0 for p in g], [p.run.seconds or 0.0 for p in g]), len(g))
        for g in groups.values() if len(g) >= FEWEST
    ]  # fmt: skip
    if not found:
        return None
    return sum(r * n for r, n in found) / sum(n for _, n in found), len(found)


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """The value at which half of the weight lies below; pairs of value and weight."""
    ordered = sorted(values)
    half, below = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        below += weight
        if below >= half:
            return value
    raise ValueError("no values")


def by_source(some: Iterable[Priced], error: Callable[[Priced], float | None]) -> list[tuple[float, float]]:
    """Errors, and weights that give each source as much as any other."""
    pairs = [(p.run.source, e) for p in some if (e := error(p)) is not None]
    count = Counter(source for source, _ in pairs)
    return [(e, 1 / count[source]) for source, e in pairs]


# --- tables ----------------------------------------------------------------------------------------------------------

COLUMNS = (
    "rows", "mean", "median abs.", "90% within", "worst", "ranks", "memory rows", "mean", "median abs.", "lowest",
    "OOM seen", "refused",
)  # fmt: skip


def line(some: Sequence[Priced]) -> tuple[str, ...]:
    """The errors of some rows, as :data:`COLUMNS` names them."""
    time = [e for p in some if (e := time_error(p)) is not None]
    memory = [e for p in some if (e := memory_error(p)) is not None]
    ranks = ranks_of(some)
    oom = [p for p in some if p.run.is_out_of_memory and p.fits is not None]
    ran = [p for p in some if not p.run.is_out_of_memory and p.fits is not None and not is_recompute_assumed(p)]
    return (
        str(len(time)), *_errors(time), f"{max(time, key=abs):+.0%}" if time else "-",
        f"{ranks[0]:.2f} ({ranks[1]})" if ranks else "-", str(len(memory)), *_errors(memory, band=False),
        f"{min(memory):+.0%}" if memory else "-", f"{sum(not p.fits for p in oom)} of {len(oom)}" if oom else "-",
        f"{sum(not p.fits for p in ran)} of {len(ran)}" if ran else "-",
    )  # fmt: skip


def _errors(errors: Sequence[float], band: bool = True) -> tuple[str, ...]:
    if not errors:
        return ("-",) * (3 if band else 2)
    sizes = sorted(abs(e) for e in errors)
    found = (f"{fmean(errors):+.1%}", f"{median(sizes):.1%}")
    return (*found, f"{sizes[ceil(0.9 * len(sizes)) - 1]:.0%}") if band else found


def split(some: Sequence[Priced], key: Callable[[Priced], str]) -> dict[str, list[Priced]]:
    """Rows by a key, the most rows first."""
    groups: dict[str, list[Priced]] = defaultdict(list)
    for p in some:
        groups[key(p)].append(p)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))


def size_of(p: Priced) -> str:
    """The class of a row's number of GPUs."""
    return next(name for most, name in SIZES if p.run.n_gpus <= most)


def software_column(p: Priced) -> str:
    """The software, and its factor."""
    return f"{p.run.software} x {p.factor:.2f}"


def tables(priced: Sequence[Priced], refused: Mapping[tuple[str, str], int]) -> list[Table]:
    """All tables, the whole first."""
    there = [p for p in priced if p.seconds is not None]
    known = [p for p in there if is_known(p)]
    found = [_whole(known, there)]
    for name, key in (("source", lambda p: f"{p.run.source} [{software_column(p)}]"), ("GPU", lambda p: p.run.gpu),
                      ("software", software_column), ("GPUs", size_of)):  # fmt: skip
        found.append(Table(f"by {name}", (name, *COLUMNS), tuple((k, *line(v)) for k, v in split(known, key).items())))
    others = [p for p in there if not is_known(p)]
    if others:
        found.append(Table(
            "counted apart: software without a record, or a precision that only a stand-in prices",
            ("source", *COLUMNS),
            tuple((k, *line(v)) for k, v in
                  split(others, lambda p: f"{p.run.source}: {p.standin or 'software not known'}").items()),
        ))  # fmt: skip
    found.append(_parts(known))
    why = Counter((p.run.source, p.why) for p in priced if p.seconds is None)
    for (source, reason), n in refused.items():
        why[source, reason] += n
    if why:
        rows = tuple((source, str(n), reason) for (source, reason), n in sorted(why.items(), key=lambda i: -i[1]))
        found.append(Table("not priced", ("source", "rows", "why"), rows))
    return found


def _whole(known: Sequence[Priced], there: Sequence[Priced]) -> Table:
    rows = []
    for what, error in (("seconds of a step", time_error), ("memory", memory_error)):
        weighed = by_source(known, error)
        if not weighed:
            continue
        errors = [e for e, _ in weighed]
        sizes = [(abs(e), w) for e, w in weighed]
        total = sum(w for _, w in weighed)
        rows.append((
            what, str(len(errors)), f"{sum(e * w for e, w in weighed) / total:+.1%}", f"{weighted_median(sizes):.1%}",
            f"{fmean(errors):+.1%}", f"{median(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.0%}",
        ))  # fmt: skip
    note = f"{len(known)} rows have known software and precision, of {len(there)} priced"
    columns = ("what", "rows", "mean by source", "median abs. by source", "mean", "median abs.", "worst")
    return Table("all sources", columns, tuple(rows), note)


PARTS_BY: dict[str, Callable[[Priced], str]] = {
    "": lambda p: "", "tp": lambda p: str(p.run.sizes.tp), "pp": lambda p: str(p.run.sizes.pp),
    "dp": lambda p: str(p.run.sizes.dp), "mbs": lambda p: str(p.run.sizes.micro),
}  # fmt: skip


def _parts(known: Sequence[Priced]) -> Table:
    """Where the seconds of a step go, as parts of the measured ones, beside the error, by layout."""
    rows = []
    for source, some in split(known, lambda p: p.run.source).items():
        timed = [p for p in some if time_error(p) is not None]
        for what, key in PARTS_BY.items():
            groups = split(timed, key)
            if what and (len(timed) < 10 or len(groups) < 2):
                continue
            for value, group in sorted(groups.items(), key=lambda item: int(item[0] or 0)):
                shares = [
                    f"{median(p.parts.get(name, 0.0) / (p.run.seconds or 1) for p in group):.2f}"
                    for name in ("compute", "activation", "parameter", "optimizer", "waiting")
                ]
                error = median(time_error(p) or 0.0 for p in group)
                rows.append((source, f"{what}={value}" if what else "all", str(len(group)), f"{error:+.0%}", *shares))
    columns = ("source", "where", "rows", "error", "compute", "activations", "parameters", "optimizer", "waiting")
    return Table("where the predicted seconds go, over the measured ones (medians)", columns, tuple(rows))


def text_of(found: Sequence[Table], rows: Sequence[Priced] = ()) -> str:
    """Tables as plain text, and each row where rows are given."""
    parts = [_plain(table) for table in found if table.rows]
    if rows:
        parts.append(_plain(row_table(rows)))
    return "\n\n".join(parts)


def row_table(priced: Sequence[Priced]) -> Table:
    """Every priced row."""
    rows = []
    for p in priced:
        if p.seconds is None:
            continue
        s, time, memory = p.run.sizes, time_error(p), memory_error(p)
        sizes = (("tp", s.tp), ("pp", s.pp), ("vp", s.vp), ("cp", s.cp), ("ep", s.ep), ("dp", s.dp))
        words = [f"{n}{v}" for n, v in sizes if v > 1]
        words += [f"zero{s.zero}"] * bool(s.zero) + ["sp"] * s.is_sequence_parallel + [f"mbs{s.micro}"]
        rows.append((
            p.run.id, p.run.model, p.run.gpu, str(p.run.n_gpus), " ".join(words), p.run.sizes.recompute or "",
            f"{p.run.seconds:.4g}" if p.run.seconds else "-", f"{p.seconds:.4g}",
            f"{time:+.0%}" if time is not None else "-", f"{p.run.gib:.1f}" if p.run.gib else "-",
            f"{predicted_gib(p):.1f}", f"{memory:+.0%}" if memory is not None else "-",
            "" if p.fits is None else "fits" if p.fits else "refused",
        ))  # fmt: skip
    columns = ("row", "model", "GPU", "GPUs", "layout", "recompute", "measured s", "priced s", "error", "measured GiB",
               "priced GiB", "error", "limit")  # fmt: skip
    return Table("every row", columns, tuple(rows))


def _plain(table: Table) -> str:
    widths = [max(len(row[i]) for row in (table.columns, *table.rows)) for i in range(len(table.columns))]
    lines = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in (table.columns, *table.rows)
    ]
    return "\n".join([f"== {table.title}", *lines, *([table.note] if table.note else [])])


# --- files -----------------------------------------------------------------------------------------------------------


def saved(priced: Sequence[Priced]) -> list[dict[str, Any]]:
    """Plain values of rows."""
    return [p.as_json() for p in priced]


def loaded(text: str) -> list[Priced]:
    """Rows from what :func:`saved` gave as JSON."""
    import json

    found = []
    for each in json.loads(text):
        run = dict(each.pop("run"))
        shape, sizes = Shape(**run.pop("shape")), Sizes(**run.pop("sizes"))
        run["assumed"] = tuple(run["assumed"])
        found.append(Priced(Run(shape=shape, sizes=sizes, **run), **each))
    return found


def with_factors(priced: Sequence[Priced], factors: Mapping[str, float]) -> list[Priced]:
    """Rows as they would be priced with other software factors: all seconds are proportional to them."""
    return [
        p if p.seconds is None or p.run.software not in factors else replace(
            p, seconds=p.seconds / p.factor * factors[p.run.software], factor=factors[p.run.software],
            parts={k: v / p.factor * factors[p.run.software] for k, v in p.parts.items()},
        )
        for p in priced
    ]  # fmt: skip


__all__ = [
    "Table", "by_source", "is_known", "line", "loaded", "memory_error", "predicted_gib", "rank_correlation", "ranks_of",
    "row_table", "saved", "size_of", "software_column", "split", "tables", "text_of", "time_error", "weighted_median",
    "with_factors",
]  # fmt: skip
