"""The page of docs with the published error, its picture, and the table of error bands."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil, log10
from pathlib import Path
from statistics import median

from published.built_clusters import device_of
from published.errors import Table, is_known, memory_error, predicted_gib, tables, time_error
from published.pricing import Priced

FEWEST = 5
"""Runs of a software on a device of which a band of errors is said."""

HEAD = """# The published error

How far autopar's prices are from training runs that others published. `python benchmarks/accuracy.py FILE...` makes
this page (`--page`), its picture and [the numbers of every row](accuracy_rows.csv): the model of a row is built from
its sizes, its cluster from its GPU and links, and the layout is pinned in the words of `autopar plan --like`; what a
row does not say is what its software does by default. Errors are price over measurement, less one: negative is too
fast, or too little memory.

What is fitted: one factor for each software (hardware_profiles/data/software.toml), on every second model of its
sources, or every second row where a source has one model, by `benchmarks/fit_software.py`; the tables below show all
rows, and the factor beside the software; where it is 1.00 there were too few rows to fit. For two trainers,
Megatron-DeepSpeed and Nanotron, the time that their host takes to launch an operator is read off the floor of their own
tables; that DeepSpeed hides no reductions, off its own benchmark. Nothing else is fitted to these rows: rates of
devices and links come from data sheets and from measurements of single kernels and collectives.

What was measured here: one H200 (hardware_profiles/measured/h200). All else on this page are claims of others about
their runs: they were read, not repeated.

## Where the floor is

The same recipe, measured twice by its own authors, moves by 3 to 14%, once by 41% (NVIDIA/Megatron-LM issue 5728). No
prediction is better than that on rows that it was not fitted to.

## What other tools say of themselves

| tool | claim | of what |
|---|---|---|
| SimuMax v1.2 | memory -1.4 to -0.1%, seconds within 13.5% | 43 rows on 8 B200, its own runs |
| Charon | 5.4% of seconds | its own runs |
| Maya | 5% of seconds | its own runs |
| Primus projection | within 10% of seconds | its own runs on MI300X and MI355X |

These are errors on runs of their authors, with their kernels measured beforehand; the tables below are of runs by
others.

## What is known to be missing

- **Nanotron across machines.** 586 of the 845 rows have a pipeline over several machines, 526 of them with tensor
  parallelism. There a layer of one microbatch of one or two rows (1B to 8B) takes, as the median, 14 ms with tp=2, 19
  with tp=4, 29 with tp=8, 59 with tp=16 and 199 with tp=32; without a pipeline 10, 6, 6, 9 and 16 ms. Neither bytes
  nor products explain that, so no price does, and nothing was fitted to it: such rows are priced 3 to 8 times too
  fast.
- **ZeRO-3 across machines.** On 32 H100 a third of the seconds of gathers and reductions was not hidden, by
  DeepSpeed, DeepCompile and FSDP alike (benchmarks/published_data). Prices of DeepSpeed have that; those of accelerate
  have one factor alone, and are 20% too low there. DeepCompile keeps parameters whole where memory is left: no price
  has that, and with 16 microbatches a step is priced 27% too long.
- **Three times as long for half as many tokens more**: two steps of DeepSpeed's PR 8255, not fitted to.
- **Hosts that hold the device up** are priced operator by operator: the longer of launch and kernel. Where large
  kernels and small ones alternate, a host that runs ahead hides some of that.
- **What a row does not say.** Recomputation is not in most rows of Megatron-Bridge: then nothing is said of memory.
  The multi-token prediction of DeepSeek-V3 is one more layer here; GPT-OSS is built without its sinks and windows;
  machines of several kinds are not priced, because the rows do not say which is where.
"""


def write_page(path: Path, priced: Sequence[Priced], refused: Mapping[tuple[str, str], int]) -> None:
    """Write the page, its picture and the rows beside it."""
    found = tables(priced, refused)
    drawn = f"This page has {len(priced)} rows; where the tables have more, these were drawn from all sources alike.\n"
    text = [HEAD, drawn, f"![Priced over measured seconds and memory]({path.stem}.svg)\n"]
    text += [_markdown(table) for table in found if table.rows]
    path.write_text("\n".join(text), encoding="utf-8")
    path.with_suffix(".svg").write_text(picture(priced), encoding="utf-8")
    with path.with_name(f"{path.stem}_rows.csv").open("w", encoding="utf-8", newline="") as file:
        _write_rows(file, priced)


def _markdown(table: Table) -> str:
    title = table.title[0].upper() + table.title[1:]
    lines = [f"## {title}", "", *([table.note, ""] if table.note else [])]
    lines += [f"| {' | '.join(table.columns)} |", "|" + "---|" * len(table.columns)]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in table.rows]
    return "\n".join(lines) + "\n"


def _write_rows(file: object, priced: Sequence[Priced]) -> None:
    """Each row's price and errors; what was measured stands in its source."""
    out = csv.writer(file, lineterminator="\n")  # type: ignore[arg-type]
    out.writerow(["row", "software", "factor", "seconds", "error", "gib", "memory_error", "fits", "known"])
    for p in sorted(priced, key=lambda p: p.run.id):
        if p.seconds is None:
            continue
        time, memory = time_error(p), memory_error(p)
        out.writerow([
            p.run.id, p.run.software, f"{p.factor:g}", f"{p.seconds:.5g}", "" if time is None else f"{time:.3f}",
            f"{predicted_gib(p):.2f}", "" if memory is None else f"{memory:.3f}",
            "yes" if p.fits else "no", "yes" if is_known(p) else "no",
        ])  # fmt: skip


