"""A copy of a model without the values of its parameters, all of whose code reads the copy.

``copy.deepcopy`` takes functions as they are. One that is an attribute, and that reads modules of the model through its
closure, its defaults or a partial's arguments (``m = self.mlp; self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))``),
would go on with the modules of the original. So such functions are made again, with cells that hold the copies.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from autopar.torch_private import FAKE_PARAMETERS
from autopar.words.trees import PyTree

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType)
"""What leads to no module."""
_REGISTERED = ("_parameters", "_buffers", "_modules")
_STRIDES: Any = WeakIdKeyDictionary()
"""For parameters of copies, how those of the model lie in memory. The copies are one value each, expanded."""


def without_values(model: torch.nn.Module, memo: dict[int, Any] | None = None) -> torch.nn.Module:
    """Return the copy; its parameters have the shapes of the model's, and one value each.

    Args:
        memo: copies by the ids of what they are of, as of ``copy.deepcopy``.

    Raises:
        Exception: the model holds what cannot be copied.
        ValueError: something that was copied still reads modules or tensors of the model.
    """
    memo = {} if memo is None else memo
    for parameter in model.parameters():
        memo[id(parameter)] = copied_parameter(parameter)
    copied: torch.nn.Module = copy.deepcopy(model, memo)
    originals = {id(x) for part in (model.modules(), model.parameters(), model.buffers()) for x in part}
    rebinding = _Rebinding(originals, memo)
    for module in copied.modules():
        rebinding.attributes(module)
    parts: list[object] = [x for part in (copied.modules(), copied.parameters(), copied.buffers()) for x in part]
    for module in copied.modules():
        parts.extend(value for name, value in vars(module).items() if name not in _REGISTERED)
    if _leads_to(originals, parts, set(), weakly=False):  # what only watches a model is no part of it
        raise ValueError("code or an attribute of the model reads modules of it that cannot be copied with it")
    return copied


def copied_parameter(parameter: torch.nn.Parameter, device: torch.device | None = None) -> torch.nn.Parameter:
    """Return a parameter of one value in the shape of another one, which a trace lays out as that one."""
    value = torch.zeros((), dtype=parameter.dtype, device=device or parameter.device)
    copied = torch.nn.Parameter(value.expand(parameter.shape), parameter.requires_grad)
    _STRIDES[copied] = _STRIDES.get(parameter, parameter.stride())
    return copied


def laid_out_as(parameter: torch.nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """Return a value in the dtype of a parameter, laid out in memory as that was at first."""
    new = torch.empty_strided(
        value.shape, _STRIDES.get(parameter, parameter.stride()), dtype=parameter.dtype, device=value.device
    )
    return new.copy_(value)


def expanded(parameter: torch.nn.Parameter, device: torch.device | None = None) -> torch.Tensor:
    """Return one value in the shape of a parameter, which a trace lays out as the parameter was at first."""
    _STRIDES.setdefault(parameter, parameter.stride())
    return parameter.detach().new_zeros((), device=device or parameter.device).expand(parameter.shape)


@contextlib.contextmanager
def with_strides() -> Iterator[None]:
    """Lay out the parameters of copies, in a trace in this scope, as those of the model were.

    Code may ask for their strides, or take views of them.
    """
    made_fake = FAKE_PARAMETERS.get()

    def laid_out(fake_mode: Any, module: torch.nn.Module) -> Any:
        alive = []  # torch remembers them weakly
        for parameter in module.parameters():
            strides = _STRIDES.get(parameter)
            if strides is not None and strides != parameter.stride():
                with fake_mode:
                    value = torch.empty_strided(
                        parameter.shape, strides, dtype=parameter.dtype, device=parameter.device
                    )
                    fake = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
                alive.append(fake)
                fake_mode.fake_tensor_converter.set_tensor_memo(parameter, fake)
        return made_fake(fake_mode, module)

    with FAKE_PARAMETERS.replaced(laid_out):
        yield


class _Rebinding:
    """Functions made again so that they read copies.

    Args:
        originals: ids of the model's modules and tensors.
        memo: the copies, by the originals' ids, as ``copy.deepcopy`` leaves them.
    """

    def __init__(self, originals: set[int], memo: dict[int, object]) -> None:
        self.originals, self.memo = originals, memo
        self.copies = {id(copied) for copied in memo.values()}
        self.free: set[int] = set()
        """Ids of what leads to no original."""
        self.made: dict[int, Any] = {}
        self.kept: list[object] = []
        """What ids in ``made`` are of, so that no other object gets one."""

    def attributes(self, module: torch.nn.Module) -> None:
        """Return the attributes of one module of the copy."""
        for name, value in list(vars(module).items()):
            if name not in _REGISTERED and (new := self.of(value)) is not value:
                vars(module)[name] = new

    def of(self, value: object) -> Any:
        """Return a value that reads copies; the value itself where it reads no module of the model."""
        if id(value) in self.originals:
            return self.memo.get(id(value), value)
        if id(value) in self.made:
            return self.made[id(value)]
        if isinstance(value, (torch.Tensor, torch.nn.Module)) or not _leads_to(self.originals, [value], self.free):
            return value
        self.kept.append(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        self.made[id(value)] = value
        new = self._other(value)
        self.made[id(value)] = new
        return new

    def _other(self, value: PyTree) -> PyTree:
        if isinstance(value, types.MethodType):
            return types.MethodType(self.of(value.__func__), self.of(value.__self__))
        if type(value) is functools.partial:
            named = {name: self.of(v) for name, v in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **named)
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(map(self.of, value))
        if isinstance(value, dict):  # of the copy: in place, since it may be of any kind
            new = copy.copy(value)
            for key in value:
                new[key] = self.of(value[key])
            return new
        if type(value) is weakref.ref:
            return weakref.ref(self.of(value()))
        if id(value) in self.copies and hasattr(value, "__dict__"):
            value.__dict__.update({name: self.of(v) for name, v in vars(value).items()})
        return value  # it is seen at the end where it still leads to an original

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        """Return the same code with cells, defaults and attributes that hold copies; it may refer to itself."""
        cells = [self.made.setdefault(id(cell), types.CellType()) for cell in function.__closure__ or ()]
        new = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, None, tuple(cells) if cells else None
        )
        self.made[id(function)] = new
        functools.update_wrapper(new, function, updated=())
        del new.__wrapped__  # type: ignore[attr-defined]
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            self.kept.append(old)
            if (content := _content(old)) is not _EMPTY:
                cell.cell_contents = self.of(content[0])
        if function.__defaults__ is not None:
            new.__defaults__ = tuple(map(self.of, function.__defaults__))
        if function.__kwdefaults__ is not None:
            new.__kwdefaults__ = {name: self.of(v) for name, v in function.__kwdefaults__.items()}
        new.__dict__.update({name: self.of(v) for name, v in function.__dict__.items()})
        return new


_EMPTY: tuple[object, ...] = ()


def _content(cell: types.CellType) -> tuple[object, ...]:
    """Return the value of a cell, alone in a tuple; empty for a variable that has no value yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return _EMPTY


def _leads_to(originals: set[int], values: Iterable[object], free: set[int], weakly: bool = True) -> bool:
    """Check whether one of `values` is, holds or reads one of `originals`; other modules are not looked into.

    ``free`` has ids of objects that do not; those seen here are added. With ``weakly``, weak references count.
    """
    todo, seen = list(values), set()
    while todo:
        value = todo.pop()
        if isinstance(value, _PLAIN) or id(value) in seen or id(value) in free:
            continue
        if id(value) in originals:
            return True
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            todo.extend(content for cell in value.__closure__ or () for content in _content(cell))
            todo.extend([value.__defaults__, value.__kwdefaults__, value.__dict__])
        elif isinstance(value, types.MethodType):
            todo.extend([value.__func__, value.__self__])
        elif isinstance(value, functools.partial):
            todo.extend([value.func, value.args, value.keywords])
        elif isinstance(value, (list, tuple, set, frozenset)):
            todo.extend(value)
        elif isinstance(value, dict):
            todo.extend(value.values())
        elif isinstance(value, weakref.ref):
            if weakly and id(value()) in originals:
                return True
        elif not isinstance(value, (torch.Tensor, torch.nn.Module)):
            todo.append(getattr(value, "__dict__", None))
    free |= seen
    return False
