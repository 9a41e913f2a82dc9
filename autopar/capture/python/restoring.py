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

from autopar.capture.python.frozen_values import is_plain
from autopar.torch_private import DisableTorchFunction, TorchDispatchMode, pytree

_SEED = 20240229
_AFTER = "_post_accumulate_grad_hooks"


class Draws(TorchDispatchMode):
    """Seeds the generator before each random operator: operators of one kind and shape draw the same numbers.

    Args:
        nothing_dropped: dropouts keep every element, scaled as those that are kept are.

    Attributes:
        dropouts: how often elements of which shape were dropped, or kept.
        others: whether there were other random operators.
    """

    def __init__(self, nothing_dropped: bool) -> None:
        super().__init__()
        self.nothing_dropped = nothing_dropped
        self.dropouts: Counter[tuple[int, ...]] = Counter()
        self.others = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(_SEED)
            if func in _DROPOUTS:
                self.dropouts[tuple(args[0].shape)] += 1
                if self.nothing_dropped:
                    return _all_kept(*args)
            else:
                self.others = True
        return func(*args, **(kwargs or {}))


_DROPOUTS = (torch.ops.aten.bernoulli_.float, torch.ops.aten.native_dropout.default)


def _all_kept(x: torch.Tensor, p: float, train: bool | None = None) -> Any:
    """What a dropout gives that keeps everything: of CPUs its noise, of GPUs the result and the mask."""
    if train is None:
        return x.fill_(1)
    return x / (1 - p) if p < 1 else x * 0, torch.ones_like(x, dtype=torch.bool)


@contextlib.contextmanager
def same_draws(nothing_dropped: bool = False) -> Iterator[Draws]:
    with generators_kept(), Draws(nothing_dropped) as draws:
        yield draws


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """The states of all generators are put back."""
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
    """Parameters that a forward writes, such as those of a momentum encoder, are put back: a copy of one is made before
    the first write to its memory."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        super().__init__()
        params = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
        self.before = [(p, p.data) for p in params.values() if not p.is_meta]
        self.at = {data.untyped_storage()._cdata: data for _, data in self.before}
        self.copies: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        """What was written has the values that it had, and parameters have the memory that they had."""
        for param, data in self.before:
            if param.data_ptr() != data.data_ptr():
                param.data = data
        for memory, copy_before in self.copies.items():
            self.at[memory].copy_(copy_before)


def _may_write(name: str, kwargs: Any) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__setitem__", *_IN_PLACE) or "out" in (kwargs or {})


_IN_PLACE = tuple(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


@contextlib.contextmanager
def kept(*roots: Any) -> Iterator[None]:
    """Buffers, parameters, hooks of parameters and Python attributes of modules are put back."""
    modules = [m for root in roots if isinstance(root, torch.nn.Module) for m in root.modules()]
    written = _ParametersKept(modules)
    attributes = []
    for module in modules:
        entries = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        inside = {k: _in(v) for k, v in entries.items() if isinstance(v, (dict, list, set)) and not is_plain(v)}
        attributes.append((module, entries, inside, dict(module._buffers)))
    values = [(b, b.detach().clone()) for *_, buffers in attributes for b in buffers.values() if b is not None]
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
            for name, before in inside.items():
                value = entries[name]
                if not _same_things(_in(value), before):  # a container that cannot be changed is never touched
                    value.clear()
                    value.extend(before) if isinstance(value, list) else value.update(before)
            module._buffers.update(buffers)
        with torch.no_grad():
            written.put_back()
            for buffer, before in values:
                if not _same_bits(buffer, before):
                    buffer.copy_(before)


def _in(container: Any) -> list[Any]:
    """What a list, a set or a dict holds now; of a dict its pairs."""
    return list(container.items()) if isinstance(container, dict) else list(container)


def _same_things(a: list[Any], b: list[Any]) -> bool:
    """Whether two contents are the same objects in the same order."""
    parts = [[part for x in xs for part in (x if isinstance(x, tuple) and len(x) == 2 else (x,))] for xs in (a, b)]
    return len(parts[0]) == len(parts[1]) and all(map(operator.is_, *parts))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.detach(), b)


__all__ = ["generators_kept", "kept", "same_draws"]
