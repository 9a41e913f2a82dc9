"""What distributed lowerings share: sums, maxima and positions across the axes that cut a factor.

Tensors here are one rank's piece, of type V (our S) on ``axes``. Axes are names of the ambient ``spmd_types`` mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import rules

from autopar.rules.lowerings.lowering_trial import COUNTED, TRIAL, ToOther, in_trial
from autopar.torch_private import LocalIntNode, LocalTensor, functional_collectives, group_of_axis, local_tensor_mode
from autopar.words.pieces import lengths_of
from autopar.words.placements import axis_and_unit

Axes = Sequence[str]

class _Collected(torch.autograd.Function):
    """Stands for a collective in a trial: a tensor of its own, in the backward too, and nothing kept for that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grads[0])


def axes_of(cut: Mapping[str, Axes], *factors: str) -> tuple[str, ...]:
    """The axes that cut any of ``factors``."""
    return tuple(axis_and_unit(axis)[0] for f in factors for axis in cut.get(f, ()))


def axes_except(cut: Mapping[str, Axes], *factors: str) -> tuple[str, ...]:
    """The axes that cut any other factor."""
    return tuple(axis_and_unit(axis)[0] for f, axes in cut.items() if f not in factors for axis in axes)


def n_pieces(axes: Axes) -> int:
    """Number of pieces that ``axes`` cut together."""
    return prod(_size_and_unit(axis)[0] for axis in axes)


def _size_and_unit(axis: str) -> tuple[int, int]:
    """How many ranks an axis has, and of how many elements the pieces that it cuts are multiples (``tensor*64``)."""
    name, unit = axis_and_unit(axis)
    sizes = TRIAL.get()
    return spmd.normalize_axis(name).size() if sizes is None else sizes[name], unit


def index_on(axis: str) -> Any:
    """This rank's number on an axis of the ambient mesh: an int; in a process that plays many ranks, one for each."""
    group = group_of_axis(axis)
    mode = local_tensor_mode()
    if mode is None:
        return dist.get_rank(group)
    number = {rank: k for ranks in _groups_like(group) for k, rank in enumerate(ranks)}
    return torch.SymInt(LocalIntNode({rank: number[rank] for rank in mode.ranks}))


def for_each(axis: str, value: Callable[[int], int]) -> Any:
    """``value`` of this rank's number on an axis of the ambient mesh; in a process that plays many ranks, one for each;
    in a trial that of the first."""
    if in_trial():
        return value(0)
    group, mode = group_of_axis(axis), local_tensor_mode()
    if mode is None:
        return value(dist.get_rank(group))
    numbers = {rank: k for ranks in _groups_like(group) for k, rank in enumerate(ranks)}
    return torch.SymInt(LocalIntNode({rank: value(numbers[rank]) for rank in mode.ranks}))


def _groups_like(group: Any) -> list[list[int]]:
    """The ranks of this process group and of its siblings, of which a process that plays many ranks knows one only."""
    ranks = dist.get_process_group_ranks(group)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    block = stride * len(ranks)
    return [
        [start + offset + stride * k for k in range(len(ranks))]
        for start in range(0, dist.get_world_size(), block) for offset in range(stride)
    ]  # fmt: skip


def which_piece(axis: str) -> Any:
    """This rank's number on an axis, as :func:`index_on`; in a trial that of the last rank, which works most where a
    mask is causal."""
    as_last = TRIAL.get() is not None or COUNTED.get() is not None
    return _size_and_unit(axis)[0] - 1 if as_last else index_on(axis_and_unit(axis)[0])


def cuts_on(axes: Axes) -> tuple[tuple[int, int], ...]:
    """``(size, unit)`` of axes that cut a dim: :func:`~autopar.words.pieces.nested_piece_of` takes them."""
    return tuple(map(_size_and_unit, axes))


def sends_on(axis: str) -> Any:
    """The process group of an axis, for :func:`permuted`, which a backward may call where there is no ambient mesh;
    None in a trial."""
    return None if TRIAL.get() is not None else group_of_axis(axis_and_unit(axis)[0])


