"""Activation checkpointing that a model has written itself, as an ``autograd.Function``.

Diffusion models and many scripts after them have one: ``forward`` calls a function that it gets as an argument without
keeping anything, ``backward`` calls it again and asks ``torch.autograd.grad`` for the gradients. Kept whole like other
Functions, its operators could not be cut, and its code would have to find the parameters of modules in its arguments.
So a call that does just this is traced as a region (:mod:`~autopar.capture.trace.checkpointed_regions`), and plans
decide what is recomputed.

No name says that it does just this; a trial on tensors without values does. All is watched that the two methods do:

* ``forward`` calls the function once, on the tensors that it was given, and returns what it returns;
* ``backward`` calls it once more, on the same memory and plain values, asks once for the gradients of what came out,
  weighted by the gradients that it was given, and returns those that it got, each in the place of its argument;
* neither runs an operator of its own but views;
* a gradient goes wherever one goes in the function itself, and to the same tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import FunctionCtx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

from autopar.capture.graph.exported_nodes import storage_of
from autopar.capture.trace import checkpointed_regions
from autopar.capture.trace.autograd_functions import AS_REGION, Watch
from autopar.capture.trace.patches import Function
from autopar.capture.trace.recording import here, now
from autopar.rules.function import PLAIN, tensors_of
from autopar.torch_private import DisableTorchFunction, OpOverload, SingleLevelFunction
from autopar.words.autocasting import autocast_now, without_autocast
from autopar.words.trees import PyTree


class _Otherwise(Exception):
    """The Function does something else."""


@dataclass
class _Asked:
    """A call of ``torch.autograd.grad``."""

    outputs: tuple[Any, ...]
    inputs: tuple[Any, ...]
    weights: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclass
class _Called:
    """A call of the function, and the state of torch that it found."""

    args: tuple[PyTree, ...]
    result: PyTree
    random_state: torch.Tensor
    autocast: dict[str, torch.dtype]


@dataclass
class _Seen:
    """The observations of a trial.

    Attributes:
        calls: the calls of the function, the forward's first.
        asked: the requests for gradients.
        given, returned: what the backward got and gave.
        depth: the number of open calls that may run operators; there are none outside.
        more: there were.
    """

    calls: list[_Called] = field(default_factory=list)
    asked: list[_Asked] = field(default_factory=list)
    given: tuple[Any, ...] = ()
    returned: tuple[Any, ...] = ()
    depth: int = 0
    more: bool = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


class _Watch(Watch):
    """Mode that notes operators of the Function's own and writes, too."""

    def __init__(self, seen: _Seen, tracked: Any) -> None:
        super().__init__(tracked)
        self.seen = seen

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: PyTree = (), kwargs: PyTree = None
    ) -> PyTree:
        own = not self.seen.depth and not func.is_view and func.namespace != "prim"  # which asks for a device
        # what is written would be written twice, by the forward and by the backward
        written = func._schema.is_mutable and any(isinstance(x, torch.Tensor) and x in self.tracked for x in args)
        self.seen.more |= own or written  # noted only: the autograd engine does not bear an exception everywhere
        return super().__torch_dispatch__(func, types, args, kwargs)


def as_region(cls: Any, args: Sequence[PyTree], kwargs: PyTree) -> Callable[[], Any] | None:
    """Return the call of ``cls.apply`` as a region under activation checkpointing; None if it does more.

    ``cls``: the Function. ``args``, ``kwargs``: what ``apply`` was called with, where a gradient flows.
    """
    functions = [k for k, x in enumerate(args) if callable(x) and not isinstance(x, (torch.Tensor, type))]
    others = [x for k, x in enumerate(args) if k not in functions]
    if len(functions) != 1 or kwargs or not all(isinstance(x, (torch.Tensor, *PLAIN)) for x in others):
        return None
    place = functions[0]
    generator = torch.default_generator
    random_state = generator.get_state()
    try:
        seen, starts, random = _tried(cls, args, place)
    except Exception:  # of the trial: it is no checkpoint, or nothing that can be known without values
        return None
    finally:
        generator.set_state(random_state)
    first, second = seen.calls
    position = {id(start): k for k, start in enumerate(starts) if isinstance(start, torch.Tensor)}
    given = [args[position[id(x)]] if isinstance(x, torch.Tensor) else x for x in first.args]

    def run() -> Any:
        recording = now()
        assert recording is not None
        name = f"the autograd.Function {cls.__qualname__} {here()}"
        if random and not torch.equal(first.random_state, second.random_state):
            recording.notes[
                f"{name} draws random numbers in its backward that are others than those of its forward, so its "
                "gradients are of another function than its value; the program draws the same ones, as "
                "torch.utils.checkpoint does"
            ] = None
        if first.autocast != second.autocast:
            recording.notes[
                f"{name} computes its forward under autocast, and in its backward again without; the program computes "
                "it under autocast, as torch.utils.checkpoint does"
            ] = None
        with checkpointed_regions.marked():
            return args[place](*given)

    return run


