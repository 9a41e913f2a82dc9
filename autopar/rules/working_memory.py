"""The memory that one call needs while it runs, forward and backward, beyond what exists before and after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.allocations import Allocations
from autopar.rules.axis_options import Option
from autopar.rules.kernels import OF_GPU
from autopar.rules.local_calls import LocalCall
from autopar.rules.lowering_helpers.lowering_trial import trial
from autopar.rules.notation import Rule
from autopar.rules.operator_call import Call
from autopar.rules.saved_tensors import LocalLayout, Strides, filled, key_of_call, trial_of, without_values
from autopar.torch_private import pytree
from autopar.words.meshes import Mesh
from autopar.words.trees import Context


class Gradient(NamedTuple):
    """The gradient of one input: in the memory of that of output ``source``, or in the call's own number ``memory``."""

    source: int | None
    memory: int
    strides: Strides


@dataclass(frozen=True)
class Needs:
    """The needs of one call.

    Attributes:
        forward_bytes: the most that its forward makes and has at once.
        backward_bytes: the most that its backward has at once of what it keeps, of gradients, and of what it makes.
        kept_bytes: the part of `backward_bytes` that the forward kept and that is neither input nor parameter.
        out_bytes: the part of `backward_bytes` that gradients of the outputs take.
        gradients: one for every input; None for one that has none.
        memories: bytes of the gradients' own memory.
    """

    forward_bytes: int
    backward_bytes: int
    kept_bytes: int
    out_bytes: int
    gradients: tuple[Gradient | None, ...]
    memories: tuple[int, ...]


_known: dict[object, Needs] = {}


def needs_of(
    call: Call, rule: Rule, options: Sequence[Option], mesh: Mesh, ins: Sequence[LocalLayout],
    arriving: tuple[Strides, ...] = (), gpu: bool = False,
) -> Needs:  # fmt: skip
    """Return the working memory of a call on one rank.

    Args:
        ins: its inputs on that rank.
        arriving: how the gradients of its outputs lie, of those that have one; if empty, as copies of the outputs do.
        gpu: by the kernels of a GPU.
    """
    gpu = gpu and call.target in OF_GPU
    key = key_of_call(call, rule, options, mesh, ins), arriving, gpu
    if key not in _known:
        _known[key] = trial_of(_counting(arriving), call, rule, options, mesh, ins, gpu) or _unknown(ins)
    return _known[key]


@cache
def _counting(arriving: tuple[Strides, ...]) -> Callable[..., Needs]:
    """Return the same function whenever gradients have equal strides, since trials are cached by it."""
    return partial(_counted, arriving=arriving)


def _unknown(ins: Sequence[LocalLayout]) -> Needs:
    """Return the needs of an operator that cannot be tried: a gradient for every input, and nothing else."""
    memories: list[int] = []
    gradients: list[Gradient | None] = []
    for x in ins:
        gradients.append(Gradient(None, len(memories), x.strides) if x.grad else None)
        memories += [x.n_bytes] if x.grad else []
    return Needs(0, sum(memories), 0, 0, tuple(gradients), tuple(memories))


class _Root(torch.autograd.Function):
    """The start of the trial's backward: it makes the gradients of the outputs, which nobody else holds."""

    @staticmethod
    def forward(
        ctx: Context, bytes_of_gradients: dict[StorageWeakRef, int], arriving: Sequence[Strides], *outputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.bytes_of_gradients = bytes_of_gradients
        # of an output that has holes (a part of a split) the gradient has none: it lies as a copy of it would
        strides = arriving or [torch.empty_like(x).stride() for x in outputs]
        ctx.layouts = [(x.shape, lies, x.dtype, x.device) for x, lies in zip(outputs, strides, strict=True)]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Context, *_: Any) -> Any:
        grads = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in ctx.layouts
        ]
        for storage in (x.untyped_storage() for x in grads):
            ctx.bytes_of_gradients[StorageWeakRef(storage)] = storage.nbytes()
        return (None, None, *grads)


class _Leaf(torch.autograd.Function):
    """The end of the trial's backward for one input: it reads the gradient."""

    @staticmethod
    def forward(ctx: Context, ends: dict[int, torch.Tensor], position: int, x: torch.Tensor) -> torch.Tensor:
        ctx.ends, ctx.position = ends, position
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> Any:
        ctx.ends[ctx.position] = grads[0]
        return None, None, None


def _counted(
    local: LocalCall, ins: Sequence[LocalLayout], sizes: Mapping[str, int], device: str, arriving: Sequence[Strides]
) -> Needs:
    ends: dict[int, torch.Tensor] = {}
    leaves = without_values(ins, device)
    with torch.enable_grad(), trial(sizes):
        tensors = [_Leaf.apply(ends, k, x) if x.requires_grad else x for k, x in enumerate(leaves)]
        count = Allocations()
        for x in leaves:
            count.ignore(x)
        args, kwargs = filled(local, tensors, sizes, device)
        with count:
            results = local.fn(*args, **kwargs)
        forward_bytes, count.peak_bytes = count.peak_bytes, 0
        outputs = [x for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not outputs:
            return Needs(forward_bytes, 0, 0, 0, (None,) * len(ins), ())
        # bytes of the gradients of outputs; as long as a storage is weakly referred to, no other one gets its address
        bytes_of_gradients: dict[StorageWeakRef, int] = {}
        root = _Root.apply(bytes_of_gradients, arriving, *outputs)
        del results, outputs, tensors, args, kwargs
        kept_bytes = count.live_bytes
        with count:
            root.backward(torch.empty((), dtype=root.dtype, device=device))
    sources = {storage.cdata: k for k, storage in enumerate(bytes_of_gradients)}
    numbers: dict[int, int] = {}
    memories: list[int] = []
    gradients: list[Gradient | None] = []
    for position in range(len(ins)):
        grad = ends.get(position)
        if grad is None:
            gradients.append(None)
            continue
        storage = grad.untyped_storage()
        if storage._cdata in sources:
            gradients.append(Gradient(sources[storage._cdata], 0, grad.stride()))
            continue
        if storage._cdata not in numbers:
            numbers[storage._cdata] = len(memories)
            memories.append(storage.nbytes())
        gradients.append(Gradient(None, numbers[storage._cdata], grad.stride()))
    out_bytes = sum(bytes_of_gradients.values())
    return Needs(forward_bytes, count.peak_bytes, kept_bytes, out_bytes, tuple(gradients), tuple(memories))
