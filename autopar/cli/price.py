"""``autopar price``: the config of another trainer, priced."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from autopar.cli.common import (
    Batch,
    Json,
    Seq,
    UsageError,
    load_and_capture,
    print_json,
    print_lines,
    progress,
    show_bytes,
    show_seconds,
)
from autopar.report import Facts

if TYPE_CHECKING:
    from autopar.planner.layouts.pricing import PricedLayout, PricedLayouts
    from autopar.report.memory_contents import DeviceMemory
    from autopar.targets.pricing import LayoutChange
    from autopar.targets.search import TargetSearch
    from autopar.targets.target import Config, Target

T = TypeVar("T")


def price(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="A trainer's file: ds_config.json, an accelerate yaml, Megatron "
                       "arguments or a script that has them, TorchTitan overrides or TOML, a NeMo yaml."),
    ],
    model: Annotated[str, typer.Option("--model", help="The model: PATH.py:factory, or hf:PATH/config.json.")],
    cluster: Annotated[str, typer.Option("--cluster", "-c", help="Name of a cluster, or a .toml or .json file.")],
    of: Annotated[
        str | None, typer.Option("--of", help="The trainer whose file it is, where the file does not show it.")
    ] = None,
    batch: Batch = None,
    seq: Seq = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Precision policy, where the file does not say it: bf16-mixed.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", help="Bytes per device: 70GiB. Default: the usable memory.")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Price the config of another trainer: seconds, memory, whether it fits, and what would help most.

    Exit code 0 if it fits, 1 if it does not. Nothing of the file is imported or run. A field that is unknown, or that
    the price cannot honour, is one error with its name. --batch is the rows of a step over all ranks, where the file
    does not say it.

    Examples: autopar price ds_config.json --model hf:llama/config.json -c dgx-h100-x8 --seq 4096

    autopar price arguments.txt --model hf:llama/config.json -c dgx-h100-x8
    """
    from autopar.plans.clusters import get_cluster
    from autopar.targets.pricing import (
        as_priced,
        best_changes,
        check_layout,
        check_model,
        layout_words,
        of_batch,
        read_config,
    )

    target, said = read_config(config, of)
    target = as_priced(said, target)
    hardware = get_cluster(cluster)
    rows = _agreed("--batch", batch, of_batch(said, hardware.n_devices), config.name)
    if rows is not None:
        check_layout(layout_words(said, hardware.n_devices, rows, config.name), config.name)
    length = _agreed("--seq", seq, said.sequence, config.name)
    policy = _agreed("--precision", precision, said.precision, config.name)
    search, layouts = _search(target, model, cluster, (rows, length, policy), said, memory_limit)
    if rows is not None and search.rows != rows:
        raise UsageError(f"{config.name} has a batch of {rows} rows, the example inputs of {model} have {search.rows}; "
                         "make them that many")  # fmt: skip
    check_model(said, search.model, config.name)
    words = layout_words(said, hardware.n_devices, search.rows, config.name)
    check_layout(words, config.name)
    with progress(f"pricing {words}") as say:
        search.say = say
        found = layouts.price(search.where, words)
        changes = best_changes(search, found)
    if as_json:
        print_json(_facts(config, target, said, found, changes), "price")
    else:
        print_lines(*_answer(target, said, found, changes, search))
    if not found.fits:
        raise typer.Exit(1)


def _agreed(option: str, given: T | None, said: T | None, name: str) -> T | None:
    """Return what an option or the file says; both have to agree."""
    if given is not None and said is not None and given != said:
        raise UsageError(f"{option} says {given}, {name} {said}; leave one of them out")
    return said if given is None else given