def permuted(
    x: torch.Tensor, axis: str, group: Any, to: Sequence[int], beside: object = None, backward: bool = False
) -> Callable[[], torch.Tensor]:
    """Send ``x`` [n], as long on all ranks of an axis, from rank i of it to rank ``to[i]``; what is returned waits for
    what arrives. ``beside`` and ``backward`` are for who counts (:class:`ToOther`), ``group`` is from :func:`sends_on`.

    It is an all-to-all in which each rank has something for one other: ranks of a group post collectives in one order,
    so no message waits for one that is posted behind it, and no channel is made that a plan does not know of.
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
        moved = {ranks[to[i]]: pieces[rank] for ranks in _groups_like(group) for i, rank in enumerate(ranks)}
        with mode.disable():
            simulated = LocalTensor({rank: moved[rank].clone() for rank in pieces})
        return lambda: simulated
    number, n = dist.get_rank(group), x.numel()
    sent, received = ([n if i == peer else 0 for i in range(len(to))] for peer in (to[number], list(to).index(number)))
    arriving = functional_collectives.all_to_all_single(x, received, sent, group)

    if isinstance(arriving, functional_collectives.AsyncCollectiveTensor):
        return arriving.wait
    return lambda: arriving


def length_of(n: int, axes: Axes) -> Any:
    """How many of ``n`` elements this rank has where ``axes`` cut them, each as ``torch.chunk`` does."""
    for axis in axes:
        size, unit = _size_and_unit(axis)
        length = -(-n // (size * unit)) * unit
        if TRIAL.get() is not None:  # of the first rank, whose piece is the largest
            n = length
            continue
        at = index_on(axis_and_unit(axis)[0])
        n = _least(length, n - _least(at * length, n))
    return n


def _least(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


def first_of(n: int, axes: Axes, device: torch.device) -> torch.Tensor:
    """The first of ``n`` elements that this rank has where ``axes`` cut them: int64 without dims, V on ``axes``."""
    if TRIAL.get() is not None:
        return torch.zeros((), dtype=torch.int64, device=device)
    return _own(_pieces(n, axes, device)[0], axes)


def _pieces(n: int, axes: Axes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """First elements and lengths of all pieces into which ``axes`` cut ``n`` elements, int64 [pieces], the first axis
    the major one; as :func:`~autopar.words.pieces.piece_of` has them.

    They are computed on the device: numbers from the host would have to be copied, which it waits for.
    """
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    lengths = torch.full((1,), n, dtype=torch.int64, device=device)
    for axis in axes:
        size, unit = _size_and_unit(axis)
        each = (lengths + (size * unit - 1)).div(size * unit, rounding_mode="floor") * unit
        begins = torch.minimum(torch.arange(size, device=device) * each.unsqueeze(1), lengths.unsqueeze(1))
        starts = (starts.unsqueeze(1) + begins).flatten()
        lengths = torch.minimum(each.unsqueeze(1), lengths.unsqueeze(1) - begins).flatten()
    return starts, lengths


def _own(every: torch.Tensor, axes: Axes) -> torch.Tensor:
    """This rank's of the values of all ranks of ``axes`` [pieces]: no dims, V on ``axes``."""
    for axis in axes_of({"": axes}, ""):
        every = spmd.convert(every, axis, src=spmd.R, dst=spmd.S(0))
    return every.reshape(())


