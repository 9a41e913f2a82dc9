"""``autopar report``: a plan as one HTML page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.common import (
    MOST_LAYOUTS,
    ModelOption,
    PlanPath,
    Trust,
    UsageError,
    bound,
    model_of,
    open_plan,
    out,
    progress,
    show_bytes,
    what_if,
    within,
)
from autopar.cli.output_files import PAGE, Force, OutputFile
from hardware_profiles.strict import Unreadable, parse_count, shortened

MOST_COUNTS = 16
"""Most numbers of devices of one page."""


def report(
    path: PlanPath,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the page.")] = Path("report.html"),
    top: Annotated[
        int,
        typer.Option("--top", help="Search again, and show this many of the best layouts next to the plan; takes "
                     "minutes for a large model.", callback=within(1, MOST_LAYOUTS)),
    ] = 1,
    devices: Annotated[
        str | None,
        typer.Option("--devices", help="Plan for these numbers of devices, too, and show them next to the plan: "
                     "8,16,32. Each is a search of its own, of minutes for a large model."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Number of tokens (of samples, for a model without tokens) whose cost is shown, "
                     "such as 1T or 300B."),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option("--price-per-hour", help="Price of one device for an hour, in the currency you want shown.",
                     callback=within(0.0, 1e9)),
    ] = None,
    model: ModelOption = None,
    trust: Trust = False,
    force: Force = False,
) -> None:  # fmt: skip
    """Write a plan as one HTML page: the sharded model, the schedule, memory, seconds, links.

    The page is self-contained and loads nothing: send it, open it anywhere. It is drawn from the plan file and the
    model that it names. The points of its plots can be clicked: other layouts with --top, other numbers of devices with
    --devices; nothing is shown that was not planned.

    Examples: autopar report plan.json --trust -o report.html

    autopar report plan.json --trust --top 8 --devices 32,64,128 --tokens 1T --price-per-hour 2.5
    """
    from autopar.cli.report_layouts import Searches
    from autopar.report.page.html_page import Subject, html_page
    from autopar.report.workload import parse_amount

    file = OutputFile(output, PAGE, "--output", force)
    file.check()
    amount = None if tokens is None else parse_amount(tokens)
    if tokens is not None and amount is None:
        raise UsageError(f"--tokens is {shortened(tokens)}; give a number above 0, such as 1T, 300B or 2.5e12")
    counts = _counts(devices)
    document = open_plan(path)
    loaded, captured = model_of(document, path, model, trust=trust)
    with progress("reading the plan"):
        replanner = what_if(captured, *bound(document, captured))
        plan, timeline = replanner.simulated()
    name = model if model is not None else str((document.model or {}).get("spec", "a model"))
    folder = path.parent if model is None else None
    subject = Subject(
        name, captured.graph, replanner.graphs, plan, timeline, replanner.cluster, kind=type(loaded.model).__name__,
        amount=amount, price_per_hour=price_per_hour,
    )  # fmt: skip
    if top > 1 or counts:
        searches = Searches(name, folder, document, plan, timeline, captured, replanner.cluster)
        by_devices, refused = searches.by_devices(counts)
        layouts = searches.layouts(top) if top > 1 else []
        subject = replace(subject, alternatives=layouts, by_devices=by_devices, not_planned=refused)
    with progress("drawing"):
        page = html_page(subject)
    file.write(page)
    out().print(f"written to {output} ({show_bytes(len(page.encode()))}); open it in a browser", markup=False)


def _counts(devices: str | None) -> list[int]:
    """Return the numbers of devices of ``--devices``, ascending."""
    if devices is None:
        return []
    try:
        counts = sorted({parse_count(part.strip()) for part in devices.split(",")})
    except Unreadable as error:
        raise UsageError(f"--devices is {shortened(devices)}: {error}; give numbers such as 8,16,32") from None
    if counts[0] < 1 or len(counts) > MOST_COUNTS:
        raise UsageError(
            f"--devices is {shortened(devices)}; give 1 to {MOST_COUNTS} numbers, each of at least one device"
        )
    return counts