def _tried(cls: Any, args: Sequence[PyTree], place: int) -> tuple[_Seen, list[Any], bool]:
    """Try a call; return what it did, its arguments there, and whether it draws random numbers."""
    mode = get_proxy_mode()
    assert mode is not None
    seen = _Seen()
    with DisableTorchFunction(), disable_proxy_modes_tracing(), torch.enable_grad():
        starts = [_start(x) for x in args]
        function, starts[place] = args[place], _watched(args[place], seen)
        learned = [(k, x) for k, x in enumerate(starts) if isinstance(x, torch.Tensor) and x.requires_grad]
        watch = _Watch(seen, mode.tracer.tensor_tracker)
        with watch, _grad_watched(seen), _backward_watched(cls, seen):
            result = super(SingleLevelFunction, cls).apply(*starts)
            with seen.inside():
                roots = [x for x in tensors_of(result) if x.requires_grad]
                weights = [torch.zeros_like(x) for x in roots]
            with without_autocast():  # as it is where the user calls backward()
                plain_grad(roots, [x for _, x in learned], weights, allow_unused=True)
        _check(not seen.more)
        _check_calls(seen, starts, result)
        _check_gradients(seen, starts)
        with watch, seen.inside():
            outs = [x for x in tensors_of(function(*seen.calls[0].args)) if x.requires_grad]
            zeros = [torch.zeros_like(x) for x in outs]
            hidden = [x for x, _ in watch.read.values() if x.requires_grad and id(x) not in {id(s) for s in starts}]
            true = plain_grad(outs, [x for _, x in learned] + hidden, zeros, allow_unused=True)
    reached = [k for (k, _), gradient in zip(learned, true, strict=False) if gradient is not None]
    if reached != [k for k, _ in learned if seen.returned[k] is not None]:
        raise _Otherwise
    if any(gradient is not None for gradient in true[len(learned) :]):
        raise _Otherwise  # what is not among the arguments gets no gradient from it
    return seen, starts, watch.random


plain_grad = torch.autograd.grad


def _start(x: object) -> Any:
    """Return a copy of an argument; a parameter is itself, for the function reads it from its module."""
    if not isinstance(x, torch.Tensor) or (x.requires_grad and x.is_leaf):
        return x
    return x.detach().clone().requires_grad_(x.requires_grad)


def _watched(function: Function, seen: _Seen) -> Function:
    def call(*args: PyTree) -> PyTree:
        generator = torch.default_generator
        random_state, autocast = generator.get_state(), autocast_now()
        with seen.inside():
            result = function(*args)
        generator.manual_seed(len(seen.calls))  # as if it had drawn: who wants the same state again has to set it
        seen.calls.append(_Called(args, result, random_state, autocast))
        return result

    return call


@contextlib.contextmanager
def _grad_watched(seen: _Seen) -> Iterator[None]:
    def grad(outputs: PyTree, inputs: PyTree, grad_outputs: PyTree = None, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if seen.depth:  # the function's own
            return plain_grad(outputs, inputs, grad_outputs, *args, **kwargs)
        with seen.inside():
            results = plain_grad(outputs, inputs, grad_outputs, *args, **kwargs)
        seen.asked.append(_Asked(*map(_as_tuple, (outputs, inputs, grad_outputs, results))))
        return results

    with mock.patch.object(torch.autograd, "grad", grad):
        yield


@contextlib.contextmanager
def _backward_watched(cls: Any, seen: _Seen) -> Iterator[None]:
    backward = cls.backward

    def watched(ctx: FunctionCtx, *grads: object) -> Any:
        returned = backward(ctx, *grads)
        seen.given, seen.returned = grads, _as_tuple(returned)
        return returned

    with mock.patch.object(cls, "backward", staticmethod(watched)):
        yield


def _as_tuple(x: object) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (list, tuple)) else (x,)


def _same_memory(a: object, b: object) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return a is b
    same = (a.shape, a.stride(), a.storage_offset(), a.dtype) == (b.shape, b.stride(), b.storage_offset(), b.dtype)
    return same and storage_of(a) is not None and storage_of(a) == storage_of(b)


def _check(right: bool) -> None:
    if not right:
        raise _Otherwise


def _check_calls(seen: _Seen, starts: Sequence[object], result: PyTree) -> None:
    """Check that the function was called on the arguments, once in each direction, with the result of the call."""
    _check(len(seen.calls) == 2)
    first, second = seen.calls
    ids = {id(x) for x in starts}
    for mine, again in zip(first.args, second.args, strict=True):
        if isinstance(mine, torch.Tensor):
            _check(id(mine) in ids and _same_memory(mine, again))
        else:
            _check(isinstance(mine, PLAIN) and mine == again)
    _check(isinstance(first.result, (torch.Tensor, tuple)))
    _check(isinstance(result, tuple) == isinstance(first.result, tuple))
    for mine, theirs in zip(_as_tuple(first.result), _as_tuple(result), strict=True):
        _check(_same_memory(mine, theirs))


def _check_gradients(seen: _Seen, starts: Sequence[object]) -> None:
    """Check that the backward gave autograd's gradients of the second call, each in its place."""
    _check(len(seen.asked) == 1)
    (asked,) = seen.asked
    outs = _as_tuple(seen.calls[1].result)
    place = {id(x): i for i, x in enumerate(outs)}
    _check(len(place) == len(outs))
    for out, weight in zip(asked.outputs, asked.weights, strict=True):
        _check(id(out) in place and weight is seen.given[place[id(out)]])
    covered = {id(out) for out in asked.outputs}
    _check(len(covered) == len(asked.outputs))
    _check(all(id(x) in covered for x in outs if isinstance(x, torch.Tensor) and x.requires_grad))
    _check(len({id(x) for x in asked.inputs}) == len(asked.inputs))  # one that stands there twice gets it twice
    for k, start in enumerate(starts):
        if isinstance(start, torch.Tensor) and start.requires_grad and seen.returned[k] is not None:
            where = [j for j, x in enumerate(asked.inputs) if x is start or _same_memory(x, start)]
            _check(len(where) == 1 and seen.returned[k] is asked.results[where[0]])


AS_REGION.append(as_region)