def _search(
    target: Target, model: str, cluster: str, sizes: tuple[int | None, int | None, str | None], said: Config,
    memory_limit: str | None,
) -> tuple[TargetSearch, PricedLayouts]:  # fmt: skip
    """Return a search among the trainer's layouts of the model, for prices of one and of changes of it."""
    from autopar.capture.microbatches import rows_of
    from autopar.planner.layouts.pricing import PricedLayouts
    from autopar.planner.planning import options_of
    from autopar.plans.request import as_option, request_of
    from autopar.targets.exporting import Exporter

    rows, length, precision = sizes
    given = {"memory_limit": memory_limit, "precision": precision, "optimizer": said.optimizer}
    wanted = request_of({name: value for name, value in given.items() if value is not None}, spelled=as_option)
    hf = model.startswith("hf:")
    loaded, captured = load_and_capture(
        model, rows if hf else None, length if hf else None, precision=wanted.pins.precision, by_default=True
    )
    layouts = PricedLayouts(loaded.model, captured, (loaded.args, loaded.kwargs), options_of(wanted))
    exporter = Exporter(target, loaded, captured, layouts, cluster, rows_of((loaded.args, loaded.kwargs)))
    return exporter.search(), layouts


def _memory(found: PricedLayout, where: str) -> DeviceMemory:
    """Return the memory of the fullest device by category."""
    from autopar.plans.clusters import get_cluster
    from autopar.report.memory_contents import memory_of_devices

    devices = memory_of_devices(found.pinned.graph, found.plan, get_cluster(where))
    return max(devices, key=lambda device: device.n_bytes / device.limit_bytes)


def _answer(
    target: Target, said: Config, found: PricedLayout, changes: list[LayoutChange], search: TargetSearch
) -> list[str]:
    """Return the answer as lines of text."""
    from autopar.targets.pricing import where_time_goes

    over = found.memory_bytes - found.limit_bytes
    side = f"{show_bytes(over)} too much" if over > 0 else f"{show_bytes(-over)} left"
    lines = [
        f"{'fits' if found.fits else 'does not fit'}: {found.layout.text} on {search.where}, {target.title}",
        f"a step takes {show_seconds(found.seconds)}, {search.rows / found.seconds:,.1f} rows a second",
        f"the fullest device needs {show_bytes(found.memory_bytes)} of {show_bytes(found.limit_bytes)}, {side}",
    ]
    held = sorted(_memory(found, search.where).categories.items(), key=lambda entry: -entry[1])
    lines += [f"  {show_bytes(n):>12}  {what}" for what, n in held if n]
    lines.append("where the time goes, on the devices that work longest:")
    lines += [
        f"  {show_seconds(seconds):>12}  {seconds / found.seconds:5.1%}  {what}"
        for what, seconds in where_time_goes(found.plan).items()
    ]
    lines.append("what would help most:" if changes else "no single change of what this trainer can say is faster")
    for change in changes:
        gain = f"{change.seconds / found.seconds:.1%} faster" if change.seconds >= 0 else "slower, but it fits"
        lines.append(
            f"  {change.words}: {show_seconds(change.found.seconds)} a step, {gain}; "
            f"{show_bytes(change.found.memory_bytes)}"
        )
    lines += [f"not in the price: {what}" for what in said.unpriced]
    lines += [f"note: {note}" for note in found.pinned.notes]
    return lines


def _facts(config: Path, target: Target, said: Config, found: PricedLayout, changes: list[LayoutChange]) -> Facts:
    """Return the answer as values for JSON."""
    from autopar.targets.pricing import facts, where_time_goes

    memory = _memory(found, found.plan.cluster)
    return {
        "config": str(config), "target": target.name, "software": target.software, "layout": found.layout.text,
        "cluster": found.plan.cluster, "seconds": found.seconds, "fits": found.fits,
        "memory_bytes": found.memory_bytes, "limit_bytes": found.limit_bytes,
        "over_bytes": found.memory_bytes - found.limit_bytes, "memory": memory.categories,
        "time": where_time_goes(found.plan), "changes": facts(changes), "unpriced": list(said.unpriced),
        "ignored": list(said.ignored), "notes": list(found.pinned.notes),
    }  # fmt: skip
