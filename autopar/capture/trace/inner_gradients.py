"""``torch.autograd.grad`` inside a forward: forces of an energy, penalties on gradients, equations in derivatives.

Autograd computes such gradients with operators that the tracer sees like any other. What it does not see is where the
values come from that autograd kept for them: they are other Python objects than those of the forward. Here they are
known by their memory: a value that was kept lies where an operator of the trace has put it, or is a view of that.
``..._backward`` operators are written in plain ones, whose own gradients autograd knows, and which have rules.

The program then computes the gradient forward, and its backward differentiates it once more.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor,
)

from autopar.capture.graph.exported_nodes import storage_of
from autopar.capture.trace.decisions import Undecided
from autopar.capture.trace.patches import PASS, Args, Function, Kwargs
from autopar.capture.trace.recording import DATA, FUNCTION, HOOK, now, refuse, under_way
from autopar.torch_private import FakeTensor, OpOverload, plainly, pytree
from autopar.words.trees import PyTree

ADVICE = (
    "write the gradient out, or put it into an autograd.Function that computes it in its own forward"
)  # fmt: skip

def gradients(grad: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
    """Compute ``grad(*args, **kwargs)`` of traced tensors, as operators of the trace."""
    bound = inspect.signature(torch.autograd.grad).bind(*args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    if options["is_grads_batched"]:
        raise refuse("torch.autograd.grad inside a forward with is_grads_batched", ADVICE)
    _only_known(options["outputs"], options["inputs"])
    with _kept_values_known():
        grads = grad(*args, **kwargs)
    if options["create_graph"]:
        return grads
    return tuple(None if g is None else g.detach() for g in grads)  # a constant for what comes after


def _only_known(outputs: PyTree, inputs: PyTree) -> None:
    """Refuse operators in between that are not torch's own, of which autograd knows nothing."""
    mode = get_proxy_mode()
    assert mode is not None
    tracker = mode.tracer.tensor_tracker

    def nodes_of(tensors: object) -> set[torch.fx.Node]:
        slots = (tracker.get(t) for t in pytree.tree_leaves(tensors) if isinstance(t, torch.Tensor))
        return {slot.proxy.node for slot in slots if slot is not None}

    to, behind = nodes_of(inputs), nodes_of(inputs)
    for node in mode.tracer.graph.nodes:
        if node not in behind and any(before in behind for before in node.all_input_nodes):
            behind.add(node)
    todo, seen = list(nodes_of(outputs)), set[torch.fx.Node]()
    while todo:
        node = todo.pop()
        if node in seen or node in to or node not in behind:
            continue
        seen.add(node)
        todo.extend(node.all_input_nodes)
        if str(node.target) == DATA:  # a constant
            continue
        if isinstance(node.target, OpOverload) and node.target.namespace not in ("aten", "prims"):
            record, called, number = now(), str(node.target), node.args[-1]
            if record is not None and called in (FUNCTION, HOOK) and isinstance(number, int):
                called = record.calls[number].name
            raise refuse(f"torch.autograd.grad inside a forward, through {called},", ADVICE)


