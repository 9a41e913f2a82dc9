"""The same random numbers on both sides of a comparison, and everything put back that a run of the model changes."""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.capture.python.containers import plain_tensors, refill, shallow_copy
from autopar.capture.python.frozen_values import is_plain, items_in
from autopar.torch_private import DisableTorchFunction, OpOverload, TorchDispatchMode, pytree
from autopar.words.trees import PyTree

_SEED = 20240229
_AFTER = "_post_accumulate_grad_hooks"


class Draws(TorchDispatchMode):
    """Mode that seeds the generator before each random operator, so that equal draws are equal in any memory order.

    Args:
        nothing_dropped: dropouts keep every element, scaled as those that are kept are.

    Attributes:
        dropouts: how often elements of which shape were dropped, or kept.
        others: how often numbers of which shape were drawn for anything else.
    """

    def __init__(self, nothing_dropped: bool) -> None:
        super().__init__()
        self.nothing_dropped = nothing_dropped
        self.dropouts: Counter[tuple[int, ...]] = Counter()
        self.others: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        if torch.Tag.nondeterministic_seeded in func.tags:
            if func in _DROPOUTS:
                self.dropouts[tuple(args[0].shape)] += 1
                if self.nothing_dropped:
                    return _all_kept(*args)
                return _drawn(func, args, kwargs or {})
            drawn = _drawn(func, args, kwargs or {})
            self.others.update(tuple(x.shape) for x in pytree.tree_leaves(drawn)[:1])
            return drawn
        return func(*args, **(kwargs or {}))


def _drawn(func: OpOverload, args: PyTree, kwargs: PyTree) -> PyTree:
    """Return what a random operator gives from one seed, element by element in the order of the shape.

    torch draws in the order of memory, and a graph has no ``contiguous()``: a tensor that was transposed on one side of
    a comparison alone would get the same numbers at other places.
    """

    def dense(x: object) -> Any:
        return x.contiguous() if isinstance(x, torch.Tensor) and not x.is_contiguous() else x

    in_order, in_order_kwargs = pytree.tree_map(dense, (args, kwargs))
    torch.manual_seed(_SEED)
    drawn = func(*in_order, **in_order_kwargs)
    if all(map(operator.is_, pytree.tree_leaves((args, kwargs)), pytree.tree_leaves((in_order, in_order_kwargs)))):
        return drawn
    torch.manual_seed(_SEED)
    given = func(*args, **kwargs)  # in the memory that the model would have
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if i < len(args) and args[i] is not in_order[i]:
                args[i].copy_(in_order[i])
    for mine, other in zip(pytree.tree_leaves(given), pytree.tree_leaves(drawn), strict=True):
        if isinstance(mine, torch.Tensor) and mine is not other:
            mine.copy_(other)
    return given


_DROPOUTS = (torch.ops.aten.bernoulli_.float, torch.ops.aten.native_dropout.default)


def _all_kept(x: torch.Tensor, p: float = 0.5, train: bool | None = None) -> Any:
    """Return the result of a dropout that keeps everything: on CPUs its noise, on GPUs the result and the mask."""
    if train is None:
        return x.fill_(1)
    return x / (1 - p) if p < 1 else x * 0, torch.ones_like(x, dtype=torch.bool)


@contextlib.contextmanager
def same_draws(nothing_dropped: bool = False) -> Iterator[Draws]:
    """Draw the same numbers on both sides, and restore the generators."""
    with generators_kept(), Draws(nothing_dropped) as draws:
        yield draws


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the states of all generators in the end."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None and states[1] is not None:
                numpy.random.set_state(states[1])


class _ParametersKept(TorchFunctionMode):
    """Mode that copies a parameter before the first write to its memory, to restore it."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        super().__init__()
        params = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
        self.before = [(p, p.data) for p in params.values() if not p.is_meta]
        self.at = {data.untyped_storage()._cdata: data for _, data in self.before}
        self.copies: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: object, args: PyTree = (), kwargs: PyTree = None) -> PyTree:
        name = getattr(func, "__name__", "")
        written = [*args[:1], *((kwargs or {}).get("out", None),)] if self.at and _may_write(name, kwargs) else []
        for x in pytree.tree_leaves(written):
            if isinstance(x, torch.Tensor):
                with DisableTorchFunction():
                    memory = x.untyped_storage()._cdata
                    if memory in self.at and memory not in self.copies:
                        self.copies[memory] = self.at[memory].clone()
        return func(*args, **(kwargs or {}))

    def put_back(self) -> None:
        """Restore the values that were written, and the memory of parameters."""
        for param, data in self.before:
            if param.data_ptr() != data.data_ptr():
                param.data = data
        for memory, copy_before in self.copies.items():
            self.at[memory].copy_(copy_before)


def _may_write(name: str, kwargs: PyTree) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", *_IN_PLACE) or "out" in (kwargs or {})


_IN_PLACE = tuple(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


@contextlib.contextmanager
def kept(*roots: object) -> Iterator[None]:
    """Restore buffers, plain tensors, parameters, their hooks and Python attributes of modules in the end."""
    modules = [m for root in roots if isinstance(root, torch.nn.Module) for m in root.modules()]
    written = _ParametersKept(modules)
    attributes = []
    for module in modules:
        entries = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        containers = {k: v for k, v in entries.items() if isinstance(v, (dict, list, set)) and not is_plain(v)}
        inside = {k: (_in(v), shallow_copy(v)) for k, v in containers.items()}
        attributes.append((module, entries, inside, dict(module._buffers)))
    buffers_and_plain = [b for *_, buffers in attributes for b in buffers.values() if b is not None]
    buffers_and_plain += [t for root in roots if isinstance(root, torch.nn.Module) for t in plain_tensors(root)]
    values = [(t, t.detach().clone()) for t in buffers_and_plain]
    params = [p for m in modules for p in m._parameters.values() if p is not None]
    hooked: list[Any] = [hooks for p in params for hooks in (p._backward_hooks, getattr(p, _AFTER, None)) if hooks]
    removed = [dict(hooks) for hooks in hooked]
    for hooks in hooked:  # they belong to the reduced gradient, not to this comparison
        hooks.clear()
    try:
        with written:
            yield
    finally:
        for hooks, hooks_before in zip(hooked, removed, strict=True):
            hooks.update(hooks_before)
        for module, entries, inside, buffers in attributes:
            new = vars(module).keys() - entries.keys() - {"_parameters", "_buffers", "_modules"}
            for name in new:
                del module.__dict__[name]
            module.__dict__.update(entries)
            for name, (before, copied) in inside.items():
                value = entries[name]
                now = _in(value)
                # a container that cannot be changed is never touched
                if len(now) != len(before) or not all(map(operator.is_, now, before)):
                    refill(value, copied)
            module._buffers.update(buffers)
        with torch.no_grad():
            written.put_back()
            for buffer, before in values:
                if not _same_bits(buffer, before):
                    buffer.copy_(before)


def _in(container: object) -> list[Any]:
    """Return the elements of a list, a set or a dict; of a dict its keys and values in turn."""
    items = items_in(container) or []
    return [part for pair in items for part in pair] if isinstance(container, dict) else items


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.detach(), b)
