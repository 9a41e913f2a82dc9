"""Operators where the ranks' pieces differ in size, run for one rank after the other, forward and backward.

In torch's simulation of many ranks in one process such sizes are objects that hold one number a rank, and code of torch
that decides by a size fails: whether a view is possible, whether a dim has length 1, and that in backwards as well,
where nobody can ask for another way (the gradient of a view is a ``reshape``). So nothing of this kind is left to
symbolic sizes: operators of aten see plain tensors of one rank.

Operators that write to their argument run so where no gradient is asked for, and give the argument back. Where one is,
they are left to the simulation, as random operators always are: it keeps the random state of every rank. Nothing here
communicates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from autopar.torch_private import LocalIntNode, LocalTensor, OpOverload, local_tensor_mode, pytree
from autopar.words.trees import Context, PyTree

DRAWS_SOMETIMES = frozenset({"scaled_dot_product_attention"})
"""Operators that draw random numbers in some of their uses; proofs and programs use them without."""

SAME_AS = {"cross_entropy": "cross_entropy_loss"}
"""Functions of torch whose operator has another name."""


class OneByOne(TorchFunctionMode):
    """Runs operators of aten for one rank after the other, where sizes differ between ranks."""

    def __torch_function__(self, func: Any, types: Any, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        kwargs = kwargs or {}
        if local_tensor_mode() is not None and (_runs_here(func) or _writes(func)):
            flat, spec = pytree.tree_flatten((args, kwargs))
            if any(isinstance(x, LocalTensor) for x in flat) and any(map(_differs, flat)):
                if not _writes(func):
                    return one_by_one(func, flat, spec)
                if not torch.is_grad_enabled() or not any(isinstance(x, LocalTensor) and x.requires_grad for x in flat):
                    return written_one_by_one(func, flat, spec)
        return func(*args, **kwargs)


def _overloads(func: Any) -> tuple[str, list[OpOverload]]:
    """Return the name of an aten operator and the overloads that may be called under it.

    For an overload, itself; for a function or method of torch, all overloads of the operator of its name; none
    otherwise.
    """
    if isinstance(func, OpOverload):
        return func.overloadpacket.__name__, [func] if func.namespace == "aten" else []
    name = SAME_AS.get(getattr(func, "__name__", ""), getattr(func, "__name__", ""))
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() and not name.startswith("__") else None
    return name, [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []


@functools.cache
def _runs_here(func: Any) -> bool:
    """Check that an operator, or a torch function or method of its name, returns new tensors and draws nothing."""
    if func is torch.Tensor.__getitem__:
        return True
    name, overloads = _overloads(func)
    # Some names also have overloads for TorchScript, of numbers alone, and others that write to ``out``.
    giving = [op for op in overloads if not op._schema.is_mutable and any(map(_holds_tensors, op._schema.arguments))]
    random = any(torch.Tag.nondeterministic_seeded in op.tags for op in giving) and name not in DRAWS_SOMETIMES
    results = [result for op in giving for result in op._schema.returns]
    return bool(results) and not random and all(map(_holds_tensors, results))


@functools.cache
def _writes(func: Any) -> bool:
    """Check that an operator, or a method of its name, only writes new values to its first argument."""
    name, overloads = _overloads(func)
    not_here = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}  # draws, or changes the sizes
    into = [op for op in overloads if op._schema.is_mutable and not op._schema.name.endswith("out")]
    if not name.endswith("_") or not hasattr(torch.ops.aten, name[:-1]):  # requires_grad_ writes no values
        return False
    return bool(into) and not any(not_here & {*op.tags} for op in overloads)


def _holds_tensors(of_schema: Any) -> bool:
    """Check whether an argument or a result of an operator is a tensor or a list of tensors."""
    return str(of_schema.type) in ("Tensor", "List[Tensor]")


def _differs(x: torch.Tensor) -> bool:
    """Check whether a tensor has shards of different sizes, or a number differs between ranks."""
    if isinstance(x, LocalTensor):
        return len({tuple(piece.shape) for piece in x._local_tensors.values()}) > 1
    if isinstance(x, slice):
        return any(map(_differs, (x.start, x.stop, x.step)))
    return isinstance(x, torch.SymInt) and isinstance(x.node, LocalIntNode)


def one_by_one(func: Callable[..., Any], flat: list[Any], spec: Any) -> Any:
    """Call ``func`` on flattened arguments, for one rank after the other."""
    at = [i for i, x in enumerate(flat) if isinstance(x, LocalTensor)]
    shape: list[Any] = []
    outs = _EachRank.apply(func, flat, spec, at, shape, *(flat[i] for i in at))
    return pytree.tree_unflatten(list(outs), shape[0])


def written_one_by_one(func: Callable[..., Any], flat: list[Any], spec: Any) -> Any:
    """Call ``func``, which writes to its first argument, for one rank after the other; return that argument."""
    mode = local_tensor_mode()
    assert mode is not None
    with mode.disable():
        for rank in sorted(mode.ranks):
            args, kwargs = pytree.tree_unflatten([_of_rank(x, rank) for x in flat], spec)
            func(*args, **kwargs)
    return flat[0]


class _EachRank(torch.autograd.Function):
    """An operator with an autograd graph of plain tensors on every rank.

    What those graphs keep is saved as this function's own, so that hooks on saved tensors see it when and where they
    see that of other operators: a segment that runs again does so before the ranks are taken one by one.
    """

    @staticmethod
    def forward(ctx: Context, func: Any, flat: Any, spec: Any, at: Any, shape: list[Any], *tensors: LocalTensor) -> Any:
        mode = local_tensor_mode()
        assert mode is not None
        by_rank: dict[int, tuple[list[torch.Tensor], list[Any]]] = {}
        kept: list[torch.Tensor] = []
        values_again: list[torch.Tensor] = []

        def pack(x: torch.Tensor) -> tuple[int, int]:
            kept.append(x.detach())
            return len(kept) - 1, rank

        def unpack(place: tuple[int, int]) -> Any:
            return _of_rank(values_again[place[0]], place[1])

        with mode.disable(), torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            for rank in sorted(mode.ranks):
                values = [_of_rank(x, rank) for x in flat]
                leaves = [t._local_tensors[rank].detach().requires_grad_(t.requires_grad) for t in tensors]
                for i, value in zip(at, leaves, strict=True):
                    values[i] = value
                args, kwargs = pytree.tree_unflatten(values, spec)
                outs, out_spec = pytree.tree_flatten(func(*args, **kwargs))
                by_rank[rank] = leaves, outs
        shape.append(out_spec)
        ctx.by_rank, ctx.mode, ctx.values_again = by_rank, mode, values_again
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        joined = [
            LocalTensor({rank: outs[k].detach() for rank, (_, outs) in by_rank.items()}) for k in range(len(outs))
        ]
        constant = [x for x, of_rank in zip(joined, outs, strict=True) if not of_rank.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return tuple(joined)

    @staticmethod
    def backward(ctx: Context, *grads: Any) -> Any:
        by_rank: dict[int, list[torch.Tensor | None]] = {}
        ctx.values_again[:] = ctx.saved_tensors
        with ctx.mode.disable():
            for rank, (leaves, outs) in ctx.by_rank.items():
                wanted = [x for x in leaves if x.requires_grad]
                pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if o.requires_grad and g is not None]
                got = iter(torch.autograd.grad(
                    [o for o, _ in pairs], wanted, [_of_rank(g, rank) for _, g in pairs], allow_unused=True,
                    retain_graph=True,
                ))  # fmt: skip
                by_rank[rank] = [next(got) if x.requires_grad else None for x in leaves]
            of_inputs = zip(*by_rank.values(), strict=True)
            joined = [_of_all_ranks(dict(zip(by_rank, of_input, strict=True))) for of_input in of_inputs]
        ctx.values_again.clear()
        return (None, None, None, None, None, *joined)


def _of_all_ranks(gradients: dict[int, torch.Tensor | None]) -> LocalTensor | None:
    """Join the gradients of one input on every rank; None if a rank has none."""
    pieces = {rank: gradient.detach() for rank, gradient in gradients.items() if gradient is not None}
    return LocalTensor(pieces) if len(pieces) == len(gradients) else None


def _of_rank(x: torch.Tensor, rank: int) -> Any:
    """Return one rank's part of a value."""
    if isinstance(x, LocalTensor):
        return x._local_tensors[rank]
    if isinstance(x, slice):
        return slice(*(_of_rank(part, rank) for part in (x.start, x.stop, x.step)))
    if isinstance(x, torch.SymInt):
        return x.node._local_ints[rank] if isinstance(x.node, LocalIntNode) else int(x)
    return x
