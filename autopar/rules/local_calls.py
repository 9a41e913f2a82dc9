"""From a rule and one option per axis to the call that one rank makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from math import prod
from typing import Any

import torch

from autopar.rules.axis_options import Option
from autopar.rules.function import PREFIX
from autopar.rules.notation import Comm, Rule
from autopar.rules.operator_call import Call
from autopar.rules.option_names import factor_and_block
from autopar.torch_private import OpOverload
from autopar.words.exchanges import exchange_written, exchanges_along
from autopar.words.load_shares import busiest, grown
from autopar.words.meshes import Mesh
from autopar.words.placements import Placement, State, axis_and_block, axis_text
from autopar.words.shards import largest_shard, local_shape
from autopar.words.trees import PyTree
from cost_models.joined_axes import JOINED


@dataclass(frozen=True, slots=True)
class Seed:
    """Stands for the program's seed tensor in the arguments of a :class:`LocalCall`."""


def resolve(target: str) -> Callable[..., Any]:
    """Return the torch operator of a name such as ``aten.linear.default``."""
    return reduce(getattr, target.split("."), torch.ops)  # type: ignore[return-value]


def is_told_device(call: Call) -> bool:
    """Check whether a call must be given the device of its result, by torch's schema.

    It makes a tensor from nothing, or was given a device when the model was captured, which need not be the one it
    runs on.
    """
    if not call.target.startswith("aten."):
        return False
    takes = any(argument.name == "device" for argument in resolve(call.target)._schema.arguments)  # type: ignore[attr-defined]
    return takes and (not call.ins or call.kwargs.get("device") is not None)


def gives_list(fn: Callable[..., Any]) -> bool:
    """Check whether an operator returns a list of tensors, be it of one: ``chunk(1)``, ``unbind`` of length 1."""
    returns = fn._schema.returns if isinstance(fn, OpOverload) else ()
    return len(returns) == 1 and str(returns[0].type) == "List[Tensor]"


@dataclass(frozen=True, slots=True)
class ShardSize:
    """Stands for how many of ``n`` elements a rank has where ``axes`` cut them into pieces that are not equal."""

    n: int
    axes: tuple[str, ...]


@dataclass(frozen=True)
class LocalCall:
    """The call on one rank: ``fn(*args, **kwargs)`` with tensors at the :class:`In` positions."""

    fn: Callable[..., Any]
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    distributed: bool


