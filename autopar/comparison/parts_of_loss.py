"""Comparison of the sum of the microbatches' losses with the loss of the batch.

A step in microbatches adds up their losses, which are divided by totals of the whole batch
(:mod:`autopar.runtime.batches.totals_ahead`). Where the graph does not show that this is the loss of the batch
(:mod:`autopar.capture.batch_factor`), such as where rows are compared with each other, the example is tried, and a
difference is reported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import torch

from autopar.capture import Captured, with_wide_products
from autopar.capture.evaluation import evaluated
from autopar.capture.in_parts import no_rows_in
from autopar.capture.microbatches import part_of_batch
from autopar.comparison import generators_kept, kept, reason_not_to
from autopar.comparison.sides import attention_on, named_tensors
from autopar.lower.emit import lower
from autopar.planner.intra_op.one_device import one_device
from autopar.plans.plan import Plan
from autopar.runtime.batches.batch import Batch
from autopar.runtime.batches.batch_statistics import of_each_microbatch
from autopar.runtime.batches.totals_ahead import computed_ahead, totals_ahead
from autopar.torch_private import pytree
from autopar.words.trees import PyTree

ROUNDING_OF_DOUBLE, ROUNDING, ROUNDING_OF_HALF = 1e-7, 1e-5, 2e-2
"""Relative differences of two losses that sums in another order explain, with room: what weights in single precision,
which take no gradient, make of a loss in double precision; a hundred units in the last place of single precision, and a
few of bfloat16."""
ADVICE = "  use microbatches=1 to train by the loss of the whole batch, or write the loss as a mean over rows"


def with_notes(plan: Plan, captured: Captured, model: torch.nn.Module, example: PyTree) -> Plan:
    """Add notes about statistics that are computed per microbatch instead of per batch.

    ``parallelize`` warns of these; arguments are those of :func:`difference_by_parts`.
    """
    said = [
        of_each_microbatch([captured.graph], plan.microbatches),
        difference_by_parts(captured, model, example, plan.microbatches) if plan.microbatches > 1 else "",
    ]
    new = [note for note in said if note and note not in plan.notes]
    return replace(plan, notes=(*plan.notes, *new)) if new else plan


def difference_by_parts(captured: Captured, model: torch.nn.Module, example: PyTree, parts: int) -> str:
    """Return how ``parts`` microbatches change a batch's loss; empty if it is equal or unknown.

    The model runs without dropout and with the statistics that its batch norms hold, without gradients, and is not
    changed. A model without values, one that takes long, fails in eval mode, or has a random loss even so is not
    judged. ``captured`` is of one microbatch; ``example`` is ``(args, kwargs, targets)``, the batch of a step.
    """
    loss_fn = captured.example.loss_fn if captured.example is not None else None
    number = captured.graph.loss
    decided = captured.example.in_parts if captured.example is not None else None
    if decided is not None and decided.found.is_proved:
        return ""
    if number is None or reason_not_to(captured, model, example, True, times=parts):
        return ""

    def loss_of(batch: PyTree) -> float:
        args, kwargs, targets = pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), batch)
        given = (targets,) if isinstance(targets, torch.Tensor) else tuple(targets)
        output = model(*args, **kwargs)
        return float(pytree.tree_leaves(output if loss_fn is None else loss_fn(output, *given))[number])

    on_cuda = any(p.is_cuda for p in model.parameters())
    with kept(model, loss_fn), generators_kept(), torch.no_grad(), attention_on(on_cuda):
        for root in (model, loss_fn):
            if isinstance(root, torch.nn.Module):
                root.eval()
        try:
            torch.manual_seed(0)
            whole = loss_of(example)
            torch.manual_seed(1)
            if loss_of(example) != whole:
                return _of_random_loss(captured, parts)
            mean = _by_parts(captured, model, loss_fn, [
                part_of_batch(example, parts, k, no_rows_in(captured)) for k in range(parts)
            ])  # fmt: skip
        except Exception:  # of the user's code, in a mode in which it is not run otherwise
            return ""
    if abs(whole - mean) <= _rounding(captured, model) * max(abs(whole), abs(mean)):
        return _of_statistics(captured, parts)
    digits = next(n for n in (6, 9, 17) if f"{whole:.{n}g}" != f"{mean:.{n}g}")
    return (
        f"the loss of the example batch is {whole:.{digits}g} for the whole batch and {mean:.{digits}g} as the mean of "
        f"{parts} microbatches, which a step minimizes: it is no mean over rows{_where(captured)}\n{ADVICE}"
    )


def _rounding(captured: Captured, model: torch.nn.Module) -> float:
    """Return the rounding error of a difference of losses, by the coarsest numbers that gradients come through."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    dtypes |= {out.dtype for node in captured.graph.nodes if node.needs_grad for out in node.outs if out is not None}
    if {dtype for dtype in dtypes if "float" in dtype} <= {"float64"}:  # a top-k has places, too
        return ROUNDING_OF_DOUBLE
    single = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    return ROUNDING if single else ROUNDING_OF_HALF


