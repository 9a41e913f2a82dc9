"""The conditions under which a model's calls can be padded to buckets, and a trial that padding changes no result.

Padding must not count: neither in the loss (labels there are ignored) nor in results of other positions (attention
looks back, or is masked). No single operator shows that, so it is tried: a part of the example batch goes through the
model with and without padding, and outputs, loss and gradients have to be equal.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.capture import Captured
from autopar.capture.batch_factor import inputs_with_rows
from autopar.capture.batch_totals import with_totals
from autopar.capture.microbatches import modules_with_statistics
from autopar.comparison import generators_kept, kept, reason_not_to
from autopar.errors import CaptureError
from autopar.runtime.batches.totals_ahead import TotalsAhead
from autopar.runtime.variants.buckets import LENGTH, ROWS, Buckets, Key, Size, Template, dims_of, keys_of, size_of
from autopar.torch_private import pytree
from autopar.words.trees import PyTree

FILLS = (-100, -1, 0)
"""What labels are tried to be ignored by, where the loss does not say it."""
ROUNDING, ROUNDING_OF_HALF = 1e-4, 5e-2
"""Relative differences that sums in another order explain, with room."""

Batch = tuple[tuple[PyTree, ...], Mapping[str, PyTree], tuple[PyTree, ...]]
"""Positional and keyword arguments of the model, and targets of its loss function."""


@dataclass(frozen=True)
class Padded:
    """An example padded with zeros to its bucket, and facts about its leaves from before the capture."""

    buckets: Buckets
    example: Batch


def padded_example(model: torch.nn.Module, example: Batch, sizes: Sequence[Size]) -> Padded:
    """Return the example of a bucket, from any batch that fits one.

    Raises:
        CaptureError: no input has rows and a length.
        RunError: the example fits no bucket.
    """
    args, kwargs, targets = example
    call = (*args, *targets), dict(kwargs)
    leaves = pytree.tree_leaves(call)
    size = size_of(leaves)
    signature = inspect.signature(model.forward)
    model_args = len(args) if targets else None
    keys = keys_of(signature, model_args, *call)
    dims = {
        key: dims_of(leaf, size) for key, leaf in zip(keys, leaves, strict=True) if isinstance(leaf, torch.Tensor)
    }
    buckets = Buckets(sizes, signature, model_args, dims, {}, None)
    (positional, by_name), _ = buckets.padded(*call)
    return Padded(buckets, (positional[: len(args)], by_name, positional[len(args) :]))


def of_size(buckets: Buckets, example: Batch, size: Size) -> Batch:
    """Return the padded example in a bucket of another size, in zeros."""
    args, kwargs, targets = example
    call = (*args, *targets), dict(kwargs)
    leaves, spec = pytree.tree_flatten(call)
    wanted = {ROWS: size[0], LENGTH: size[1]}

    def sized(key: Key, leaf: PyTree) -> PyTree:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        named = zip(leaf.shape, buckets.dims[key], strict=True)
        return leaf.new_zeros([n if dim is None else wanted[dim] for n, dim in named]).requires_grad_(
            leaf.requires_grad
        )

    keys = keys_of(buckets.signature, buckets.model_args, *call)
    positional, by_name = pytree.tree_unflatten([sized(k, x) for k, x in zip(keys, leaves, strict=True)], spec)
    return positional[: len(args)], by_name, positional[len(args) :]


def proved(padded: Padded, captured: Captured, model: torch.nn.Module, example: Batch) -> Buckets:
    """Return the buckets of a model that supports padding, with fill values of labels and shapes of outputs.

    ``captured`` is of the padded example; ``example`` has no padding, and values.

    Raises:
        CaptureError: padding changes the model's results, or that cannot be excluded.
    """
    args, kwargs, targets = example
    call = (*args, *targets), dict(kwargs)
    if modules := modules_with_statistics([captured.graph]):
        raise CaptureError(
            f"shapes='buckets': batch norms ({', '.join(modules[:4])}) take statistics of padded rows, too; use "
            "shapes='any', or norms without statistics of the batch"
        )
    buckets = padded.buckets
    keys = keys_of(buckets.signature, buckets.model_args, *call)
    buckets.fill = _fills(captured, keys)
    reason = reason_not_to(captured, model, example, True, times=4)
    if reason:
        if captured.graph.loss is not None and not buckets.fill:
            raise CaptureError(
                "shapes='buckets': it is not known which labels the loss ignores, and the model was not run to see "
                f"whether it bears padding ({reason}); give labels with an ignore_index, or use shapes='any'"
            )
        warnings.warn(
            f"shapes='buckets': it was not tried whether the model bears padding ({reason}). Attention has to look "
            "back only, or be masked; outputs of padded calls keep the bucket's shape",
            stacklevel=3,
        )
        return buckets
    buckets.templates = _tried(buckets, captured, model, call, size_of(pytree.tree_leaves(call)))
    return buckets


def _fills(captured: Captured, keys: Sequence[Key]) -> dict[Key, float]:
    """Return the values with which labels of the loss are padded so that they do not count."""
    graph, device = captured.graph, torch.device("cpu")
    if graph.loss is None:
        return {}
    rows = next((node.out.shape[0] for _, node in graph.of_kind("input") if node.out.shape), 0)
    totals = captured.totals or with_totals(graph, inputs_with_rows(graph, rows))[1]
    if totals is None or all(each.how == "parts" for each in totals.ahead):
        return {}
    ahead = TotalsAhead(totals, device)
    if len(ahead.programs) > 1 or ahead.buffers - captured.constants.keys():
        return {}
    of_name = {
        graph.nodes[number].target: key
        for number, key in zip(captured.inputs, keys, strict=True) if number is not None
    }  # fmt: skip
    dtypes = {node.target: getattr(torch, node.out.dtype) for _, node in graph.of_kind("input")}
    ignored = [each.ignored for each in totals.ahead if each.how == "scale"]
    for fill in dict.fromkeys((*ignored, *FILLS)):
        fills = {name: 0 if dtypes[name] is torch.bool or dtypes[name].is_floating_point else fill
                 for name in ahead.inputs}  # fmt: skip
        given = {name: torch.full(shape, fills[name], dtype=dtypes[name]) for name, shape in ahead.inputs.items()}
        terms = ahead.terms(0, given, captured.constants)
        if terms and all(not term.any() for term in terms.values()):
            return {of_name[name]: value for name, value in fills.items()}
    return {}


def _tried(
    buckets: Buckets, captured: Captured, model: torch.nn.Module, call: PyTree, size: Size
) -> frozenset[Template]:
    """Run the model on a part of the example, without and with padding.

    Returns:
        Shapes of its outputs.

    Raises:
        CaptureError: they differ.
    """
    small = size[0], max(1, size[1] - 1)
    size = size[0] + 1, small[1] + 1  # no longer than the example, which may be as long as the model can take
    leaves, spec = pytree.tree_flatten(call)
    keys = keys_of(buckets.signature, buckets.model_args, *call)

    def part(key: Key, leaf: PyTree) -> PyTree:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        for at, dim in enumerate(buckets.dims[key]):
            if dim is not None:
                leaf = leaf.narrow(at, 0, small[0] if dim == ROWS else small[1])
        return leaf.clone()

    bare = pytree.tree_unflatten([part(key, leaf) for key, leaf in zip(keys, leaves, strict=True)], spec)
    whole = Buckets([size], buckets.signature, buckets.model_args, buckets.dims, buckets.fill, None)
    wide, padding = whole.padded(*bare)
    loss_fn = captured.example.loss_fn if captured.example is not None else None

    def run(args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> tuple[list[PyTree], list[PyTree]]:
        torch.manual_seed(0)
        output = model(*args[: buckets.model_args], **kwargs)
        outputs = pytree.tree_leaves(output if loss_fn is None else loss_fn(output, *args[buckets.model_args or 0 :]))
        wanted = [p for p in model.parameters() if p.requires_grad]
        number = captured.graph.loss
        if number is None or not wanted:
            return outputs, []
        return outputs, list(torch.autograd.grad(outputs[number], wanted, allow_unused=True))

    with kept(model, loss_fn), generators_kept(), torch.enable_grad():
        for root in (model, loss_fn):
            if isinstance(root, torch.nn.Module):
                root.eval()
        try:
            (without, gradients), (with_padding, padded_gradients) = run(*bare), run(*wide)
        except Exception as error:
            raise CaptureError(
                f"shapes='buckets': the model failed on a part of the example batch, or on it padded from {small} to "
                f"{size} (rows, length): {type(error).__name__}: {error}"
            ) from error
    templates = {
        _template(x, y, padding.size, padding.bucket)
        for x, y in zip(without, with_padding, strict=True) if isinstance(x, torch.Tensor)
    }  # fmt: skip
    whole.templates = frozenset(templates)
    single = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    bound = ROUNDING if single else ROUNDING_OF_HALF
    cut = whole.cut(with_padding, padding)
    for i, (x, y) in enumerate([*zip(without, cut, strict=True), *zip(gradients, padded_gradients, strict=True)]):
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            continue
        is_loss, x, y = i == captured.graph.loss, x.detach(), y.detach()
        if x.shape != y.shape or not _close(x, y, bound):
            what = "the loss" if is_loss else f"output {i}" if i < len(without) else "a gradient"
            numbers = f": {float(x):.6g}, and {float(y):.6g} padded" if x.numel() == y.numel() == 1 else ""
            raise CaptureError(
                f"shapes='buckets': padding a part of the example batch from {small} to {size} (rows, length) changes "
                f"{what}{numbers}. The model takes padded positions for others: give labels that its loss ignores "
                "there (a mean over labels with ignore_index, or over a mask), attention that looks back only, or an "
                "attention mask; or use shapes='any', which pads nothing"
            )
    return whole.templates


def _close(x: torch.Tensor, y: torch.Tensor, bound: float) -> bool:
    """Return whether two tensors are equal but for rounding; NaNs differ."""
    if not x.is_floating_point():
        return bool(torch.equal(x, y))
    worst = (x - y).abs().max() if x.numel() else torch.zeros(())
    return bool(worst <= bound * torch.maximum(x.abs().max(), torch.full_like(worst, 1e-6))) if x.numel() else True


def _template(x: torch.Tensor, y: torch.Tensor, small: Size, size: Size) -> Template:
    """Return the shape of an output, from those of two calls."""
    names: list[int | str] = []
    for at, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)):
        pairs = [(small[0], size[0], ROWS), (small[1], size[1], LENGTH)]
        of = [name for p, q, name in (pairs if at == 0 else reversed(pairs)) if (a, b) == (p, q) and p != q]
        names.append(of[0] if of else int(b))
    return tuple(names)
