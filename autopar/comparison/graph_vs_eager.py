"""The comparison of a captured graph with its model, and its limits on time."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from autopar.capture import Captured, with_wide_products
from autopar.comparison.double_precision import LOW, as_wide_as, doubled, promoted, wide, widen
from autopar.comparison.first_difference import explained
from autopar.comparison.relative import LIMITS, Comparison, difference_of, is_tensor
from autopar.comparison.sides import Sides
from autopar.errors import AutoparError, CaptureError
from autopar.rules.registry import rules_of
from autopar.torch_private import pytree
from autopar.words.trees import PyTree

FLOPS = {"cpu": 2e10, "cuda": 1e14}
"""Operations of a forward up to which a model is compared unasked: some seconds on the kind of device."""
FAILS = "the model itself fails on these inputs"
"""How a note begins where that is so."""
BYTES = 4 * 2**30
"""Bytes of parameters up to which a model is compared unasked: their gradients are made twice."""


def compare_with_eager(
    captured: Captured, model: torch.nn.Module, args: Sequence[PyTree], kwargs: Mapping[str, PyTree],
    targets: Sequence[PyTree] = (), *, bounded: bool = True, other_ways: bool = False,
) -> Comparison:  # fmt: skip
    """Run the graph and the model on one batch, and compare loss, gradients and new buffers.

    ``args``, ``kwargs`` and ``targets`` are a batch with values, of the captured shapes. With ``bounded``, models are
    left out that would take long; with ``other_ways``, batches for which a model that branches on data takes another
    branch than was captured. The note says so.

    Raises:
        CaptureError: they differ by more than rounding; it names the first module whose output does.
    """
    note = reason_not_to(captured, model, (args, kwargs, targets), bounded)
    if note:
        return Comparison(note=note)
    captured = replace(captured, graph=with_wide_products(captured.graph))  # eager mode has no narrow ones
    policy = captured.graph.precision
    with policy.of_model(model) if policy is not None else contextlib.nullcontext():
        side = Sides(captured, model, args, kwargs, targets)
        try:
            theirs = side.eager()
        except Exception as error:
            return Comparison(note=f"{FAILS} ({type(error).__name__}: {error})".split("\n")[0])
        mine = side.graph()
        difference = difference_of(captured.graph, mine, theirs)
        if difference.worst > difference.limit and side.drop_other_elements:
            mine, theirs = side.graph(nothing_dropped=True), side.eager(nothing_dropped=True)
            difference = difference_of(captured.graph, mine, theirs)
        if difference.worst <= difference.limit:
            return difference
        if other_ways and any(bool(mine.buffers[flag.target]) for flag in captured.graph.ways):
            return Comparison(note="the model goes another way with this batch than was captured")
        if difference.limit > LIMITS["float64"] and _same_in_double(captured, model, args, kwargs, targets):
            return replace(difference, limit=difference.worst)  # rounding alone: it vanishes with the precision
        raise CaptureError(explained(side, difference))


def reason_not_to(captured: Captured, model: torch.nn.Module, batch: PyTree, bounded: bool, times: int = 1) -> str:
    """Return why a model is not run on a batch for a comparison; empty if nothing speaks against it.

    With ``bounded`` a long time does; the batch is ``times`` as large as the captured one.
    """
    tensors = [*model.parameters(), *model.buffers(), *(x for x in pytree.tree_leaves(batch) if is_tensor(x))]
    if any(t.is_meta or type(t) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) for t in tensors):
        return "model or inputs have no values"
    if len({t.device for t in tensors}) > 1:
        return "model and inputs are on several devices"
    flops = times * sum(rule.flops_at({}) for rule in rules_of(captured.graph) if rule is not None)
    n_bytes = sum(node.out.n_bytes for _, node in captured.graph.of_kind("param"))
    kind = tensors[0].device.type if tensors else "cpu"
    if bounded and (flops > FLOPS.get(kind, FLOPS["cuda"]) or n_bytes > BYTES):
        return f"it would take long ({flops:.1e} operations in a forward, {n_bytes / 2**30:.1f} GiB of parameters)"
    return ""


def _same_in_double(captured: Captured, model: torch.nn.Module, args: PyTree, kwargs: PyTree, targets: PyTree) -> bool:
    """Return whether a copy of the model in double precision agrees with the graph in double precision."""

    def double(x: PyTree) -> PyTree:
        if not is_tensor(x) or x.dtype not in LOW:
            return x
        return wide(x.detach()).requires_grad_(x.requires_grad)

    try:
        in_double = widen(copy.deepcopy(model))
        args, kwargs, targets = pytree.tree_map(double, (tuple(args), dict(kwargs), tuple(targets)))
        captured = promoted(replace(captured, constants=doubled(captured.constants)))
        side = Sides(captured, in_double, args, kwargs, targets)
        with as_wide_as(captured.graph):
            difference = difference_of(captured.graph, side.graph(), side.eager())
    except (AutoparError, RuntimeError, TypeError, ValueError):  # NotImplementedError is a RuntimeError
        return False
    return difference.worst <= 1e-6  # the model may still cast to float32 in places
