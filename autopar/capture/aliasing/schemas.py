"""What the schema of an operator says: what it writes, what it gives without writing, whether it draws numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.rules.registry import RULES
from autopar.torch_private import OpOverload, OpOverloadPacket
from autopar.words.graph import Ref, Spec, map_refs
from autopar.words.trees import PyTree


@dataclass(frozen=True)
class Facts:
    """What is true of every call of an operator.

    Attributes:
        writes: ``(position, name)`` of the arguments that are written; a position of -1 stands for keyword only.
        pure: the operator without writes: ``foo`` for ``foo_``, for ``__ifoo__`` and for the ``out=`` variants of
            ``foo``. It gives one result per written argument. None if there is none.
        renames: it writes shape, strides or history of its first argument, never values (``unsqueeze_``); ``pure`` is
            a view then.
        may_alias: an output may share memory with an input.
        drawn: ``pure`` draws new values over the old ones, which do not matter (``normal_``).
    """

    writes: tuple[tuple[int, str], ...]
    pure: OpOverload | None
    renames: bool
    may_alias: bool
    drawn: bool


@cache
def facts(op: OpOverload) -> Facts:
    """Return the :class:`Facts` of an operator, from its schema and its tags."""
    schema = op._schema
    writes = tuple(
        (-1 if a.kwarg_only else i, a.name)
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    may_alias = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    pure = _pure(op) if writes else None
    drawn = pure is not None and torch.Tag.nondeterministic_seeded in pure.tags and "dropout" not in str(pure)
    return Facts(writes, pure, torch.Tag.inplace_view in op.tags, may_alias, drawn and "rrelu" not in str(pure))


def _pure(op: OpOverload) -> OpOverload | None:
    namespace, name = op._schema.name.split("::")
    written = [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    is_out = all(a.is_out for a in written)
    if is_out:
        bases = [name]
    elif name.startswith("__i") and name.endswith("__"):
        bases = ["__" + name.removeprefix("__i")]
    elif name.endswith("_"):
        bases = [name[:-1], name[:-1] + "_functional"]
    else:
        return None
    wanted = _types(op._schema.arguments, skip_out=is_out)
    count = len(written)
    candidates: list[OpOverload] = []
    for base in bases:
        packet = getattr(getattr(torch.ops, namespace), base, None)
        if not isinstance(packet, OpOverloadPacket):
            continue
        for overload in packet.overloads():
            candidate = getattr(packet, overload)
            schema = candidate._schema
            if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
                continue
            names = {a.name for a in op._schema.arguments}
            # a factory has its dtype among the arguments that are given by keyword only
            like = [a for a in schema.arguments if a.name in names or not (is_out and a.kwarg_only)]
            if _types(like) == wanted and len(schema.returns) == count:
                candidates.append(candidate)
        if candidates:
            break
    same = [f for f in candidates if f._overloadname == op._overloadname]
    return next(iter(same or candidates), None)


def parts_of(op: OpOverload, args: Sequence[object]) -> torch.fx.GraphModule | None:
    """Trace a composite operator as a program of the operators that it calls; return None for others."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]

    def run(*given: torch.Tensor) -> Any:
        rest = iter(given)
        return op(*(next(rest) if isinstance(a, torch.Tensor) else a for a in args))

    module = make_fx(run, tracing_mode="fake")(*tensors)
    return None if any(n.target is op for n in module.graph.nodes) else module


def results_of(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], spec_of: Callable[[Ref], Spec]
) -> tuple[Spec | None, ...]:
    """Return the specs of the results of a call, from a run on tensors without values; empty if it cannot run so."""

    def empty(ref: Ref) -> torch.Tensor:
        spec = spec_of(ref)
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")

    try:
        with torch.no_grad():
            results = op(*map_refs(list(args), empty), **map_refs(dict(kwargs), empty))
    except (RuntimeError, NotImplementedError, TypeError):
        return ()
    listed = results if isinstance(results, (tuple, list)) else [results]
    return tuple(Spec(tuple(map(int, v.shape)), str(v.dtype).removeprefix("torch.")) for v in listed)


def _types(arguments: Sequence[Any], skip_out: bool = False) -> list[str]:
    return [str(a.type) for a in arguments if not (skip_out and a.is_out)]


def argument_names(op: OpOverload) -> frozenset[str]:
    """Return the names of all arguments of an operator."""
    return frozenset(a.name for a in op._schema.arguments)


def argument(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], name: str) -> Any:
    """Return a named argument of a call, or its default; None if the schema has no such argument."""
    for position, a in enumerate(op._schema.arguments):
        if a.name == name:
            if not a.kwarg_only and position < len(args):
                return args[position]
            return kwargs.get(name, a.default_value if a.has_default_value() else None)
    return None


def with_defaults(
    op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Return the call with the trailing arguments that were left out and for which ``pure`` has no default."""
    full, pure = list(args), facts(op).pure
    assert pure is not None
    for position, (argument, of_pure) in enumerate(zip(op._schema.arguments, pure._schema.arguments, strict=False)):
        if argument.kwarg_only or position < len(full) or argument.name in kwargs:
            continue
        if argument.has_default_value() and not of_pure.has_default_value():
            full += [a.default_value for a in op._schema.arguments[len(full) : position + 1]]
    return tuple(full), dict(kwargs)


@cache
def named(target: str) -> OpOverload | None:
    """Return the operator of a name such as ``aten.linear.default``; None for a name that torch does not know."""
    try:
        op = reduce(getattr, target.split("."), torch.ops)
    except AttributeError:
        return None
    return op if isinstance(op, OpOverload) else None


@cache
def seeded(target: str) -> bool:
    """Check whether an operator may draw random numbers, as its tags say; one that torch does not know may."""
    op = named(target)
    return op is None or torch.Tag.nondeterministic_seeded in op.tags


def draws_by_itself(target: str, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Check whether a call draws random numbers by torch's generator: no rule draws them alike on all ranks."""
    op = named(target)
    if op is None or target in RULES or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    names = argument_names(op)
    if argument(op, args, kwargs, "num_layers") == 1:  # dropout of recurrent layers is between them
        return False
    for name in names & {"dropout", "dropout_p", "p"}:
        if argument(op, args, kwargs, name) == 0:
            return False
    return not any(argument(op, args, kwargs, name) is False for name in names & {"train", "training"})
