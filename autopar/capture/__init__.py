"""Capture: a model and example inputs become a :class:`~autopar.words.graph.Graph`.

``torch.export`` (pre-dispatch ATen, non-strict) does the tracing. What follows is a list of small rewrites that leave
one spelling for each thing, so that rules see few operators:

* views are ``reshape`` with the full shape, transposes are ``permute``, factories are ``full`` and ``arange``;
* in-place operators become functional, views are followed through them (:mod:`.aliasing`), and buffers that the forward
  changes are listed in ``Graph.updates``;
* casts that change nothing, ``contiguous``, ``clone``, ``alias``, inactive dropout and metadata asserts vanish;
* what ``torch.autocast`` casts, around the call or in a region, is cast by operators of the graph;
* ``no_grad`` regions are inlined with their inputs detached;
* tied parameters are one node with their other names in ``Graph.tied``.

Plain values that the model's Python code reads on the way (:mod:`~autopar.capture.python.python_reads`) are kept in
``Captured.guards``; what it writes, and random numbers that it draws outside torch, are refused where the next call
would see them.

While tracing, Python branches on tensors that are the same for every input (position ids, say) are answered by
evaluating them, so libraries take the same path as in eager mode. Of a branch on data the way that the example takes is
followed, and checked at every call; of one on random numbers both sides are kept (:mod:`.branches`).

What stands where, in the order in which a model passes through:

====================== ================================================================================================
:mod:`.tensor_layouts` sparse and nested tensors are refused
:mod:`.untraceable_modules` scripted modules and far too many are refused
:mod:`.recorded`       a trace with what Python code read on the way
:mod:`.module_hooks`   models with hooks are refused, or the hooks traced
:mod:`.trace`          ``torch.export``, with operators of autopar's own in it
:mod:`.repeats`        repeated blocks are traced twice
:mod:`.branches`       branches on random numbers: traces with other answers become one graph
:mod:`.python`         plain values that the model's code reads: heard of, kept and compared
:mod:`.passes`         the rewrites on the way to a graph, as an ordered list
:mod:`.patterns`       what serves one pattern of users, a file each, registered
:mod:`.graph`          the exported program becomes a graph; :mod:`.aliasing`: views and writes are followed;
                       :mod:`.normalize`: operators in one spelling each
:mod:`.rows_of_draws`  where the rows of the batch are in what random operators draw
:mod:`.losses`         a loss without a gradient is refused; :mod:`.dataclass_nodes`: dataclasses in inputs and outputs
of a captured model    :mod:`.evaluation` (eval mode), :mod:`.microbatches` (other numbers of rows),
                       :mod:`.batch_factor` (which inputs have rows, and what the loss is to them),
                       :mod:`.row_flows` (where rows are in tensors), :mod:`.in_parts` (a microbatch captured),
                       :mod:`.batch_totals` (what it reads of the whole batch), :mod:`.without_values` (a copy to
                       capture when the model is gone), :mod:`.unread` (strings of the call that nobody reads)
====================== ================================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.capture.batch_totals import Totals
from autopar.capture.branches.data_branches import warn_of_fixed_numbers
from autopar.capture.branches.observed_run import answers_of
from autopar.capture.graph.marked_products import check_products_run, none_narrow, with_wide_products
from autopar.capture.in_parts import InParts
from autopar.capture.losses import check_loss
from autopar.capture.passes import GRAPH, run
from autopar.capture.python.attribute_outputs import Left, own_outputs
from autopar.capture.python.guards import Guards
from autopar.capture.recorded import traced
from autopar.capture.tensor_layouts import check_dense
from autopar.capture.trace.contexts import entered
from autopar.capture.trace.decisions import Answers, TraceDecisions, settled
from autopar.capture.trace.patches import Phase
from autopar.capture.trace.tracing import run_failed
from autopar.capture.untraceable_modules import check_modules
from autopar.errors import AutoparError, CaptureError
from autopar.garbage_collection import uncollected
from autopar.torch_private import pytree
from autopar.words.autocasting import AutocastState, autocast_now
from autopar.words.graph import Graph
from autopar.words.precision import Precision
from autopar.words.trees import PyTree


@dataclass(frozen=True)
class Example:
    """The call by which a model was captured, without values.

    Attributes:
        decisions: how it was traced.
        in_parts: how the call is one microbatch of several.
    """

    args: tuple[PyTree, ...]
    kwargs: Mapping[str, PyTree]
    loss_fn: Callable[..., torch.Tensor] | None
    targets: tuple[PyTree, ...]
    decisions: TraceDecisions = field(default_factory=TraceDecisions)
    precision: Precision | None = None
    in_parts: InParts | None = None

    def capture(self, model: torch.nn.Module) -> Captured:
        """Capture the same call of another model of that kind, such as one in eval mode."""
        device = next((p.device for p in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
        args, kwargs, targets = pytree.tree_map_only(
            torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device=device, requires_grad=t.requires_grad),
            (self.args, dict(self.kwargs), self.targets),
        )  # fmt: skip
        captured = capture(
            model, args, kwargs, loss_fn=self.loss_fn, targets=targets, precision=self.precision,
            decisions=self.decisions,
        )  # fmt: skip
        return captured if self.in_parts is None else self.in_parts.of(captured)


@dataclass(frozen=True)
class Captured:
    """A graph with what is needed to call it like the model.

    Attributes:
        in_spec: pytree of ``(args, kwargs)``; its leaves are the graph's inputs and the values in ``literals``.
        literals: leaves that are no tensors, by position; they are part of what was captured.
        inputs: for every leaf, the graph node that holds it (None for a literal or an unused input).
        out_spec: pytree of the model's output, whose leaves are the first of ``graph.outputs``.
        constants: tensors that the model's code makes and that are no registered buffers, by buffer name.
        example: the call that was captured.
        unread: positions of literals, strings, that calls may have others of, since nobody reads them.
        left: what the forward leaves in attributes; outputs of it stand in ``graph.outputs`` behind those of the model.
        autocast: the autocast that was on around the call; its casts are in the graph, and it is for calls under the
            same.
        guards: what Python code read while it was traced, and must still be so when the program runs.
        totals: for a microbatch, the inputs of its graph that are computed ahead of a step; none of them is a leaf.
    """

    graph: Graph
    in_spec: pytree.TreeSpec
    literals: Mapping[int, Any]
    inputs: tuple[int | None, ...]
    out_spec: pytree.TreeSpec
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    example: Example | None = field(default=None, compare=False, repr=False)
    autocast: AutocastState = field(default_factory=dict)
    guards: Guards = field(default_factory=Guards, compare=False, repr=False)
    left: tuple[Left, ...] = ()
    unread: frozenset[int] = frozenset()
    totals: Totals | None = None

    def is_of(self, position: int, leaf: Any) -> bool:
        """Check whether a call may have this leaf in the place of a literal."""
        literal = self.literals[position]
        if position in self.unread:
            return isinstance(leaf, str)
        return type(literal) is type(leaf) and (literal == leaf or (literal != literal and leaf != leaf))


class WithLoss(torch.nn.Module):
    """``loss_fn(model(*args, **kwargs), *targets)`` as a module: the targets follow the model's positional args.

    Args:
        loss_fn: None if the model's output is wanted.
        precision: a policy, under which the model's inputs are cast.
    """

    def __init__(
        self, model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor] | None, n_args: int,
        precision: Precision | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.loss_fn, self.n_args, self.precision = model, loss_fn, n_args, precision
        self._called = type(model).__name__ + (" with its loss_fn" if loss_fn is not None else "")

    def forward(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call the model, and the loss function on its output."""
        of_model, targets = args[: self.n_args], args[self.n_args :]
        if self.precision is not None:
            of_model, kwargs = pytree.tree_map(self.precision.cast, (of_model, kwargs))
        output = self.model(*of_model, **kwargs)
        return output if self.loss_fn is None else self.loss_fn(output, *targets)