def _where(captured: Captured) -> str:
    """Return where rows are combined, for a message."""
    decided = captured.example.in_parts if captured.example is not None else None
    places = [t.where for t in decided.found.troubles[:1]] if decided is not None else []
    return f" (rows are combined at {places[0]})" if places else " (rows are compared with each other, or summed)"


def _of_statistics(captured: Captured, parts: int) -> str:
    """Return a message: the loss is a function of sums over the batch that are equal for the example only."""
    decided = captured.example.in_parts if captured.example is not None else None
    if decided is None or not decided.statistics:
        return ""
    return (
        f"the loss of the example batch is the same in {parts} microbatches, but that of other batches may differ: "
        f"{decided.statistics[0].where} reads a sum over the batch that depends on the parameters, and each microbatch "
        f"has its own\n{ADVICE}"
    )


def _of_random_loss(captured: Captured, parts: int) -> str:
    """Return a message: rows are combined in a loss that cannot be compared, since it is random.

    Batch norms have a warning of their own.
    """
    decided = captured.example.in_parts if captured.example is not None else None
    places = [] if decided is None else [
        t.where for t in decided.found.troubles if not decided.operators[t.node].startswith("aten.batch_norm")
    ]  # fmt: skip
    if not places:
        return ""
    return (
        f"the mean loss of {parts} microbatches, which a step minimizes, may differ from that of the batch; it is "
        f"random, so the two are not compared: it is no mean over rows (rows are combined at {places[0]})\n{ADVICE}"
    )


def _by_parts(
    captured: Captured, model: torch.nn.Module, loss_fn: Callable[..., object] | None, of_parts: list[PyTree]
) -> float:
    """Return the loss of a step in eval mode: those of its microbatches, weighted by their rows."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    named = {**named_tensors(model, loss_fn), **captured.constants}
    graph = evaluated(with_wide_products(captured.graph))  # scales are those of each microbatch
    program = lower(graph, one_device(graph), device)
    ahead = totals_ahead(captured, device)
    batch = Batch(captured, inspect.signature(model.forward), device)
    inputs = []
    for args, kwargs, targets in of_parts:
        given = (targets,) if isinstance(targets, torch.Tensor) else tuple(targets)
        inputs.append(batch.tensors((*args, *given), kwargs))
    shares = [1 / len(inputs)] * len(inputs)
    totals = computed_ahead([ahead] * len(inputs), inputs, shares, named.get)
    number, loss = captured.graph.loss, 0.0
    assert number is not None
    for tensors, share, of_batch in zip(inputs, shares, totals, strict=True):
        there = {**named, **tensors, **of_batch}
        seed = torch.zeros((), dtype=torch.int64, device=device)
        values = [seed if slot.kind == "seed" else there[slot.name].detach().clone() for slot in program.slots]
        weight = share if captured.totals is None else captured.totals.weight(share)
        loss += weight * float(program.module(*values)[number])
    return loss