# --- bands -----------------------------------------------------------------------------------------------------------


def write_errors(path: Path, priced: Sequence[Priced]) -> None:
    """Write the bands that :mod:`hardware_profiles.published_errors` reads: of a software on each device with at least
    :data:`FEWEST` runs, and on any."""
    groups: dict[tuple[str, str], list[Priced]] = defaultdict(list)
    for p in priced:
        if p.seconds is not None and is_known(p):
            groups[p.run.software, device_of(p.run.gpu)].append(p)
            groups[p.run.software, "any"].append(p)
    lines = [
        "# Errors of prices against published runs, as fractions without their sign, by software and device; written",
        "# by benchmarks/accuracy.py --errors. Nine of ten runs were nearer than *_90; docs/accuracy.md has tables.",
    ]
    for (software, device), some in sorted(groups.items()):
        time = [abs(e) for p in some if (e := time_error(p)) is not None]
        memory = [abs(e) for p in some if (e := memory_error(p)) is not None]
        said = [line for what, errors, rows in (("seconds", time, "rows"), ("memory", memory, "memory_rows"))
                if len(errors) >= FEWEST for line in _band(what, errors, rows)]  # fmt: skip
        if said:
            lines += ["", f'["{software}"."{device}"]', *said]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _band(what: str, errors: Sequence[float], rows: str) -> list[str]:
    ordered = sorted(errors)
    most = ordered[ceil(0.9 * len(ordered)) - 1]
    return [f"{rows} = {len(ordered)}", f"{what}_median = {median(ordered):.3f}", f"{what}_90 = {most:.3f}"]


# --- the picture -----------------------------------------------------------------------------------------------------

COLOURS = (
    "#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0",
)  # fmt: skip
SIDE, LEFT, TOP, GAP = 380, 64, 40, 70
"""Of one panel, in pixels."""


def picture(priced: Sequence[Priced]) -> str:
    """An SVG of two panels, priced over measured: seconds of a step and GiB of memory, a colour for each software."""
    known = [p for p in priced if p.seconds is not None and is_known(p)]
    software = sorted({p.run.software for p in known})
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(software)}
    time = [
        (p.run.seconds or 0.0, p.seconds or 0.0, colours[p.run.software]) for p in known if time_error(p) is not None
    ]
    memory = [
        (p.run.gib or 0.0, predicted_gib(p), colours[p.run.software]) for p in known if memory_error(p) is not None
    ]
    width, height = 2 * SIDE + 2 * LEFT + GAP, SIDE + TOP + 70 + 18 * ((len(software) + 2) // 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_panel("seconds of a step", LEFT, time),
        *_panel("GiB of the fullest device", LEFT + SIDE + GAP, memory),
    ]
    for i, name in enumerate(software):
        x, y = LEFT + (i % 3) * 270, SIDE + TOP + 62 + 18 * (i // 3)
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{colours[name]}"/>')
        parts.append(f'<text x="{x + 10}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(title: str, x0: float, points: Iterable[tuple[float, float, str]]) -> list[str]:
    """One panel with logarithmic axes; the grey band is within 10%."""
    shown = [(x, y, colour) for x, y, colour in points if x > 0 and y > 0]
    if not shown:
        return []
    values = [v for x, y, _ in shown for v in (x, y)]
    low, high = log10(min(values)) - 0.1, log10(max(values)) + 0.1
    scale = SIDE / (high - low)

    def at(x: float, y: float) -> tuple[float, float]:
        return x0 + (log10(x) - low) * scale, TOP + SIDE - (log10(y) - low) * scale

    first, last = 10**low, 10**high
    corners = [
        at(first, first * 1.1), at(last / 1.1, last), at(last, last), at(last, last / 1.1), at(first * 1.1, first),
        at(first, first),
    ]  # fmt: skip
    parts = [
        f'<rect x="{x0}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#888"/>',
        f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}" fill="#e6e6e6"/>',
        f'<text x="{x0 + SIDE / 2}" y="{TOP - 14}" text-anchor="middle" font-weight="bold">{title}</text>',
        f'<text x="{x0 + SIDE / 2}" y="{TOP + SIDE + 36}" text-anchor="middle">measured</text>',
        f'<text transform="translate({x0 - 46},{TOP + SIDE / 2}) rotate(-90)" text-anchor="middle">priced</text>',
    ]
    for power in range(int(low) - 1, int(high) + 2):
        if not low <= power <= high:
            continue
        x, y = at(10.0**power, 10.0**power)
        name = f"{10.0**power:g}"
        parts += [
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + SIDE}" stroke="#ddd"/>',
            f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + SIDE}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{x:.1f}" y="{TOP + SIDE + 16}" text-anchor="middle">{name}</text>',
            f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{name}</text>',
        ]
    for x, y, colour in shown:
        px, py = at(x, y)
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colour}" fill-opacity="0.6"/>')
    return parts


__all__ = ["picture", "write_errors", "write_page"]
