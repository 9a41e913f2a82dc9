"""Steps of distributed lowerings across the axes that cut a factor: sums, maxima, means, gathers, messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import rules
from torch.distributed import ProcessGroup

from autopar.rules.lowering_helpers.local_shard import (
    Axes,
    axes_of,
    groups_like,
    n_shards,
    share,
    size_and_unit,
    some_have_none,
)
from autopar.rules.lowering_helpers.lowering_trial import COUNTED, TRIAL, ToOther
from autopar.torch_private import (
    LocalTensor,
    all_gather_single,
    functional_collectives,
    group_of_axis,
    local_tensor_mode,
)
from autopar.words.placements import axis_and_block
from autopar.words.trees import Context


class _Collected(torch.autograd.Function):
    """Stands for a collective in a trial: a tensor of its own, in the backward too, and nothing kept for that."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grads[0])


def sends_on(axis: str) -> Any:
    """Return the process group of an axis for :func:`permuted`; None in a trial.

    A backward may use it if there is no ambient mesh.
    """
    return None if TRIAL.get() is not None else group_of_axis(axis_and_block(axis)[0])


def permuted(
    x: torch.Tensor, axis: str, group: ProcessGroup | None, to: Sequence[int], beside: object = None,
    backward: bool = False,
) -> Callable[[], torch.Tensor]:
    """Send ``x`` [n], of equal length on all ranks of an axis, from its rank i to rank ``to[i]``.

    The function that is returned waits for what arrives. ``beside`` and ``backward`` are for counting
    (:class:`ToOther`), ``group`` is from :func:`sends_on`.

    It is an all-to-all in which each rank sends to one other: ranks of a group post collectives in one order, so no
    message waits for a later one, and no channel is made that the plan does not know.
    """
    mode, counted = local_tensor_mode(), COUNTED.get()
    if counted is not None:
        n_bytes = x.numel() * x.element_size()
        counted.messages.append(ToOther(axis, n_bytes, beside, backward, counted.times))
    if group is None or counted is not None:
        arrived = torch.empty_like(x)
        return lambda: arrived
    if mode is not None and isinstance(x, LocalTensor):
        pieces = x._local_tensors
        moved = {ranks[to[i]]: pieces[rank] for ranks in groups_like(group) for i, rank in enumerate(ranks)}
        with mode.disable():
            simulated = LocalTensor({rank: moved[rank].clone() for rank in pieces})
        return lambda: simulated
    number, n = dist.get_rank(group), x.numel()
    sent, received = ([n if i == peer else 0 for i in range(len(to))] for peer in (to[number], list(to).index(number)))
    arriving = functional_collectives.all_to_all_single(x, received, sent, group)
    return lambda: _arrived(arriving)


