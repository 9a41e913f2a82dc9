"""Whether losses of microbatches, on several data ranks, add up to the loss of the batch, and what that needs.

A cross entropy is a mean over the labels that count, which are unequally many in microbatches. Its code in the folder
divides by those of the whole batch instead; where these labels are in the inputs is found, and tried on random ones.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.capture.batch_factor import LABELLED, inputs_with_rows
from autopar.capture.batch_totals import Ahead, Totals
from autopar.capture.in_parts import numbers_in
from autopar.capture.row_flows import FollowedRows
from autopar.errors import CaptureError, PlanError
from autopar.lower.emit import lower
from autopar.planner.intra_op.one_device import one_device
from autopar.planner.microbatch_graphs import part_of
from autopar.targets.target import Export
from autopar.targets.trainers.fsdp2.inputs import inputs_with_rows as names_with_rows
from autopar.targets.trainers.fsdp2.inputs import names_in_graph
from autopar.words.graph import Graph

BATCH_NORMS: tuple[type, ...] = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
MOST_SKIPPED = 4
"""Places of a row up to which the first labels may be left out, as causal models leave out the first one."""


def loss_of_batch(export: Export) -> dict[str, Any]:
    """Return ``sum``, and ``means`` of labels that count: see BATCH in ``folder/parallelize.py``; empty for one part.

    Raises:
        PlanError: the losses of microbatches do not add up to that of the batch; the message has the place.
    """
    parts = export.microbatches * export.layout.sizes["dp"]
    if parts == 1:
        return {}
    derived = export.captured.graph.derived
    key = "loss of batch", tuple(names_with_rows(export))
    if key not in derived:
        try:
            derived[key] = "", _found(export)
        except (CaptureError, PlanError) as error:
            derived[key] = str(error), {}
    why, table = derived[key]
    if why:
        raise PlanError(
            f"fsdp2: {export.layout.text}: the losses of {parts} parts of the batch do not add up to its loss: {why}; "
            "use dp=1 and m=1, with tp or pp"
        )
    return dict(table)


def _found(export: Export) -> dict[str, Any]:
    whole = export.captured
    check_buffers(export.loaded.model, whole.graph, inputs_with_rows(whole.graph, export.rows, numbers_in(whole)))
    few = next(n for n in range(2, export.rows + 1) if export.rows % n == 0)
    part = part_of(export.loaded.model, whole, (export.loaded.args, export.loaded.kwargs), few)
    assert part.example is not None and part.example.in_parts is not None
    check_rows(export, part.example.in_parts.found)
    totals: Totals | None = part.totals
    if totals is None:
        return {"means": []}
    table: dict[str, Any] = {"sum": True} if totals.loss_is_sum else {}
    means = [labels_of(export, totals, each) for each in totals.ahead]
    calls = [node for _, node in whole.graph.of_kind("op") if node.target in LABELLED]
    if means and len(calls) != len(means):
        raise PlanError(f"{len(means)} of its {len(calls)} cross entropies are means over labels of the inputs")
    return {**table, "means": means}


def check_rows(export: Export, found: FollowedRows) -> None:
    """Refuse a model that puts rows together on the way to its loss, except in batch norms."""
    for trouble in found.troubles:
        node = export.captured.graph.nodes[trouble.node] if trouble.node < len(export.captured.graph.nodes) else None
        names = [name for name, module in export.loaded.model.named_modules() if isinstance(module, BATCH_NORMS)]
        if any(f"'{name}'" in trouble.where or (node is not None and node.module == name) for name in names):
            continue
        raise PlanError(f"{trouble.where} puts rows of the batch together")


def check_buffers(model: torch.nn.Module, graph: Graph, found: FollowedRows) -> None:
    """Refuse buffers that the model writes from the rows of the batch, except statistics of batch norms."""
    for name, ref in graph.updates.items():
        flow = found.flows.get(ref)
        if flow is None or not flow.inputs:
            continue
        path, _, own = name.rpartition(".")
        holder = dict(model.named_modules()).get(path)
        if holder is not None and own in dict(holder.named_buffers()) and not isinstance(holder, BATCH_NORMS):
            raise PlanError(f"buffer '{name}' is written with values of the rows, of which each part has others")


def labels_of(export: Export, totals: Totals, each: Ahead) -> dict[str, Any]:
    """Return where the labels of a cross entropy are.

    That is their input, how many first places of a row are skipped, and which label is ignored.
    """
    what = each.name.partition(".")[2]
    if each.how != "scale":
        raise PlanError(f"it reads {what}, a {'sum' if each.how == 'parts' else each.how} over rows of the batch")
    graph = totals.graphs[each.level]
    first, second = (_labels_and_inputs(graph, each, seed) for seed in (1, 2))
    if each.level or not (first and second) or not torch.equal(first[1], second[1]):
        raise PlanError(f"{what} weighs labels by what follows from the inputs")
    for name in names_with_rows(export):
        for skip in range(MOST_SKIPPED):
            if all(_has_labels(export, name, skip, each.ignored, found) for found in (first, second)):
                return {"labels": name, "skip": skip, "ignored": each.ignored}
    raise PlanError(
        f"{what} is a mean over labels that the model computes from its inputs; give it labels in which those that do "
        f"not count are {each.ignored}"
    )


Sample = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def _labels_and_inputs(graph: Graph, each: Ahead, seed: int) -> Sample | None:
    """Return the labels of a cross entropy for random inputs, the weights of classes, and the inputs."""
    generator = torch.Generator().manual_seed(seed)
    program = lower(graph, one_device(graph), torch.device("cpu"))
    values, inputs = [], {}
    for slot in program.slots:
        dtype = graph.nodes[graph.index[slot.name]].out.dtype
        value = torch.randint(0, 97, tuple(slot.shape), generator=generator).to(getattr(torch, dtype))
        if slot.kind == "input":
            if not value.is_floating_point() and value.dtype != torch.bool:
                value[torch.rand(value.shape, generator=generator) < 0.4] = each.ignored
            inputs[slot.name] = value
        else:
            value = torch.ones_like(value)
        values.append(value)
    outputs = program.module(*values)
    given = [outputs[i] for i in each.outputs]
    return given[0], given[1] if len(given) > 1 else torch.ones(()), inputs


def _has_labels(export: Export, name: str, skip: int, ignored: int, sample: Sample) -> bool:
    """Check whether labels that count are those of an input without its first places."""
    labels, _, inputs = sample
    for slot, value in inputs.items():
        if slot in names_in_graph(export, name) and not value.is_floating_point() and (value.dim() > 1 or not skip):
            value = value[..., skip:] if value.dim() > 1 else value
            mine, theirs = (x[x != ignored].flatten().sort().values for x in (value, labels))
            return mine.shape == theirs.shape and bool(torch.equal(mine.long(), theirs.long()))
    return False