def cuts_of(
    rule: Rule, options: Sequence[Option], mesh: Mesh
) -> tuple[dict[str, int | Fraction], dict[str, tuple[str, ...]]]:
    """Return ``({factor: number of shards}, {factor: axes that cut it})``; axes of size 1 cut nothing.

    Of a factor cut into uneven blocks, the number is how often the largest shard fits into the whole, and the axes
    name the elements of a block (``tensor*64``), or how an exchange is made (``tensor/4``).
    """
    pieces: dict[str, int | Fraction] = {}
    axes: dict[str, tuple[str, ...]] = {}
    for option, (axis, size) in zip(options, mesh, strict=True):
        factor, block = factor_and_block(option.name)
        if factor in rule.sizes and size > 1:
            before = pieces.get(factor, 1)
            if block:
                n = rule.sizes[factor]
                pieces[factor] = Fraction(n, largest_shard(int(-(-n // before)), size, block))
            else:
                pieces[factor] = before * size
            axes[factor] = (*axes.get(factor, ()), axis_text(axis, max(block, 1)) + exchange_written(option.name))
    return pieces, axes


def collectives_inside(
    rule: Rule, pieces: Mapping[str, int | Fraction], axes: Mapping[str, tuple[str, ...]], differentiable: bool,
    sizes: Mapping[str, int],
) -> Iterator[tuple[Comm, str, int, int]]:
    """List the collectives of an op's lowering, each with its axis, the bytes of its buffer, and how often it is made.

    Of several axes in one exchange the names are joined (``data+tensor``).

    Args:
        pieces, axes: number of pieces and cutting axes of every cut factor, as :func:`cuts_of` gives them.
        differentiable: whether there is a backward.
        sizes: the sizes of the axes.
    """
    lowering = rule.lowering(axes)
    for comm in () if lowering is None else lowering.comm:
        if comm.factor in axes and (differentiable or not comm.backward):
            elements = prod(rule.size_at(f, pieces) for f in comm.over)
            exchanges = exchanges_along(axes[comm.factor])
            ranks_of = [prod(sizes[axis] for axis in exchange.axes) for exchange in exchanges]
            most = _most(comm, ranks_of, axes, sizes)
            for exchange, ranks, factor in zip(exchanges, ranks_of, most, strict=True):
                chunks = exchange.chunks if comm.when else 1
                of_all = int(elements * factor) * (ranks if comm.gathers else 1) // chunks
                if exchange.bound and comm.when:
                    rows = rule.size_at(comm.over[0], pieces)
                    of_all = exchange.rows_to_each(rows, ranks) * ranks * (elements // max(1, rows))
                made = replace(comm, chunks=chunks) if chunks > 1 else comm
                yield made, JOINED.join(exchange.axes), of_all * comm.item_bytes, made.times(ranks)


def _most(
    comm: Comm, ranks_of: Sequence[int], axes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]
) -> Sequence[float]:
    """Return the busiest rank's buffer over an equal share, in each of the exchanges among so many ranks."""
    if not comm.load:
        return [1.0] * len(ranks_of)
    if not comm.load_of:
        return grown(comm.load, ranks_of)
    pieces = prod(sizes[axis_and_block(axis)[0]] for axis in axes.get(comm.load_of, ()))
    return [busiest(comm.load, pieces)[1] * pieces] * len(ranks_of)


def _local_sizes(shape: Sequence[int], state: State, mesh: Mesh) -> list[int | ShardSize]:
    """Return the shape of one rank's shard; sizes that differ between ranks are found when the program runs."""
    sizes: list[int | ShardSize] = list(local_shape(shape, state, mesh))
    for d, n in enumerate(shape):
        if n % prod(size * p.unit for (_, size), p in zip(mesh, state, strict=True) if p.dim == d):
            sizes[d] = ShardSize(n, _axes_that_cut(d, state, mesh))
    return sizes


def _axes_that_cut(d: int, state: Sequence[Placement], mesh: Mesh) -> tuple[str, ...]:
    """Return the axes that cut a dim of a tensor, with the block sizes of their shards."""
    return tuple(
        axis_text(axis, p.unit)
        for (axis, size), p in zip(mesh, state, strict=True) if p.dim == d and size > 1
    )


def local_call(call: Call, rule: Rule, options: Sequence[Option], mesh: Mesh, site: Any = 0) -> LocalCall:
    """Return the call on one rank: same arguments, with output shapes and other sizes made local.

    ``site`` is the call of a random operator, as :data:`~autopar.rules.families.sharded_random.Site` says.
    """
    pieces, axes = cuts_of(rule, options, mesh)
    args, kwargs = call.args, dict(call.kwargs)
    if rule.localize is not None and pieces:
        args, kwargs = rule.localize(call, {f: int(n) for f, n in pieces.items()})
    if rule.shape_arg is not None and pieces:
        state = State(option.outs[0] for option in options)
        shape = _local_sizes(call.out.shape, state, mesh)
        position, name = rule.shape_arg
        args, kwargs = Call(call.target, args, kwargs, call.ins, call.outs).replaced(position, name, shape)
    if call.target.startswith(PREFIX):
        callee, *leaves = args
        return LocalCall(callee, tuple(leaves), {"seed": Seed(), "site": site} if rule.random else {}, False)
    lowering = rule.lowering(axes)
    if lowering is None:
        return LocalCall(resolve(call.target), args, kwargs, False)
    if rule.random:
        shape = call.out.shape
        state = [option.outs[0] for option in options]
        shards = tuple(_axes_that_cut(d, state, mesh) for d in range(len(shape)))
        kwargs |= {"seed": Seed(), "site": site, "shape": shape, "shards": shards}
    elif any(isinstance(n, Fraction) or rule.sizes[f] % n for f, n in pieces.items()):
        kwargs["sizes"] = {f: rule.sizes[f] for f in axes}
    if call.load:
        kwargs["load"] = call.load
    return LocalCall(lowering.function, args, {**kwargs, "cut": dict(axes)}, True)
