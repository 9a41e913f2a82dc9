"""``autopar reshard``: the price of moving a model's weights from one plan's layout to another's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.common import (
    Json,
    ModelOption,
    Trust,
    UsageError,
    bound,
    model_of,
    open_plan,
    out,
    print_json,
    print_lines,
    progress,
    show_bytes,
    show_seconds,
    within,
)
from autopar.errors import ClusterError, PlanError

if TYPE_CHECKING:
    from autopar.planfile import Document
    from autopar.plans.moving import StoredParameter
    from autopar.plans.moving_cost import MovedTensor, ParameterMove
    from autopar.plans.plan import Plan
    from autopar.words.graph import Graph
    from hardware_profiles import Cluster

MOST_TENSORS = 1000


def reshard(
    old_path: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan in whose layout the weights are.")],
    new_path: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan to whose layout they go.")],
    used: Annotated[
        bool,
        typer.Option("--used", help="Go to the placement and format in which the second plan's programs read weights "
                     "(serving), not to those on which its optimizer steps."),
    ] = False,
    optimizer_state: Annotated[
        bool, typer.Option("--optimizer-state", help="Move the optimizer's moments, too. Default: parameters alone.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="The first layout stays in memory, as where training goes on.")
    ] = False,
    apart: Annotated[
        bool, typer.Option("--apart", help="Each plan has machines of its own, though their clusters have one name.")
    ] = False,
    top: Annotated[
        int, typer.Option("--top", help="Rows of parameters, the largest first.", callback=within(0, MOST_TENSORS))
    ] = 8,
    model: ModelOption = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Price moving a model's weights from one plan's layout to another's: training to rollout, train to serve.

    Rank i is device i of the plan's cluster. Plans whose clusters have one name share the devices, or choose them:
    dgx-h100-x4@0-15 and dgx-h100-x4@16-31. Other clusters, and --apart, are machines on one network. Each rank gets
    what it lacks from the nearest rank that has it; what several ranks of a machine need enters it once.

    Examples: autopar reshard train.json serve.json --trust --used

    autopar reshard a.json b.json --trust --optimizer-state --json
    """
    from autopar.plans.moving import check_same_model, stored_parameters
    from autopar.plans.moving_cost import move
    from cost_models.optimizer_bytes import MUON, OPTIMIZERS

    if used and optimizer_state:
        raise UsageError("--used moves to copies that programs read, which have no optimizer state; leave out one of "
                         "--used and --optimizer-state")  # fmt: skip
    documents = open_plan(old_path), open_plan(new_path)
    cluster, devices = shared_cluster(documents, apart)
    plans: list[Plan] = []
    graphs: list[Graph] = []
    for document, path in zip(documents, (old_path, new_path), strict=True):
        if not plans or _model(document) != _model(documents[0]):
            _, captured = model_of(document, path, model, trust=trust)
        plans.append(bound(document, captured)[0])
        graphs.append(captured.graph)
    old_plan, new_plan = plans
    if optimizer_state and old_plan.optimizer != new_plan.optimizer:
        raise PlanError(
            f"the first plan's optimizer is {old_plan.optimizer}, the second's {new_plan.optimizer}, whose states "
            "differ; leave out --optimizer-state"
        )
    if optimizer_state and old_plan.optimizer == MUON:
        raise PlanError(
            "the plans are for muon, which keeps one moment of matrices, and two of what AdamW steps on: how much of "
            "that moves is not counted; leave out --optimizer-state"
        )
    moments = OPTIMIZERS[old_plan.optimizer][0] if optimizer_state else 0
    old = stored_parameters(old_plan, graphs[0], devices[0], n_moments=moments)
    new = stored_parameters(new_plan, graphs[1], devices[1], as_used=used, n_moments=moments)
    check_same_model(old, new)
    with progress("pricing the move"):
        found = move(old, new, cluster, keeps_old=keep)
    if as_json:
        print_json(_facts(found, cluster, moments, top), "reshard")
        return
    print_lines(_title(old, new, plans, moments), *_lines(found, keep))
    if top and found.n_bytes:
        _print_tensors(found, new, top)


def _model(document: Document) -> tuple[object, ...]:
    """Return what identifies the captured model of a plan file."""
    return document.model, document.raw["fingerprint"], document.folder, str(document.precision)