def pending(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """V -> P: the pieces are terms of a sum that is still to be made. Only the type changes, forward and backward."""
    for axis in axes if spmd.is_type_checking() else ():
        x = spmd.reinterpret(x, axis, src=spmd.V, dst=spmd.P)
    return x


def bilinear(fn: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``fn(x, y)`` for a bilinear ``fn`` that the type checker does not know as one; typed as a product of x and y."""
    if not spmd.is_type_checking():
        return fn(x, y)
    with spmd.no_typecheck():
        out = fn(x, y)
    like = torch.mul(x.flatten().narrow(0, 0, 1), y.flatten().narrow(0, 0, 1))
    spmd.assert_type(out, dict(spmd.get_local_type(like)))
    return out


def summed_back(x: torch.Tensor) -> dict[str, Any]:
    """How the backward of a step of ``x`` adds up gradients: in the precision of ``x``, as its forward does.

    spmd-types wants to be told so for precisions below float32.
    """
    low = x.is_floating_point() and x.element_size() < 4
    return {"backward_options": {"op_dtype": x.dtype}} if low else {}


def total(x: torch.Tensor, axes: Axes, dst: Any) -> torch.Tensor:
    """The sum of the pieces on every rank; ``dst`` is ``spmd.R`` if ranks go on differently, ``spmd.I`` if alike."""
    x = pending(x.contiguous(), axes)
    for axis in axes:
        x = (
            _Collected.apply(x)
            if TRIAL.get() is not None
            else spmd.all_reduce(x, axis, src=spmd.P, dst=dst, **summed_back(x))
        )
    return x


def part_of(x: torch.Tensor, dim: int, axes: Axes) -> torch.Tensor:
    """R -> V: this rank's piece of a tensor along a dim, which ``axes`` divide evenly; the gradient is pending."""
    for axis in axes:
        if TRIAL.get() is not None:
            x = x.narrow(dim, 0, x.shape[dim] // _size_and_unit(axis)[0])
        else:
            x = spmd.convert(x, axis, src=spmd.R, dst=spmd.S(dim))
    return x


def all_parts(x: torch.Tensor, dim: int, axes: Axes) -> torch.Tensor:
    """V -> R: the equal pieces of all ranks, one behind the other along a dim; the first axis is the major one. In the
    backward the gradients, which are pending, are summed, and each rank gets its piece."""
    for axis in reversed(axes):
        if TRIAL.get() is not None:
            x = torch.cat([x] * _size_and_unit(axis)[0], dim)
        else:
            x = spmd.all_gather(x.contiguous(), axis, src=spmd.S(dim), dst=spmd.R, **summed_back(x))
    return x


class _Greatest(torch.autograd.Function):
    """All-reduce with max, of a constant; spmd-types itself only sums."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: str) -> torch.Tensor:
        return _arrived(functional_collectives.all_reduce(x, "max", group_of_axis(axis)))

    @staticmethod
    def spmd_typecheck(*, x: torch.Tensor, axis: str) -> Any:
        return rules.all_reduce(rules.reinterpret(x, axis, src=spmd.V, dst=spmd.P), axis, src=spmd.P, dst=spmd.R)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("a maximum across ranks is a constant")


def greatest(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The elementwise maximum of the pieces on every rank, as a constant."""
    x = x.detach().contiguous()
    for axis in axes:
        x = torch.empty_like(x) if TRIAL.get() is not None else _Greatest.apply(x, axis)
    return x


def gathered_constant(x: torch.Tensor, axis: str, group: Any) -> torch.Tensor:
    """``x`` of all ranks of an axis, [ranks *x], without a gradient.

    Args:
        group: the axis's, from :func:`sends_on`.
    """
    if group is None:
        return x.new_empty((n_pieces([axis]), *x.shape))
    return _arrived(functional_collectives.all_gather_single(x.unsqueeze(0).contiguous(), 0, group))


def summed_constant(x: torch.Tensor, axis: str, group: Any) -> torch.Tensor:
    """The sum of ``x`` over all ranks of an axis, without a gradient; for a backward, too, as ``group`` is given."""
    return torch.empty_like(x) if group is None else _arrived(
        functional_collectives.all_reduce(x.contiguous(), "sum", group)
    )  # fmt: skip


def _arrived(x: torch.Tensor) -> torch.Tensor:
    return x.wait() if isinstance(x, functional_collectives.AsyncCollectiveTensor) else x  # type: ignore[no-any-return]


def piece(axes: Axes, device: torch.device) -> torch.Tensor:
    """Number of this rank's piece: int64 without dims, V on ``axes``; the first axis is the major one."""
    if not axes or TRIAL.get() is not None:
        return torch.zeros((), dtype=torch.int64, device=device)
    number = torch.arange(n_pieces(axes), device=device)
    for axis in axes:
        number = spmd.convert(number, axis, src=spmd.R, dst=spmd.S(0))
    return number.reshape(())


def positions(n: int, axes: Axes, device: torch.device) -> torch.Tensor:
    """Global positions of this rank's elements of a dim of ``n``, which ``axes`` cut."""
    if n % prod(prod(_size_and_unit(axis)) for axis in axes):
        return torch.arange(length_of(n, axes), device=device) + first_of(n, axes, device)
    local = torch.arange(n // n_pieces(axes), device=device)
    return local + piece(axes, device) * (n // n_pieces(axes)) if axes else local


def first(cut: Mapping[str, Axes], sizes: Mapping[str, int] | None, factor: str, x: torch.Tensor, dim: int) -> Any:
    """Global position of the first element of ``x`` along a dim, which is cut along ``factor``: V on its axes."""
    axes = cut.get(factor, ())
    if sizes is None:
        return piece(axes, x.device) * x.shape[dim]
    return first_of(sizes[factor], axes, x.device)


def average(
    x: torch.Tensor, cut: Mapping[str, Axes], sizes: Mapping[str, int] | None, factors: Sequence[str]
) -> torch.Tensor:
    """The mean over all ranks' elements of a mean ``x`` over this rank's elements, where these factors are cut."""
    axes = axes_of(cut, *factors)
    if sizes is None:
        return total(x, axes, spmd.R) / n_pieces(axes)
    return total(numbers(x, cut, sizes, factors) * share(x, cut, sizes, factors), axes, spmd.R)


def numbers(
    x: torch.Tensor, cut: Mapping[str, Axes], sizes: Mapping[str, int] | None, factors: Sequence[str]
) -> torch.Tensor:
    """A statistic ``x`` over this rank's elements of these factors, zero where it has none: there it is no number."""
    if sizes is None or not any(some_have_none(cut, sizes, f) for f in factors):
        return x
    return x.masked_fill(share(x, cut, sizes, factors) == 0, 0)


def some_have_none(cut: Mapping[str, Axes], sizes: Mapping[str, int] | None, factor: str) -> bool:
    """Whether the axes that cut a factor leave some rank without any of it."""
    if sizes is None or factor not in cut:
        return False
    return not min(lengths_of(sizes[factor], [_size_and_unit(axis) for axis in cut[factor]]))


def with_one(
    x: torch.Tensor, dim: int, value: float, cut: Mapping[str, Axes], sizes: Mapping[str, int] | None, factor: str
) -> torch.Tensor:
    """``x`` with one more element of ``value`` along a dim, where some rank has none of the factor that cuts it; else
    ``x`` itself.

    So a maximum over nothing has a neutral element, and an index finds something to read.
    """
    if not some_have_none(cut, sizes, factor):
        return x
    return padded(x, dim, x.shape[dim] + 1, value)


def padded(x: torch.Tensor, dim: int, to: Any, value: float = 0.0) -> torch.Tensor:
    """``x`` with ``value`` behind it along a dim, up to ``to`` elements."""
    missing = to - x.shape[dim]
    if isinstance(missing, int) and not missing:
        return x
    behind = [*[0, 0] * (x.dim() - 1 - dim % x.dim()), 0, missing]
    if not spmd.is_type_checking():
        return torch.nn.functional.pad(x, behind, value=value)
    with spmd.no_typecheck():  # zeros change no type: of a pending sum they are terms
        longer = torch.nn.functional.pad(x, behind, value=value)
    spmd.assert_type(longer, dict(spmd.get_local_type(x)))
    return longer


def share(x: torch.Tensor, cut: Mapping[str, Axes], sizes: Mapping[str, int], factors: Sequence[str]) -> torch.Tensor:
    """What part of all elements of these factors this rank has: a number of the type of ``x``, V on their axes."""
    part = torch.ones((), dtype=x.dtype, device=x.device)
    for f in factors:
        if f in cut:
            part = part * _part(sizes[f], cut[f], x)
    return part


def _part(n: int, axes: Axes, x: torch.Tensor) -> torch.Tensor:
    if TRIAL.get() is not None:
        return torch.ones((), dtype=x.dtype, device=x.device)
    lengths = _pieces(n, axes, x.device)[1]
    return _own((lengths.double() / n).to(x.dtype), axes)


def weights_on(n: int, axes: Axes, k: int, device: torch.device) -> torch.Tensor:
    """What part each rank of axis ``k`` has of what they have together of ``n`` elements, which ``axes`` cut one
    after the other: float64 [ranks], V on the axes before; all are zero where they have none."""
    sizes = [_size_and_unit(axis)[0] for axis in axes]
    if TRIAL.get() is not None:
        return torch.full((sizes[k],), 1 / sizes[k], dtype=torch.float64, device=device)
    lengths = _pieces(n, axes, device)[1].reshape(prod(sizes[:k]), sizes[k], -1).sum(-1)
    for axis in axes_of({"": axes[:k]}, ""):
        lengths = spmd.convert(lengths, axis, src=spmd.R, dst=spmd.S(0))
    lengths = lengths.reshape(sizes[k]).double()
    return lengths / lengths.sum().clamp(min=1)


def all_of(n: int, cut: Mapping[str, Axes], sizes: Mapping[str, int] | None, factor: str) -> int:
    """How many elements a dim has on all ranks that has ``n`` on this one."""
    return n * n_pieces(cut.get(factor, ())) if sizes is None else sizes.get(factor, n)