def capture(
    model: torch.nn.Module,
    args: Sequence[PyTree] = (),
    kwargs: Mapping[str, PyTree] | None = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    targets: Sequence[PyTree] = (),
    precision: Precision | None = None,
    decisions: TraceDecisions | None = None,
) -> Captured:
    """Capture ``model(*args, **kwargs)``, or ``loss_fn(model(...), *targets)``, as a graph.

    Args:
        model: any module; its parameters may be on the meta device. Its training mode is kept.
        args: positional example inputs with global shapes: tensors, nested containers, None, numbers.
        kwargs: example inputs by keyword.
        loss_fn: called with the model's output and the targets; with it the graph's output is the loss.
        targets: further arguments of ``loss_fn``, of global shapes.
        precision: a policy: the graph computes under it, on parameters and floating point inputs that are cast.
        decisions: those of an earlier capture of such a call; others are added as needed.

    Returns:
        The graph, at global shapes and with the dtypes of the model (or of the policy), and what is needed to call it
        like the model.

    Raises:
        CaptureError: the model branches on tensor values, has data-dependent shapes, or uses what cannot be traced;
            the message names the source line and what to change. Or it is to be trained, and its loss has no gradient.
    """
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"expected a torch.nn.Module, got {type(model).__name__}; pass the model object itself")
    check_modules(model)
    if type(model).forward is torch.nn.Module.forward and "forward" not in vars(model):
        raise CaptureError(
            f"{type(model).__name__} has no forward(), which is what is captured and trained\n  write one that calls "
            "the method to train by: def forward(self, *args): return self.method(*args); other methods run on the "
            "parallel module without gradients"
        )
    kwargs = dict(kwargs or {})
    check_dense(model, args, kwargs, targets)
    prefix = ""
    shapes = pytree.tree_map_only(torch.Tensor, on_meta, (tuple(args), kwargs, tuple(targets)))
    example = Example(shapes[0], shapes[1], loss_fn, shapes[2], precision=precision)
    module: torch.nn.Module = model
    if targets and loss_fn is None:
        raise CaptureError(f"{len(targets)} targets were given without a loss_fn; pass loss_fn(output, *targets)")
    if loss_fn is not None or precision is not None:
        module, args, prefix = WithLoss(model, loss_fn, len(args), precision), (*args, *targets), "model."
    args, kwargs = _without_aliases((tuple(args), kwargs))
    in_precision = precision.of_model(model) if precision is not None else contextlib.nullcontext()
    with uncollected(), in_precision:
        first = decisions or TraceDecisions()
        found, (guards, exported, builder, (graph, user_inputs)) = settled(
            lambda attempt: traced(module, args, kwargs, prefix, loss_fn, attempt), first,
            lambda: _observed(module, args, kwargs),
        )  # fmt: skip
    if found.fixed_numbers and not first.fixed_numbers:
        warn_of_fixed_numbers(found)
    example, graph = replace(example, decisions=found), replace(graph, precision=precision)
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    _check_renewed(graph, model, precision)
    check_loss(graph, module, loss_fn is not None)
    graph = run(GRAPH, graph)
    literals = {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    if len(user_inputs) != len(leaves):
        raise CaptureError(f"the model takes {len(leaves)} input leaves, the captured graph {len(user_inputs)}")
    inputs = tuple(None if i in literals else user_inputs[i] for i in range(len(leaves)))
    return Captured(graph, in_spec, literals, inputs, own_outputs(exported), builder.constants, example,
                    autocast_now(), guards, exported.left)  # fmt: skip


def _observed(module: torch.nn.Module, args: PyTree, kwargs: PyTree) -> Answers:
    """Run the model on the example as it is, and return how it branches.

    Raises:
        CaptureError: it fails.
    """
    try:
        with entered(Phase.OBSERVE):
            return answers_of(module, args, kwargs)
    except AutoparError:
        raise
    except Exception as error:
        raise run_failed(error, module) from error


def _check_renewed(graph: Graph, model: torch.nn.Module, precision: Precision | None) -> None:
    """Refuse a parameter that the forward writes in less precision than it is kept in, which rounds updates away.

    Raises:
        CaptureError: with its name and both dtypes.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    written = [*graph.written, *(graph.before.updates if graph.before is not None else ())]
    for name in written if precision is not None else ():
        computed, kept = graph.nodes[graph.index[name]].out.dtype, str(params[name].dtype) if name in params else ""
        if kept and kept != f"torch.{computed}":
            raise CaptureError(
                f"forward writes parameter '{name}', which is kept in {kept.removeprefix('torch.')} and computed in "
                f"{computed} under this precision policy\n  keep it as a buffer, or change it outside of forward"
            )


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its shape and dtype without values; it wants a gradient if ``tensor`` does."""
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def _without_aliases(inputs: PyTree) -> PyTree:
    """Copy tensors that are given in several places: else the graph would read one place for all."""
    seen: set[int] = set()

    def fresh(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in seen:
                return leaf.detach().clone().requires_grad_(leaf.requires_grad)
            seen.add(id(leaf))
        return leaf

    return pytree.tree_map(fresh, inputs)


__all__ = [
    "Captured", "WithLoss", "capture", "check_products_run", "none_narrow", "on_meta", "with_wide_products",
]  # fmt: skip