def shared_cluster(
    documents: tuple[Document, Document], apart: bool
) -> tuple[Cluster, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return one cluster with the devices of both plans, and the device of each rank of either.

    Raises:
        ClusterError: the clusters cannot be joined by their names.
    """
    from autopar.launching.job import machines_named
    from autopar.planfile.parsing import cluster_named
    from autopar.plans.clusters import FILES, get_cluster

    names: list[str] = []
    found = []
    for document in documents:

        def load(name: str, document: Document = document) -> Cluster:
            is_file = name.endswith(FILES)
            names.append(str((document.folder / name).resolve()) if is_file else name)
            return cluster_named(name, document.folder)

        found.append(machines_named(str(document.raw["cluster"]), load))
    (cluster, first), (other, second) = found
    if cluster.abstract or other.abstract:
        raise ClusterError("an abstract mesh has no links between devices; plan for a real cluster")
    if names[0] == names[1] and not apart:
        return cluster, (first, second)
    try:
        if any(name.endswith(FILES) for name in names):
            raise ClusterError("files say nothing of the network to other machines")
        joined = get_cluster("+".join(names))
    except ClusterError as error:
        reason = str(error).splitlines()[-1].strip(" -")
        raise ClusterError(
            f"the plans are for '{documents[0].raw['cluster']}' and '{documents[1].raw['cluster']}' on machines of "
            f"their own, which cannot be joined: {reason}; describe all machines in one file, and plan for parts of "
            "it: all.toml@0-15 and all.toml@16-31"
        ) from None
    return joined, (first, tuple(cluster.n_devices + device for device in second))


def _title(
    old: dict[str, StoredParameter], new: dict[str, StoredParameter], plans: list[Plan], moments: int
) -> str:
    def total(parameters: dict[str, StoredParameter]) -> str:
        formats = "/".join(dict.fromkeys(each.spec.dtype for each in parameters.values()))
        return f"{show_bytes(sum(each.spec.n_bytes for each in parameters.values()))} in {formats}"

    what = f" with {moments} moments each" if moments else ", without optimizer state"
    return (
        f"{len(old)} parameters{what}: {total(old)} as {_layout(plans[0])}, to {total(new)} as {_layout(plans[1])}"
    )


def _layout(plan: Plan) -> str:
    meshes = list(dict.fromkeys(stage.mesh.shown() for stage in plan.stages))
    stages = f"{len(plan.stages)} stages of " if len(plan.stages) > 1 else ""
    return f"{stages}{' or '.join(meshes[:3])} on {plan.cluster}"


def _lines(found: ParameterMove, keep: bool) -> list[str]:
    """Return the answer in words."""
    if not found.n_bytes:
        return ["  nothing moves: every rank has what it needs"]
    sends, receives = max(found.sent.values()), max(found.received.values())
    places = ", ".join(f"{show_bytes(n)} {name}" for name, n in found.by_link.items() if n)
    from_old = show_bytes(found.crossing_bytes or 0)
    crossing = "" if found.crossing_bytes is None else f"; {from_old} leave the first plan's devices"
    freed = "kept" if keep else "freed"
    return [
        f"  {show_bytes(found.n_bytes)} in {found.n_messages} messages: {places}{crossing}; "
        f"{show_bytes(found.stays_bytes)} are there already",
        f"  the busiest ranks send {show_bytes(sends)} and receive {show_bytes(receives)}",
        f"  {show_seconds(found.seconds)} all at once, limited by {found.busiest}; "
        f"{show_seconds(found.one_by_one_seconds)} one parameter after the other",
        f"  memory of the fullest rank: {show_bytes(found.old_bytes)} before, {show_bytes(found.new_bytes)} after; at "
        f"most {show_bytes(found.peak_bytes)} all at once (old and new shards, messages), "
        f"{show_bytes(found.one_by_one_peak_bytes)} one after the other (old shards {freed})",
    ]


def _print_tensors(found: ParameterMove, new: dict[str, StoredParameter], top: int) -> None:
    from rich.text import Text

    from autopar.report.fitted_tables import FittedTable

    table = FittedTable("parameter", "shape")
    for name in ("in messages", "of all", "there already"):
        table.add_column(name, justify="right")
    alike: dict[tuple[str, str], list[MovedTensor]] = {}
    for tensor in found.tensors:
        shape = " x ".join(map(str, new[tensor.name].spec.shape))
        alike.setdefault((re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor.name), shape), []).append(tensor)
    rows = [(sum(each.n_bytes for each in of), key, of) for key, of in alike.items()]
    for n_bytes, (name, shape), of in sorted(rows, key=lambda row: -row[0])[:top]:
        several = f" ({len(of)})" if len(of) > 1 else ""
        stays = show_bytes(sum(each.stays_bytes for each in of))
        table.add_row(Text(name + several), shape, show_bytes(n_bytes), f"{n_bytes / found.n_bytes:.1%}", stays)
    out().print(table)


def _facts(found: ParameterMove, cluster: Cluster, moments: int, top: int) -> dict[str, object]:
    """Return the answer as values for JSON; ranks are devices of ``cluster``."""
    largest = sorted(found.tensors, key=lambda each: -each.n_bytes)[:top]
    return {
        "cluster": cluster.name, "parameters": len(found.tensors), "moments": moments, "bytes": found.n_bytes,
        "stays_bytes": found.stays_bytes, "messages": found.n_messages, "by_link": dict(found.by_link),
        "crossing_bytes": found.crossing_bytes, "sent": dict(sorted(found.sent.items())),
        "received": dict(sorted(found.received.items())), "seconds": found.seconds, "limited_by": found.busiest,
        "one_by_one_seconds": found.one_by_one_seconds, "old_bytes": found.old_bytes, "new_bytes": found.new_bytes,
        "peak_bytes": found.peak_bytes, "one_by_one_peak_bytes": found.one_by_one_peak_bytes, "largest": largest,
    }  # fmt: skip
