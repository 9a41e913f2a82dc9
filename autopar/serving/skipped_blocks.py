"""Blocks that repeat are traced once or twice and stand for the others: a capture as quick as that of few layers.

Modules of one container are *alike* if they are built alike and no plain attribute differs but those that are the
module's own number, which its code does not read. While the model is traced, the first of them are traced, and of each
further one it is checked that it is called with the same arguments, but for the hidden state that goes through; then
it returns that state as it is. So the graph has few blocks, and :attr:`SkippedBlocks.times` says how many each stands
for. Where a check fails, :class:`NotAlike` is raised, and the whole model is to be traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from autopar.capture.repeats.attribute_reads import watched
from autopar.capture.repeats.block_calls import own_state
from autopar.capture.repeats.python_state import Memo, Structures, Unknown
from autopar.torch_private import module_at, pytree

TRACED = 2
"""Blocks of a kind that are traced: the first one may differ at its edge to what comes before."""


class NotAlike(Exception):
    """Blocks that were taken to be alike do not do the same; the whole model has to be traced."""


@dataclass
class _Kind:
    """Blocks that are alike, in order.

    Attributes:
        own_numbers: attributes that are the number of the block, as ``(path in it, name)``.
        called: the arguments of the first call, without the hidden state.
        returned: the first call's result without its tensor, as ``(leaves, spec)``.
        calls: how often each block was called.
    """

    modules: list[torch.nn.Module]
    own_numbers: frozenset[tuple[str, str]]
    called: object = None
    returned: tuple[list[Any], Any] | None = None
    calls: dict[int, int] = field(default_factory=dict)


class SkippedBlocks:
    """Which blocks of a model are traced, and which they stand for.

    Attributes:
        times: by the path of each traced block, how many blocks it stands for; others stand for themselves.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.times: dict[str, int] = {}
        self._kinds: list[_Kind] = []
        self._skipped: list[torch.nn.Module] = []
        paths = {id(module): path for path, module in model.named_modules()}
        self._kind_of: dict[int, _Kind] = {}
        for kind in _alike(model):
            first, *others = kind.modules[:TRACED]
            self.times |= {paths[id(first)]: 1, **{paths[id(m)]: 1 for m in others}}
            self.times[paths[id(others[-1])]] += len(kind.modules) - TRACED
            self._skipped += kind.modules[TRACED:]
            self._kinds.append(kind)
            self._kind_of |= {id(module): kind for module in kind.modules}

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        """Skip blocks in this scope: their code does not run, and they have no parameters.

        Raises:
            NotAlike: at the end of the scope, blocks were called differently often, or read their numbers.
        """
        reads: set[tuple[int, str]] = set()
        with contextlib.ExitStack() as stack:
            for kind in {type(module) for each in self._kinds for module in each.modules}:
                stack.enter_context(mock.patch.object(kind, "forward", self._forward(kind.forward)))
            numbers = {
                (type(module_at(each.modules[0], path)), name)
                for each in self._kinds for path, name in each.own_numbers
            }
            for kind, name in numbers:
                stack.enter_context(watched(kind, name, reads))
            stack.enter_context(_without_tensors(self._skipped))
            yield
        inside = {id(m.__dict__) for each in self._kinds for block in each.modules for m in block.modules()}
        if any(module in inside for module, _ in reads):
            raise NotAlike("a block reads its own number")
        for each in self._kinds:
            if len({each.calls.get(id(module), 0) for module in each.modules}) > 1:
                raise NotAlike("blocks are called differently often")

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a class's forward that skips blocks."""

        def forward(this: Any, *args: Any, **kwargs: Any) -> Any:
            module = this.get_base() if hasattr(this, "get_base") else this
            kind = self._kind_of.get(id(module))
            if kind is None:
                return original(this, *args, **kwargs)
            hidden, called = _call(args, kwargs)
            kind.calls[id(module)] = kind.calls.get(id(module), 0) + 1
            if kind.called is None:
                kind.called = called
            elif kind.called != called:
                raise NotAlike("blocks are called with other arguments")
            if module not in kind.modules[:TRACED]:
                assert kind.returned is not None
                leaves, spec = kind.returned
                return pytree.tree_unflatten([hidden if leaf is HIDDEN else leaf for leaf in leaves], spec)
            result = original(this, *args, **kwargs)
            kind.returned = _without_hidden(result, hidden)
            return result

        return forward


HIDDEN = object()
"""Stands in a block's result for the hidden state."""


def _call(args: Any, kwargs: Any) -> tuple[torch.Tensor, object]:
    """Return the hidden state of a call, which is its first tensor, and what else it is called with."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise NotAlike("a block takes no tensor")
    hidden = leaves[tensors[0]]
    others = tuple([
        (type(leaf), leaf) if isinstance(leaf, (int, float, str, bool, type(None))) else id(leaf)
        for k, leaf in enumerate(leaves) if k != tensors[0]
    ])  # fmt: skip
    return hidden, (str(spec), tuple(hidden.shape), hidden.dtype, others)


def _without_hidden(result: Any, hidden: torch.Tensor) -> tuple[list[Any], Any]:
    """Return a block's result with :data:`HIDDEN` in the place of its one tensor, which is like the one it took."""
    leaves, spec = pytree.tree_flatten(result)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if len(tensors) != 1 or tensors[0].shape != hidden.shape or tensors[0].dtype != hidden.dtype:
        raise NotAlike("a block returns other tensors than the hidden state that it takes")
    return [HIDDEN if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec


@contextlib.contextmanager
def _without_tensors(modules: list[torch.nn.Module]) -> Iterator[None]:
    """Take parameters and buffers out of modules in this scope: nothing has to be done for them."""
    inside = [m for module in modules for m in module.modules()]
    before = [(m, m._parameters, m._buffers) for m in inside]
    try:
        for m in inside:
            m.__dict__["_parameters"], m.__dict__["_buffers"] = {}, {}
        yield
    finally:
        for m, parameters, buffers in before:
            m.__dict__["_parameters"], m.__dict__["_buffers"] = parameters, buffers


def _alike(model: torch.nn.Module) -> Iterator[_Kind]:
    """Yield the kinds of blocks of which there are more than are traced, in the outermost containers."""
    structure, done = Structures(), set[int]()
    for container in model.modules():
        if id(container) in done or not isinstance(container, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        children = list(container)
        if len(children) <= TRACED or len({id(child) for child in children}) < len(children):
            continue
        found = list(_kinds_among(children, structure))
        if found:
            done |= {id(m) for child in children for m in child.modules()}
        yield from found


def _kinds_among(children: list[torch.nn.Module], structure: Structures) -> Iterator[_Kind]:
    memo: Memo = {}
    built: dict[int, list[int]] = {}
    for number, child in enumerate(children):
        of_child = structure(child)
        if of_child is not None and next(child.parameters(), None) is not None:
            built.setdefault(of_child, []).append(number)
    for numbers in built.values():
        if len(numbers) <= TRACED:
            continue
        try:
            states = {number: own_state(children[number], memo) for number in numbers}
        except Unknown:
            continue
        own = frozenset(
            key for key in states[numbers[0]]
            if all(state.get(key) == (int, number) for number, state in states.items())
        )  # fmt: skip
        alike: dict[object, list[int]] = {}
        for number, state in states.items():
            alike.setdefault(frozenset((k, v) for k, v in state.items() if k not in own), []).append(number)
        for group in alike.values():
            if len(group) > TRACED:
                yield _Kind([children[number] for number in group], own)
