"""Published training runs beside autopar's prices of them, with the layout pinned and nothing fitted to a row.

    python benchmarks/accuracy.py published_throughput.csv published_memory.csv
    python benchmarks/accuracy.py other.csv --sample 150 --seed 1     so many rows, from all sources alike
    python benchmarks/accuracy.py *.csv --json rows.json --page docs/accuracy.md

Each row's model is built from its sizes on the meta device, its cluster from its GPU and links, its precision is a
policy, and its layout is pinned in the words of ``autopar plan --like``. A row that cannot be priced is counted with
the reason. ``--json`` keeps every row; ``--from rows.json`` prints the tables of such a file again without pricing.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from published.errors import Table, loaded, saved, tables, text_of
from published.page import write_errors, write_page
from published.pricing import Graphs, Priced, in_order, price
from published.rows import Run, UnpricedError, alike_but_apart, read, run_of


def sampled(runs: Sequence[Run], n: int, seed: int) -> list[Run]:
    """So many runs, the same number from each source as far as it has them."""
    by_source: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_source[run.source].append(run)
    generator = random.Random(seed)
    for group in by_source.values():
        generator.shuffle(group)
    chosen: list[Run] = []
    while len(chosen) < min(n, len(runs)):
        for group in by_source.values():
            if group and len(chosen) < n:
                chosen.append(group.pop())
    return chosen


def _priced(task: tuple[list[Run], Path | None, float]) -> list[Priced]:
    runs, folder, most = task
    graphs = Graphs(folder)
    return [price(run, graphs, most) for run in runs]


def all_priced(
    runs: Sequence[Run], jobs: int, folder: Path | None, most: float, keep: Callable[[list[Priced]], None]
) -> list[Priced]:
    """Prices of all runs, with a line every few seconds on standard error.

    Args:
        keep: told every few seconds what is priced so far.
    """
    ordered = in_order(runs)
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in ordered:
        groups[repr(run.shape)].append(run)
    done: list[Priced] = []
    last = time.monotonic()
    if jobs == 1:
        graphs = Graphs(folder)
        for run in ordered:
            done.append(price(run, graphs, most))
            if time.monotonic() - last > 5:
                last = time.monotonic()
                keep(done)
                print(f"{len(done)} of {len(runs)} rows", file=sys.stderr, flush=True)
        return done
    with ProcessPoolExecutor(jobs) as pool:
        for some in pool.map(_priced, [(group, folder, most) for group in groups.values()]):
            done += some
            keep(done)
            print(f"{len(done)} of {len(runs)} rows", file=sys.stderr, flush=True)
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    """Price the rows of some files and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="tables of published runs (.csv)")
    parser.add_argument("--sample", type=int, help="price so many rows, from all sources alike")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--only", action="append", default=[], help="only sources that have this in their name")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--cache", type=Path, help="folder that keeps captured graphs, for the next time")
    parser.add_argument("--row-seconds", type=float, default=60.0, help="a row that takes longer is given up")
    parser.add_argument("--json", type=Path, help="where to write every row")
    parser.add_argument("--from", dest="before", action="append", default=[], type=Path,
                        help="rows of an earlier --json")  # fmt: skip
    parser.add_argument("--page", type=Path, help="where to write the page of docs, with its picture beside it")
    parser.add_argument("--errors", type=Path, help="where to write the table of error bands (.toml)")
    parser.add_argument("--rows", action="store_true", help="print every row, too")
    given = parser.parse_args(arguments)
    if not given.files and not given.before:
        parser.error("give tables of published runs (.csv), or rows of an earlier run with --from")
    rows = read(given.files)
    runs, refused = [], Counter[tuple[str, str]]()
    for row in rows:
        if given.only and not any(word.lower() in row.get("source", "").lower() for word in given.only):
            continue
        try:
            runs.append(run_of(row))
        except UnpricedError as error:
            refused[row.get("source", ""), str(error)] += 1
    apart = alike_but_apart(runs)
    refused.update((run.source, apart[run.id]) for run in runs if run.id in apart)
    runs = [run for run in runs if run.id not in apart]
    if given.sample:
        runs = sampled(runs, given.sample, given.seed)
    priced = [p for path in given.before for p in loaded(path.read_text(encoding="utf-8"))]
    earlier = list(priced)

    def keep(so_far: list[Priced]) -> None:
        if given.json:
            given.json.write_text(json.dumps(saved([*earlier, *so_far]), indent=0), encoding="utf-8")

    priced += all_priced(runs, given.jobs, given.cache, given.row_seconds, keep)
    keep(priced[len(earlier) :])
    found: list[Table] = tables(priced, refused)
    print(text_of(found, priced if given.rows else ()))
    if given.page:
        write_page(given.page, priced, refused)
    if given.errors:
        write_errors(given.errors, priced)


if __name__ == "__main__":
    main()