@contextlib.contextmanager
def _kept_values_known() -> Iterator[None]:
    """Make the values that autograd has kept known to the tracer, while autograd computes."""
    mode = get_proxy_mode()
    assert mode is not None
    kept = _Kept(mode)
    trace = ProxyTorchDispatchMode.__torch_dispatch__

    def traced(self: Any, func: OpOverload, types: Any, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        if self is not mode:
            return trace(self, func, types, args, kwargs)

        def run(f: Any, *a: Any) -> Any:
            return trace(self, f, types, a, {})

        for value in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(value, FakeTensor) and value not in mode.tracer.tensor_tracker:
                kept.find(value, func, run)
        if (plain := _plain(func)) is not None:
            with self:
                return plain(*args, **(kwargs or {}))
        return trace(self, func, types, args, kwargs)

    with mock.patch.object(ProxyTorchDispatchMode, "__torch_dispatch__", traced):
        yield


def _plain(func: OpOverload) -> Function | None:
    """Return a backward operator of torch in operators that autograd can differentiate; None if there is none."""
    name = getattr(func, "_opname", "")
    if not (name.endswith(("_backward", "_backward_data"))):
        return None
    if name == "convolution_backward":
        return _of_convolution
    return plainly(func)


def _of_convolution(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool,
    output_padding: Any, groups: int, wanted: Sequence[bool],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return the gradients of a convolution as convolutions, for its input, weight and bias."""
    n = grad.dim() - 2
    stride, padding, dilation = ([*v] * n if len(v) == 1 else [*v] for v in (stride, padding, dilation))
    if transposed or (wanted[1] and groups > 1):
        kind = "a transposed convolution" if transposed else "the weight of a convolution in groups"
        raise refuse(f"torch.autograd.grad inside a forward, of {kind}", ADVICE)
    to_x = to_weight = to_bias = None
    if wanted[0]:
        left = [
            size - ((g - 1) * s - 2 * p + d * (k - 1) + 1)
            for size, g, s, p, d, k in zip(
                x.shape[2:], grad.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True
            )
        ]
        transpose = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[n - 1]
        to_x = transpose(grad, weight, None, stride, padding, left, groups, dilation)  # type: ignore[operator]
    if wanted[1]:  # the batch is what is summed over: input and gradient change rows for channels
        convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[n - 1]
        whole = convolve(x.transpose(0, 1), grad.transpose(0, 1), None, dilation, padding, stride)  # type: ignore[operator]
        to_weight = whole.transpose(0, 1)
        for dim, size in enumerate(weight.shape[2:], 2):
            to_weight = to_weight.narrow(dim, 0, size)
    if wanted[2]:
        to_bias = grad.sum([0, *range(2, grad.dim())])
    return to_x, to_weight, to_bias


class _Kept:
    """The nodes of a trace that autograd's kept values come from."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.nodes: dict[int, list[torch.fx.Node]] = {}
        self.last: torch.fx.Node | None = None

    def find(self, value: torch.Tensor, func: OpOverload, run: Function) -> None:
        """Make the tracer know a value."""
        tracker = self.mode.tracer.tensor_tracker
        with disable_proxy_modes_tracing():
            self._look()
            nodes = self.nodes.get(storage_of(value) or 0, [])
        for node in reversed(nodes):
            traced = node.meta["val"]
            if _same(traced, value):
                tracker[value] = self._known(node)
                return
        for node in reversed(nodes):
            traced = node.meta["val"]
            if (way := _as_view(traced, value)) is not None:
                tracker[traced] = self._known(node)
                viewed = way(traced, run)
                tracker[value] = tracker[viewed]
                return
        error = refuse(
            f"torch.autograd.grad inside a forward: {func} needs a value of shape {list(value.shape)} that an operator "
            "of the forward keeps for itself, such as the statistics of a norm,", ADVICE,
        )  # fmt: skip
        now = under_way()
        raise error if now is None or now.attempt.decisions.plain_operators else Undecided(plain_operators=True)

    def _known(self, node: torch.fx.Node) -> Any:
        """Return the tracer's entry for a tensor of a node."""
        tracer = self.mode.tracer
        with disable_proxy_modes_tracing():
            detached = node.meta["val"].detach()
        track_tensor(detached, tracer.proxy(node), constant=None, tracer=tracer)
        return tracer.tensor_tracker[detached]

    def _look(self) -> None:
        """Note the nodes that have come since the last look, by their memory."""
        graph = self.mode.tracer.graph
        node = next(iter(graph.nodes), None) if self.last is None else self.last.next
        while node is not None and node.op != "root":
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and (memory := storage_of(value)) is not None:
                self.nodes.setdefault(memory, []).append(node)
            self.last, node = node, node.next


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.stride(), a.storage_offset(), a.dtype) == (b.shape, b.stride(), b.storage_offset(), b.dtype)


def _as_view(base: torch.Tensor, value: torch.Tensor) -> Callable[[Any, Function], Any] | None:
    """Return a function that views a contiguous tensor in the same memory as the value; None for another part of it."""
    strides: tuple[int, ...] = value.stride()
    once = [1 if s == 0 else n for n, s in zip(value.shape, strides, strict=True)]
    order = sorted(range(value.dim()), key=lambda d: (once[d] == 1, -strides[d], d))
    sizes = [once[d] for d in order]
    dense = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    fits = base.is_contiguous() and base.numel() == math.prod(once) and base.dtype == value.dtype
    steps = all(once[d] == 1 or strides[d] == step for d, step in zip(order, dense, strict=True))
    if not fits or not steps or base.storage_offset() != value.storage_offset():
        return None
    back = [order.index(d) for d in range(value.dim())]

    def view(tensor: torch.Tensor, run: Function) -> Any:
        if list(tensor.shape) != sizes:
            tensor = run(torch.ops.aten.reshape.default, tensor, sizes)
        if back != [*range(len(back))]:
            tensor = run(torch.ops.aten.permute.default, tensor, back)
        if list(tensor.shape) != list(value.shape):
            tensor = run(torch.ops.aten.expand.default, tensor, [*value.shape])
        return tensor

    return view


# --- operators that keep values of their own -------------------------------------------------------------------------


def in_plain_operators(func: Function, args: Args, kwargs: Kwargs) -> PyTree:
    """Write an operator that keeps values of its own for the backward in ones that keep only what they get and give.

    These are norms with their statistics, a cross entropy with its probabilities, attention, and products of what must
    be copied first.
    """
    plain = PLAIN_FORMS[func](*args, **kwargs) if get_proxy_mode() is not None else NotImplemented
    return PASS if plain is NotImplemented else plain


def _normed(x: Any, dims: Sequence[int], eps: float) -> Any:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _layer_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *_: Any,
) -> Any:  # fmt: skip
    y = _normed(x, [*range(-len(normalized_shape), 0)], eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any,
) -> Any:  # fmt: skip
    y = _normed(x.reshape(x.shape[0], num_groups, -1), [-1], eps).reshape(x.shape)
    of_channels = (x.shape[1], *[1] * (x.dim() - 2))
    y = y if weight is None else y * weight.view(of_channels)
    return y if bias is None else y + bias.view(of_channels)


