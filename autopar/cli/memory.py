"""``autopar memory``: the contents of the devices' memory at the peak, by category and tensor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.common import (
    Json,
    ModelOption,
    PlanPath,
    Trust,
    UsageError,
    bound,
    model_of,
    open_plan,
    out,
    print_json,
    progress,
    show_bytes,
    within,
)
from autopar.cli.output_files import SNAPSHOT, Force, OutputFile

if TYPE_CHECKING:
    from autopar.plans.plan import Plan
    from autopar.report.memory_contents import DeviceMemory

MOST_TENSORS = 1000


def memory(
    path: PlanPath,
    group: Annotated[
        int | None,
        typer.Option("--group", help="Group of devices whose tensors are shown and whose snapshot is written. "
                     "Default: the fullest.", callback=within(0)),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", help="Number of largest tensors to show.", callback=within(0, MOST_TENSORS))
    ] = 12,
    snapshot: Annotated[
        Path | None,
        typer.Option("--snapshot", help="Write the memory of a step as a snapshot for pytorch.org/memory_viz."),
    ] = None,
    model: ModelOption = None,
    trust: Trust = False,
    force: Force = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show what fills the memory of a plan's devices at the peak of a step.

    The moment of the peak; a table by category with a column for each group of devices; the largest tensors; what is on
    the host; and the source of the limit. The bytes are those of the plan, and add up to its memory.

    --snapshot writes a file that https://pytorch.org/memory_viz opens: every block of a step from its allocation to its
    end, with the operator that it belongs to.

    Examples: autopar memory plan.json --trust; autopar memory plan.json --trust --snapshot step.pickle
    """
    from autopar.report.memory_contents import limit_words, memory_of_devices, sentence
    from autopar.report.on_host import facts, lines, on_hosts

    file = OutputFile(snapshot, SNAPSHOT, "--snapshot", force) if snapshot is not None else None
    if file is not None:
        file.check()
    document = open_plan(path)
    _, captured = model_of(document, path, model, trust=trust)
    with progress("reading the plan"):
        plan, cluster = bound(document, captured)
        devices = memory_of_devices(captured.graph, plan, cluster)
        kept_there = on_hosts(captured.graph, plan, cluster)
    if group is not None and group >= len(devices):
        raise UsageError(f"--group is {group}; the plan has {len(devices)} groups of devices, which count from 0")
    full = max(range(len(devices)), key=lambda g: devices[g].n_bytes / devices[g].limit_bytes)
    shown = devices[full if group is None else group]
    summary = _written(file, plan, shown) if file is not None else None
    if as_json:
        print_json({
            "plan": str(path), "moment": sentence(devices), "groups": [device.row() for device in devices],
            "group": shown.group, "tensors": shown.tensors(top), "snapshot": summary, **facts(kept_there),
        }, "memory")  # fmt: skip
        return
    console = out()
    console.print(sentence(devices), markup=False, soft_wrap=True)
    _print_categories(devices)
    if top:
        _print_tensors(shown, top)
    for text in lines(kept_there, len(plan.stages)):
        console.print(text, markup=False, soft_wrap=True)
    console.print(limit_words(shown, plan.pins.memory_limit_bytes), markup=False, soft_wrap=True)
    if summary is not None:
        console.print(summary, markup=False, soft_wrap=True)


def _written(file: OutputFile, plan: Plan, memory: DeviceMemory) -> str:
    """Write the snapshot and print its contents."""
    from autopar.report.memory_snapshot import pickled
    from autopar.report.memory_snapshot import snapshot as snapshot_of

    with progress("writing the snapshot"):
        data, most, n_actions = snapshot_of(plan, memory)
        file.write_bytes(pickled(data))
    of = len(plan.schedule.rows[memory.group])
    part = "a whole step" if n_actions == of else f"the first {n_actions} of {of} forwards and backwards"
    return (
        f"written to {file.path}: {part} of a device of group {memory.group}, with a peak of {show_bytes(most)} "
        f"({show_bytes(memory.n_bytes)} by the plan); open it at https://pytorch.org/memory_viz"
    )


def _print_categories(devices: list[DeviceMemory]) -> None:
    from rich.text import Text

    from autopar.report.fitted_tables import FittedTable
    from autopar.report.memory_contents import CATEGORIES
    from autopar.report.page.memory_chart import group_words

    alike: dict[tuple[object, ...], list[DeviceMemory]] = {}
    for device in devices:
        alike.setdefault((*device.categories.values(), device.limit_bytes), []).append(device)
    columns = list(alike.values())
    table = FittedTable("at the fullest moment")
    for column in columns:
        table.add_column(group_words([device.group for device in column]), justify="right")
    for name in CATEGORIES:
        sizes = [column[0].categories[name] for column in columns]
        if any(sizes):
            table.add_row(Text(name), *(show_bytes(n) if n else "" for n in sizes))
    table.add_section()
    table.add_row("together", *(show_bytes(column[0].n_bytes) for column in columns), style="bold")
    table.add_row("a plan may fill", *(show_bytes(column[0].limit_bytes) for column in columns))
    reserved = [column[0].budget.reserved_bytes for column in columns]
    if any(reserved):
        table.add_row("reserved beside", *(show_bytes(n) for n in reserved))
    out().print(table)


def _print_tensors(device: DeviceMemory, top: int) -> None:
    from rich.text import Text

    from autopar.report.fitted_tables import FittedTable

    table = FittedTable("the largest", "what", "stage")
    table.add_column("bytes", justify="right")
    for row in device.tensors(top):
        pieces = f" ({row['pieces']} tensors)" if row["pieces"] > 1 else ""
        table.add_row(Text(row["name"]), row["category"] + pieces, str(row["stage"]), show_bytes(row["bytes"]))
    out().print(table)