def pending(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Convert V -> P: pieces become terms of a sum to be made. Only the type changes, forward and backward."""
    for axis in axes if spmd.is_type_checking() else ():
        x = spmd.reinterpret(x, axis, src=spmd.V, dst=spmd.P)
    return x


def bilinear(fn: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute ``fn(x, y)`` for a bilinear ``fn`` unknown to the type checker; typed as a product of x and y."""
    if not spmd.is_type_checking():
        return fn(x, y)
    with spmd.no_typecheck():
        out = fn(x, y)
    like = torch.mul(x.flatten().narrow(0, 0, 1), y.flatten().narrow(0, 0, 1))
    spmd.assert_type(out, dict(spmd.get_local_type(like)))
    return out


def summed_back(x: torch.Tensor) -> dict[str, Any]:
    """Return the options by which a step's backward adds up gradients in the precision of ``x``, as its forward does.

    spmd-types requires them for precisions below float32.
    """
    low = x.is_floating_point() and x.element_size() < 4
    return {"backward_options": {"op_dtype": x.dtype}} if low else {}


def total(x: torch.Tensor, axes: Axes, dst: Any) -> torch.Tensor:
    """Sum the shards of all ranks; ``dst`` is ``spmd.R`` if ranks go on differently, ``spmd.I`` if alike."""
    x = pending(x.contiguous(), axes)
    for axis in axes:
        x = (
            _Collected.apply(x)
            if TRIAL.get() is not None
            else spmd.all_reduce(x, axis, src=spmd.P, dst=dst, **summed_back(x))
        )
    return x


def part_of(x: torch.Tensor, dim: int, axes: Axes) -> torch.Tensor:
    """Convert R -> V: take this rank's piece along a dim that ``axes`` divide evenly; the gradient is pending."""
    for axis in axes:
        if TRIAL.get() is not None:
            x = x.narrow(dim, 0, x.shape[dim] // size_and_unit(axis)[0])
        else:
            x = spmd.convert(x, axis, src=spmd.R, dst=spmd.S(dim))
    return x


def all_parts(x: torch.Tensor, dim: int, axes: Axes) -> torch.Tensor:
    """Concatenate the equal shards of all ranks along a dim (V -> R); the first axis is the major one.

    The backward sums the gradients, which are pending, and gives each rank its shard.
    """
    for axis in reversed(axes):
        if TRIAL.get() is not None:
            x = torch.cat([x] * size_and_unit(axis)[0], dim)
        else:
            x = spmd.all_gather(x.contiguous(), axis, src=spmd.S(dim), dst=spmd.R, **summed_back(x))
    return x


class _Greatest(torch.autograd.Function):
    """All-reduce with max, of a constant; spmd-types itself only sums."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, axis: str) -> torch.Tensor:
        return _arrived(functional_collectives.all_reduce(x, "max", group_of_axis(axis)))

    @staticmethod
    def spmd_typecheck(*, x: torch.Tensor, axis: str) -> Any:
        return rules.all_reduce(rules.reinterpret(x, axis, src=spmd.V, dst=spmd.P), axis, src=spmd.P, dst=spmd.R)

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> Any:
        raise AssertionError("a maximum across ranks is a constant")


def greatest(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Return the elementwise maximum of the shards of all ranks, as a constant."""
    x = x.detach().contiguous()
    for axis in axes:
        x = torch.empty_like(x) if TRIAL.get() is not None else _Greatest.apply(x, axis)
    return x


def gathered_constant(x: torch.Tensor, axis: str, group: ProcessGroup | None) -> torch.Tensor:
    """Gather ``x`` of all ranks of an axis, [ranks *x], without a gradient.

    Args:
        group: the axis's, from :func:`sends_on`.
    """
    if group is None:
        return x.new_empty((n_shards([axis]), *x.shape))
    return _arrived(all_gather_single(x.unsqueeze(0).contiguous(), 0, group))


def summed_constant(x: torch.Tensor, axis: str, group: ProcessGroup | None) -> torch.Tensor:
    """Sum ``x`` over all ranks of an axis, without a gradient; with a given ``group`` also in a backward."""
    return torch.empty_like(x) if group is None else _arrived(
        functional_collectives.all_reduce(x.contiguous(), "sum", group)
    )  # fmt: skip


def greatest_constant(x: torch.Tensor, axis: str, group: ProcessGroup | None) -> torch.Tensor:
    """Return the elementwise maximum of ``x`` over all ranks of an axis, as :func:`summed_constant` sums."""
    return torch.empty_like(x) if group is None else _arrived(
        functional_collectives.all_reduce(x.contiguous(), "max", group)
    )  # fmt: skip


def _arrived(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, functional_collectives.AsyncCollectiveTensor) else x  # type: ignore[no-any-return]


def average(
    x: torch.Tensor, cut: Mapping[str, Axes], sizes: Mapping[str, int] | None, factors: Sequence[str]
) -> torch.Tensor:
    """Average a mean ``x`` over this rank's elements over all ranks' elements, if `factors` are cut."""
    axes = axes_of(cut, *factors)
    if sizes is None:
        return total(x, axes, spmd.R) / n_shards(axes)
    return total(numbers(x, cut, sizes, factors) * share(x, cut, sizes, factors), axes, spmd.R)


def numbers(
    x: torch.Tensor, cut: Mapping[str, Axes], sizes: Mapping[str, int] | None, factors: Sequence[str]
) -> torch.Tensor:
    """Return a statistic ``x`` over this rank's elements of these factors, with zero where the rank has none."""
    if sizes is None or not any(some_have_none(cut, sizes, f) for f in factors):
        return x
    return x.masked_fill(share(x, cut, sizes, factors) == 0, 0)
