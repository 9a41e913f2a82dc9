"""Strings of a batch that a forward does not read: names of files, sentences beside their tokens.

A string is part of what was captured, since the model may branch on it. Batches of a collator have other sentences each
time, and most models look at none. That nobody reads them is tried: the model is captured with an object in the place
of each that tells of every question, and gives no answer to any.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from autopar.capture.python.bytecode import uses_in
from autopar.capture.python.user_lines import is_users
from autopar.capture.trace.patches import Args, Function, Kwargs
from autopar.capture.trace.recording import Recording
from autopar.errors import CaptureError
from autopar.torch_private import pytree
from autopar.words.trees import PyTree

DEPTH = 4
"""The depth of containers to which a function's variables are searched for a hidden leaf."""


class Trial:
    """One trace with hidden strings.

    Attributes:
        places: the places of the leaves that are hidden, among those of ``(args, kwargs)``.
        read: somebody asked one of them for something.
        over: nothing is traced any more; whoever has kept one of them has a string.
    """

    def __init__(self, places: frozenset[int]) -> None:
        self.places, self.read, self.over = places, False, False


class _Hidden:
    """A stand-in for a string, which only says that it is one."""

    __slots__ = ("text", "trial")

    def __init__(self, text: str, trial: Trial) -> None:
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "trial", trial)

    def __getattribute__(self, name: str) -> Any:
        return str if name == "__class__" else getattr(_asked(self), name)


def _asked(hidden: _Hidden) -> str:
    trial: Trial = object.__getattribute__(hidden, "trial")
    if not trial.over:
        trial.read = True
        raise CaptureError("a string of the call is read")
    return str(object.__getattribute__(hidden, "text"))


def _operator(name: str) -> Function:
    return lambda self, *args: getattr(_asked(self), name)(*args)


for _name in (
    "eq", "ne", "lt", "le", "gt", "ge", "hash", "len", "iter", "getitem", "contains", "str", "repr", "format", "add",
    "mod", "mul", "rmul", "setattr", "delattr", "dir", "reduce_ex",
):  # fmt: skip
    setattr(_Hidden, f"__{_name}__", _operator(f"__{_name}__"))
setattr(_Hidden, "__bool__", lambda self: bool(_asked(self)))  # noqa: B010  (of a string it is that of its length)



@contextlib.contextmanager
def hiding(places: frozenset[int]) -> Iterator[Trial]:
    """Yield a trial, to be a decision of traces, in which the leaves of the call at `places` are hidden."""
    trial = Trial(places)
    try:
        yield trial
    finally:
        trial.over = True


@contextlib.contextmanager
def strings_hidden(record: Recording) -> Iterator[None]:
    """Give a forward stand-ins for the strings of its call, where the decisions hide them."""
    trial: Trial | None = record.attempt.decisions.hidden
    if trial is None:
        yield
        return

    def hide(_module: torch.nn.Module, args: Args, kwargs: Kwargs) -> PyTree:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for i in trial.places:
            leaves[i] = _Hidden(leaves[i], trial)
        return pytree.tree_unflatten(leaves, spec)

    def watch(frame: FrameType, event: str, _: object) -> None:
        """Note code that calls ``type(x)``, which asks the stand-in nothing: it may read the string."""
        asks = event == "return" and is_users(frame.f_code.co_filename) and "type" in uses_in(frame.f_code).names
        if asks and holds_hidden(list(frame.f_locals.values())):
            trial.read = True

    handle = record.module.register_forward_pre_hook(hide, with_kwargs=True)
    profile_before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(profile_before)
        handle.remove()


def holds_hidden(value: PyTree, depth: int = DEPTH) -> bool:
    """Check that a value is a hidden leaf, or a container with one."""
    kind = type(value)
    if kind is _Hidden or not depth:
        return kind is _Hidden
    if issubclass(kind, Mapping):
        return any(holds_hidden(x, depth - 1) for x in value.values())
    return issubclass(kind, (list, tuple)) and any(holds_hidden(x, depth - 1) for x in value)


def keeps_hidden(module: torch.nn.Module) -> bool:
    """Check that a hidden leaf is in an attribute of a module, or in a container there."""
    return any(holds_hidden(value) for part in module.modules() for value in vars(part).values())


def arguments_of_strings(spec: pytree.TreeSpec, literals: Mapping[int, Any]) -> list[frozenset[int]]:
    """Return the places of strings among the leaves of a call, those of one list or tuple together."""
    paths, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(range(spec.num_leaves), spec))
    groups: dict[str, list[int]] = {}
    for i, (path, _) in enumerate(paths):
        if isinstance(literals.get(i), str):
            groups.setdefault(_without_last_numbers(path), []).append(i)
    return [frozenset(places) for places in groups.values()]


def _without_last_numbers(path: Sequence[Any]) -> str:
    """Return the path of the list in which a leaf is; of another leaf its own."""
    fixed = 2  # args or kwargs, and which one
    n = len(path)
    while n > fixed and isinstance(path[n - 1], pytree.SequenceKey):
        n -= 1
    return pytree.keystr(tuple(path[:n]))