def _batch_norm(
    x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None = None, bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    dims, of_channels = [0, *range(2, x.dim())], (x.shape[1], *[1] * (x.dim() - 2))
    n = x.numel() // x.shape[1]
    if training and (n < 2 or momentum is None):
        return NotImplemented  # torch says what is wrong
    if training:
        y = _normed(x, dims, eps)
        with torch.no_grad():
            for running, value in ((running_mean, x.mean(dims)), (running_var, x.var(dims))):
                if running is not None:
                    running.copy_(running * (1 - momentum) + value * momentum)  # type: ignore[operator]
    else:
        y = (x - running_mean.view(of_channels)) * (running_var.view(of_channels) + eps).rsqrt()
    y = y if weight is None else y * weight.view(of_channels)
    return y if bias is None else y + bias.view(of_channels)


def _instance_norm(
    x: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    if running_mean is not None or running_var is not None or not use_input_stats:
        return NotImplemented
    of_channels = (x.shape[1], *[1] * (x.dim() - 2))
    y = _normed(x, [*range(2, x.dim())], eps)
    y = y if weight is None else y * weight.view(of_channels)
    return y if bias is None else y + bias.view(of_channels)


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    dims = [*range(-len(normalized_shape), 0)]
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    return y if weight is None else y * weight


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if inplace or not training or not 0 < p < 1:
        return NotImplemented
    return x * torch.dropout(torch.ones_like(x), p, True)


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    if (size_average, reduce) != (None, None):
        return NotImplemented
    classes = 1 if input.dim() > 1 else 0
    n, logs = input.shape[classes], input.log_softmax(classes)
    weights = 1.0 if weight is None else weight.view(-1, *[1] * (input.dim() - 1 - classes))
    if target.is_floating_point():
        shares = target * (1 - label_smoothing) + label_smoothing / n
        losses = -(shares * weights * logs).sum(classes)
        counts: Any = losses.numel()
    else:
        counted = target != ignore_index
        places = torch.where(counted, target, 0)
        picked = logs.gather(classes, places.unsqueeze(classes)).squeeze(classes)
        of_target = 1.0 if weight is None else weight[places]
        losses = picked * of_target * (1 - label_smoothing) + (logs * weights).sum(classes) * (label_smoothing / n)
        losses = torch.where(counted, -losses, 0.0)
        counts = counted.sum() if weight is None else torch.where(counted, of_target, 0.0).sum()
    if reduction == "none":
        return losses
    return losses.sum() / counts if reduction == "mean" else losses.sum()


def _attention(
    query: Tensor, key: Tensor, value: PyTree, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if dropout_p:
        return NotImplemented
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = scores.new_ones(scores.shape[-2:]).tril().bool()
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if masked else scores + attn_mask
    return scores.softmax(-1) @ value


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if input.is_contiguous() or input.dim() < 3:
        return NotImplemented
    return F.linear(input.contiguous(), weight, bias)


def _matmul(input: object, other: object) -> Any:
    if not (isinstance(input, Tensor) and isinstance(other, Tensor)):
        return NotImplemented
    if min(input.dim(), other.dim()) < 2 or (input.is_contiguous() and other.is_contiguous()):
        return NotImplemented
    return torch.matmul(input.contiguous(), other.contiguous())


PLAIN_FORMS: dict[Any, Function] = {
    F.layer_norm: _layer_norm, F.group_norm: _group_norm, F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm, F.rms_norm: _rms_norm, F.dropout: _dropout, F.cross_entropy: _cross_entropy,
    F.scaled_dot_product_attention: _attention, F.linear: _linear, torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul, torch.Tensor.__matmul__: _matmul,
}  # fmt: skip
