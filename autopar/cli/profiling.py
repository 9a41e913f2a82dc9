"""``autopar profile``: measure a model's ops, transfers and the executor on this machine, as a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.common import (
    Batch,
    DeviceOption,
    Json,
    Model,
    Seq,
    UsageError,
    cluster_from,
    err,
    load_and_capture,
    out,
    print_json,
    progress,
    seconds_within,
    show_seconds,
    styled,
    where_to_run,
    within,
)
from autopar.cli.output_files import PROFILE, Force, OutputFile
from autopar.report import Facts

if TYPE_CHECKING:
    from hardware_profiles import Cluster


def profile(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the profile: a .json file.")],
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="The cluster that describes this machine: a name or a file.")
    ] = "local-x2",
    mesh: Annotated[
        list[str] | None,
        typer.Option("--mesh", "-m", help="Also measure ops as sharded on this mesh: data=2. Repeatable."),
    ] = None,
    batch: Batch = None,
    seq: Seq = None,
    microbatches: Annotated[
        int,
        typer.Option("--microbatches", help="Number of microbatches of the plans; ops of one microbatch are measured.",
                     callback=within(1)),
    ] = 1,
    seconds: Annotated[
        float,
        typer.Option("--seconds", help="Seconds to measure once the processes run; kept within 20% from 30 s on.",
                     callback=seconds_within),
    ] = 60.0,
    processes: Annotated[
        int | None,
        typer.Option("--processes", help="Processes that measure at the same time, 1 or 2; transfers need 2. Default: "
                     "2; 1 on a cluster of one device.", callback=within(1, 2)),
    ] = None,
    most_ops: Annotated[
        int, typer.Option("--most-ops", help="Maximum number of distinct ops to measure.", callback=within(1))
    ] = 4000,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Time-out of the command in seconds.", callback=seconds_within)
    ] = 1800.0,
    device: DeviceOption = "auto",
    force: Force = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Measure a model's ops, transfers, optimizer and executor on this machine, and write them to a profile file.

    The example inputs are one full step's batch, as for autopar plan. The file can be used wherever a cluster can be
    named. Measured are the distinct local ops of the model, whole and as sharded on the given meshes, forward and
    backward. Ops of other sizes are priced by formulas, corrected by the measurements.

    Example: autopar profile gpt.py:make --cluster local-x2 --microbatches 8 -o profile.json

    Then: autopar plan gpt.py:make --cluster profile.json --stages 2 --microbatches 8 -o plan.json
    """
    from autopar.plans.clusters import get_cluster
    from autopar.profiling import document as documents
    from autopar.words.meshes import Mesh

    hardware = get_cluster(cluster)
    if hardware.is_profile:
        raise UsageError(f"{cluster} is a profile itself; give the cluster that it was measured on")
    count = processes or min(2, hardware.n_devices)
    measured_on = on_device_of(cluster, hardware, device, count)
    if output.suffix != ".json":
        raise UsageError(f"the profile is {output}; give a name that ends in .json, as a cluster's file has")
    file = OutputFile(output, PROFILE, "--output", force)
    file.check()
    meshes = tuple(Mesh.parse(text) for text in mesh or ())
    loaded, captured = load_and_capture(model, batch, seq, parts=microbatches)
    cluster = cluster_from(cluster, output.parent)
    partial = output.with_name(f".{output.name}.partial")
    request = documents.ProfilingOptions(
        seconds, count, meshes, most_ops, timeout=timeout, device=measured_on, partial=partial
    )
    if partial.with_name(f"{partial.name}.0").exists():
        err().print(f"resuming the interrupted measurement for {output}, if it is of this model")
    with progress(f"measuring in {count} processes, about {seconds:.0f} s"):
        try:
            measured = documents.profile(
                captured.graph, hardware, cluster, str(loaded.named(output.parent)["spec"]), request
            )
        except KeyboardInterrupt:
            if partial.with_name(f"{partial.name}.0").exists():
                err().print(f"measurements so far are kept in {partial}.*: run the same command to resume")
            raise
    file.write(documents.dumps(measured))
    report = summary(measured)
    if as_json:
        print_json({"profile": str(output), **report}, "profile")
        return
    console = out()
    console.print(
        f"{report['ops']} ops measured by {count} processes at once, each at least "
        f"{report['provenance']['rounds']} times"
    )
    for kind, row in report["kinds"].items():
        console.print(
            f"  {kind:9} {row['ops']:4} ops: forward {show_seconds(row['forward_seconds'])}, backward "
            f"{show_seconds(row['backward_seconds'])} together; other sizes: {_line(row['forward'])} forward, "
            f"{_line(row['backward'])} backward"
        )
    for what in measured["provenance"]["left_out"]:
        console.print(styled("  [yellow]left out:[/yellow] {}", what))
    console.print(f"written to {output}; plan with it: autopar plan {model} --cluster {output}")


def on_device_of(cluster: str, hardware: Cluster, requested: str, count: int) -> str:
    """Return ``cpu`` or ``cuda`` for the measurement; refuse a cluster whose devices are not in this machine."""
    from autopar.plans.detection import record_here
    from hardware_profiles import device_named, list_devices

    kind = hardware.device(0).name
    is_known = kind in list_devices()
    if is_known and kind.startswith("cpu"):
        if requested == "cuda":
            raise UsageError(f"--device is cuda, and {cluster} has CPUs ({kind}); name a cluster of this machine's "
                             "GPUs: autopar devices lists them")  # fmt: skip
        return "cpu"
    device_type, how = where_to_run(requested, count)
    if is_known and device_type == "cpu":
        raise UsageError(f"{cluster} has devices {kind}, and this machine would measure {how}; name a cluster of "
                         "this machine's devices, such as local-x2")  # fmt: skip
    if is_known:
        here = record_here()
        device, reason = device_named(here.product, here.memory_bytes)
        if device != kind:
            raise UsageError(f"{cluster} has devices {kind}, and here is {here.product}: {reason or device}")
    err().print(f"measuring {how}")
    return device_type


def _line(pair: list[float]) -> str:
    return f"{show_seconds(pair[0])} + {pair[1]:.2f} x formula"


def summary(document: Facts) -> Facts:
    """Return the contents of a profile as numbers."""
    kinds: Facts = {}
    for op in document["ops"].values():
        row = kinds.setdefault(op["kind"], {"ops": 0, "forward_seconds": 0.0, "backward_seconds": 0.0})
        row["ops"] += 1
        for way in ("forward_seconds", "backward_seconds"):
            row[way] += op[way]
    for kind, row in kinds.items():
        row.update(document["corrections"][kind])
    return {"ops": len(document["ops"]), "kinds": dict(sorted(kinds.items())), "provenance": document["provenance"]}
